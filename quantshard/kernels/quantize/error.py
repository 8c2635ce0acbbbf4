"""The error of a quantization, from one read of the values and their codes: `numerics.quantization_error.add_error`,
and `add_values` for values that were not quantized.

Counts and extremes equal the oracle's. A program sums squares in float32, after dividing values by a power of two near
the largest scale of its tiles. So the square of a value within a factor of 2**63 of that scale neither overflows nor
vanishes. Sums over programs are in float64. A sum of n values has a relative error of at most (log2(n) + 4) * 2**-23,
plus the roundings of q and of x - q, each 2**-24 of the larger of both. A block of zeros has scale 1: in the same
program, squares of values below 1e-19 vanish.

If all values and scales are finite, and no scale is so small that a product with it could be 0, each product and sum is
one operation. Otherwise the program computes again, and counts and sums only finite values.

Programs add to rows by atomic operations. Each uses one of several copies of the row, so that they rarely wait.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import OrientedCodes, Scaling
from quantshard.kernels import language as ql, scale_rule as sr
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import decode_scale, expanded, grid_of_tile, transformed
from quantshard.kernels.quantize.targets import MOST_PLANS, WARPS, Region, TileShape, finite, registers, tiles, tiling
from quantshard.numerics.quantization_error import beyond

TILE: Final = (32, 256)
STEPS: Final = 6
"""Number of tiles, one below the other, that a program of `error_kernel` sums."""
EVERY: Final = 4
LARGE: Final = 1 << 22
"""From `LARGE` elements on, `partial` measures one in `EVERY` columns of tiles."""
ELEMENTS: Final = 8
"""Elements of a tile per thread. This leaves registers for two programs of 16 warps on one multiprocessor."""
SMALLEST = tl.constexpr(2.0**-100)
"""Nonzero scales above this bound give a nonzero product with every nonzero code."""


@triton.jit
def error_kernel(
    x_ptr, x_row, x_col, codes, scales, sums_ptr, sums_stride, extremes_ptr, extremes_stride, copies, where,
    tiles, measured, BEYOND: tl.constexpr, STEPS: tl.constexpr, EVERY: tl.constexpr, TURNED: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    first = where.row_origin // H.rows + tl.program_id(0) * STEPS
    col = (where.col_origin // H.cols + tl.program_id(1) * EVERY) * H.cols
    steps = tl.minimum(STEPS, tiles - tl.program_id(0) * STEPS)
    values = (x_ptr, x_row, x_col)
    unit, per_unit = _power_near(_bound_of_scales(first, col, scales, where, steps, H))
    signal, noise, amax, nonzeros, saturated, zeros, highest, smallest, is_tiny = _sums_where_finite(
        first, col, values, codes, scales, where, steps, per_unit, BEYOND, TURNED, H
    )
    excluded = tl.zeros((), tl.float64)
    nonfinite = excluded
    if is_tiny | ~(signal + noise < float("inf")):
        signal, noise, excluded, saturated, zeros = _sums_of_finite(
            first, col, values, codes, scales, where, steps, per_unit, BEYOND, TURNED, H
        )
        amax, nonfinite, nonzeros = _values_of_program(first, col, values, where, steps, TURNED, H)
    copy = ((tl.program_id(0) + tl.program_id(1)) % copies).to(tl.int64)
    sums_row = sums_ptr + copy * sums_stride
    square = unit.to(tl.float64) * unit.to(tl.float64)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        elements = tl.full((), 1.0, tl.float64) * measured  # Triton makes an argument of 1 a constant
        tl.atomic_add(sums_row, elements, sem="relaxed")
        tl.atomic_add(sums_row + 3, elements, sem="relaxed")
    tl.atomic_add(sums_row + 1, nonfinite, sem="relaxed")
    tl.atomic_add(sums_row + 2, nonzeros, sem="relaxed")
    tl.atomic_add(sums_row + 3, -excluded, sem="relaxed")
    tl.atomic_add(sums_row + 4, saturated, sem="relaxed")
    tl.atomic_add(sums_row + 5, zeros, sem="relaxed")
    tl.atomic_add(sums_row + 6, signal.to(tl.float64) * square, sem="relaxed")
    tl.atomic_add(sums_row + 7, noise.to(tl.float64) * square, sem="relaxed")
    bits = ql.as_bits(extremes_ptr + copy * extremes_stride)  # positive floats sort as their bits do
    tl.atomic_max(bits, amax, sem="relaxed")
    tl.atomic_max(bits + 1, highest.to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_min(bits + 2, smallest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _bound_of_scales(first, col, scales, where, steps, H: tl.constexpr):
    """An upper bound near the scales of a program's tiles."""
    rule: tl.constexpr = H.rule
    if rule.kind == 2:
        return tl.load(scales[1]) * (1.0 / rule.element.max)  # scale of a block that has the tensor's amax
    largest = tl.zeros((H.rows // H.block_rows, H.cols // H.block_cols), tl.float32)
    for step in range(steps):
        grid, usable = _scales_of_tile((first + step) * H.rows, col, scales, where, H)
        largest = tl.maximum(largest, tl.where(usable, grid, 0.0))
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def _sums_where_finite(
    first, col, values, codes, scales, where, steps, per_unit, BEYOND: tl.constexpr, TURNED: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    """Statistics of a program's tiles if all values and scales are finite and no scale is tiny.

    Returns sums of squares of values and of errors, divided by the unit squared; bits of the amax; counts of values
    that are not zero, saturate, and became zero; largest and smallest scale; whether one is tiny (`SMALLEST`).
    """
    rule: tl.constexpr = H.rule
    ROWS: tl.constexpr = H.rows
    HALF: tl.constexpr = H.cols // 2
    signal = tl.zeros((ROWS, HALF), tl.float32)
    noise, top = signal, signal
    counts = tl.zeros((ROWS, HALF), tl.int32)
    largest = tl.zeros((H.rows // H.block_rows, H.cols // H.block_cols), tl.float32)
    smallest = largest + float("inf")
    least = smallest
    for step in range(steps):
        row = (first + step) * H.rows
        i, j, x = _values_of_tile(row, col, values, where, TURNED, H)
        grid, usable = _scales_of_tile(row, col, scales, where, H)
        bounded = tl.where(usable, grid, float("inf"))
        largest = tl.maximum(largest, tl.where(usable, grid, 0.0))
        smallest = tl.minimum(smallest, bounded)
        if rule.kind == 2:  # an FP8 scale can be 0
            least = tl.minimum(least, tl.where(grid == 0.0, float("inf"), bounded))
        code, other_code = _halves_of_codes(i, j, col, codes, where, H)
        x, other_x = _halves(x, H)
        unit, other_unit = _halves(expanded(grid * per_unit, H), H)
        limit, other_limit = _halves(expanded(grid * BEYOND, H), H)
        scaled, other_scaled = x * per_unit, other_x * per_unit
        scaled_error, other_scaled_error = tl.fma(code, -unit, scaled), tl.fma(other_code, -other_unit, other_scaled)
        signal = tl.fma(other_scaled, other_scaled, tl.fma(scaled, scaled, signal))
        noise = tl.fma(other_scaled_error, other_scaled_error, tl.fma(scaled_error, scaled_error, noise))
        top = tl.maximum(top, tl.maximum(tl.abs(x), tl.abs(other_x)))
        nonzero, other_nonzero = code != 0.0, other_code != 0.0
        if rule.kind == 2:
            nonzero, other_nonzero = nonzero & (unit != 0.0), other_nonzero & (other_unit != 0.0)
        counts += _kinds(x, nonzero, limit) + _kinds(other_x, other_nonzero, other_limit)
    lowest = tl.min(tl.min(smallest, 1), 0)
    is_tiny = (tl.min(tl.min(least, 1), 0) if rule.kind == 2 else lowest) < SMALLEST
    return (
        tl.sum(tl.sum(signal, 1), 0), tl.sum(tl.sum(noise, 1), 0), ql.largest_bits(top), _count(counts >> 6),
        _count(counts >> 12), _count(counts >> 18), tl.max(tl.max(largest, 1), 0), lowest, is_tiny,
    )  # fmt: skip


@triton.jit
def _sums_of_finite(
    first, col, values, codes, scales, where, steps, per_unit, BEYOND: tl.constexpr, TURNED: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    """Sums of squares of finite values and their errors; counts of other values, of saturated and of new zeros."""
    signal, excluded = tl.zeros((), tl.float32), tl.zeros((), tl.float64)
    noise, saturated, zeros = signal, excluded, excluded
    for step in range(steps):
        row = (first + step) * H.rows
        i, j, x = _values_of_tile(row, col, values, where, TURNED, H)
        scale = expanded(_scales_of_tile(row, col, scales, where, H)[0], H)
        code, other_code = _halves_of_codes(i, j, col, codes, where, H)
        q = tl.reshape(tl.join(code, other_code), (H.rows, H.cols)) * scale
        error = x - q
        both_finite = tl.abs(error) < float("inf")  # True only if both are finite, since x and q have one sign
        x, error = tl.where(both_finite, x, 0.0), tl.where(both_finite, error, 0.0)
        scaled, scaled_error = x * per_unit, error * per_unit
        signal += tl.sum(tl.sum(scaled * scaled, 1), 0)
        noise += tl.sum(tl.sum(scaled_error * scaled_error, 1), 0)
        inside = ((i >= 0) & (i < where.rows))[:, None] & ((j >= 0) & (j < where.cols))[None, :]  # elsewhere x is 0
        kinds = _kinds(x, q != 0.0, scale * BEYOND) + tl.where(inside & ~both_finite, 1, 0)
        excluded += _count(kinds)
        saturated += _count(kinds >> 12)
        zeros += _count(kinds >> 18)
    return signal, noise, excluded, saturated, zeros


@triton.jit
def _kinds(x, nonzero, limit):
    """Three counters in fields of 6 bits from bit 6 on: x is not zero, x saturates, x became zero."""
    return tl.where(
        x != 0.0, tl.where(nonzero, tl.where(tl.abs(x) > limit, 1 << 6 | 1 << 12, 1 << 6), 1 << 6 | 1 << 18), 0
    )


@triton.jit
def _values_of_tile(row, col, values, where, TURNED: tl.constexpr, H: tl.constexpr):
    """Local rows and columns of a tile, and its float32 values. TURNED: elements of a column are adjacent in memory."""
    x_ptr, x_row, x_col = values
    i = row - where.row_origin + tl.arange(0, H.rows)
    j = col - where.col_origin + tl.arange(0, H.cols)
    row_mask, col_mask = (i >= 0) & (i < where.rows), (j >= 0) & (j < where.value_cols)
    down, across = i.to(tl.int64) * x_row, j.to(tl.int64) * x_col
    if TURNED:
        x = tl.trans(
            tl.load(x_ptr + across[:, None] + down[None, :], mask=col_mask[:, None] & row_mask[None, :], other=0.0)
        )
    else:
        x = tl.load(x_ptr + down[:, None] + across[None, :], mask=row_mask[:, None] & col_mask[None, :], other=0.0)
    return i, j, transformed(x, x_ptr.dtype.element_ty, H)


@triton.jit
def _values_of_program(first, col, values, where, steps, TURNED: tl.constexpr, H: tl.constexpr):
    """Bits of a program's largest finite magnitude, and counts of nonfinite and of finite nonzero values."""
    top, nonfinite = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
    nonzeros = nonfinite
    for step in range(steps):
        _, _, x = _values_of_tile((first + step) * H.rows, col, values, where, TURNED, H)
        finite = tl.abs(x) < float("inf")
        top = tl.maximum(top, ql.largest_bits(tl.where(finite, x, 0.0)))
        counts = tl.where(finite, tl.where(x != 0.0, 1 << 6, 0), 1)
        nonfinite += _count(counts)
        nonzeros += _count(counts >> 6)
    return top, nonfinite, nonzeros


@triton.jit
def _halves(x, H: tl.constexpr):
    """Split [H.rows, H.cols] into its even and its odd columns."""
    return tl.split(tl.reshape(x, (H.rows, H.cols // 2, 2)))


@triton.jit
def _scales_of_tile(row, col, scales, where, H: tl.constexpr):
    """The scales of a tile's blocks, and the mask of those that exist and are finite."""
    rule: tl.constexpr = H.rule
    scale_ptr, amax_ptr, row_stride, col_stride, rows, cols = scales
    entries, inside = grid_of_tile(row, col, where, row_stride, col_stride, rows, cols, H)
    second = tl.load(amax_ptr) if amax_ptr is not None else 0.0
    grid = decode_scale(tl.load(scale_ptr + entries, mask=inside, other=0), second, rule)
    return grid, inside & (tl.abs(grid) < float("inf"))


@triton.jit
def _halves_of_codes(i, j, col, codes, where, H: tl.constexpr):
    """The decoded codes of a tile, split as by `_halves`."""
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
        return ql.decode(packed & 0xF, element), ql.decode(packed >> 4, element)
    else:
        valid = inside & ((j >= 0) & (j < where.cols))[None, :]
        return _halves(ql.decode(tl.load(codes_ptr + rows + j[None, :], mask=valid, other=0), element), H)


@triton.jit
def values_kernel(
    x_ptr, x_row, x_col, rows, cols, sums_ptr, sums_stride, extremes_ptr, extremes_stride, copies, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (i < rows)[:, None] & (j < cols)[None, :]
    offsets = i.to(tl.int64)[:, None] * x_row + j.to(tl.int64)[None, :] * x_col
    x = ql.widen(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    finite = tl.abs(x) < float("inf")
    copy = ((tl.program_id(0) + tl.program_id(1)) % copies).to(tl.int64)
    sums_row = sums_ptr + copy * sums_stride
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.atomic_add(sums_row, tl.full((), 1.0, tl.float64) * rows * cols, sem="relaxed")
    counts = tl.where(finite, tl.where(x != 0.0, 1 << 16, 0), 1)
    totals = tl.sum(tl.sum(counts, 1), 0)
    tl.atomic_add(sums_row + 1, (totals & 0xFFFF).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_row + 2, (totals >> 16).to(tl.float64), sem="relaxed")
    top = ql.largest_bits(tl.where(finite, x, 0.0))
    tl.atomic_max(ql.as_bits(extremes_ptr + copy * extremes_stride), top, sem="relaxed")


@triton.jit
def _power_near(x):
    """A power of two near a finite float32 x >= 0, within [2**-122, 2**126], and its reciprocal."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True), 0x02800000), 0x7E800000) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _count(counts):
    return tl.sum(tl.sum(counts & 0x3F, 1), 0).to(tl.float64)


def add_values(sums: Tensor, extremes: Tensor, x: Tensor) -> None:
    """Add `numerics.quantization_error.add_values` of x [R, C] to a row of float64 `sums` and float32 `extremes`."""
    if x.numel() == 0:
        return
    grid = triton.cdiv(x.shape[0], TILE[0]), triton.cdiv(x.shape[1], TILE[1])
    launch_kernel(
        values_kernel, grid, x.device,
        x, *x.stride(), *x.shape, sums, sums.stride(0), extremes, extremes.stride(0), sums.shape[0],
        ROWS=TILE[0], COLS=TILE[1], num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def add_error(
    sums: Tensor, extremes: Tensor, x: Tensor, copy: OrientedCodes, parts: Mapping[str, Tensor],
    origin: tuple[int, int] = (0, 0), hadamard: bool = False, partial: bool = False,
) -> None:  # fmt: skip
    """Add `numerics.quantization_error.add_error` of x to a row of `sums` and `extremes`; `partial`: of a part of x."""
    if x.numel() == 0:
        return
    codes, scale = parts[copy.codes.name], parts[copy.scale.name]
    second = parts[copy.amax.name] if copy.amax is not None else None
    turned = x.stride(0) == 1 < x.stride(1)
    every = EVERY if partial and x.numel() >= LARGE else 1
    region, tile_counts, grid, constants = _plan(copy, x.shape, origin, x.device, hadamard, turned, every)
    launch_kernel(
        error_kernel, grid, x.device,
        x, *x.stride(), (codes, codes.stride(0), codes.shape[1]), (scale, second, *scale.stride(), *scale.shape),
        sums, sums.stride(0), extremes, extremes.stride(0), sums.shape[0], region, *tile_counts, **constants,
    )  # fmt: skip


@lru_cache(MOST_PLANS)
def _plan(
    copy: OrientedCodes, shape: tuple[int, int], origin: tuple[int, int], device: torch.device, hadamard: bool,
    turned: bool, every: int,
) -> tuple[Region, tuple[int, int], tuple[int, int], dict[str, Any]]:  # fmt: skip
    """Launch parameters: region, (rows of tiles, measured elements), programs, and constants of the kernel.

    `turned`: elements of a column are adjacent in memory. `every`: measure one in so many columns of tiles.
    """
    rows, cols = finite(copy.block)
    tile = TileShape(max(64 if turned else 16, rows), max(64 if turned else 256 if rows <= 16 else 128, cols))
    config = tiling(copy.block, tile, sr.scale_rule(copy, Scaling(), torch.float32, device), hadamard=hadamard)
    region = Region(shape[0], shape[1] + (-shape[1] % 16 if hadamard else 0), shape[1], *origin)
    touched_rows, touched_cols = tiles(region, config)
    warps = min(16, tile[0] * tile[1] // (32 * ELEMENTS))
    constants = {"BEYOND": beyond(copy.codes.encoding), "STEPS": STEPS, "EVERY": every, "TURNED": turned, "H": config}
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    if tile[0] * tile[1] == 32 * ELEMENTS * warps:
        options["maxnreg"] = registers(warps, 32 // warps)
    programs = -(touched_rows // -STEPS), -(touched_cols // -every)
    first = origin[1] // tile[1] * tile[1]
    starts = range(first, first + touched_cols * tile[1], every * tile[1])
    cols = sum(min(start + tile[1], origin[1] + region.cols) - max(start, origin[1]) for start in starts)
    return region, (touched_rows, region.rows * cols), programs, {**constants, **options}
