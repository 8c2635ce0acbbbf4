"""Optimizer states in kernels over many tensors: tiles are read as float32, and written in the stored format.

A table on the device holds what differs between the tensors of a launch (addresses, shapes, regions); a second table
holds what differs between steps. `StepKernelConfig` has the compile-time constants. The oracle is `optimizers.state`
with `numerics`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quantshard.kernels import language as ql, scale_rule as sr
from quantshard.kernels.optimizer.stored import SETTINGS, Algorithm
from quantshard.kernels.quantize import random_words as rw
from quantshard.numerics.states import StateKind

ABSENT, PLAIN, REMAINDER, SCALED, SPLIT = (tl.constexpr(kind.value) for kind in StateKind)
ADAM, LION, MUON = (tl.constexpr(algorithm.value) for algorithm in Algorithm)


class StateConfig(NamedTuple):
    """How one state, or one copy of the weight, is stored, and the work of a launch on it; constants of a kernel.

    `kind`: a `StateKind`. `dtype`: stored dtype. `rule`: rule of the scales. `block_rows`, `block_cols`: shape of a
    scale block; `rows`, `cols`: its part within a tile. `given`: scales derive from amaxes measured before, instead of
    the tile's. `second`: the amax of the whole tensor, measured before, also counts. `measures`, `measures_second`: the
    launch measures such amaxes.
    """

    kind: int
    dtype: Any = None
    rule: Any = None
    block_rows: int = 1
    block_cols: int = 1
    rows: int = 1
    cols: int = 1
    row_all: bool = False
    col_all: bool = False
    stochastic: bool = False
    own_key: bool = False
    keep_positive: bool = False
    given: bool = False
    second: bool = False
    measures: bool = False
    measures_second: bool = False
    writes: bool = False


class StepKernelConfig(NamedTuple):
    """Constants of a kernel: `chunks` tiles of `rows` x `cols` for each program, and the configs of all states.

    `aligned`: all addresses, row lengths and origins are multiples of 16. `by_four`: see `rw.words_of_tile`. `high`:
    blocks are higher than a tile, so a program measures all its chunks before it quantizes one. `measuring`: constants
    of a first loop over the chunks that writes nothing, if the second computes the step again. `bound`: a
    `numerics.adam.Bound`. `algorithm`: an `Algorithm`. `states`: how many it has. `only_raises`: see `step.raise_amax`.
    """

    rows: int
    cols: int
    chunks: int
    aligned: bool
    by_four: bool
    high: bool
    bound: int
    algorithm: int
    states: int
    state1: StateConfig
    state2: StateConfig
    master: StateConfig
    weight: StateConfig
    columnwise: StateConfig
    average: StateConfig
    only_raises: bool = False
    measuring: Any = None


class StatePointers(NamedTuple):
    """Addresses of one stored tensor: `codes` (or plain values), `scale`, the stride of its grid and of amax grids,
    `second` (stored), amaxes to write (`measured`) and to read (`given`), and the new amax of the whole tensor."""

    codes: Any
    scale: Any
    stride: Any
    second: Any
    measured: Any
    given: Any
    new_second: Any


# The table of tensors: int64, one row per tensor: these columns, then `StatePointers` of the six stored tensors.
(
    PARAMETER, GROUP_ROW, ROW_COUNT, COL_COUNT, ROW_ORIGIN, COL_ORIGIN, WIDTH, TILES_ACROSS, FIRST_PROGRAM, STREAM,
    RNG_KEY, WEIGHT_STREAM, REDO_FLAG, ENTRY_COLUMNS,
) = (tl.constexpr(column) for column in range(14))  # fmt: skip
STATE1, STATE2, MASTER, WEIGHT, COLUMNWISE, AVERAGE = (tl.constexpr(slot) for slot in range(6))
SLOT_COLUMNS = tl.constexpr(len(StatePointers._fields))
COLUMNS = tl.constexpr(13 + 6 * len(StatePointers._fields))

# The table of a step, int64. For each parameter: code of the gradient's dtype (0: no gradient), the gradient's address,
# the counter of the weight's own random bits, and, for Muon, the address of the orthogonalized momentum. For each
# group: the optimizer's seed, the step, and the float32 settings.
GRADIENT_DTYPE, GRADIENT_ADDRESS, RNG_COUNTER, DIRECTION, GRADIENT_COLUMNS = (tl.constexpr(i) for i in range(5))
GROUP_COLUMNS = tl.constexpr(2)
SETTINGS_COLUMNS = tl.constexpr(len(SETTINGS))


class EntryRegion(NamedTuple):
    rows: Any
    cols: Any
    row_origin: Any
    col_origin: Any


class TileOffsets(NamedTuple):
    """Position of a tile: its global row and column; the offset of its first element in the rectangle; offsets of all
    elements from the first; and the mask of elements inside the rectangle."""

    row: Any
    col: Any
    first: Any
    offsets: Any
    valid: Any


@triton.jit
def region_of(entry, ALIGNED: tl.constexpr):
    """The rectangle of an entry, in int32, which halves the registers of indices."""
    cols = tl.load(entry + COL_COUNT).to(tl.int32)
    col_origin = tl.load(entry + COL_ORIGIN).to(tl.int32)
    if ALIGNED:  # by shifts, so that the compiler sees the multiple across function calls
        cols = (cols >> 4) << 4
        col_origin = (col_origin >> 4) << 4
    return EntryRegion(
        tl.load(entry + ROW_COUNT).to(tl.int32), cols, tl.load(entry + ROW_ORIGIN).to(tl.int32), col_origin
    )


@triton.jit
def slot_of(entry, role):
    s = entry + ENTRY_COLUMNS + role * SLOT_COLUMNS
    return StatePointers(
        tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + 4), tl.load(s + 5), tl.load(s + 6)
    )


@triton.jit
def pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Convert an address from a table to a pointer.

    Aligned pointers are declared as aligned to four elements, not to 16 bytes, so that a thread has the same four
    elements of every tensor. A warp still reads 128 consecutive bytes of the shortest dtype.
    """
    if ALIGNED:
        WIDTH: tl.constexpr = dtype.primitive_bitwidth // 2
        return tl.multiple_of(address.to(tl.pointer_type(dtype)), WIDTH)
    else:
        return address.to(tl.pointer_type(dtype))


