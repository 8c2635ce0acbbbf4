"""The error of a quantization, in one read of the values and their codes: `numerics.quantization_error.add_error_`; and
of values that were not quantized `add_values_`.

Counts and extremes are the oracle's. Squares are summed in float32 within a tile, of values that are divided by a
power of two near the tile's largest first, so that none overflows or vanishes, and in float64 over tiles: of n values
to a tile a sum is off by a relative (log2(n) + 4) * 2**-23 at most, beside the rounding of x - q itself, 2**-24 of the
larger of both.

Programs add to rows by atomic operations, each to one of several copies of the row, for else all would wait for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import QuantizedCopy
from quantshard.kernels import language as ql
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.dequantize import tiles_of
from quantshard.kernels.quantize.matrix import decode_scale, grid_of_tile, tile_of, transformed
from quantshard.kernels.quantize.targets import MOST_PLANS, WARPS, Region, tiles
from quantshard.numerics.quantization_error import beyond

TILE: Final = (32, 256)
"""Values that a program of `values_kernel` reads."""


@triton.jit
def error_kernel(
    x_ptr, x_row, x_col, codes_ptr, codes_stride, codes_cols, scale_ptr, amax_ptr, grid_row, grid_col, grid_rows,
    grid_cols, sums_ptr, sums_stride, extremes_ptr, extremes_stride, copies, where, BEYOND: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    rule: tl.constexpr = H.rule
    element: tl.constexpr = rule.element
    row, col, i, j, valued = tile_of(where, H)
    inside = valued
    if H.hadamard:  # what it pads is quantized too
        inside = ((i >= 0) & (i < where.rows))[:, None] & ((j >= 0) & (j < where.cols))[None, :]
    if element.bits == 4:
        half = tl.max_contiguous((col - where.col_origin) // 2 + tl.arange(0, H.cols // 2), 4)
        valid = ((i >= 0) & (i < where.rows))[:, None] & ((half >= 0) & (half < codes_cols))[None, :]
        packed = tl.load(codes_ptr + i.to(tl.int64)[:, None] * codes_stride + half[None, :], mask=valid, other=0)
        codes = ql.unpack(packed, H.rows, H.cols)
    else:
        codes = tl.load(codes_ptr + i.to(tl.int64)[:, None] * codes_stride + j[None, :], mask=inside, other=0)
    entries, in_grid = grid_of_tile(row, col, where, grid_row, grid_col, grid_rows, grid_cols, H)
    second = tl.load(amax_ptr) if amax_ptr is not None else 0.0
    grid = decode_scale(tl.load(scale_ptr + entries, mask=in_grid, other=0), second, rule)
    scale = ql.expand(grid, H.rows, H.cols, H.block_rows, H.block_cols)
    q = ql.decode(codes, element) * scale
    at = i.to(tl.int64)[:, None] * x_row + j.to(tl.int64)[None, :] * x_col
    x = transformed(tl.load(x_ptr + at, mask=valued, other=0.0), x_ptr.dtype.element_ty, H)
    size = tl.abs(x)
    infinity = float("inf")
    finite = inside & (size < infinity)
    known = finite & (tl.abs(q) < infinity)
    top = tl.max(tl.max(tl.where(finite, size, 0.0), 1), 0)
    unit, per_unit = _power_near(top)
    part, off = tl.where(known, x * per_unit, 0.0), tl.where(known, (x - q) * per_unit, 0.0)
    square = unit.to(tl.float64) * unit.to(tl.float64)
    copy = (tl.program_id(0) + tl.program_id(1)) % copies
    to = sums_ptr + copy.to(tl.int64) * sums_stride
    _add_values(to, inside, finite, x)
    tl.atomic_add(to + 3, _count(known))
    tl.atomic_add(to + 4, _count(known & (size > scale * BEYOND) & (q != 0.0)))
    tl.atomic_add(to + 5, _count(known & (x != 0.0) & (q == 0.0)))
    tl.atomic_add(to + 6, tl.sum(tl.sum(part * part, 1), 0).to(tl.float64) * square)
    tl.atomic_add(to + 7, tl.sum(tl.sum(off * off, 1), 0).to(tl.float64) * square)
    bits = (extremes_ptr + copy.to(tl.int64) * extremes_stride).to(tl.pointer_type(tl.int32), bitcast=True)
    usable = in_grid & (tl.abs(grid) < infinity)  # of positive numbers bits are in the order of values
    tl.atomic_max(bits, top.to(tl.int32, bitcast=True))
    largest = tl.max(tl.max(tl.where(usable, grid, 0.0), 1), 0)
    smallest = tl.min(tl.min(tl.where(usable, grid, infinity), 1), 0)
    tl.atomic_max(bits + 1, largest.to(tl.int32, bitcast=True))
    tl.atomic_min(bits + 2, smallest.to(tl.int32, bitcast=True))


@triton.jit
def values_kernel(
    x_ptr, x_row, x_col, rows, cols, sums_ptr, sums_stride, extremes_ptr, extremes_stride, copies, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (i < rows)[:, None] & (j < cols)[None, :]
    at = i.to(tl.int64)[:, None] * x_row + j.to(tl.int64)[None, :] * x_col
    x = ql.widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    finite = inside & (tl.abs(x) < float("inf"))
    copy = (tl.program_id(0) + tl.program_id(1)) % copies
    _add_values(sums_ptr + copy.to(tl.int64) * sums_stride, inside, finite, x)
    top = tl.max(tl.max(tl.where(finite, tl.abs(x), 0.0), 1), 0)
    bits = (extremes_ptr + copy.to(tl.int64) * extremes_stride).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(bits, top.to(tl.int32, bitcast=True))


@triton.jit
def _add_values(to, inside, finite, x):
    count = _count(inside)
    tl.atomic_add(to, count)
    tl.atomic_add(to + 1, count - _count(finite))
    tl.atomic_add(to + 2, _count(finite & (x != 0.0)))


@triton.jit
def _power_near(x):
    """A power of two near a float32 x, not negative and finite, within 2**-122 and 2**126; and what 1 by it is."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True), 0x02800000), 0x7E800000) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _count(chosen):
    return tl.sum(tl.sum(chosen.to(tl.int32), 1), 0).to(tl.float64)


