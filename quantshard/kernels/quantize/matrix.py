"""Quantization of a matrix, and of its transpose, from one read of the values.

    scale      = rule of the amax of a block (`numerics.scales_and_multipliers`)
    code[i, j] = round(x[i, j] * multiplier of its block)

A program works on a tile of whole blocks of the global block grid, and takes the amaxes of these blocks in the same
pass. If blocks exceed a tile (one scale for the tensor or for a row) or cross the edge of this rank's rectangle, the
caller passes their amaxes or multipliers, which were measured and reduced before.

One launch can quantize the operands of stored weights and also lay these weights out (`swizzle.swizzle_tile`).

Kernels that compute the values themselves (`fused.norm`, `fused.activation`) pass their tiles to the same `emit`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql, scale_rule as sr, workspace
from quantshard.kernels.graph_launch import writes, writes_fields
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize import random_words as rw, targets as kt
from quantshard.kernels.quantize.swizzle import SwizzleRequest, swizzle_tile, swizzled
from quantshard.numerics.transforms import HADAMARD_NEGATIVE

NO_RANDOM_WORDS = rw.random_arguments_of([])
NAN = tl.constexpr(0x7FC00000)
"""The bits of a NaN. As an integer they exceed the bits of every number."""


@triton.jit
def tile_of(where, H: tl.constexpr, TURNED: tl.constexpr = False):
    """This program's tile: global row and column, local indices, mask of its elements. TURNED: of the transpose."""
    ROWS: tl.constexpr = H.cols if TURNED else H.rows
    COLS: tl.constexpr = H.rows if TURNED else H.cols
    row = (where.row_origin // ROWS + tl.program_id(0)) * ROWS
    col = (where.col_origin // COLS + tl.program_id(1)) * COLS
    i = row - where.row_origin + ql.row_order(ROWS, H.together)
    j = col - where.col_origin + tl.arange(0, COLS)
    if H.together == 16:  # a thread then has 16 rows of 4 columns instead of 8 rows of 8
        j = tl.max_contiguous(j, 4)
    valued = ((i >= 0) & (i < where.rows))[:, None] & ((j >= 0) & (j < where.value_cols))[None, :]
    return row, col, i, j, valued


@triton.jit
def emit(
    values, row, col, where, out, words, other_where, other_out, other_words, dtype: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Quantize a tile and store the requested results.

    `values`: the tile in a floating dtype or float32, zero where masked. H: config of the tile; T: config of its
    transpose, if that has its own scales. H or T can be None.
    """
    random_bits = 0
    if H is not None:
        if out.next_amax is not None:
            tl.atomic_max(ql.as_bits(out.next_amax), ql.largest_bits(ql.widen(values)), sem="relaxed")
        if H.stochastic:  # computed while the values are still being loaded
            random_bits = _drawn(row, col, words, H)
        x = transformed(values, dtype, H)
        amax = _amaxes(values, x, out, H)
        if T is None or T.hadamard:
            _emit(x, amax, row, col, where, out, random_bits, H)
    if T is not None:
        y = transformed(values, dtype, T)
        other_amax = _amaxes(values, y, other_out, T)
        if H is not None and not T.hadamard:
            # after the amaxes: otherwise threads wait for each other with values and magnitudes in registers
            _emit(x, amax, row, col, where, out, random_bits, H)
        if T.stochastic:
            random_bits = ql.swap_halves(random_bits) if T.words_shared else _drawn(col, row, other_words, T)
        _emit(y, other_amax, col, row, other_where, other_out, random_bits, T)


@triton.jit
def _drawn(row, col, words, H: tl.constexpr):
    """Random words of the tile at a row and column of the quantized matrix, in the tile's register layout."""
    key_words, stream, width = words
    k0, k1, draw = key_words
    draw_number = tl.load(draw) if H.draw_loaded else draw
    key = (k0, k1, draw_number, stream, width)
    index: tl.constexpr = tl.uint32 if H.short_index else tl.int64
    # both the words and the tile can be in the order of the quantized matrix or of its transpose
    first, second = (col, row) if H.words_transposed else (row, col)
    ROWS: tl.constexpr = H.cols if H.words_transposed else H.rows
    COLS: tl.constexpr = H.rows if H.words_transposed else H.cols
    if H.transposed != H.words_transposed:
        bits = rw.words_of_transposed_tile(first, second, key, ROWS, COLS, H.by_four, H.together, index)
    else:
        bits = rw.words_of_tile(first, second, key, ROWS, COLS, H.by_four, H.together, index)
    return ql.swap_halves(bits) if H.words_transposed else bits


@triton.jit
def _emit(x, amax, row, col, where, out, drawn, H: tl.constexpr):
    """Store the codes of a tile at a row and column of the quantized matrix. `drawn`: random words, if H.stochastic."""
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
    destination = (out.codes, where.rows, where.cols, out.codes_cols)
    if H.transposed:
        _store_across(codes, at_row, at_col, destination, H.cols, H.rows, H)
    else:
        _store(codes, at_row, at_col, destination, H)
    if out.transposed is not None:
        transposed_destination = (out.transposed, where.cols, where.rows, out.transposed_cols)
        if H.transposed:
            _store(codes, at_col, at_row, transposed_destination, H)
        else:
            _store_across(codes, at_col, at_row, transposed_destination, H.rows, H.cols, H)


@triton.jit
def transformed(values, dtype: tl.constexpr, H: tl.constexpr):
    """Widen values of `dtype` to float32; with H.hadamard, return `numerics.hadamard16` of the matrix's rows, rounded
    to `dtype`. These rows are columns of the tile if H.transposed."""
    x = ql.widen(values)
    if H.hadamard:
        if H.transposed:
            tl.static_assert(H.together == 16)
            signs = hadamard_signs(ql.row_order(H.cols, H.together))[:, None]  # tiles start at multiples of 16
            x = hadamard16(x, signs, H.cols, H.rows, H.cols // 16 * H.rows)
        else:
            signs = hadamard_signs(tl.arange(0, H.cols))[None, :]
            x = hadamard16(x, signs, H.rows, H.cols, 1)
        x = ql.rounded(x, dtype)
    return x


@triton.jit
def hadamard16(x, SIGNS, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr):
    """Transform groups of 16 elements, STEP apart, of float32 [ROWS, COLS] times SIGNS: `numerics.hadamard16`."""
    x = x * SIGNS
    x = _butterflies(x, STEP, ROWS, COLS)
    x = _butterflies(x, 2 * STEP, ROWS, COLS)
    x = _butterflies(x, 4 * STEP, ROWS, COLS)
    return _butterflies(x, 8 * STEP, ROWS, COLS) * 0.25


@triton.jit
def _butterflies(x, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    pairs = tl.reshape(x, (ROWS * COLS // (2 * STRIDE), 2, STRIDE))
    a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, COLS))


# a bit mask, because a kernel cannot index a tuple by a tile
SIGN_MASK = tl.constexpr(HADAMARD_NEGATIVE)


@triton.jit
def hadamard_signs(columns):
    """Return +1 or -1 for each of these global columns."""
    mask = tl.zeros_like(columns) + SIGN_MASK
    return 1.0 - 2.0 * ((mask >> (columns % 16)) & 1).to(tl.float32)


@triton.jit
def _amaxes(values, x, out, H: tl.constexpr):
    """Amaxes of the blocks of a tile x of `values`, in register order; x itself, unused, if the caller passed them."""
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
    """Offsets of a tile's blocks in the touched grid [rows, cols], in register order, and the mask of blocks inside it.

    If H.swizzled, `row_stride` is the number of swizzle tiles in a row.
    """
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
    """`targets.touched` for a nonzero size."""
    return (origin + size - 1) // COVERS - origin // COVERS + 1


@triton.jit
def _in_order(grid, ENTRIES: tl.constexpr, H: tl.constexpr):
    """Flatten a grid from register order to storage order."""
    return tl.reshape(tl.trans(grid) if H.transposed != H.by_columns else grid, (ENTRIES,))


@triton.jit
def _as_held(entries, ROWS: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr):
    """Inverse of `_in_order`."""
    grid = tl.reshape(entries, (COLS, ROWS) if H.by_columns else (ROWS, COLS))
    return tl.trans(grid) if H.transposed != H.by_columns else grid


@triton.jit
def _scales(amax, row, col, where, out, H: tl.constexpr):
    """The multiplier of each element, from the caller's grid or from the block's amax; store the scale of each block.

    If a block spans several tiles, the program of the first tile stores its scale. If H.decoded no scale is stored; the
    second result then has the decoded scale of each element.
    """
    rule: tl.constexpr = H.rule
    ROWS: tl.constexpr = H.rows // H.block_rows
    COLS: tl.constexpr = H.cols // H.block_cols
    ENTRIES: tl.constexpr = ROWS * COLS
    grid_rows = 1 if H.row_all else touched_by(where.row_origin, where.rows, H.block_rows)
    grid_cols = 1 if H.col_all else touched_by(where.col_origin, where.cols, H.block_cols)
    entries, inside = grid_of_tile(row, col, where, out.grid_row, out.grid_col, grid_rows, grid_cols, H)
    if out.given is not None:
        amax = tl.load(out.given + entries, mask=inside, other=0.0)
        if H.row_all:
            inside = ql.mask_where(row <= where.row_origin, inside)
        if H.col_all:
            inside = ql.mask_where(col <= where.col_origin, inside)
    decoded = amax
    if out.scale is None and not H.decoded:
        multiplier = amax  # loaded from the grid of multipliers
    else:
        second = tl.load(out.second) if out.second is not None else 0.0
        if out.second_scale is not None:
            encoding: tl.constexpr = rule.stored
            second_scale = second * (1.0 / (rule.element.max * encoding.max))
            if H.nan_from_amax:
                second_scale = tl.where(second < float("inf"), second_scale, float("nan"))
            tl.store(out.second_scale, second_scale, mask=(row <= where.row_origin) & (col <= where.col_origin))
        scale_ptr = out.scale
        if out.scale is not None and rule.kind > 0:  # any 1-byte dtype
            scale_ptr = out.scale.to(tl.pointer_type(tl.uint8), bitcast=True)
        if ENTRIES >= 32:
            # one entry per thread: after the reduction several threads have the same entries, and would repeat the work
            order = tl.arange(0, ENTRIES)
            stored_scale, flat_multiplier = sr.scales(tl.gather(_in_order(amax, ENTRIES, H), order, 0), second, rule)
            if out.nan_flag is not None:
                stored_scale += tl.load(out.nan_flag)
            if H.decoded:
                scale = tl.gather(decode_scale(stored_scale, second, rule), order, 0)
                decoded = _as_held(scale, ROWS, COLS, H)
            else:
                tl.store(scale_ptr + _in_order(entries, ENTRIES, H), stored_scale, mask=_in_order(inside, ENTRIES, H))
            multiplier = _as_held(tl.gather(flat_multiplier, order, 0), ROWS, COLS, H)
        else:
            stored_scale, multiplier = sr.scales(amax, second, rule)
            if H.nan_from_amax and rule.kind == 0:
                stored_scale = tl.where(amax < float("inf"), stored_scale, float("nan"))
            if out.nan_flag is not None:
                stored_scale += tl.load(out.nan_flag)
            if H.decoded:
                decoded = decode_scale(stored_scale, second, rule)
            elif H.merges_scale:
                tl.atomic_max(
                    ql.as_bits(out.scale + entries), stored_scale.to(tl.int32, bitcast=True), mask=inside, sem="relaxed"
                )
            else:
                tl.store(scale_ptr + entries, stored_scale, mask=inside)
    return expanded(multiplier, H), expanded(decoded, H)


@triton.jit
def decode_scale(stored, second, R: tl.constexpr):
    """Decode stored scales to float32 factors of decoded codes; `second`: amax of the whole tensor, as in `scales`."""
    if R.kind == 0:
        return stored
    elif R.kind == 1:
        return sr.decode_e8m0(stored)
    else:
        encoding: tl.constexpr = R.stored
        return ql.decode(stored, encoding) * second * (1.0 / (R.element.max * encoding.max))


@triton.jit
def expanded(grid, H: tl.constexpr):
    """The grid entry of each element's block, in register order."""
    if H.transposed:
        return ql.expand(grid, H.cols, H.rows, H.block_cols, H.block_rows, H.together)
    else:
        return ql.expand(grid, H.rows, H.cols, H.block_rows, H.block_cols, H.together)


@triton.jit
def _store(codes, row, col, to, H: tl.constexpr):
    """Store codes, in register order, at a local row and column of `to`: (pointer, rows, columns, stored columns)."""
    ROWS: tl.constexpr = H.cols if H.transposed else H.rows
    COLS: tl.constexpr = H.rows if H.transposed else H.cols
    _store_at(codes, row + ql.row_order(ROWS, H.together), col, to, ROWS, COLS, H)


@triton.jit
def _store_across(codes, row, col, to, ROWS: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr):
    """Store the transpose [COLS, ROWS] of codes in register order."""
    shape: tl.constexpr = (H.together, ROWS // H.together, COLS)
    transposed = tl.reshape(tl.permute(tl.reshape(codes, shape), (2, 1, 0)), (COLS, ROWS))
    _store_at(transposed, row + tl.arange(0, COLS), col, to, COLS, ROWS, H)


@triton.jit
def _store_at(codes, i, col, to, ROWS: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr):
    """Store codes [ROWS, COLS], packed if of 4 bits, or values if H.decoded, at local rows i, from column `col` on."""
    ptr, rows, elements, cols = to
    if not H.decoded:  # PyTorch's dtypes of codes are bytes
        ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    if H.rule.element.bits == 4 and not H.decoded:
        if H.rule.kind == 1:  # a NaN multiplier would give the padding after an odd last column a nonzero code
            codes = tl.where((col + tl.arange(0, COLS) < elements)[None, :], codes, 0)
        codes = ql.pack(codes, ROWS, COLS)
        j = col // 2 + tl.arange(0, COLS // 2)
    else:
        j = col + tl.arange(0, COLS)
        if H.together == 16:  # the layout of `tile_of`, so that values stay in the threads that loaded them
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
    offsets = i.to(tl.int64)[:, None] * row_stride + j.to(tl.int64)[None, :] * col_stride
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            key = rw.key_of(part, (k0, k1, draw), (k2, k3, draw1), (k4, k5, draw2))
            words = (key, stream, width)
            other_words = (key, other_stream, other_width)
            values = tl.load(x_ptrs[part] + offsets, mask=valued, other=0.0)
            emit(
                values, row, col, where, outs[part], words, other_where, other_outs[part], other_words, values.dtype,
                H, T,
            )  # fmt: skip


writes_fields(kt.QuantizedOutput, "codes", "scale", "second_scale", "transposed", "next_amax")
writes(quantize_kernel, "weights.*.2.2", "weights.*.3.3", "weights.*.4.1", "weights.*.6")


def allocate_results(
    plan: kt.QuantizePlan, requests: kt.Requests, device: torch.device, next_amax: Tensor | None = None
) -> kt.Targets:
    rowwise, columnwise = requests
    return (
        None if rowwise is None or plan.rowwise is None else _allocate(plan.rowwise, rowwise, device, next_amax),
        None if columnwise is None or plan.columnwise is None else _allocate(plan.columnwise, columnwise, device),
    )


def _allocate(
    layout: kt.QuantizeLayout, request: kt.QuantizeRequest, device: torch.device, next_amax: Tensor | None = None
) -> kt.QuantizedOutput:
    input_grid, scale, (grid_row, grid_col), transposed = request.given, request.scale, layout.strides, None
    codes = torch.empty(layout.codes, dtype=layout.coded, device=device)
    if layout.transposed is not None:
        transposed = torch.empty(layout.transposed, dtype=layout.coded, device=device)
    if request.spec.given == "multipliers" and input_grid is not None:  # perhaps of a piece of a grid
        grid_row, grid_col = input_grid.stride()
    elif layout.scale is not None and scale is None:
        if 0 in layout.codes:  # no kernel runs
            scale = torch.ones(layout.scale, dtype=layout.stored, device=device)
        elif layout.scale == (1, 1) and layout.stored is torch.float32:
            scale = workspace.zero(device, written=True)
        elif layout.how.swizzled:
            scale = torch.empty(layout.scale, dtype=layout.stored, device=device)
            if layout.fills:
                scale.view(torch.uint8).zero_()  # E8M0 has no zero
        else:
            scale = torch.empty_strided(layout.scale, layout.strides, dtype=layout.stored, device=device)
    second_scale = None
    if request.second_amax is not None and request.spec.ready:
        second_scale = workspace.zero(device, written=True)
    if layout.wraps:
        codes, scale, transposed = kt.as_known(codes), kt.as_known(scale), kt.as_known(transposed)
    return kt.QuantizedOutput(
        codes, layout.codes[1], scale, input_grid, grid_row, grid_col, request.second_amax, second_scale, transposed,
        0 if layout.transposed is None else layout.transposed[1], next_amax, request.nan_flag,
    )  # fmt: skip


def quantize_matrix(
    x: Tensor, request: kt.QuantizeRequest, other: kt.QuantizeRequest | None = None, next_amax: Tensor | None = None
) -> tuple[kt.QuantizedOutput, kt.QuantizedOutput | None]:
    """Quantize x [R, C] of any strides and, with `other`, its transpose; `next_amax`: raised to the amax of x."""
    rowwise, columnwise = quantize_matrices([x], [kt.KernelOutputs(request, other, amax=next_amax)])[0]
    assert rowwise is not None
    return rowwise, columnwise


def quantize_matrices(
    xs: Sequence[Tensor], requests: Sequence[kt.KernelOutputs], swizzle: SwizzleRequest | None = None
) -> list[kt.Targets]:
    """Quantize several matrices of one shape, strides, dtype and device with one kernel and the same specs.

    Random words serve at most `KEYS` matrices. Raises `amax` of each request. `swizzle`: weights to lay out as well.
    """
    x, (request, transposed_request, *_) = xs[0], requests[0]
    assert request is not None
    keys, streams, roundings = NO_RANDOM_WORDS
    if request.words is not None or (transposed_request is not None and transposed_request.words is not None):
        keys, streams, roundings = rw.random_arguments_of(requests)
    transposed_spec = None if transposed_request is None else transposed_request.spec
    plan = kt.plan_quantization(request.spec, transposed_spec, x.shape, x.dtype, x.device, x.stride(1) == 1, *roundings)
    targets = [allocate_results(plan, outputs[:2], x.device, outputs.amax) for outputs in requests]
    if x.numel() > 0:
        outs, transposed = zip(*targets, strict=True)
        (down, across), layers, weights, config = plan.programs, len(xs), None, None
        if swizzle is not None:
            layers += -(swizzle.tiles // -(down * across))
            weights, config, swizzle.launched = swizzle.arguments, swizzle.config, True
        launch_kernel(
            quantize_kernel, (down, across, layers), x.device,
            tuple(xs), *x.stride(), plan.where, outs, plan.columnwise and plan.columnwise.where, transposed,
            *keys, *streams, weights, PARTS=len(xs), S=config, **plan.constants,
        )  # fmt: skip
    return targets