@triton.jit
def load_tile(address, tile, DTYPE: tl.constexpr, CONFIG: tl.constexpr):
    """Load a tile of a matrix; zero outside."""
    return tl.load(pointer(address, DTYPE, CONFIG.aligned) + tile.first + tile.offsets, mask=tile.valid, other=0)


@triton.jit
def store_tile(address, values, tile, DTYPE: tl.constexpr, CONFIG: tl.constexpr):
    tl.store(pointer(address, DTYPE, CONFIG.aligned) + tile.first + tile.offsets, values.to(DTYPE), mask=tile.valid)


@triton.jit
def load_plain(address, tile, DTYPE: tl.constexpr, CONFIG: tl.constexpr):
    """Load a tile of a plain tensor as float32; zero outside."""
    if DTYPE == tl.bfloat16:  # as bits, because Triton's interpreter flushes subnormal bfloat16s
        return (load_tile(address, tile, tl.int16, CONFIG).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return load_tile(address, tile, DTYPE, CONFIG).to(tl.float32)


@triton.jit
def tile_at(row, col, region, CONFIG: tl.constexpr):
    i = row - region.row_origin + tl.arange(0, CONFIG.rows)
    j = col - region.col_origin + tl.arange(0, CONFIG.cols)
    valid = ((i >= 0) & (i < region.rows))[:, None] & ((j >= 0) & (j < region.cols))[None, :]
    first = (row - region.row_origin).to(tl.int64) * region.cols + (col - region.col_origin)
    offsets = tl.arange(0, CONFIG.rows)[:, None] * region.cols + tl.arange(0, CONFIG.cols)[None, :]
    return TileOffsets(row, col, first, offsets, valid)


@triton.jit
def blocks_at(tile, region, stride, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Offsets of a tile's blocks in a grid, and the mask of blocks that the rectangle touches."""
    i = tl.arange(0, CONFIG.rows // STATE.rows)
    j = tl.arange(0, CONFIG.cols // STATE.cols)
    if STATE.row_all:
        inside_rows = i < 1
    else:
        first = region.row_origin // STATE.block_rows
        end = (region.row_origin + region.rows + STATE.block_rows - 1) // STATE.block_rows
        i += tile.row // STATE.block_rows - first
        inside_rows = (i >= 0) & (i < end - first)
    if STATE.col_all:
        inside_cols = j < 1
    else:
        first = region.col_origin // STATE.block_cols
        end = (region.col_origin + region.cols + STATE.block_cols - 1) // STATE.block_cols
        j += tile.col // STATE.block_cols - first
        inside_cols = (j >= 0) & (j < end - first)
    return i[:, None] * stride.to(tl.int32) + j[None, :], inside_rows[:, None] & inside_cols[None, :]


@triton.jit
def expand(blocks, STATE: tl.constexpr, CONFIG: tl.constexpr):
    return ql.expand(blocks, CONFIG.rows, CONFIG.cols, STATE.rows, STATE.cols)


@triton.jit
def block_amaxes(x, STATE: tl.constexpr, CONFIG: tl.constexpr):
    return ql.block_amax(x, CONFIG.rows, CONFIG.cols, STATE.rows, STATE.cols, FOURS=CONFIG.aligned)


@triton.jit
def read_state(entry, role, tile, region, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Read float32 values of a state; zero outside."""
    slot = slot_of(entry, role)
    if STATE.kind == PLAIN:
        return load_plain(slot.codes, tile, STATE.dtype, CONFIG)
    elif STATE.kind == REMAINDER:
        weight = slot_of(entry, WEIGHT)
        high = load_tile(weight.codes, tile, tl.int16, CONFIG)
        low = load_tile(slot.codes, tile, tl.int16, CONFIG)
        upper = high.to(tl.int32) - (low < 0).to(tl.int32)
        return ((upper << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    elif STATE.kind == SPLIT:
        WEIGHT_STATE: tl.constexpr = CONFIG.weight
        weight = slot_of(entry, WEIGHT)
        values = split_values(weight.codes, slot.codes, tile, WEIGHT_STATE, CONFIG)
        return values * expand(stored_scales(weight, tile, region, WEIGHT_STATE, CONFIG), WEIGHT_STATE, CONFIG)
    else:
        values = stored_values(slot, tile, region, STATE, CONFIG)
        return values * expand(stored_scales(slot, tile, region, STATE, CONFIG), STATE, CONFIG)


@triton.jit
def stored_values(slot, tile, region, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Decode the codes of a tile, without the scale."""
    element: tl.constexpr = STATE.rule.element
    if element.bits == 16:
        return load_plain(slot.codes, tile, tl.float16, CONFIG)
    elif element.bits == 8:
        return ql.decode(load_tile(slot.codes, tile, tl.uint8, CONFIG), element)
    else:
        offsets, valid = packed_at(tile, region, CONFIG)
        codes = tl.load(pointer(slot.codes, tl.uint8, CONFIG.aligned) + offsets, mask=valid, other=0)
        return ql.decode(ql.unpack(codes, CONFIG.rows, CONFIG.cols), element)


@triton.jit
def split_values(codes, low, tile, WEIGHT_STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Decode a weight's codes and the low bytes that extend them, without the scale: `split_codes.decode`."""
    element: tl.constexpr = WEIGHT_STATE.rule.element
    MANTISSA: tl.constexpr = element.mantissa
    # half way between the largest number and NaN (the largest code): no remainder of another code reaches it
    BEYOND: tl.constexpr = (2 - 1.5 * 0.5**MANTISSA) * 2.0 ** (2 ** (7 - MANTISSA) - 2 + element.lowest)
    high = load_tile(codes, tile, tl.uint8, CONFIG).to(tl.int32)
    rest = load_tile(low, tile, tl.int8, CONFIG).to(tl.int32)
    magnitude = tl.maximum(((high & 0x7F) << 8) + rest, 0)
    bits = (magnitude << (15 - MANTISSA)) | ((high & 0x80) << 24)
    values = bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + element.lowest)  # from float32's lowest binades
    return ql.nan_where_infinite(values * (2.0**128 / (BEYOND * (1 - 0.5**14))), values)


@triton.jit
def packed_at(tile, region, CONFIG: tl.constexpr):
    """Offsets of a tile's bytes of two codes each, and the mask of existing bytes."""
    i = tile.row - region.row_origin + tl.arange(0, CONFIG.rows)
    if CONFIG.aligned:
        first = ((tile.col - region.col_origin) >> 4) << 3
        across = (region.cols >> 4) << 3
    else:
        first = (tile.col - region.col_origin) // 2
        across = (region.cols + 1) // 2
    j = first + tl.arange(0, CONFIG.cols // 2)
    valid = ((i >= 0) & (i < region.rows))[:, None] & ((j >= 0) & (j < across))[None, :]
    return i[:, None].to(tl.int64) * across + j[None, :], valid


@triton.jit
def stored_scales(slot, tile, region, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Load the factors of decoded codes: `numerics.dequantize`."""
    rule: tl.constexpr = STATE.rule
    entries, inside = blocks_at(tile, region, slot.stride, STATE, CONFIG)
    if rule.kind == 0:
        return tl.load(pointer(slot.scale, tl.float32, False) + entries, mask=inside, other=0.0)
    elif rule.kind == 1:
        return sr.decode_e8m0(tl.load(pointer(slot.scale, tl.uint8, False) + entries, mask=inside, other=0))
    else:
        encoding: tl.constexpr = rule.stored
        scale = ql.decode(tl.load(pointer(slot.scale, tl.uint8, False) + entries, mask=inside, other=0), encoding)
        amax = tl.load(pointer(slot.second, tl.float32, False))
        return scale * amax * (1.0 / (rule.element.max * encoding.max))


@triton.jit
def zero_amaxes(CONFIG: tl.constexpr):
    ROWS: tl.constexpr = CONFIG.rows
    COLS: tl.constexpr = CONFIG.cols // 4
    return tl.zeros((ROWS, COLS), tl.int32)


@triton.jit
def measure_tile(x, top, entry, role, tile, region, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Raise the amax grids that a later pass needs to the amaxes of this tile. Returns the new `top`.

    `top`: running maximum of each four neighbours, for amaxes of whole tensors (`store_tensor_amaxes`).
    """
    if STATE.measures and not (STATE.row_all and STATE.col_all):
        slot = slot_of(entry, role)
        amax = block_amaxes(x, STATE, CONFIG).to(tl.int32, bitcast=True)
        entries, inside = blocks_at(tile, region, slot.stride, STATE, CONFIG)
        tl.atomic_max(pointer(slot.measured, tl.int32, False) + entries, amax, mask=inside, sem="relaxed")
    if STATE.measures_second or (STATE.measures and STATE.row_all and STATE.col_all):
        amax = ql.block_amax(x, CONFIG.rows, CONFIG.cols, 1, 4, FOURS=CONFIG.aligned)
        top = tl.maximum(top, amax.to(tl.int32, bitcast=True))
    return top


@triton.jit
def store_tensor_amaxes(top, entry, role, STATE: tl.constexpr):
    """Raise the amaxes of whole tensors that a later pass needs to the running maximum."""
    slot = slot_of(entry, role)
    if STATE.measures_second:
        tl.atomic_max(pointer(slot.new_second, tl.int32, False), tl.max(tl.max(top, 1), 0), sem="relaxed")
    if STATE.measures and STATE.row_all and STATE.col_all:
        tl.atomic_max(pointer(slot.measured, tl.int32, False), tl.max(tl.max(top, 1), 0), sem="relaxed")


@triton.jit
def multipliers(amax, slot, tile, region, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Multipliers of a tile's blocks, from earlier amaxes or else from `amax`, which also gives the scales to store."""
    rule: tl.constexpr = STATE.rule
    entries, inside = blocks_at(tile, region, slot.stride, STATE, CONFIG)
    second = tl.load(pointer(slot.new_second, tl.float32, False)) if STATE.second else 0.0
    if STATE.given:
        amax = tl.load(pointer(slot.given, tl.float32, False) + entries, mask=inside, other=0.0)
    stored_scale, multiplier = sr.scales(amax, second, rule)
    if STATE.writes and not STATE.given:
        dtype: tl.constexpr = tl.float32 if rule.kind == 0 else tl.uint8
        if CONFIG.cols == STATE.cols:  # a warp has a whole row, so its first thread stores the scale
            lane = tl.arange(0, 32)[None, :]
            stored_scale = tl.broadcast_to(stored_scale, (CONFIG.rows // STATE.rows, 32))
            tl.store(pointer(slot.scale, dtype, False) + (entries + lane), stored_scale, mask=inside & (lane == 0))
        else:
            tl.store(pointer(slot.scale, dtype, False) + entries, stored_scale, mask=inside)
    return multiplier


@triton.jit
def state_random_bits(key, tile, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Random bits of a tile, uint32, if its state is rounded stochastically; `key`: see `rw.words_of_tile`."""
    if STATE.stochastic and STATE.writes:
        return rw.words_of_tile(tile.row, tile.col, key, CONFIG.rows, CONFIG.cols, CONFIG.by_four)
    else:
        return 0


@triton.jit
def store_codes(x, multiplier, slot, tile, region, random_bits, STATE: tl.constexpr, CONFIG: tl.constexpr):
    element: tl.constexpr = STATE.rule.element
    scaled = x * expand(multiplier, STATE, CONFIG)
    if STATE.stochastic:
        codes = ql.encode_stochastic(scaled, random_bits, element, STATE.keep_positive, x)
    else:
        tl.static_assert(not STATE.keep_positive)
        codes = ql.encode(scaled, element)
    if element.bits == 16:
        store_tile(slot.codes, codes, tile, tl.int16, CONFIG)
    elif element.bits == 8:
        store_tile(slot.codes, codes, tile, tl.uint8, CONFIG)
    else:
        offsets, valid = packed_at(tile, region, CONFIG)
        codes = ql.pack(tl.where(tile.valid, codes, 0), CONFIG.rows, CONFIG.cols).to(tl.uint8)
        tl.store(pointer(slot.codes, tl.uint8, CONFIG.aligned) + offsets, codes, mask=valid)


@triton.jit
def write_weight(x, entry, tile, region, random_bits, CONFIG: tl.constexpr):
    """Write the rowwise codes of a weight, zero outside, and a `SPLIT` master. See `weight_random_bits`."""
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    if WEIGHT_STATE.kind == SCALED and WEIGHT_STATE.writes:
        slot = slot_of(entry, WEIGHT)
        multiplier = multipliers(block_amaxes(x, WEIGHT_STATE, CONFIG), slot, tile, region, WEIGHT_STATE, CONFIG)
        store_weight(x, multiplier, slot, entry, tile, region, random_bits, CONFIG)
    else:
        write_state(x, entry, WEIGHT, tile, region, random_bits, WEIGHT_STATE, CONFIG)


@triton.jit
def store_weight(x, multiplier, slot, entry, tile, region, random_bits, CONFIG: tl.constexpr):
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    MASTER_STATE: tl.constexpr = CONFIG.master
    if MASTER_STATE.kind == SPLIT:  # the high bytes are codes and the low bytes the master: `split_codes.quantize`
        wide: tl.constexpr = MASTER_STATE.rule.element
        code = ql.encode_stochastic(x * expand(multiplier, WEIGHT_STATE, CONFIG), random_bits, wide)
        magnitude = tl.minimum(code & 0x7FFF, 0x7F7F)
        high = ((magnitude + 0x80) >> 8) | ((code >> 8) & 0x80)
        store_tile(slot.codes, high, tile, tl.uint8, CONFIG)
        store_tile(slot_of(entry, MASTER).codes, magnitude & 0xFF, tile, tl.uint8, CONFIG)
    else:
        store_codes(x, multiplier, slot, tile, region, random_bits, WEIGHT_STATE, CONFIG)


@triton.jit
def weight_random_bits(key, tile, CONFIG: tl.constexpr):
    """`state_random_bits` of a weight, or of the `SPLIT` master written with it."""
    WEIGHT_STATE: tl.constexpr = CONFIG.weight
    MASTER_STATE: tl.constexpr = CONFIG.master
    if MASTER_STATE.kind == SPLIT:
        return state_random_bits(key, tile, MASTER_STATE, CONFIG)
    else:
        return state_random_bits(key, tile, WEIGHT_STATE, CONFIG)


@triton.jit
def write_state(x, entry, role, tile, region, random_bits, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Write the new values of a state or weight, zero outside, in the stored format. See `state_random_bits`."""
    if STATE.writes:
        slot = slot_of(entry, role)
        if STATE.kind == PLAIN:
            write_plain(x, slot, tile, random_bits, STATE, CONFIG)
        elif STATE.kind == REMAINDER:
            store_tile(slot_of(entry, WEIGHT).codes, nearest_bfloat16(x), tile, tl.int16, CONFIG)
            store_tile(slot.codes, x.to(tl.int32, bitcast=True), tile, tl.int16, CONFIG)
        elif STATE.kind == SCALED:
            amax = block_amaxes(x, STATE, CONFIG)
            multiplier = multipliers(amax, slot, tile, region, STATE, CONFIG)
            store_codes(x, multiplier, slot, tile, region, random_bits, STATE, CONFIG)


@triton.jit
def write_plain(x, slot, tile, random_bits, STATE: tl.constexpr, CONFIG: tl.constexpr):
    """Round float32 to a plain tensor, as in `numerics.rounded` and `FloatState.write`."""
    if STATE.dtype == tl.bfloat16:
        if STATE.stochastic:
            bits = stochastic_bfloat16(x, random_bits)
        else:
            bits = nearest_bfloat16(x)
        if STATE.keep_positive:
            bits = tl.where((bits == 0) & (x > 0), 1, bits).to(tl.int16)
        store_tile(slot.codes, bits, tile, tl.int16, CONFIG)
    elif STATE.dtype == tl.float16 and STATE.stochastic:
        element: tl.constexpr = STATE.rule.element
        store_tile(slot.codes, ql.encode_stochastic(x, random_bits, element), tile, tl.int16, CONFIG)
    else:
        store_tile(slot.codes, x, tile, STATE.dtype, CONFIG)


@triton.jit
def nearest_bfloat16(x):
    """Round to bfloat16 bits, int16, with ties away from zero: `numerics.split_bfloat16`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits >> 16) + ((bits >> 15) & 1)).to(tl.int16)


@triton.jit
def stochastic_bfloat16(x, random_bits):
    """Round to saturated bfloat16 bits, int16: `numerics.rounded`. NaN stays NaN for any bits."""
    rounded = ql.saturate(x, 3.3895313892515355e38).to(tl.int32, bitcast=True)
    carried = (rounded + (random_bits >> 16).to(tl.int32)) >> 16
    return tl.where(x != x, 0x7FC0, carried).to(tl.int16)
