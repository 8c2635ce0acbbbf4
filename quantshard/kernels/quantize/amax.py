"""The amax of every block of a matrix, from one read of the values: `numerics.block_amax`.

    amax[block] = max |x|

For what `quantize` cannot see within one tile: the whole tensor, a whole row, and blocks that ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import ALL
from quantshard.kernels import language as ql
from quantshard.kernels import workspace
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import grid_of_tile, tile_of
from quantshard.kernels.quantize.targets import MOST_PLANS, WARPS, KernelConfig, Region, tiles, tiling, touched
from quantshard.numerics import Pair


@triton.jit
def amax_kernel(
    x_ptrs, row_stride, col_stride, where, grid_ptrs, grid_stride, grid_rows, grid_cols,
    PARTS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            _measure(
                x_ptrs[part], row_stride, col_stride, where, grid_ptrs[part], grid_stride, grid_rows, grid_cols, H
            )  # fmt: skip


@triton.jit
def _measure(
    x_ptr, row_stride, col_stride, where, grid_ptr, grid_stride, grid_rows, grid_cols, H: tl.constexpr
):  # fmt: skip
    row, col, i, j, valued = tile_of(where, H)
    at = i.to(tl.int64)[:, None] * row_stride + j.to(tl.int64)[None, :] * col_stride
    values = tl.load(x_ptr + at, mask=valued, other=0.0)
    x = ql.widen(values)
    if H.hadamard:
        signs = ql.hadamard_signs(tl.arange(0, H.cols))[None, :]
        x = ql.rounded(ql.hadamard16(x, signs, H.rows, H.cols, 1), values.dtype)
    found = ql.block_amax(x, H.rows, H.cols, H.block_rows, H.block_cols)
    entries, inside = grid_of_tile(row, col, where, grid_stride, 1, grid_rows, grid_cols, H)
    if H.row_all or H.col_all:  # several tiles share an entry
        tl.atomic_max(ql.as_bits(grid_ptr + entries), found.to(tl.int32, bitcast=True), mask=inside, sem="relaxed")
    else:
        tl.store(grid_ptr + entries, found, mask=inside)


def block_amax(
    x: Tensor, covers: tuple[int, int], origin: tuple[int, int] = (0, 0), *, hadamard: bool = False
) -> Tensor:
    """Largest |x| per block: float32, one entry for each block of `covers` elements that x [R, C] touches.

    x: any strides; float32, bfloat16 or float16. `hadamard`: of its rows after `numerics.hadamard16`.
    """
    return block_amaxes([x], covers, origin, hadamard=hadamard)[0]


def block_amaxes(
    xs: Sequence[Tensor], covers: tuple[int, int], origin: tuple[int, int] = (0, 0), *, hadamard: bool = False
) -> list[Tensor]:
    """The same of several matrices of one shape, strides, dtype and device, by one kernel."""
    x = xs[0]
    where, spans, how, programs = _plan(x.shape, covers, origin, hadamard)
    if spans == (1, 1):
        grids = [workspace.zero(x.device) for _ in xs]
    else:
        # zeros: several programs share an entry, or none runs
        new = torch.zeros if x.numel() == 0 or how.row_all or how.col_all else torch.empty
        grids = [new(spans, dtype=torch.float32, device=x.device) for _ in xs]
    if x.numel() > 0:
        launch_kernel(
            amax_kernel, (*programs, len(xs)), x.device,
            tuple(xs), *x.stride(), where, tuple(grids), spans[1], *spans,
            PARTS=len(xs), H=how, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return grids


@lru_cache(MOST_PLANS)
def _plan(shape: Pair, covers: Pair, origin: Pair, hadamard: bool) -> tuple[Region, Pair, KernelConfig, Pair]:
    rows, cols = shape[0], shape[1] + (-shape[1] % 16 if hadamard else 0)
    down, across = (touched(at, size, cover) for at, size, cover in zip(origin, (rows, cols), covers, strict=True))
    finite = [1 if cover == ALL else cover for cover in covers]
    how = tiling(covers, (max(32, finite[0]), max(256 if finite[0] <= 32 else 128, finite[1])), NO_RULE)
    where = Region(rows, cols, shape[1], *origin)
    return where, (down, across), how._replace(hadamard=hadamard), tiles(where, how)


_NOTHING = ql.KernelEncoding(0.0, 0, 0, 0, 0)
NO_RULE = ql.ScaleRule(0, _NOTHING, _NOTHING, 0.0, 0.0, False, 0.0)
"""The rule of tiles that are not quantized."""
