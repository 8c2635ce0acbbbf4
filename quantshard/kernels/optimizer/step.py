"""Adam, Lion and Muon over many tensors. `states` describes the tables that the kernels read.

One launch updates the states, weights and averages of all parameters with the same storage and formula. For Muon,
`momentum_kernel` first writes the matrices to orthogonalize, and the step reads the orthogonalized ones.

A program works on a tile of whole scale blocks of the global grid, so it quantizes the weight in the same pass. If a
scale needs more (one scale for a tensor or row, a block shared by ranks), one pass measures amaxes, ranks reduce them,
and a later pass quantizes. `plan` decides which pass does what.
"""

import triton
import triton.language as tl

from quantshard.kernels import language as ql
from quantshard.kernels.optimizer import formulas, states as ks


@triton.jit
def random_key(entry, gradients, groups, number, OWN: tl.constexpr):
    """The key of random bits: the optimizer's stream with this number or, if OWN, a counter of the weight's own key."""
    if OWN:
        key = tl.load(entry + ks.RNG_KEY)
        counter = tl.load(gradients + tl.load(entry + ks.PARAMETER) * ks.GRADIENT_COLUMNS + ks.RNG_COUNTER)
        stream = tl.load(entry + ks.WEIGHT_STREAM)
    else:
        group = groups + tl.load(entry + ks.GROUP_ROW) * ks.GROUP_COLUMNS
        key, counter = tl.load(group), tl.load(group + 1)
        stream = tl.load(entry + ks.STREAM) + number
    return key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF, counter & 0xFFFFFFFF, stream, tl.load(entry + ks.WIDTH)


@triton.jit
def weight_random_key(entry, gradients, groups, CONFIG: tl.constexpr):
    """`random_key` for the random bits of a weight, or of the `SPLIT` master written with it."""
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    MASTER_STATE: tl.constexpr = CONFIG.master
    number = CONFIG.states + (0 if MASTER_STATE.kind == ks.SPLIT else 1)
    return random_key(entry, gradients, groups, number, WEIGHT_STATE.own_key)


@triton.jit
def update_tile(tile, region, entry, gradients, groups, settings, GRAD: tl.constexpr, CONFIG: tl.constexpr):
    """Read, update and write the states of a tile; return its new weights, float32."""
    FIRST: tl.constexpr = CONFIG.state1
    SECOND: tl.constexpr = CONFIG.state2
    MASTER_STATE: tl.constexpr = CONFIG.master
    AVERAGE_STATE: tl.constexpr = CONFIG.average
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    group_settings = settings + tl.load(entry + ks.GROUP_ROW) * ks.SETTINGS_COLUMNS
    gradient_row = gradients + tl.load(entry + ks.PARAMETER) * ks.GRADIENT_COLUMNS
    grad = ks.load_plain(tl.load(gradient_row + ks.GRADIENT_ADDRESS), tile, GRAD, CONFIG)
    state1 = ks.read_state(entry, ks.STATE1, tile, region, FIRST, CONFIG)
    if SECOND.kind != ks.ABSENT:
        state2 = ks.read_state(entry, ks.STATE2, tile, region, SECOND, CONFIG)
    if MASTER_STATE.kind != ks.ABSENT:
        master = ks.read_state(entry, ks.MASTER, tile, region, MASTER_STATE, CONFIG)
    else:
        master = ks.read_state(entry, ks.WEIGHT, tile, region, WEIGHT_STATE, CONFIG)
    if CONFIG.algorithm == ks.LION:
        master, state1 = formulas.lion(grad, master, state1, group_settings)
    elif CONFIG.algorithm == ks.MUON:
        state1 = formulas.momentum(grad, state1, group_settings)
        direction = ks.load_plain(tl.load(gradient_row + ks.DIRECTION), tile, tl.bfloat16, CONFIG)
        master = formulas.muon(master, direction, group_settings)
    else:
        master, state1, state2 = formulas.adam(grad, master, state1, state2, group_settings, CONFIG.bound)
    key = random_key(entry, gradients, groups, 0, False)  # both states share it
    random_bits = ks.state_random_bits(key, tile, FIRST if FIRST.stochastic else SECOND, CONFIG)
    measure(state1, entry, ks.STATE1, tile, region, FIRST, CONFIG)
    ks.write_state(state1, entry, ks.STATE1, tile, region, random_bits, FIRST, CONFIG)
    if SECOND.kind != ks.ABSENT:
        measure(state2, entry, ks.STATE2, tile, region, SECOND, CONFIG)
        swapped = ql.swap_halves(random_bits) if SECOND.stochastic else 0
        ks.write_state(state2, entry, ks.STATE2, tile, region, swapped, SECOND, CONFIG)
    measure(master, entry, ks.MASTER, tile, region, MASTER_STATE, CONFIG)
    if MASTER_STATE.kind != ks.SPLIT:  # a SPLIT master is written with the weight
        key = random_key(entry, gradients, groups, CONFIG.states, False)
        random_bits = ks.state_random_bits(key, tile, MASTER_STATE, CONFIG)
        ks.write_state(master, entry, ks.MASTER, tile, region, random_bits, MASTER_STATE, CONFIG)
    if AVERAGE_STATE.kind != ks.ABSENT:
        average = ks.read_state(entry, ks.AVERAGE, tile, region, AVERAGE_STATE, CONFIG)
        average = average + (master - average) * tl.load(group_settings + formulas.SHARE)
        ks.write_state(average, entry, ks.AVERAGE, tile, region, 0, AVERAGE_STATE, CONFIG)
    return master


