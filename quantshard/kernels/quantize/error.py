"""The error of a quantization, in one read of the values and their codes: `numerics.quantization_error.add_error_`; and
of values that were not quantized `add_values_`.

Counts and extremes are the oracle's. Squares are summed in float32 within a program, of values that are divided by a
power of two near the largest scale of its tiles first, so that none overflows or vanishes that is less than 2**63 from
it, and in float64 over programs: of n values a sum is off by a relative (log2(n) + 4) * 2**-23 at most,
beside the roundings of q and of x - q itself, 2**-24 of the larger of both. A block of zeros has scale 1: beside one,
squares of values below 1e-19 vanish.

Where all is finite, and no scale so small that a product with it might be 0, products and sums are one operation. Of
tiles that are not so a program then counts and sums what is finite.

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

from quantshard.formats import ALL, OrientedCodes, Scaling
from quantshard.kernels import language as ql
from quantshard.kernels import scale_rule as sr
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import decode_scale, grid_of_tile, transformed
from quantshard.kernels.quantize.targets import MOST_PLANS, WARPS, Region, registers, tiles, tiling
from quantshard.numerics.quantization_error import beyond

TILE: Final = (32, 256)
"""Values that a program of `values_kernel` reads."""
STEPS: Final = 6
"""Tiles, one below the other, that a program of `error_kernel` adds up."""
EVERY: Final = 4
LARGE: Final = 1 << 22
"""Of a matrix of `LARGE` elements or more `partial` measures one in `EVERY` columns of tiles."""
ELEMENTS: Final = 8
"""Of a tile that a thread has, so that registers leave room for two programs of 16 warps beside each other."""
SMALLEST = tl.constexpr(2.0**-100)
"""Of a scale that is not 0: with any code that is not 0 a larger one makes a value that is not 0."""


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
    unknown = tl.zeros((), tl.float64)
    nonfinite = unknown
    if is_tiny | ~(signal + noise < float("inf")):
        signal, noise, unknown, saturated, zeros = _sums_of_finite(
            first, col, values, codes, scales, where, steps, per_unit, BEYOND, TURNED, H
        )
        amax, nonfinite, nonzeros = _values_of_program(first, col, values, where, steps, TURNED, H)
    copy = ((tl.program_id(0) + tl.program_id(1)) % copies).to(tl.int64)
    to = sums_ptr + copy * sums_stride
    square = unit.to(tl.float64) * unit.to(tl.float64)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        elements = tl.full((), 1.0, tl.float64) * measured  # a number that is 1 is a constant
        tl.atomic_add(to, elements, sem="relaxed")
        tl.atomic_add(to + 3, elements, sem="relaxed")
    tl.atomic_add(to + 1, nonfinite, sem="relaxed")
    tl.atomic_add(to + 2, nonzeros, sem="relaxed")
    tl.atomic_add(to + 3, -unknown, sem="relaxed")
    tl.atomic_add(to + 4, saturated, sem="relaxed")
    tl.atomic_add(to + 5, zeros, sem="relaxed")
    tl.atomic_add(to + 6, signal.to(tl.float64) * square, sem="relaxed")
    tl.atomic_add(to + 7, noise.to(tl.float64) * square, sem="relaxed")
    bits = ql.as_bits(extremes_ptr + copy * extremes_stride)  # of positive numbers they are in the order of values
    tl.atomic_max(bits, amax, sem="relaxed")
    tl.atomic_max(bits + 1, highest.to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_min(bits + 2, smallest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _bound_of_scales(first, col, scales, where, steps, H: tl.constexpr):
    """What the scales of a program's tiles come near, and do not exceed."""
    rule: tl.constexpr = H.rule
    if rule.kind == 2:
        return tl.load(scales[1]) * (1.0 / rule.element.max)  # that of a block with the tensor's amax
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
    """Of a program's tiles, where all values and scales are finite and no scale is tiny: the squares of values and of
    errors, divided by the unit; bits of the amax; how many values are not zero, saturate, and became zero. If something
    is not finite a sum of squares is not. Then the largest and the smallest scale, and whether one is tiny: so small,
    and not 0, that a product with a code that is not 0 might be 0."""
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
        if rule.kind == 2:  # an FP8 scale may be 0
            least = tl.minimum(least, tl.where(grid == 0.0, float("inf"), bounded))
        code, other_code = _halves_of_codes(i, j, col, codes, where, H)
        x, other_x = _halves(x, H)
        unit, other_unit = _halves(_expanded(grid * per_unit, H), H)
        limit, other_limit = _halves(_expanded(grid * BEYOND, H), H)
        part, other_part = x * per_unit, other_x * per_unit
        off, other_off = tl.fma(code, -unit, part), tl.fma(other_code, -other_unit, other_part)
        signal = tl.fma(other_part, other_part, tl.fma(part, part, signal))
        noise = tl.fma(other_off, other_off, tl.fma(off, off, noise))
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
    """The same of values that are finite, as what they became: squares of values and errors; how many values are not
    so, saturate, and became zero."""
    signal, unknown = tl.zeros((), tl.float32), tl.zeros((), tl.float64)
    noise, saturated, zeros = signal, unknown, unknown
    for step in range(steps):
        row = (first + step) * H.rows
        i, j, x = _values_of_tile(row, col, values, where, TURNED, H)
        scale = _expanded(_scales_of_tile(row, col, scales, where, H)[0], H)
        q = _codes_of_tile(i, j, col, codes, where, H) * scale
        error = x - q
        known = tl.abs(error) < float("inf")  # if both are finite: they have one sign
        x, error = tl.where(known, x, 0.0), tl.where(known, error, 0.0)
        part, off = x * per_unit, error * per_unit
        signal += tl.sum(tl.sum(part * part, 1), 0)
        noise += tl.sum(tl.sum(off * off, 1), 0)
        inside = ((i >= 0) & (i < where.rows))[:, None] & ((j >= 0) & (j < where.cols))[None, :]  # else x is 0
        kinds = _kinds(x, q != 0.0, scale * BEYOND) + tl.where(inside & ~known, 1, 0)
        unknown += _count(kinds)
        saturated += _count(kinds >> 12)
        zeros += _count(kinds >> 18)
    return signal, noise, unknown, saturated, zeros


