"""Quantization, and that of the transpose too, from one read of the values.

    scale      = a rule of the amax of a block (`numerics.scales`)
    code[i, j] = round(x[i, j] * multiplier of its block)

A program takes a tile of whole blocks, by the global block grid: amaxes of such blocks are taken in the same pass. Of
blocks that reach beyond a tile (a scale for the whole tensor or a whole row) or beyond this rank's rectangle, amaxes or
multipliers are given, which were taken and reduced before.

What is multiplied with stored weights may be quantized by the launch that lays these out (`swizzle.swizzle_tile`).

Kernels that compute the values themselves (`norm`, `activation`) hand their tiles to the same `emit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels import scale_rule as sr
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize import hadamard
from quantshard.kernels.quantize import random_words as rw
from quantshard.kernels.quantize.swizzle import SwizzleRequest, swizzle_tile, swizzled
from quantshard.kernels.quantize.targets import (
    KernelOutputs,
    QuantizedOutput,
    QuantizeRequest,
    Targets,
    plan_quantization,
)

NAN = tl.constexpr(0x7FC00000)
"""The bits of a NaN that is more than all numbers, as integers are compared."""


@triton.jit
def tile_of(where, H: tl.constexpr, TURNED: tl.constexpr = False):
    """Row and column of this program's tile in the global matrix, its local indices, and which have a value.

    TURNED: H is of the transpose.
    """
    ROWS: tl.constexpr = H.cols if TURNED else H.rows
    COLS: tl.constexpr = H.rows if TURNED else H.cols
    row = (where.row_origin // ROWS + tl.program_id(0)) * ROWS
    col = (where.col_origin // COLS + tl.program_id(1)) * COLS
    i = row - where.row_origin + ql.row_order(ROWS, H.together)
    j = col - where.col_origin + tl.arange(0, COLS)
    if H.together == 16:  # a thread then has 16 rows of 4 columns, not 8 of 8
        j = tl.max_contiguous(j, 4)
    valued = ((i >= 0) & (i < where.rows))[:, None] & ((j >= 0) & (j < where.value_cols))[None, :]
    return row, col, i, j, valued


@triton.jit
def emit(
    values, row, col, where, out, words, other_where, other_out, other_words, dtype: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of values of a floating dtype, held in it or in float32, and store what is asked for.

    Values are zero where there are none. H: of the tile itself. T: of its transpose, with scales of its own; either may
    be None.
    """
    drawn = 0
    if H is not None:
        if out.next_amax is not None:
            tl.atomic_max(ql.as_bits(out.next_amax), ql.largest_bits(ql.widen(values)), sem="relaxed")
        if H.stochastic:  # before anything reads the values, which are on their way
            drawn = _drawn(row, col, words, H)
        x = transformed(values, dtype, H)
        amax = _amaxes(values, x, out, H)
        if T is None or T.hadamard:
            _emit(x, amax, row, col, where, out, drawn, H)
    if T is not None:
        y = transformed(values, dtype, T)
        other_amax = _amaxes(values, y, other_out, T)
        if H is not None and not T.hadamard:
            # not before the amaxes: threads would wait for each other with the values and their magnitudes in registers
            _emit(x, amax, row, col, where, out, drawn, H)
        if T.stochastic:
            drawn = ql.swap_halves(drawn) if T.words_shared else _drawn(col, row, other_words, T)
        _emit(y, other_amax, col, row, other_where, other_out, drawn, T)


@triton.jit
def _drawn(row, col, words, H: tl.constexpr):
    """Random words of a tile at a row and column of the quantized matrix, as it is held."""
    named, stream, width = words
    k0, k1, draw = named
    number = tl.load(draw) if H.draw_loaded else draw
    key = (k0, k1, number, stream, width)
    index: tl.constexpr = tl.uint32 if H.short_index else tl.int64
    # words lie as the quantized matrix does, or as its transpose, and the tile is held as either
    first, second = (col, row) if H.words_transposed else (row, col)
    ROWS: tl.constexpr = H.cols if H.words_transposed else H.rows
    COLS: tl.constexpr = H.rows if H.words_transposed else H.cols
    if H.transposed != H.words_transposed:
        drawn = rw.words_of_transposed_tile(first, second, key, ROWS, COLS, H.by_four, H.together, index)
    else:
        drawn = rw.words_of_tile(first, second, key, ROWS, COLS, H.by_four, H.together, index)
    return ql.swap_halves(drawn) if H.words_transposed else drawn


