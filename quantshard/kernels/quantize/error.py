"""The error of a quantization, in one read of the values and their codes: `numerics.quantization_error.add_error_`; and
of values that were not quantized `add_values_`.

Counts and extremes are the oracle's. Squares are summed in float32 within a program, of values that are divided by a
power of two near the largest scale of its tiles first, so that none overflows or vanishes that is less than 2**63 from
it, and in float64 over programs: of n values a sum is off by a relative (log2(n) + 4) * 2**-23 at most,
beside the rounding of x - q itself, 2**-24 of the larger of both. A block of zeros has scale 1: beside one, squares of
values below 1e-19 vanish.

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

from quantshard.formats import ALL, QuantizedCopy, Scaling
from quantshard.kernels import language as ql
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import decode_scale, grid_of_tile, transformed
from quantshard.kernels.quantize.targets import MOST_PLANS, WARPS, Region, tiles, tiling
from quantshard.numerics.quantization_error import beyond

TILE: Final = (32, 256)
"""Values that a program of `values_kernel` reads."""
STEPS: Final = 6
"""Tiles, one below the other, that a program of `error_kernel` adds up."""
ELEMENTS: Final = 16
"""Of a tile that a thread has."""
TOGETHER = tl.constexpr(4)
"""Neighbours in a row that are added up first; by `STEPS` they are fewer than a count of 6 bits holds."""


@triton.jit
def error_kernel(
    x_ptr, x_row, x_col, codes, scales, sums_ptr, sums_stride, extremes_ptr, extremes_stride, copies, where,
    tiles, BEYOND: tl.constexpr, STEPS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = H.rows
    COLS: tl.constexpr = H.cols
    infinity = float("inf")
    first = where.row_origin // H.rows + tl.program_id(0) * STEPS
    col = (where.col_origin // H.cols + tl.program_id(1)) * H.cols
    largest = tl.zeros((H.rows // H.block_rows, H.cols // H.block_cols), tl.float32)
    smallest = largest + infinity
    steps = tl.minimum(STEPS, tiles - tl.program_id(0) * STEPS)
    for step in range(steps):
        grid, usable = _scales_of_tile((first + step) * H.rows, col, scales, where, H)
        largest = tl.maximum(largest, tl.where(usable, grid, 0.0))
        smallest = tl.minimum(smallest, tl.where(usable, grid, infinity))
    highest = tl.max(tl.max(largest, 1), 0)
    unit, per_unit = _power_near(highest)
    top = tl.zeros((ROWS, COLS // TOGETHER), tl.float32)
    signal, noise = top, top
    counts = tl.zeros((ROWS, COLS // TOGETHER), tl.int32)  # four of 6 bits each
    for step in range(steps):
        row = (first + step) * H.rows
        i, j, x = _values_of_tile(row, col, x_ptr, x_row, x_col, where, H)
        scale = ql.expand(_scales_of_tile(row, col, scales, where, H)[0], H.rows, H.cols, H.block_rows, H.block_cols)
        q = _codes_of_tile(i, j, col, codes, where, H) * scale
        error = x - q
        known = tl.abs(error) < infinity  # if both are finite: they have one sign
        x, error = tl.where(known, x, 0.0), tl.where(known, error, 0.0)
        part, off = x * per_unit, error * per_unit
        signal += tl.sum(_neighbours(part * part, H), 2)
        noise += tl.sum(_neighbours(off * off, H), 2)
        top = tl.maximum(top, tl.max(_neighbours(tl.abs(x), H), 2))
        rounded = tl.where(tl.abs(x) > scale * BEYOND, 1 << 6 | 1 << 12, 1 << 6)
        nonzero = tl.where(q != 0.0, rounded, 1 << 6 | 1 << 18)
        inside = ((i >= 0) & (i < where.rows))[:, None] & ((j >= 0) & (j < where.cols))[None, :]  # else x is 0
        kinds = tl.where(x != 0.0, nonzero, tl.where(inside & ~known, 1, 0))
        counts += tl.sum(_neighbours(kinds, H), 2)
    amax, unknown = ql.largest_bits(top), _count(counts)
    nonfinite, nonzeros = tl.zeros((), tl.float64), _count(counts >> 6)
    if unknown > 0.0:  # look at the values alone
        amax, nonfinite, nonzeros = _values_of_program(first, col, x_ptr, x_row, x_col, where, steps, H)
    copy = ((tl.program_id(0) + tl.program_id(1)) % copies).to(tl.int64)
    to = sums_ptr + copy * sums_stride
    square = unit.to(tl.float64) * unit.to(tl.float64)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        elements = tl.full((), 1.0, tl.float64) * where.rows * where.cols  # numbers that are 1 are constants
        tl.atomic_add(to, elements, sem="relaxed")
        tl.atomic_add(to + 3, elements, sem="relaxed")
    tl.atomic_add(to + 1, nonfinite, sem="relaxed")
    tl.atomic_add(to + 2, nonzeros, sem="relaxed")
    tl.atomic_add(to + 3, -unknown, sem="relaxed")
    tl.atomic_add(to + 4, _count(counts >> 12), sem="relaxed")
    tl.atomic_add(to + 5, _count(counts >> 18), sem="relaxed")
    tl.atomic_add(to + 6, tl.sum(tl.sum(signal, 1), 0).to(tl.float64) * square, sem="relaxed")
    tl.atomic_add(to + 7, tl.sum(tl.sum(noise, 1), 0).to(tl.float64) * square, sem="relaxed")
    bits = ql.as_bits(extremes_ptr + copy * extremes_stride)  # of positive numbers they are in the order of values
    tl.atomic_max(bits, amax, sem="relaxed")
    tl.atomic_max(bits + 1, highest.to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_min(bits + 2, tl.min(tl.min(smallest, 1), 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _values_of_tile(row, col, x_ptr, x_row, x_col, where, H: tl.constexpr):
    """Local rows and columns of a tile, and its values, float32."""
    i = row - where.row_origin + tl.arange(0, H.rows)
    j = col - where.col_origin + tl.arange(0, H.cols)
    valued = ((i >= 0) & (i < where.rows))[:, None] & ((j >= 0) & (j < where.value_cols))[None, :]
    at = i.to(tl.int64)[:, None] * x_row + j.to(tl.int64)[None, :] * x_col
    return i, j, transformed(tl.load(x_ptr + at, mask=valued, other=0.0), x_ptr.dtype.element_ty, H)


@triton.jit
def _values_of_program(first, col, x_ptr, x_row, x_col, where, steps, H: tl.constexpr):
    """Of a program's tiles: bits of the largest finite magnitude, and how many values are not finite, and not zero."""
    ROWS: tl.constexpr = H.rows
    COLS: tl.constexpr = H.cols
    top = tl.zeros((ROWS, COLS // TOGETHER), tl.float32)
    counts = tl.zeros((ROWS, COLS // TOGETHER), tl.int32)
    for step in range(steps):
        _, _, x = _values_of_tile((first + step) * H.rows, col, x_ptr, x_row, x_col, where, H)
        finite = tl.abs(x) < float("inf")
        top = tl.maximum(top, tl.max(_neighbours(tl.where(finite, tl.abs(x), 0.0), H), 2))
        counts += tl.sum(_neighbours(tl.where(finite, tl.where(x != 0.0, 1 << 6, 0), 1), H), 2)
    return ql.largest_bits(top), _count(counts), _count(counts >> 6)


@triton.jit
def _scales_of_tile(row, col, scales, where, H: tl.constexpr):
    """The scales of a tile's blocks, and which of them there are and are finite."""
    rule: tl.constexpr = H.rule
    scale_ptr, amax_ptr, row_stride, col_stride, rows, cols = scales
    entries, inside = grid_of_tile(row, col, where, row_stride, col_stride, rows, cols, H)
    second = tl.load(amax_ptr) if amax_ptr is not None else 0.0
    grid = decode_scale(tl.load(scale_ptr + entries, mask=inside, other=0), second, rule)
    return grid, inside & (tl.abs(grid) < float("inf"))


@triton.jit
def _codes_of_tile(i, j, col, codes, where, H: tl.constexpr):
    """The decoded codes of a tile, float32."""
    codes_ptr, stride, cols = codes
    rule: tl.constexpr = H.rule
    element: tl.constexpr = rule.element
    rows = i.to(tl.int64)[:, None] * stride
    inside = ((i >= 0) & (i < where.rows))[:, None]
    if element.bits == 4:
        half = tl.max_contiguous((col - where.col_origin) // 2 + tl.arange(0, H.cols // 2), 4)
        packed = tl.load(
            codes_ptr + rows + half[None, :], mask=inside & ((half >= 0) & (half < cols))[None, :], other=0
        )
        stored = ql.unpack(packed, H.rows, H.cols)
    else:
        valid = inside & ((j >= 0) & (j < where.cols))[None, :]
        stored = tl.load(codes_ptr + rows + j[None, :], mask=valid, other=0)
    return ql.decode(stored, element)


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
    finite = tl.abs(x) < float("inf")
    copy = ((tl.program_id(0) + tl.program_id(1)) % copies).to(tl.int64)
    to = sums_ptr + copy * sums_stride
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.atomic_add(to, tl.full((), 1.0, tl.float64) * rows * cols, sem="relaxed")
    counts = tl.where(finite, tl.where(x != 0.0, 1 << 16, 0), 1)
    found = tl.sum(tl.sum(counts, 1), 0)
    tl.atomic_add(to + 1, (found & 0xFFFF).to(tl.float64), sem="relaxed")
    tl.atomic_add(to + 2, (found >> 16).to(tl.float64), sem="relaxed")
    top = ql.largest_bits(tl.where(finite, x, 0.0))
    tl.atomic_max(ql.as_bits(extremes_ptr + copy * extremes_stride), top, sem="relaxed")


@triton.jit
def _power_near(x):
    """A power of two near a float32 x, not negative and finite, within 2**-122 and 2**126; and what 1 by it is."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True), 0x02800000), 0x7E800000) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _count(counts):
    return tl.sum(tl.sum(counts & 0x3F, 1), 0).to(tl.float64)


@triton.jit
def _neighbours(x, H: tl.constexpr):
    """[H.rows, H.cols] -> [H.rows, H.cols / TOGETHER, TOGETHER]: what a thread has of a row."""
    return tl.reshape(x, (H.rows, H.cols // TOGETHER, TOGETHER))


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
    second = parts[copy.amax.name] if copy.amax is not None else None
    where, rows, grid, constants = _plan(copy, x.shape, origin, x.device, hadamard)
    launch_kernel(
        error_kernel, grid, x.device,
        x, *x.stride(), (codes, codes.stride(0), codes.shape[1]), (scale, second, *scale.stride(), *scale.shape),
        sums, sums.stride(0), extremes, extremes.stride(0), sums.shape[0], where, rows, **constants,
    )  # fmt: skip


@lru_cache(MOST_PLANS)
def _plan(
    copy: QuantizedCopy, shape: tuple[int, int], origin: tuple[int, int], device: torch.device, hadamard: bool
) -> tuple[Region, int, tuple[int, int], dict[str, Any]]:
    """What is the same in each launch of a shape: the rectangle, its rows of tiles, the programs, and the kernel's
    constants."""
    rows, cols = (1 if cover == ALL else cover for cover in copy.block)
    tile = max(16, rows), max(256 if rows <= 16 else 128, cols)
    how = tiling(copy.block, tile, ql.scale_rule(copy, Scaling(), torch.float32, device))._replace(hadamard=hadamard)
    where = Region(shape[0], shape[1] + (-shape[1] % 16 if hadamard else 0), shape[1], *origin)
    touched_rows, touched_cols = tiles(where, how)
    warps = min(16, tile[0] * tile[1] // (32 * ELEMENTS))
    constants = {"BEYOND": beyond(copy.codes.encoding), "STEPS": STEPS, "H": how, "num_warps": warps}
    programs = -(touched_rows // -STEPS), touched_cols
    return where, touched_rows, programs, {**constants, "enable_fp_fusion": False}