@triton.jit
def _kinds(x, nonzero, limit):
    """One in a field of 6 bits for each of these: x is not zero, and saturates, or became zero."""
    return tl.where(
        x != 0.0, tl.where(nonzero, tl.where(tl.abs(x) > limit, 1 << 6 | 1 << 12, 1 << 6), 1 << 6 | 1 << 18), 0
    )


@triton.jit
def _values_of_tile(row, col, values, where, TURNED: tl.constexpr, H: tl.constexpr):
    """Local rows and columns of a tile, and its values, float32. TURNED: columns lie beside each other in memory."""
    x_ptr, x_row, x_col = values
    i = row - where.row_origin + tl.arange(0, H.rows)
    j = col - where.col_origin + tl.arange(0, H.cols)
    below, beside = (i >= 0) & (i < where.rows), (j >= 0) & (j < where.value_cols)
    down, across = i.to(tl.int64) * x_row, j.to(tl.int64) * x_col
    if TURNED:
        x = tl.trans(tl.load(x_ptr + across[:, None] + down[None, :], mask=beside[:, None] & below[None, :], other=0.0))
    else:
        x = tl.load(x_ptr + down[:, None] + across[None, :], mask=below[:, None] & beside[None, :], other=0.0)
    return i, j, transformed(x, x_ptr.dtype.element_ty, H)


@triton.jit
def _values_of_program(first, col, values, where, steps, TURNED: tl.constexpr, H: tl.constexpr):
    """Of a program's tiles: bits of the largest finite magnitude, and how many values are not finite, and not zero."""
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
def _expanded(grid, H: tl.constexpr):
    """The entry of each element's block."""
    return ql.expand(grid, H.rows, H.cols, H.block_rows, H.block_cols)


