"""Adam over many tensors: one launch reads and writes the states and weights of all parameters that are stored alike.

    m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
    w = w - lr (m / c1 / (sqrt(v / c2) + eps) + wd w),   c = 1 - b^step

with the operations of `optimizers.adam.adam`, in its order. The tables that it works from: `states`.

A program takes a tile of whole scale blocks by the global block grid, so the new weight is quantized in the same pass.
Where a scale derives from more than the tile (of a whole tensor or row, or of a block that ranks share), a pass
measures and a later one quantizes, from amaxes that were reduced between the two; `adam_plan` says which pass does
what.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantshard.kernels import language as ql
from quantshard.kernels.states import (
    ABSENT,
    COLUMNS,
    COLUMNWISE,
    EXP_AVG,
    EXP_AVG_SQ,
    GRADIENT_COLUMNS,
    GROUP_COLUMNS,
    MASTER,
    SETTINGS_COLUMNS,
    WEIGHT,
    area_of,
    load_plain,
    multipliers,
    pointer,
    read,
    slot_of,
    store_codes,
    tile_at,
    write,
)


@triton.jit
def updated(grad, master, exp_avg, exp_avg_sq, settings):
    """One step of `optimizers.adam.adam` on float32 tiles: new master, exp_avg and exp_avg_sq."""
    lr, beta1, rest1 = tl.load(settings), tl.load(settings + 1), tl.load(settings + 2)
    beta2, rest2 = tl.load(settings + 3), tl.load(settings + 4)
    correction1, correction2 = tl.load(settings + 5), tl.load(settings + 6)
    eps, l2, decay = tl.load(settings + 7), tl.load(settings + 8), tl.load(settings + 9)
    grad = tl.where(l2 != 0, grad + l2 * master, grad)
    exp_avg = beta1 * exp_avg + rest1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad
    root = tl.sqrt_rn(tl.div_rn(exp_avg_sq, tl.zeros_like(grad) + correction2))
    update = tl.div_rn(tl.div_rn(exp_avg, tl.zeros_like(grad) + correction1), root + eps)
    update = tl.where(decay != 0, update + decay * master, update)
    return master - lr * update, exp_avg, exp_avg_sq


@triton.jit
def words_of(entry, gradients, groups, role, OWN: tl.constexpr):
    """Names the words of a role: the optimizer's, or a draw of the weight's own key."""
    if OWN:
        key = tl.load(entry + 10)
        draw = tl.load(gradients + tl.load(entry) * GRADIENT_COLUMNS + 2)
        stream = tl.load(entry + 11)
    else:
        group = groups + tl.load(entry + 1) * GROUP_COLUMNS
        key, draw = tl.load(group), tl.load(group + 1)
        stream = tl.load(entry + 9) + role
    return key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF, draw & 0xFFFFFFFF, stream, tl.load(entry + 6)


@triton.jit
def step_of(tile, area, entry, gradients, groups, settings, GRAD: tl.constexpr, H: tl.constexpr):
    """Read, update and write the states of a tile; its new weights, float32."""
    M: tl.constexpr = H.exp_avg
    V: tl.constexpr = H.exp_avg_sq
    W: tl.constexpr = H.master
    C: tl.constexpr = H.weight
    grad_address = tl.load(gradients + tl.load(entry) * GRADIENT_COLUMNS + 1)
    grad = load_plain(grad_address, tile, GRAD, H)
    exp_avg = read(entry, EXP_AVG, tile, area, M, H)
    exp_avg_sq = read(entry, EXP_AVG_SQ, tile, area, V, H)
    master = read(entry, MASTER, tile, area, W, H) if W.kind != ABSENT else read(entry, WEIGHT, tile, area, C, H)
    master, exp_avg, exp_avg_sq = updated(
        grad, master, exp_avg, exp_avg_sq, settings + tl.load(entry + 1) * SETTINGS_COLUMNS
    )
    # outside, eps = 0 makes NaN of the zeros, and no amax must see that
    exp_avg = tl.where(tile.valid, exp_avg, 0.0)
    exp_avg_sq = tl.where(tile.valid, exp_avg_sq, 0.0)
    master = tl.where(tile.valid, master, 0.0)
    write(exp_avg, entry, EXP_AVG, tile, area, words_of(entry, gradients, groups, EXP_AVG, False), M, H)
    write(exp_avg_sq, entry, EXP_AVG_SQ, tile, area, words_of(entry, gradients, groups, EXP_AVG_SQ, False), V, H)
    write(master, entry, MASTER, tile, area, words_of(entry, gradients, groups, MASTER, False), W, H)
    return master


@triton.jit
def adam_kernel(
    entries, entry_of_program, gradients, groups, settings, skip, GRAD: tl.constexpr, GRAD_CODE: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    entry = entries + tl.load(entry_of_program + tl.program_id(0)) * COLUMNS
    if tl.load(gradients + tl.load(entry) * GRADIENT_COLUMNS) != GRAD_CODE:
        return
    area = area_of(entry, H.aligned)
    across = tl.load(entry + 7).to(tl.int32)
    number = tl.program_id(0) - tl.load(entry + 8).to(tl.int32)
    ROWS: tl.constexpr = H.rows
    HEIGHT: tl.constexpr = H.rows * H.chunks
    row = (area.row_origin // HEIGHT + number // across) * HEIGHT
    col = (area.col_origin // H.cols + number % across) * H.cols
    C: tl.constexpr = H.weight
    D: tl.constexpr = H.columnwise
    W: tl.constexpr = H.master
    end = tl.minimum(row + HEIGHT, area.row_origin + area.rows)
    words = words_of(entry, gradients, groups, WEIGHT, C.own_words)
    CHUNKS: tl.constexpr = H.chunks
    if H.high:
        ACROSS: tl.constexpr = H.cols // C.cols
        top = tl.zeros((ROWS, ACROSS), tl.int32)
        if H.rereads:
            at = row
            while at < end:
                tile = tile_at(at, col, area, H.rows, H.cols)
                x = step_of(tile, area, entry, gradients, groups, settings, GRAD, H)
                top = tl.maximum(top, ql.block_amax(x, H.rows, H.cols, 1, C.cols).to(tl.int32, bitcast=True))
                at += ROWS
        else:
            kept = ()
            for c in tl.static_range(CHUNKS):
                tile = tile_at(row + c * ROWS, col, area, H.rows, H.cols)
                x = step_of(tile, area, entry, gradients, groups, settings, GRAD, H)
                top = tl.maximum(top, ql.block_amax(x, H.rows, H.cols, 1, C.cols).to(tl.int32, bitcast=True))
                kept = kept + (x,)  # type: ignore[assignment]  # noqa: RUF005  Triton has no *
        amax = ql.block_amax(top.to(tl.float32, bitcast=True), H.rows, H.cols // C.cols, C.rows, 1)
        slot = slot_of(entry, WEIGHT)
        multiplier = multipliers(amax, slot, tile_at(row, col, area, H.rows, H.cols), area, C, H)
        if H.rereads:
            tl.debug_barrier()  # what other threads wrote of the masters is there
            at = row
            while at < end:
                tile = tile_at(at, col, area, H.rows, H.cols)
                x = read(entry, MASTER, tile, area, W, H)
                store_codes(x, multiplier, slot, tile, area, words, C, H)
                at += ROWS
        else:
            for c in tl.static_range(CHUNKS):
                tile = tile_at(row + c * ROWS, col, area, H.rows, H.cols)
                store_codes(kept[c], multiplier, slot, tile, area, words, C, H)
    else:
        while row < end:
            tile = tile_at(row, col, area, H.rows, H.cols)
            x = step_of(tile, area, entry, gradients, groups, settings, GRAD, H)
            write(x, entry, WEIGHT, tile, area, words, C, H)
            write(x, entry, COLUMNWISE, tile, area, words, D, H)
            row += ROWS


@triton.jit
def requantize_kernel(entries, entry_of_program, gradients, skip, H: tl.constexpr, REDO: tl.constexpr):
    """Quantize weights from their float32 masters; REDO: only those whose entry asks for it, some programs for each."""
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
        last, by = across * down, tl.num_programs(1)
    else:
        number = tl.program_id(0) - tl.load(entry + 8).to(tl.int32)
        last, by = number + 1, 1
    W: tl.constexpr = H.master
    C: tl.constexpr = H.weight
    D: tl.constexpr = H.columnwise
    while number < last:
        row = (area.row_origin // HEIGHT + number // across) * HEIGHT
        col = (area.col_origin // H.cols + number % across) * H.cols
        end = tl.minimum(row + HEIGHT, area.row_origin + area.rows)
        while row < end:
            tile = tile_at(row, col, area, H.rows, H.cols)
            x = read(entry, MASTER, tile, area, W, H)
            write(x, entry, WEIGHT, tile, area, (0, 0, 0, 0, 0), C, H)
            write(x, entry, COLUMNWISE, tile, area, (0, 0, 0, 0, 0), D, H)
            row += H.rows
        number += by