@triton.jit
def _emit(x, amax, row, col, where, out, drawn, H: tl.constexpr):
    """Codes of a tile at a row and column of the quantized matrix, which is held as the transpose if H.transposed;
    `drawn`: random words, if they are rounded with them."""
    element: tl.constexpr = H.rule.element
    multiplier, scale = _scales(amax, row, col, where, out, H)
    scaled = x * multiplier
    if H.stochastic:
        codes = ql.encode_stochastic(scaled, drawn, element)
    else:
        codes = ql.encode(scaled, element)
    if H.decoded:
        codes = (codes >> 28 if element.bits == 4 else codes).to(tl.uint8)
        codes = ql.narrow(ql.decode(codes, element) * scale, out.codes.dtype.element_ty)
    at_row, at_col = row - where.row_origin, col - where.col_origin
    own = (out.codes, where.rows, where.cols, out.codes_cols)
    if H.transposed:
        _store_across(codes, at_row, at_col, own, H.cols, H.rows, H)
    else:
        _store(codes, at_row, at_col, own, H)
    if out.transposed is not None:
        across = (out.transposed, where.cols, where.rows, out.transposed_cols)
        if H.transposed:
            _store(codes, at_col, at_row, across, H)
        else:
            _store_across(codes, at_col, at_row, across, H.rows, H.cols, H)


