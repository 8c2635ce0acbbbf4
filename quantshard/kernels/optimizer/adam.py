"""Adam over many tensors: one launch reads and writes the states and weights of all parameters that are stored alike.

    m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
    w = w - lr (m c1 / (sqrt(v c2) + eps) + wd w),   c = 1 / (1 - b^step)

with the operations of `numerics.adam.adam`, in its order, and its bound on m where it has one; then, where an average
of the weights is kept, that of `numerics.averages.moved`. The tables that it works from: `states`.

A program takes a tile of whole scale blocks by the global block grid, so the new weight is quantized in the same pass.
Where a scale derives from more than the tile (of a whole tensor or row, or of a block that ranks share), a pass
measures and a later one quantizes, from amaxes that were reduced between the two; `plan` says which pass does
what.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantshard.kernels import language as ql
from quantshard.kernels.optimizer.states import (
    ABSENT,
    AVERAGE,
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
    give_amaxes,
    load_plain,
    multipliers,
    no_amaxes,
    pointer,
    read_state,
    slot_of,
    state_words,
    store_codes,
    take_amaxes,
    tile_at,
    write_state,
)


def _quotient_by_root() -> str:
    """PTX of a / (sqrt(b) + c) for four elements, each step rounded to nearest even.

    The steps are those that the compiler takes for square roots and divisions: an approximation, and Newton's on
    remainders that a fused multiply-add has exactly. They are right where none leaves the normal numbers, as for b in
    [2**-101, 2**128), c in [0, 2**60] and |a| in [2**-60, 2**60]. The compiler asks that twice for each element, this
    once for four; if it is not so, all four take the instructions for any numbers.
    """
    low_a, low_b, high_c = (127 - 60) << 24, (127 - 101) << 23, (127 + 60) << 23
    lines = ["{.reg .pred p; .reg .b32 s, t, u, v; .reg .f32 d, e, h, q, r; mov.b32 u, 0; mov.b32 v, 0;"]
    for a, b in zip(range(4, 8), range(8, 12), strict=True):
        lines.append(f"mov.b32 s, ${a}; add.u32 s, s, s; sub.u32 s, s, {low_a}; max.u32 u, u, s;")
        lines.append(f"mov.b32 t, ${b}; sub.u32 t, t, {low_b}; max.u32 v, v, t;")
    lines.append(f"setp.gt.u32 p, u, {120 << 24}; setp.gt.or.u32 p, v, {(254 << 23) - low_b + 0x7FFFFF}, p;")
    lines.append(f"mov.b32 s, $12; setp.gt.or.u32 p, s, {high_c}, p; @p bra ANY;")
    for out, a, b, c in zip(range(4), range(4, 8), range(8, 12), range(12, 16), strict=True):
        lines.append(f"rsqrt.approx.ftz.f32 r, ${b}; mul.ftz.f32 q, ${b}, r; mul.ftz.f32 r, r, 0f3F000000;")
        lines.append(f"neg.f32 e, q; fma.rn.f32 e, e, q, ${b}; fma.rn.f32 d, e, r, q; add.rn.f32 d, d, ${c};")
        lines.append("rcp.approx.ftz.f32 r, d; neg.f32 e, d; fma.rn.f32 h, e, r, 0f3F800000; fma.rn.f32 r, r, h, r;")
        lines.append(f"mul.rn.f32 q, ${a}, r; fma.rn.f32 h, e, q, ${a}; fma.rn.f32 ${out}, r, h, q;")
    lines.append("bra DONE; ANY:")
    for out, a, b, c in zip(range(4), range(4, 8), range(8, 12), range(12, 16), strict=True):
        lines.append(f"sqrt.rn.f32 d, ${b}; add.rn.f32 d, d, ${c}; div.rn.f32 ${out}, ${a}, d;")
    return "".join([*lines, "DONE:}"])


QUOTIENT_BY_ROOT = tl.constexpr(_quotient_by_root())


@triton.jit
def quotient_by_root(a, b, c):
    """a / (sqrt(b) + c), each step rounded to nearest even; float32 tiles a and b, a scalar c."""
    if ql.INTERPRETED:
        return tl.div_rn(a, tl.sqrt_rn(b) + c)
    else:
        return tl.inline_asm_elementwise(
            QUOTIENT_BY_ROOT, "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f", [a, b, c], tl.float32, is_pure=True, pack=4
        )


@triton.jit
def updated(grad, master, exp_avg, exp_avg_sq, settings, BOUNDED: tl.constexpr):
    """One step of `numerics.adam.adam` on float32 tiles: new master, exp_avg and exp_avg_sq; zero outside."""
    lr, beta1, rest1 = tl.load(settings), tl.load(settings + 1), tl.load(settings + 2)
    beta2, rest2 = tl.load(settings + 3), tl.load(settings + 4)
    correction1, correction2 = tl.load(settings + 5), tl.load(settings + 6)
    eps, l2, decay = tl.load(settings + 7), tl.load(settings + 8), tl.load(settings + 9)
    if l2 != 0:
        grad = grad + l2 * master
    if BOUNDED:
        limit = tl.load(settings + 10) * tl.sqrt_rn(exp_avg_sq)
        exp_avg = tl.where(exp_avg > limit, limit, exp_avg)
        exp_avg = tl.where(exp_avg < -limit, -limit, exp_avg)
    exp_avg = beta1 * exp_avg + rest1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad
    update = quotient_by_root(exp_avg * correction1, exp_avg_sq * correction2, eps)
    if eps < 2.0**-60:
        update = tl.where(exp_avg_sq == 0, 0.0, update)
    if decay != 0:
        update = update + decay * master
    master = master - lr * update
    return master, exp_avg, exp_avg_sq


@triton.jit
def key_of(entry, gradients, groups, role, OWN: tl.constexpr):
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
    A: tl.constexpr = H.average
    C: tl.constexpr = H.weight
    grad_address = tl.load(gradients + tl.load(entry) * GRADIENT_COLUMNS + 1)
    grad = load_plain(grad_address, tile, GRAD, H)
    exp_avg = read_state(entry, EXP_AVG, tile, area, M, H)
    exp_avg_sq = read_state(entry, EXP_AVG_SQ, tile, area, V, H)
    master = (
        read_state(entry, MASTER, tile, area, W, H) if W.kind != ABSENT else read_state(entry, WEIGHT, tile, area, C, H)
    )
    master, exp_avg, exp_avg_sq = updated(
        grad, master, exp_avg, exp_avg_sq, settings + tl.load(entry + 1) * SETTINGS_COLUMNS, H.bounded
    )
    key = key_of(entry, gradients, groups, EXP_AVG, False)  # of both moments
    words = state_words(key, tile, M if M.stochastic else V, H)
    measure(exp_avg, entry, EXP_AVG, tile, area, M, H)
    write_state(exp_avg, entry, EXP_AVG, tile, area, words, M, H)
    measure(exp_avg_sq, entry, EXP_AVG_SQ, tile, area, V, H)
    write_state(exp_avg_sq, entry, EXP_AVG_SQ, tile, area, swap_halves(words) if V.stochastic else 0, V, H)
    measure(master, entry, MASTER, tile, area, W, H)
    write_state(
        master,
        entry,
        MASTER,
        tile,
        area,
        state_words(key_of(entry, gradients, groups, MASTER, False), tile, W, H),
        W,
        H,
    )
    if A.kind != ABSENT:
        average = read_state(entry, AVERAGE, tile, area, A, H)
        share = tl.load(settings + tl.load(entry + 1) * SETTINGS_COLUMNS + 11)
        write_state(average + (master - average) * share, entry, AVERAGE, tile, area, 0, A, H)
    return master


@triton.jit
def measure(x, entry, role, tile, area, S: tl.constexpr, H: tl.constexpr):
    """All amaxes of one tile of a state."""
    give_amaxes(take_amaxes(x, no_amaxes(H), entry, role, tile, area, S, H), entry, role, S)


@triton.jit
def swap_halves(words):
    """Their halves change places: `rounding.StateDraw`."""
    return (words >> 16) | (words << 16)


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
    HEIGHT: tl.constexpr = H.rows * H.chunks
    row = (area.row_origin // HEIGHT + number // across) * HEIGHT
    col = (area.col_origin // H.cols + number % across) * H.cols
    told = (entry, gradients, groups, settings)
    end = tl.minimum(row + HEIGHT, area.row_origin + area.rows)
    if H.high:
        update_high(row, end, col, area, told, GRAD, H)
    else:
        update_low(row, end, col, area, told, GRAD, H)


@triton.jit
def update_low(row, end, col, area, told, GRAD: tl.constexpr, H: tl.constexpr):
    """Tiles below each other, of weights whose blocks are no higher than one; `told`: what `step_of` takes."""
    C: tl.constexpr = H.weight
    D: tl.constexpr = H.columnwise
    ROWS: tl.constexpr = H.rows
    entry, gradients, groups, settings = told
    key = key_of(entry, gradients, groups, WEIGHT, C.own_words)
    top = no_amaxes(H)
    while row < end:
        tile = tile_at(row, col, area, H.rows, H.cols)
        x = step_of(tile, area, entry, gradients, groups, settings, GRAD, H)
        top = take_amaxes(x, top, entry, WEIGHT, tile, area, C, H)
        top = take_amaxes(x, top, entry, COLUMNWISE, tile, area, D, H)
        write_state(x, entry, WEIGHT, tile, area, state_words(key, tile, C, H), C, H)
        write_state(x, entry, COLUMNWISE, tile, area, state_words(key, tile, D, H), D, H)
        row += ROWS
    give_amaxes(top, entry, WEIGHT, C)


@triton.jit
def update_high(row, end, col, area, told, GRAD: tl.constexpr, H: tl.constexpr):
    """The same of one row of blocks that are as high as all tiles: all are updated before one is quantized."""
    C: tl.constexpr = H.weight
    W: tl.constexpr = H.master
    ROWS: tl.constexpr = H.rows
    CHUNKS: tl.constexpr = H.chunks
    ACROSS: tl.constexpr = H.cols // C.cols
    entry, gradients, groups, settings = told
    key = key_of(entry, gradients, groups, WEIGHT, C.own_words)
    top = tl.zeros((ROWS, ACROSS), tl.int32)
    kept = ()
    if H.rereads:
        at = row
        while at < end:
            tile = tile_at(at, col, area, H.rows, H.cols)
            x = step_of(tile, area, entry, gradients, groups, settings, GRAD, H)
            top = tl.maximum(top, ql.block_amax(x, H.rows, H.cols, 1, C.cols).to(tl.int32, bitcast=True))
            at += ROWS
    else:
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
            x = read_state(entry, MASTER, tile, area, W, H)
            store_codes(x, multiplier, slot, tile, area, state_words(key, tile, C, H), C, H)
            at += ROWS
    else:
        for c in tl.static_range(CHUNKS):
            tile = tile_at(row + c * ROWS, col, area, H.rows, H.cols)
            store_codes(kept[c], multiplier, slot, tile, area, state_words(key, tile, C, H), C, H)


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
            x = read_state(entry, MASTER, tile, area, W, H)
            write_state(x, entry, WEIGHT, tile, area, 0, C, H)
            write_state(x, entry, COLUMNWISE, tile, area, 0, D, H)
            row += H.rows
        number += by
