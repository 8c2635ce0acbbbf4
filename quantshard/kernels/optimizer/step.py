"""Adam, Lion and Muon over many tensors. `states` describes the tables that the kernels read.

One launch updates the states and weights of all parameters with the same storage and formula (`formulas`). It also
moves the averages of their weights (`numerics.adam.moved_average`), if there are any. For Muon's matrices,
`momentum_kernel` first writes the matrices to orthogonalize, and the step reads the orthogonalized ones.

A program works on a tile of whole scale blocks of the global block grid, so it quantizes the new weight in the same
pass. If a scale needs more than the tile (one scale for a tensor or row, or a block shared by ranks), one pass measures
amaxes, ranks reduce them, and a later pass quantizes. `plan` decides which pass does what.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantshard.kernels import language as ql
from quantshard.kernels.optimizer import formulas
from quantshard.kernels.optimizer.states import (
    ABSENT,
    AVERAGE,
    COLUMNS,
    COLUMNWISE,
    GRADIENT_COLUMNS,
    GROUP_COLUMNS,
    LION,
    MASTER,
    MUON,
    SETTINGS_COLUMNS,
    SPLIT,
    STATE1,
    STATE2,
    WEIGHT,
    area_of,
    give_amaxes,
    load_plain,
    multipliers,
    no_amaxes,
    pointer,
    read_state,
    slot_of,
    state_words,
    store_codes,
    store_weight,
    take_amaxes,
    tile_at,
    weight_words,
    write_state,
    write_weight,
)


@triton.jit
def key_of(entry, gradients, groups, number, OWN: tl.constexpr):
    """The key of random words: the optimizer's stream with this number or, if OWN, a draw of the weight's own key."""
    if OWN:
        key = tl.load(entry + 10)
        draw = tl.load(gradients + tl.load(entry) * GRADIENT_COLUMNS + 2)
        stream = tl.load(entry + 11)
    else:
        group = groups + tl.load(entry + 1) * GROUP_COLUMNS
        key, draw = tl.load(group), tl.load(group + 1)
        stream = tl.load(entry + 9) + number
    return key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF, draw & 0xFFFFFFFF, stream, tl.load(entry + 6)


@triton.jit
def key_of_weight(entry, gradients, groups, H: tl.constexpr):
    """`key_of` the random words of a weight, or of the `SPLIT` master written with it."""
    C: tl.constexpr = H.weight
    W: tl.constexpr = H.master
    return key_of(entry, gradients, groups, H.states + (0 if W.kind == SPLIT else 1), C.own_words)


@triton.jit
def step_of(tile, area, entry, gradients, groups, settings, GRAD: tl.constexpr, H: tl.constexpr):
    """Read, update and write the states of a tile; return its new weights, float32."""
    ONE: tl.constexpr = H.state1
    TWO: tl.constexpr = H.state2
    W: tl.constexpr = H.master
    A: tl.constexpr = H.average
    C: tl.constexpr = H.weight
    group_settings = settings + tl.load(entry + 1) * SETTINGS_COLUMNS
    gradient_row = gradients + tl.load(entry) * GRADIENT_COLUMNS
    grad = load_plain(tl.load(gradient_row + 1), tile, GRAD, H)
    state1 = read_state(entry, STATE1, tile, area, ONE, H)
    if TWO.kind != ABSENT:
        state2 = read_state(entry, STATE2, tile, area, TWO, H)
    master = (
        read_state(entry, MASTER, tile, area, W, H) if W.kind != ABSENT else read_state(entry, WEIGHT, tile, area, C, H)
    )
    if H.algorithm == LION:
        master, state1 = formulas.lion(grad, master, state1, group_settings)
    elif H.algorithm == MUON:
        state1 = formulas.momentum(grad, state1, group_settings)
        master = formulas.muon(master, load_plain(tl.load(gradient_row + 3), tile, tl.bfloat16, H), group_settings)
    else:
        master, state1, state2 = formulas.adam(grad, master, state1, state2, group_settings, H.bounded)
    key = key_of(entry, gradients, groups, 0, False)  # both states share it
    words = state_words(key, tile, ONE if ONE.stochastic else TWO, H)
    measure(state1, entry, STATE1, tile, area, ONE, H)
    write_state(state1, entry, STATE1, tile, area, words, ONE, H)
    if TWO.kind != ABSENT:
        measure(state2, entry, STATE2, tile, area, TWO, H)
        write_state(state2, entry, STATE2, tile, area, ql.swap_halves(words) if TWO.stochastic else 0, TWO, H)
    measure(master, entry, MASTER, tile, area, W, H)
    if W.kind != SPLIT:  # a SPLIT master is written with the weight
        key = key_of(entry, gradients, groups, H.states, False)
        write_state(master, entry, MASTER, tile, area, state_words(key, tile, W, H), W, H)
    if A.kind != ABSENT:
        average = read_state(entry, AVERAGE, tile, area, A, H)
        write_state(average + (master - average) * tl.load(group_settings + 11), entry, AVERAGE, tile, area, 0, A, H)
    return master


@triton.jit
def measure(x, entry, role, tile, area, S: tl.constexpr, H: tl.constexpr):
    """Measure all amaxes of one tile of a state."""
    give_amaxes(take_amaxes(x, no_amaxes(H), entry, role, tile, area, S, H), entry, role, S)


@triton.jit
def tiles_of(entry, H: tl.constexpr):
    """The rectangle of an entry; first row, end and column of this program's tiles, which are one below the other."""
    area = area_of(entry, H.aligned)
    across = tl.load(entry + 7).to(tl.int32)
    number = tl.program_id(0) - tl.load(entry + 8).to(tl.int32)
    HEIGHT: tl.constexpr = H.rows * H.chunks
    row = (area.row_origin // HEIGHT + number // across) * HEIGHT
    col = (area.col_origin // H.cols + number % across) * H.cols
    return area, row, tl.minimum(row + HEIGHT, area.row_origin + area.rows), col


@triton.jit
def step_kernel(
    entries, entry_of_program, gradients, groups, settings, skip, GRAD: tl.constexpr, GRAD_CODE: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    entry = entries + tl.load(entry_of_program + tl.program_id(0)) * COLUMNS
    if tl.load(gradients + tl.load(entry) * GRADIENT_COLUMNS) != GRAD_CODE:
        return
    area, row, end, col = tiles_of(entry, H)
    operands = (entry, gradients, groups, settings)
    if H.high:
        update_high(row, end, col, area, operands, GRAD, H)
    else:
        update_low(row, end, col, area, operands, GRAD, H)


@triton.jit
def momentum_kernel(
    entries, entry_of_program, gradients, settings, GRAD: tl.constexpr, GRAD_CODE: tl.constexpr, H: tl.constexpr
):
    """Write the matrices to orthogonalize, as bfloat16 rounded to nearest even, into the buffers that the step reads
    after orthogonalization. States do not change."""
    ONE: tl.constexpr = H.state1
    ROWS: tl.constexpr = H.rows
    entry = entries + tl.load(entry_of_program + tl.program_id(0)) * COLUMNS
    gradient_row = gradients + tl.load(entry) * GRADIENT_COLUMNS
    if tl.load(gradient_row) != GRAD_CODE:
        return
    area, row, end, col = tiles_of(entry, H)
    group_settings = settings + tl.load(entry + 1) * SETTINGS_COLUMNS
    while row < end:
        tile = tile_at(row, col, area, H.rows, H.cols)
        grad = load_plain(tl.load(gradient_row + 1), tile, GRAD, H)
        buffer = formulas.momentum(grad, read_state(entry, STATE1, tile, area, ONE, H), group_settings)
        bits = even_bfloat16(formulas.nesterov(grad, buffer, group_settings))
        tl.store(
            pointer(tl.load(gradient_row + 3), tl.int16, H.aligned) + tile.first + tile.offsets, bits, mask=tile.valid
        )
        row += ROWS


@triton.jit
def even_bfloat16(x):
    """Round to bfloat16 bits, int16, with ties to even as in PyTorch.

    Works on bits, because Triton's interpreter flushes subnormal bfloat16s.
    """
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def update_low(row, end, col, area, told, GRAD: tl.constexpr, H: tl.constexpr):
    """Update tiles one below the other, for weights with blocks that fit in a tile."""
    C: tl.constexpr = H.weight
    D: tl.constexpr = H.columnwise
    ROWS: tl.constexpr = H.rows
    entry, gradients, groups, settings = told
    key = key_of_weight(entry, gradients, groups, H)
    top = no_amaxes(H)
    while row < end:
        tile = tile_at(row, col, area, H.rows, H.cols)
        x = step_of(tile, area, entry, gradients, groups, settings, GRAD, H)
        top = take_amaxes(x, top, entry, WEIGHT, tile, area, C, H)
        top = take_amaxes(x, top, entry, COLUMNWISE, tile, area, D, H)
        write_weight(x, entry, tile, area, weight_words(key, tile, H), H)
        write_state(x, entry, COLUMNWISE, tile, area, state_words(key, tile, D, H), D, H)
        row += ROWS
    give_amaxes(top, entry, WEIGHT, C)


@triton.jit
def update_high(row, end, col, area, told, GRAD: tl.constexpr, H: tl.constexpr):
    """Update one row of blocks as high as all tiles of a program: all tiles are updated before any is quantized."""
    C: tl.constexpr = H.weight
    W: tl.constexpr = H.master
    ROWS: tl.constexpr = H.rows
    CHUNKS: tl.constexpr = H.chunks
    ACROSS: tl.constexpr = H.cols // C.cols
    entry, gradients, groups, settings = told
    key = key_of_weight(entry, gradients, groups, H)
    top = tl.zeros((ROWS, ACROSS), tl.int32)
    updated = ()
    if H.rereads:
        tile_row = row
        while tile_row < end:
            tile = tile_at(tile_row, col, area, H.rows, H.cols)
            x = step_of(tile, area, entry, gradients, groups, settings, GRAD, H)
            top = tl.maximum(top, ql.block_amax(x, H.rows, H.cols, 1, C.cols).to(tl.int32, bitcast=True))
            tile_row += ROWS
    else:
        for c in tl.static_range(CHUNKS):
            tile = tile_at(row + c * ROWS, col, area, H.rows, H.cols)
            x = step_of(tile, area, entry, gradients, groups, settings, GRAD, H)
            top = tl.maximum(top, ql.block_amax(x, H.rows, H.cols, 1, C.cols).to(tl.int32, bitcast=True))
            updated = updated + (x,)  # type: ignore[assignment]  # noqa: RUF005  Triton has no *
    amax = ql.block_amax(top.to(tl.float32, bitcast=True), H.rows, H.cols // C.cols, C.rows, 1)
    slot = slot_of(entry, WEIGHT)
    multiplier = multipliers(amax, slot, tile_at(row, col, area, H.rows, H.cols), area, C, H)
    if H.rereads:
        tl.debug_barrier()  # other threads have written their masters
        tile_row = row
        while tile_row < end:
            tile = tile_at(tile_row, col, area, H.rows, H.cols)
            x = read_state(entry, MASTER, tile, area, W, H)
            store_codes(x, multiplier, slot, tile, area, state_words(key, tile, C, H), C, H)
            tile_row += ROWS
    else:
        for c in tl.static_range(CHUNKS):
            tile = tile_at(row + c * ROWS, col, area, H.rows, H.cols)
            store_weight(updated[c], multiplier, slot, entry, tile, area, weight_words(key, tile, H), H)


@triton.jit
def requantize_kernel(entries, entry_of_program, gradients, skip, H: tl.constexpr, REDO: tl.constexpr):
    """Quantize weights from their float32 masters. REDO: only weights with the redo flag set; several programs for
    each."""
    if skip is not None:
        if tl.load(skip) != 0:
            return
    HEIGHT: tl.constexpr = H.rows * H.chunks
    if REDO:
        entry = entries + tl.program_id(0) * COLUMNS
        if tl.load(pointer(tl.load(entry + 12), tl.float32, False)) == 0:
            return
    else:
        entry = entries + tl.load(entry_of_program + tl.program_id(0)) * COLUMNS
    if tl.load(gradients + tl.load(entry) * GRADIENT_COLUMNS) == 0:
        return
    area = area_of(entry, H.aligned)
    across = tl.load(entry + 7).to(tl.int32)
    if REDO:
        number = tl.program_id(1)
        down = (area.row_origin + area.rows + HEIGHT - 1) // HEIGHT - area.row_origin // HEIGHT
        last, stride = across * down, tl.num_programs(1)
    else:
        number = tl.program_id(0) - tl.load(entry + 8).to(tl.int32)
        last, stride = number + 1, 1
    W: tl.constexpr = H.master
    C: tl.constexpr = H.weight
    D: tl.constexpr = H.columnwise
    while number < last:
        row = (area.row_origin // HEIGHT + number // across) * HEIGHT
        col = (area.col_origin // H.cols + number % across) * H.cols
        end = tl.minimum(row + HEIGHT, area.row_origin + area.rows)
        while row < end:
            tile = tile_at(row, col, area, H.rows, H.cols)
            x = read_state(entry, MASTER, tile, area, W, H)
            write_state(x, entry, WEIGHT, tile, area, 0, C, H)
            write_state(x, entry, COLUMNWISE, tile, area, 0, D, H)
            row += H.rows
        number += stride