def add_values(sums: Tensor, extremes: Tensor, x: Tensor) -> None:
    """`numerics.quantization_error.add_values_` of x [R, C], float32, bfloat16 or float16 with any strides, added to
    one of the rows of `sums`, float64 [copies, columns], and of `extremes`, float32 [copies, columns]."""
    if x.numel() == 0:
        return
    grid = triton.cdiv(x.shape[0], TILE[0]), triton.cdiv(x.shape[1], TILE[1])
    launch_kernel(
        values_kernel, grid, x.device,
        x, *x.stride(), *x.shape, sums, sums.stride(0), extremes, extremes.stride(0), sums.shape[0],
        ROWS=TILE[0], COLS=TILE[1], num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def add_error(
    sums: Tensor,
    extremes: Tensor,
    x: Tensor,
    copy: QuantizedCopy,
    parts: Mapping[str, Tensor],
    origin: tuple[int, int] = (0, 0),
    hadamard: bool = False,
) -> None:
    """`numerics.quantization_error.add_error_` of x [R, C], float32, bfloat16 or float16 with any strides, added to one
    of the rows of `sums`, float64 [copies, columns], and of `extremes`, float32 [copies, columns]. `hadamard`: of
    `numerics.hadamard16` of x."""
    if x.numel() == 0:
        return
    codes, scale = parts[copy.codes.name], parts[copy.scale.name]
    where, grid, constants = _plan(copy, x.shape, origin, x.device, hadamard)
    launch_kernel(
        error_kernel, grid, x.device,
        x, *x.stride(), codes, codes.stride(0), codes.shape[1], scale,
        parts[copy.amax.name] if copy.amax is not None else None, *scale.stride(), *scale.shape,
        sums, sums.stride(0), extremes, extremes.stride(0), sums.shape[0], where, **constants,
    )  # fmt: skip


@lru_cache(MOST_PLANS)
def _plan(
    copy: QuantizedCopy, shape: tuple[int, int], origin: tuple[int, int], device: torch.device, hadamard: bool
) -> tuple[Region, tuple[int, int], dict[str, Any]]:
    """What is the same in each launch of a shape: the rectangle, the programs, and the kernel's constants."""
    how = tiles_of(copy, device)._replace(hadamard=hadamard)
    where = Region(shape[0], shape[1] + (-shape[1] % 16 if hadamard else 0), shape[1], *origin)
    constants = {"BEYOND": beyond(copy.codes.encoding), "H": how, "num_warps": WARPS, "enable_fp_fusion": False}
    return where, tiles(where, how), constants