@triton.jit
def transformed(values, dtype: tl.constexpr, H: tl.constexpr):
    """Float32, of values of `dtype`; if asked for after `numerics.hadamard16` of the matrix's rows, which are columns
    if H.transposed."""
    x = ql.widen(values)
    if H.hadamard:
        if H.transposed:
            tl.static_assert(H.together == 16)
            signs = hadamard.hadamard_signs(ql.row_order(H.cols, H.together))[:, None]  # tiles start at multiples of 16
            x = hadamard.hadamard16(x, signs, H.cols, H.rows, H.cols // 16 * H.rows)
        else:
            signs = hadamard.hadamard_signs(tl.arange(0, H.cols))[None, :]
            x = hadamard.hadamard16(x, signs, H.rows, H.cols, 1)
        x = ql.rounded(x, dtype)
    return x


@triton.jit
def _amaxes(values, x, out, H: tl.constexpr):
    """Amaxes of the blocks of a tile x of `values`, in the order in which it is held. If they or multipliers are given
    nobody reads them, and x serves."""
    ROWS: tl.constexpr = H.cols if H.transposed else H.rows
    COLS: tl.constexpr = H.rows if H.transposed else H.cols
    BLOCK_ROWS: tl.constexpr = H.block_cols if H.transposed else H.block_rows
    BLOCK_COLS: tl.constexpr = H.block_rows if H.transposed else H.block_cols
    if out.given is not None:
        return x
    elif H.pairs:
        return ql.line_amax(values, ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, H.together)
    else:
        return ql.block_amax(x, ROWS, COLS, BLOCK_ROWS, BLOCK_COLS, H.together)


@triton.jit
def grid_of_tile(row, col, where, row_stride, col_stride, rows, cols, H: tl.constexpr):
    """Where the entries of a tile's blocks, as held, lie in the touched grid [rows, cols], and which there are. If
    H.swizzled, `row_stride` is the tiles of a row."""
    first_row = 0 if H.row_all else row // H.block_rows - where.row_origin // H.block_rows
    first_col = 0 if H.col_all else col // H.block_cols - where.col_origin // H.block_cols
    BLOCK: tl.constexpr = H.block_cols if H.transposed else H.block_rows
    TOGETHER: tl.constexpr = H.together // BLOCK if BLOCK < H.together else 1
    if H.transposed:
        i = first_row + tl.arange(0, H.rows // H.block_rows)[None, :]
        j = first_col + ql.row_order(H.cols // H.block_cols, TOGETHER)[:, None]
    else:
        i = first_row + ql.row_order(H.rows // H.block_rows, TOGETHER)[:, None]
        j = first_col + tl.arange(0, H.cols // H.block_cols)[None, :]
    inside = (i >= 0) & (i < rows) & (j >= 0) & (j < cols)
    if H.swizzled:
        return swizzled(i, j, row_stride), inside
    else:
        return i * row_stride + j * col_stride, inside


@triton.jit
def touched_by(origin, size, COVERS: tl.constexpr):
    """`touched`, of a size that is not zero."""
    return (origin + size - 1) // COVERS - origin // COVERS + 1


@triton.jit
def _in_order(grid, ENTRIES: tl.constexpr, H: tl.constexpr):
    """The entries of a grid as held, in the order in which they are stored."""
    return tl.reshape(tl.trans(grid) if H.transposed != H.by_columns else grid, (ENTRIES,))


@triton.jit
def _as_held(entries, ROWS: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr):
    """Inverse of `_in_order`: a grid of a tile's rows and columns, transposed if it is held so."""
    grid = tl.reshape(entries, (COLS, ROWS) if H.by_columns else (ROWS, COLS))
    return tl.trans(grid) if H.transposed != H.by_columns else grid


@triton.jit
def _scales(amax, row, col, where, out, H: tl.constexpr):
    """For each element of the tile a multiplier: the one given for its block, or one from the block's amax, whose scale
    is stored here too. Of a block that is in several tiles the first one's program stores it.

    If H.decoded the scale is not stored, but given for each element beside the multiplier.
    """
    rule: tl.constexpr = H.rule
    ROWS: tl.constexpr = H.rows // H.block_rows
    COLS: tl.constexpr = H.cols // H.block_cols
    ENTRIES: tl.constexpr = ROWS * COLS
    grid_rows = 1 if H.row_all else touched_by(where.row_origin, where.rows, H.block_rows)
    grid_cols = 1 if H.col_all else touched_by(where.col_origin, where.cols, H.block_cols)
    at, inside = grid_of_tile(row, col, where, out.grid_row, out.grid_col, grid_rows, grid_cols, H)
    if out.given is not None:
        amax = tl.load(out.given + at, mask=inside, other=0.0)
        if H.row_all:
            inside = ql.mask_where(row <= where.row_origin, inside)
        if H.col_all:
            inside = ql.mask_where(col <= where.col_origin, inside)
    decoded = amax
    if out.scale is None and not H.decoded:
        multiplier = amax  # which they are
    else:
        second = tl.load(out.second) if out.second is not None else 0.0
        if out.second_scale is not None:
            encoding: tl.constexpr = rule.stored
            whole = second * (1.0 / (rule.element.max * encoding.max))
            if H.nan_flag == "amax":
                whole = tl.where(second < float("inf"), whole, float("nan"))
            tl.store(out.second_scale, whole, mask=(row <= where.row_origin) & (col <= where.col_origin))
        to = out.scale
        if out.scale is not None and rule.kind > 0:  # of any dtype of a byte
            to = out.scale.to(tl.pointer_type(tl.uint8), bitcast=True)
        if ENTRIES >= 32:
            # one entry a thread: as reduced, each thread has all entries of its elements, and would do the same again
            order = tl.arange(0, ENTRIES)
            stored, flat = sr.scales(tl.gather(_in_order(amax, ENTRIES, H), order, 0), second, rule)
            if H.nan_flag == "given":
                stored += tl.load(out.nan_flag)
            if H.decoded:
                scale = tl.gather(decode_scale(stored, second, rule), order, 0)
                decoded = _as_held(scale, ROWS, COLS, H)
            else:
                tl.store(to + _in_order(at, ENTRIES, H), stored, mask=_in_order(inside, ENTRIES, H))
            multiplier = _as_held(tl.gather(flat, order, 0), ROWS, COLS, H)
        else:
            stored, multiplier = sr.scales(amax, second, rule)
            if H.nan_flag == "amax" and rule.kind == 0:
                stored = tl.where(amax < float("inf"), stored, float("nan"))
            if H.nan_flag == "given":
                stored += tl.load(out.nan_flag)
            if H.decoded:
                decoded = decode_scale(stored, second, rule)
            elif H.nan_flag == "apart":
                tl.atomic_max(ql.as_bits(out.scale + at), stored.to(tl.int32, bitcast=True), mask=inside, sem="relaxed")
            else:
                tl.store(to + at, stored, mask=inside)
    return _expanded(multiplier, H), _expanded(decoded, H)


@triton.jit
def decode_scale(stored, second, R: tl.constexpr):
    """Stored scales -> what decoded codes are multiplied by, float32; `second`: as of `sr.scales`."""
    if R.kind == 0:
        return stored
    elif R.kind == 1:
        return sr.decode_e8m0(stored)
    else:
        encoding: tl.constexpr = R.stored
        return ql.decode(stored, encoding) * second * (1.0 / (R.element.max * encoding.max))


@triton.jit
def _expanded(grid, H: tl.constexpr):
    """The entry of each element's block, of a grid as held."""
    if H.transposed:
        return ql.expand(grid, H.cols, H.rows, H.block_cols, H.block_rows, H.together)
    else:
        return ql.expand(grid, H.rows, H.cols, H.block_rows, H.block_cols, H.together)


@triton.jit
def _store(codes, row, col, to, H: tl.constexpr):
    """Codes as held at a local row and column of `to`: pointer, rows, columns and stored columns."""
    ROWS: tl.constexpr = H.cols if H.transposed else H.rows
    COLS: tl.constexpr = H.rows if H.transposed else H.cols
    _store_at(codes, row + ql.row_order(ROWS, H.together), col, to, ROWS, COLS, H)


@triton.jit
def _store_across(codes, row, col, to, ROWS: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr):
    """The transpose [COLS, ROWS] of codes as held, in the order of their rows."""
    shape: tl.constexpr = (H.together, ROWS // H.together, COLS)
    transposed = tl.reshape(tl.permute(tl.reshape(codes, shape), (2, 1, 0)), (COLS, ROWS))
    _store_at(transposed, row + tl.arange(0, COLS), col, to, COLS, ROWS, H)


@triton.jit
def _store_at(codes, i, col, to, ROWS: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr):
    """Codes [ROWS, COLS], or values if H.decoded, at local rows i and from a local column on; packed, if of 4 bits."""
    ptr, rows, elements, cols = to
    if not H.decoded:  # PyTorch's dtypes of codes are bytes
        ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    if H.rule.element.bits == 4 and not H.decoded:
        if H.rule.kind == 1:  # a multiplier may be NaN, which makes a code of the zero beside an odd last column too
            codes = tl.where((col + tl.arange(0, COLS) < elements)[None, :], codes, 0)
        codes = ql.pack(codes, ROWS, COLS)
        j = col // 2 + tl.arange(0, COLS // 2)
    else:
        j = col + tl.arange(0, COLS)
        if H.together == 16:  # as `tile_of`: values are held, transformed and drawn for as they are loaded
            j = tl.max_contiguous(j, 4)
    mask = ((i >= 0) & (i < rows))[:, None] & ((j >= 0) & (j < cols))[None, :]
    tl.store(ptr + i.to(tl.int64)[:, None] * cols + j[None, :], codes.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=rw.RANDOM_OF_PARTS)
def quantize_kernel(
    x_ptrs, row_stride, col_stride, where, outs, other_where, other_outs, k0, k1, draw, k2, k3, draw1, k4, k5, draw2,
    stream, width, other_stream, other_width, weights,
    PARTS: tl.constexpr, H: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    if S is not None:  # the last programs lay out weights
        if tl.program_id(2) >= PARTS:
            line = (tl.program_id(2) - PARTS) * tl.num_programs(1) + tl.program_id(1)
            swizzle_tile(line * tl.num_programs(0) + tl.program_id(0), weights, S)
    row, col, i, j, valued = tile_of(where, H)
    at = i.to(tl.int64)[:, None] * row_stride + j.to(tl.int64)[None, :] * col_stride
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            key = rw.key_of(part, (k0, k1, draw), (k2, k3, draw1), (k4, k5, draw2))
            words = (key, stream, width)
            other_words = (key, other_stream, other_width)
            values = tl.load(x_ptrs[part] + at, mask=valued, other=0.0)
            emit(
                values, row, col, where, outs[part], words, other_where, other_outs[part], other_words, values.dtype,
                H, T,
            )  # fmt: skip


def quantize_matrix(
    x: Tensor, request: QuantizeRequest, other: QuantizeRequest | None = None, next_amax: Tensor | None = None
) -> tuple[QuantizedOutput, QuantizedOutput | None]:
    """Quantize x [R, C], of any strides, float32, bfloat16 or float16; and its transpose, as `other` says.

    `next_amax`: float32 scalar, made the larger of itself and the amax of x.
    """
    one, two = quantize_matrices([x], [KernelOutputs(request, other, amax=next_amax)])[0]
    assert one is not None
    return one, two


def quantize_matrices(
    xs: Sequence[Tensor], requests: Sequence[KernelOutputs], swizzle: SwizzleRequest | None = None
) -> list[Targets]:
    """The same of several matrices of one shape, strides, dtype and device, by one kernel.

    They are quantized by the same specs, with random words at most `KEYS` of them. `amax`: as `next_amax`. `swizzle`:
    weights, which the same kernel lays out.
    """
    x, (request, other, *_) = xs[0], requests[0]
    assert request is not None
    keys, streams, roundings = rw.random_arguments_of(requests)
    plan = plan_quantization(
        request.spec, None if other is None else other.spec, x.shape, x.dtype, x.device, x.stride(1) == 1, *roundings
    )
    made = [plan.outputs(each.request, each.other, x.device, each.amax) for each in requests]
    if x.numel() > 0:
        ones, twos = zip(*made, strict=True)
        (down, across), layers, weights, config = plan.programs, len(xs), None, None
        if swizzle is not None:
            layers += -(swizzle.tiles // -(down * across))
            weights, config, swizzle.launched = swizzle.arguments, swizzle.config, True
        launch_kernel(
            quantize_kernel, (down, across, layers), x.device,
            tuple(xs), *x.stride(), plan.where, ones, plan.two and plan.two.where, twos, *keys, *streams, weights,
            PARTS=len(xs), S=config, **plan.constants,
        )  # fmt: skip
    return made
