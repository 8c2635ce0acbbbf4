"""From codes and scales to values: `numerics.dequantize`.

    x[i, j] = code[i, j] * (scale of its block + poison)      with a second scale: scale * amax * (1 / largest) + poison

where largest is the largest code times the largest scale, and poison 0 or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import ALL, QuantizedCopy, Scaling
from quantshard.kernels import language as ql
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import decode_scale, grid_of_tile, tile_of
from quantshard.kernels.quantize.targets import WARPS, KernelConfig, Region, tiles, tiling


@triton.jit
def dequantize_kernel(
    codes_ptr, codes_stride, codes_cols, scale_ptr, amax_ptr, poison_ptr, grid_row, grid_col, grid_rows, grid_cols,
    out_ptr, out_stride, where, H: tl.constexpr,
):  # fmt: skip
    rule: tl.constexpr = H.rule
    element: tl.constexpr = rule.element
    row, col, i, j, inside = tile_of(where, H)
    if element.bits == 4:
        # as many as a thread has values: what it reads is what it decodes
        half = tl.max_contiguous((col - where.col_origin) // 2 + tl.arange(0, H.cols // 2), 4)
        valid = ((i >= 0) & (i < where.rows))[:, None] & ((half >= 0) & (half < codes_cols))[None, :]
        packed = tl.load(codes_ptr + i.to(tl.int64)[:, None] * codes_stride + half[None, :], mask=valid, other=0)
        codes = ql.unpack(packed, H.rows, H.cols)
    else:
        codes = tl.load(codes_ptr + i.to(tl.int64)[:, None] * codes_stride + j[None, :], mask=inside, other=0)
    entries, in_grid = grid_of_tile(row, col, where, grid_row, grid_col, grid_rows, grid_cols, H)
    scale = tl.load(scale_ptr + entries, mask=in_grid, other=0)
    second = tl.load(amax_ptr) if amax_ptr is not None else 0.0
    scale = decode_scale(scale, second, rule)
    if poison_ptr is not None:
        scale += tl.load(poison_ptr)
    x = ql.decode(codes, element) * ql.expand(scale, H.rows, H.cols, H.block_rows, H.block_cols)
    at = i.to(tl.int64)[:, None] * out_stride + j[None, :]
    tl.store(out_ptr + at, ql.narrow(x, out_ptr.dtype.element_ty), mask=inside)


def dequantize(
    copy: QuantizedCopy,
    parts: Mapping[str, Tensor],
    shape: tuple[int, int],
    origin: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.float32,
    poison: Tensor | None = None,
) -> Tensor:
    """The touched components of one copy -> [R, C] of `dtype`, rounded once: exactly what they stand for, in float32.

    Arguments as of `numerics.dequantize`; `poison`: float32 scalar, 0 or NaN, which makes all of it NaN. With a packed
    encoding, `origin` has an even column.
    """
    codes, scale = parts[copy.codes.name], parts[copy.scale.name]
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    how = tiles_of(copy, codes.device)
    where = Region(*shape, shape[1], *origin)
    launch_kernel(
        dequantize_kernel, tiles(where, how), codes.device,
        codes, codes.stride(0), codes.shape[1], scale, parts[copy.amax.name] if copy.amax is not None else None, poison,
        *scale.stride(), *scale.shape, out, out.stride(0), where,
        H=how, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def tiles_of(copy: QuantizedCopy, device: torch.device) -> KernelConfig:
    """Tiles of whole blocks of this copy."""
    rows, cols = (1 if cover == ALL else cover for cover in copy.block)
    tile = (max(32, rows), max(256 if rows <= 32 else 128, cols))
    return tiling(copy.block, tile, ql.scale_rule(copy, Scaling(), torch.float32, device))