@triton.jit
def measure(x, entry, role, tile, region, STATE: tl.constexpr, CONFIG: tl.constexpr):
    top = ks.measure_tile(x, ks.zero_amaxes(CONFIG), entry, role, tile, region, STATE, CONFIG)
    ks.store_tensor_amaxes(top, entry, role, STATE)


@triton.jit
def tiles_of(entry, CONFIG: tl.constexpr):
    """The rectangle of an entry; first row, end and column of this program's tiles, which are one below the other."""
    region = ks.region_of(entry, CONFIG.aligned)
    across = tl.load(entry + ks.TILES_ACROSS).to(tl.int32)
    number = tl.program_id(0) - tl.load(entry + ks.FIRST_PROGRAM).to(tl.int32)
    HEIGHT: tl.constexpr = CONFIG.rows * CONFIG.chunks
    row = (region.row_origin // HEIGHT + number // across) * HEIGHT
    col = (region.col_origin // CONFIG.cols + number % across) * CONFIG.cols
    return region, row, tl.minimum(row + HEIGHT, region.row_origin + region.rows), col


@triton.jit
def step_kernel(
    entries, entry_of_program, gradients, groups, settings, skip, GRAD: tl.constexpr, GRAD_CODE: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    if skip is not None:
        if tl.load(skip) != 0:
            return
    entry = entries + tl.load(entry_of_program + tl.program_id(0)) * ks.COLUMNS
    if tl.load(gradients + tl.load(entry + ks.PARAMETER) * ks.GRADIENT_COLUMNS) != GRAD_CODE:
        return
    region, row, end, col = tiles_of(entry, CONFIG)
    operands = (entry, gradients, groups, settings)
    if CONFIG.only_raises:
        raise_amax(row, end, col, region, operands, GRAD, CONFIG)
    elif CONFIG.high:
        update_high(row, end, col, region, operands, GRAD, CONFIG)
    else:
        update_low(row, end, col, region, operands, GRAD, CONFIG)


@triton.jit
def momentum_kernel(
    entries, entry_of_program, gradients, settings, GRAD: tl.constexpr, GRAD_CODE: tl.constexpr, CONFIG: tl.constexpr
):
    """Write the matrices to orthogonalize, bfloat16, into the buffers that the step reads. States do not change."""
    FIRST: tl.constexpr = CONFIG.state1
    ROWS: tl.constexpr = CONFIG.rows
    entry = entries + tl.load(entry_of_program + tl.program_id(0)) * ks.COLUMNS
    gradient_row = gradients + tl.load(entry + ks.PARAMETER) * ks.GRADIENT_COLUMNS
    if tl.load(gradient_row + ks.GRADIENT_DTYPE) != GRAD_CODE:
        return
    region, row, end, col = tiles_of(entry, CONFIG)
    group_settings = settings + tl.load(entry + ks.GROUP_ROW) * ks.SETTINGS_COLUMNS
    while row < end:
        tile = ks.tile_at(row, col, region, CONFIG)
        grad = ks.load_plain(tl.load(gradient_row + ks.GRADIENT_ADDRESS), tile, GRAD, CONFIG)
        buffer = formulas.momentum(grad, ks.read_state(entry, ks.STATE1, tile, region, FIRST, CONFIG), group_settings)
        bits = even_bfloat16(formulas.nesterov(grad, buffer, group_settings))
        ks.store_tile(tl.load(gradient_row + ks.DIRECTION), bits, tile, tl.int16, CONFIG)
        row += ROWS


@triton.jit
def even_bfloat16(x):
    """Round to bfloat16 bits, int16, ties to even, on bits: Triton's interpreter flushes subnormal bfloat16s."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def raise_amax(row, end, col, region, operands, GRAD: tl.constexpr, CONFIG: tl.constexpr):
    """Measure the amax of the new weights, for passes that do nothing else.

    A step moves a weight by at most a learning rate times the largest update. Nearly all weights are so much smaller
    than the largest that they cannot exceed it, so most programs need nothing but their codes. The measured amax is a
    lower bound of the new one, whatever was skipped.
    """
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    ROWS: tl.constexpr = CONFIG.rows
    entry, gradients, groups, settings = operands
    slot = ks.slot_of(entry, ks.WEIGHT)
    measured = ks.pointer(slot.new_second if WEIGHT_STATE.measures_second else slot.measured, tl.float32, False)
    before = tl.load(measured, volatile=True)  # volatile, because other multiprocessors raise it
    low, high = amax_of_program(row, col, region, entry, slot, CONFIG)
    least, most = amax_after(low, high, entry, settings, CONFIG)
    if (most < before) == 0:  # also if one of them is NaN
        least = tl.where(least > 0, least, 0.0)  # not NaN, as of a rate of 0 times no bound: its bits are the largest
        tl.atomic_max(ql.as_bits(measured), least.to(tl.int32, bitcast=True), sem="relaxed")
        while row < end:
            tile = ks.tile_at(row, col, region, CONFIG)
            amax = largest(master_amaxes(tile, region, entry, CONFIG))
            _, most = amax_after(amax, amax, entry, settings, CONFIG)
            if (most < tl.load(measured, volatile=True)) == 0:
                x = update_tile(tile, region, entry, gradients, groups, settings, GRAD, CONFIG)
                measure(x, entry, ks.WEIGHT, tile, region, WEIGHT_STATE, CONFIG)
            row += ROWS


@triton.jit
def amax_of_program(row, col, region, entry, slot, CONFIG: tl.constexpr):
    """Lower and upper bound of the amax of a program's weights before the step."""
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    MASTER_STATE: tl.constexpr = CONFIG.master
    ROWS: tl.constexpr = CONFIG.rows
    COLS: tl.constexpr = CONFIG.cols
    CHUNKS: tl.constexpr = CONFIG.chunks
    element: tl.constexpr = WEIGHT_STATE.rule.element
    HAS_CODES: tl.constexpr = MASTER_STATE.kind == ks.ABSENT or MASTER_STATE.kind == ks.SPLIT
    if HAS_CODES and WEIGHT_STATE.measures and element.bits == 8:
        # the low bytes of a SPLIT master move a weight by half a step of its codes at most
        codes = tl.zeros((ROWS, COLS), tl.int32)
        for c in tl.static_range(CHUNKS):
            tile = ks.tile_at(row + c * ROWS, col, region, CONFIG)
            codes = tl.maximum(codes, ks.load_tile(slot.codes, tile, tl.uint8, CONFIG).to(tl.int32) & element.magnitude)
        code = tl.zeros((1, 1), tl.int32) + tl.max(tl.max(codes, 1), 0)
        scale = tl.load(ks.pointer(slot.scale, tl.float32, False))
        low = ql.decode(tl.maximum(code - 1, 0).to(tl.uint8), element) * scale
        high = ql.decode(tl.minimum(code + 1, element.magnitude).to(tl.uint8), element) * scale
        return largest(low.to(tl.int32, bitcast=True)), largest(high.to(tl.int32, bitcast=True))
    else:
        top = ks.zero_amaxes(CONFIG)
        for c in tl.static_range(CHUNKS):
            tile = ks.tile_at(row + c * ROWS, col, region, CONFIG)
            top = tl.maximum(top, master_amaxes(tile, region, entry, CONFIG))
        return largest(top), largest(top)


@triton.jit
def largest(bits):
    return tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)


@triton.jit
def master_amaxes(tile, region, entry, CONFIG: tl.constexpr):
    """The amaxes of each four neighbours of a tile before the step, as bits."""
    MASTER_STATE: tl.constexpr = CONFIG.master
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    if MASTER_STATE.kind != ks.ABSENT:
        x = ks.read_state(entry, ks.MASTER, tile, region, MASTER_STATE, CONFIG)
    else:
        x = ks.read_state(entry, ks.WEIGHT, tile, region, WEIGHT_STATE, CONFIG)
    amaxes = ql.block_amax(x, CONFIG.rows, CONFIG.cols, 1, 4, FOURS=CONFIG.aligned)
    return amaxes.to(tl.int32, bitcast=True)


@triton.jit
def amax_after(low, high, entry, settings, CONFIG: tl.constexpr):
    """Bounds of the amax of new weights, given bounds of the amax before the step. The lower bound can be negative.

    The largest update is 1 for Lion. For Adam it is twice what exact moments give, which covers rounding.
    """
    group_settings = settings + tl.load(entry + ks.GROUP_ROW) * ks.SETTINGS_COLUMNS
    lr, decay = tl.load(group_settings + formulas.LR), tl.load(group_settings + formulas.DECAY)
    if CONFIG.algorithm == ks.ADAM:
        largest_update = tl.load(group_settings + formulas.MOST)
    else:
        largest_update = 1.0
    shrinks, moves = lr * decay, lr * largest_update * 1.0001
    return low * (0.9999 - shrinks) - moves, high * (1.0001 + shrinks) + moves


@triton.jit
def update_low(row, end, col, region, operands, GRAD: tl.constexpr, CONFIG: tl.constexpr):
    """Update tiles one below the other, for weights with blocks that fit in a tile."""
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    COLUMNWISE_STATE: tl.constexpr = CONFIG.columnwise
    ROWS: tl.constexpr = CONFIG.rows
    entry, gradients, groups, settings = operands
    key = weight_random_key(entry, gradients, groups, CONFIG)
    top = ks.zero_amaxes(CONFIG)
    while row < end:
        tile = ks.tile_at(row, col, region, CONFIG)
        x = update_tile(tile, region, entry, gradients, groups, settings, GRAD, CONFIG)
        top = ks.measure_tile(x, top, entry, ks.WEIGHT, tile, region, WEIGHT_STATE, CONFIG)
        top = ks.measure_tile(x, top, entry, ks.COLUMNWISE, tile, region, COLUMNWISE_STATE, CONFIG)
        ks.write_weight(x, entry, tile, region, ks.weight_random_bits(key, tile, CONFIG), CONFIG)
        random_bits = ks.state_random_bits(key, tile, COLUMNWISE_STATE, CONFIG)
        ks.write_state(x, entry, ks.COLUMNWISE, tile, region, random_bits, COLUMNWISE_STATE, CONFIG)
        row += ROWS
    ks.store_tensor_amaxes(top, entry, ks.WEIGHT, WEIGHT_STATE)


@triton.jit
def update_high(row, end, col, region, operands, GRAD: tl.constexpr, CONFIG: tl.constexpr):
    """Update one row of blocks as high as all tiles of a program: all tiles are measured before any is quantized.
    The new values are then read from float32 masters, or computed again."""
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    MASTER_STATE: tl.constexpr = CONFIG.master
    ROWS: tl.constexpr = CONFIG.rows
    ACROSS: tl.constexpr = CONFIG.cols // WEIGHT_STATE.cols
    FIRST_LOOP: tl.constexpr = CONFIG if CONFIG.measuring is None else CONFIG.measuring
    MEASURED_WEIGHT: tl.constexpr = FIRST_LOOP.weight
    entry, gradients, groups, settings = operands
    key = weight_random_key(entry, gradients, groups, CONFIG)
    top = tl.zeros((ROWS, ACROSS), tl.int32)
    # an unrolled loop would compile for up to minutes
    tile_row = row
    while tile_row < end:
        tile = ks.tile_at(tile_row, col, region, CONFIG)
        x = update_tile(tile, region, entry, gradients, groups, settings, GRAD, FIRST_LOOP)
        top = tl.maximum(top, ql.block_amax(x, ROWS, CONFIG.cols, 1, WEIGHT_STATE.cols).to(tl.int32, bitcast=True))
        tile_row += ROWS
    amax = ql.block_amax(top.to(tl.float32, bitcast=True), ROWS, ACROSS, WEIGHT_STATE.rows, 1)
    slot = ks.slot_of(entry, ks.WEIGHT)
    block = ks.tile_at(row, col, region, CONFIG)
    multiplier = ks.multipliers(amax, slot, block, region, MEASURED_WEIGHT, CONFIG)
    tl.debug_barrier()  # other threads have written their masters, or read what this one overwrites
    tile_row = row
    while tile_row < end:
        tile = ks.tile_at(tile_row, col, region, CONFIG)
        if CONFIG.measuring is None:
            x = ks.read_state(entry, ks.MASTER, tile, region, MASTER_STATE, CONFIG)
        else:
            x = update_tile(tile, region, entry, gradients, groups, settings, GRAD, CONFIG)
        ks.store_weight(x, multiplier, slot, entry, tile, region, ks.weight_random_bits(key, tile, CONFIG), CONFIG)
        tile_row += ROWS
    if CONFIG.measuring is not None:
        tl.debug_barrier()  # other threads have read the old scale
        ks.multipliers(amax, slot, block, region, WEIGHT_STATE, CONFIG)


@triton.jit
def requantize_kernel(entries, entry_of_program, gradients, skip, CONFIG: tl.constexpr, REDO: tl.constexpr):
    """Quantize weights from their float32 masters. REDO: only flagged weights, with several programs for each."""
    if skip is not None:
        if tl.load(skip) != 0:
            return
    HEIGHT: tl.constexpr = CONFIG.rows * CONFIG.chunks
    if REDO:
        entry = entries + tl.program_id(0) * ks.COLUMNS
        if tl.load(ks.pointer(tl.load(entry + ks.REDO_FLAG), tl.float32, False)) == 0:
            return
    else:
        entry = entries + tl.load(entry_of_program + tl.program_id(0)) * ks.COLUMNS
    if tl.load(gradients + tl.load(entry + ks.PARAMETER) * ks.GRADIENT_COLUMNS) == 0:
        return
    region = ks.region_of(entry, CONFIG.aligned)
    across = tl.load(entry + ks.TILES_ACROSS).to(tl.int32)
    if REDO:
        number = tl.program_id(1)
        down = (region.row_origin + region.rows + HEIGHT - 1) // HEIGHT - region.row_origin // HEIGHT
        last, stride = across * down, tl.num_programs(1)
    else:
        number = tl.program_id(0) - tl.load(entry + ks.FIRST_PROGRAM).to(tl.int32)
        last, stride = number + 1, 1
    MASTER_STATE: tl.constexpr = CONFIG.master
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    COLUMNWISE_STATE: tl.constexpr = CONFIG.columnwise
    while number < last:
        row = (region.row_origin // HEIGHT + number // across) * HEIGHT
        col = (region.col_origin // CONFIG.cols + number % across) * CONFIG.cols
        end = tl.minimum(row + HEIGHT, region.row_origin + region.rows)
        while row < end:
            tile = ks.tile_at(row, col, region, CONFIG)
            x = ks.read_state(entry, ks.MASTER, tile, region, MASTER_STATE, CONFIG)
            ks.write_state(x, entry, ks.WEIGHT, tile, region, 0, WEIGHT_STATE, CONFIG)
            ks.write_state(x, entry, ks.COLUMNWISE, tile, region, 0, COLUMNWISE_STATE, CONFIG)
            row += CONFIG.rows
        number += stride