@triton.jit
def _halves(x, H: tl.constexpr):
    """[H.rows, H.cols] -> columns 0, 2, ... and 1, 3, ..."""
    return tl.split(tl.reshape(x, (H.rows, H.cols // 2, 2)))


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
    code, other_code = _halves_of_codes(i, j, col, codes, where, H)
    return tl.reshape(tl.join(code, other_code), (H.rows, H.cols))


@triton.jit
def _halves_of_codes(i, j, col, codes, where, H: tl.constexpr):
    """The same, as `_halves` gives them."""
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
    copy: OrientedCodes,
    parts: Mapping[str, Tensor],
    origin: tuple[int, int] = (0, 0),
    hadamard: bool = False,
    partial: bool = False,
) -> None:
    """`numerics.quantization_error.add_error_` of x [R, C], float32, bfloat16 or float16 with any strides, added to one
    of the rows of `sums`, float64 [copies, columns], and of `extremes`, float32 [copies, columns]. `hadamard`: of
    `numerics.hadamard16` of x. `partial`: of a large matrix a part is measured, and counts alone."""
    if x.numel() == 0:
        return
    codes, scale = parts[copy.codes.name], parts[copy.scale.name]
    second = parts[copy.amax.name] if copy.amax is not None else None
    turned = x.stride(0) == 1 < x.stride(1)
    every = EVERY if partial and x.numel() >= LARGE else 1
    where, counted, grid, constants = _plan(copy, x.shape, origin, x.device, hadamard, turned, every)
    launch_kernel(
        error_kernel, grid, x.device,
        x, *x.stride(), (codes, codes.stride(0), codes.shape[1]), (scale, second, *scale.stride(), *scale.shape),
        sums, sums.stride(0), extremes, extremes.stride(0), sums.shape[0], where, *counted, **constants,
    )  # fmt: skip


@lru_cache(MOST_PLANS)
def _plan(
    copy: OrientedCodes,
    shape: tuple[int, int],
    origin: tuple[int, int],
    device: torch.device,
    hadamard: bool,
    turned: bool,
    every: int,
) -> tuple[Region, tuple[int, int], tuple[int, int], dict[str, Any]]:
    """What is the same in each launch of a shape: the rectangle, its rows of tiles and how many elements are measured,
    the programs, and the kernel's constants. `turned`: the matrix's columns lie in memory as rows do, whose cache lines
    a high tile reads whole. `every`: one in so many columns of tiles."""
    rows, cols = (1 if cover == ALL else cover for cover in copy.block)
    tile = max(64 if turned else 16, rows), max(64 if turned else 256 if rows <= 16 else 128, cols)
    how = tiling(copy.block, tile, sr.scale_rule(copy, Scaling(), torch.float32, device))._replace(hadamard=hadamard)
    where = Region(shape[0], shape[1] + (-shape[1] % 16 if hadamard else 0), shape[1], *origin)
    touched_rows, touched_cols = tiles(where, how)
    warps = min(16, tile[0] * tile[1] // (32 * ELEMENTS))
    constants = {"BEYOND": beyond(copy.codes.encoding), "STEPS": STEPS, "EVERY": every, "TURNED": turned, "H": how}
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    if tile[0] * tile[1] == 32 * ELEMENTS * warps:
        options["maxnreg"] = registers(warps, 32 // warps)
    programs = -(touched_rows // -STEPS), -(touched_cols // -every)
    first = origin[1] // tile[1] * tile[1]
    begins = range(first, first + touched_cols * tile[1], every * tile[1])
    cols = sum(min(at + tile[1], origin[1] + where.cols) - max(at, origin[1]) for at in begins)
    return where, (touched_rows, where.rows * cols), programs, {**constants, **options}
