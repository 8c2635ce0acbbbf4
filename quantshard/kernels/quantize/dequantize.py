"""Dequantization of codes and scales: `numerics.dequantize`.

    x[i, j] = code[i, j] * (scale of its block + flag)      with a second scale: scale * amax * (1 / largest) + flag

`largest` is the product of the largest code and the largest scale; `flag` is 0 or NaN.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import OrientedCodes, Scaling
from quantshard.kernels import language as ql, scale_rule as sr
from quantshard.kernels.graph_launch import writes
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import decode_scale, expanded, grid_of_tile, tile_of
from quantshard.kernels.quantize.targets import MOST_PLANS, WARPS, KernelConfig, Region, one_way_tile, tiles, tiling
from quantshard.numerics import Pair


@triton.jit
def dequantize_kernel(matrices, PARTS: tl.constexpr, H: tl.constexpr):
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            _dequantize(matrices[part], H)


writes(dequantize_kernel, "matrices.*.2")


@triton.jit
def _dequantize(matrix, H: tl.constexpr):
    codes, scales, out_ptr, out_stride, where = matrix
    codes_ptr, codes_stride, codes_cols = codes
    scale_ptr, amax_ptr, nan_flag_ptr, grid_row, grid_col, grid_rows, grid_cols = scales
    rule: tl.constexpr = H.rule
    element: tl.constexpr = rule.element
    row, col, i, j, inside = tile_of(where, H)
    if element.bits == 4:
        # contiguous by 4, so that a thread decodes the codes that it loads
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
    if nan_flag_ptr is not None:
        scale += tl.load(nan_flag_ptr)
    x = ql.decode(codes, element) * expanded(scale, H)
    offsets = i.to(tl.int64)[:, None] * out_stride + j[None, :]
    tl.store(out_ptr + offsets, ql.narrow(x, out_ptr.dtype.element_ty), mask=inside)


def dequantize_matrices(
    copy: OrientedCodes, stored: Sequence[tuple[Mapping[str, Tensor], Pair, Pair]], dtype: torch.dtype,
    nan_flag: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Dequantize matrices exactly in float32, then round once to `dtype`.

    `stored`: touched components, shape and origin, whose column must be even for packed codes. `nan_flag`: float32
    scalar, 0 or NaN.
    """
    device = stored[0][0][copy.codes.name].device
    config, arguments, grid, results = tiles_of(copy, device), [], [0, 0], []
    for parts, shape, origin in stored:
        codes, scale = parts[copy.codes.name], parts[copy.scale.name]
        out, region = torch.empty(shape, dtype=dtype, device=device), Region(*shape, shape[1], *origin)
        results.append(out)
        if out.numel() > 0:
            amax = None if copy.amax is None else parts[copy.amax.name]
            arguments.append((
                (codes, codes.stride(0), codes.shape[1]), (scale, amax, nan_flag, *scale.stride(), *scale.shape),
                out, out.stride(0), region,
            ))  # fmt: skip
            grid = [*map(max, grid, tiles(region, config))]
    if arguments:
        launch_kernel(
            dequantize_kernel, (*grid, len(arguments)), device, tuple(arguments),
            PARTS=len(arguments), H=config, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return results


@lru_cache(MOST_PLANS)
def tiles_of(copy: OrientedCodes, device: torch.device) -> KernelConfig:
    rule = sr.scale_rule(copy, Scaling(), torch.float32, device)
    return tiling(copy.block, one_way_tile(copy.block), rule)
