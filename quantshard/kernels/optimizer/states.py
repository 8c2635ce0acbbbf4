"""Optimizer states in kernels over many tensors: tiles are read as float32, and written in the stored format.

    read(state) -> x          x -> amaxes, x -> codes and scales, or a rounded plain value

A table on the device holds what differs between the tensors of a launch (addresses, shapes, regions); a second table
holds what differs between steps. `StepKernelConfig` has the compile-time constants. The oracle is `optimizers.state`
with `numerics`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from quantshard.kernels import language as ql
from quantshard.kernels import scale_rule as sr
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
    own_words: bool = False
    keep_positive: bool = False
    given: bool = False
    second: bool = False
    measures: bool = False
    measures_second: bool = False
    writes: bool = False


class StepKernelConfig(NamedTuple):
    """Constants of a kernel: `chunks` tiles of `rows` x `cols` for each program, and the configs of all states.

    `aligned`: all addresses, row lengths and origins are multiples of 16. `by_four`: see `rw.words_of_tile`. `high`:
    blocks are higher than a tile, so a program updates all its chunks before it quantizes one. `rereads`: it then
    rereads the new values from the float32 masters, which frees registers for another program on the multiprocessor;
    otherwise it keeps them. `bounded`: see `numerics.adam.adam`. `algorithm`: an `Algorithm`. `states`: its number of
    states.
    """

    rows: int
    cols: int
    chunks: int
    aligned: bool
    by_four: bool
    high: bool
    rereads: bool
    bounded: bool
    algorithm: int
    states: int
    state1: StateConfig
    state2: StateConfig
    master: StateConfig
    weight: StateConfig
    columnwise: StateConfig
    average: StateConfig


# The table of tensors: int64, one row per tensor: the ENTRY columns, then the SLOT columns of the six stored tensors.
ENTRY: Final = ("parameter", "group", "rows", "cols", "row_origin", "col_origin", "width", "across", "first", "stream",
                "key", "key_stream", "redo")  # fmt: skip
SLOT: Final = ("codes", "scale", "stride", "second", "measured", "given", "new_second")
STATE1, STATE2, MASTER, WEIGHT, COLUMNWISE, AVERAGE = (tl.constexpr(slot) for slot in range(6))
COLUMNS: Final = tl.constexpr(len(ENTRY) + 6 * len(SLOT))
_ENTRIES: Final = tl.constexpr(len(ENTRY))
_SLOTS: Final = tl.constexpr(len(SLOT))

# The table of a step, int64. For each parameter: code of the gradient's dtype (0: no gradient), the gradient's address,
# the draw of the parameter's random words, and, for Muon, the address of the orthogonalized momentum. For each group:
# the optimizer's seed, the step, and the float32 settings.
GRADIENT: Final = ("dtype", "address", "draw", "direction")
GROUP: Final = ("seed", "step")
GRADIENT_COLUMNS: Final = tl.constexpr(len(GRADIENT))
GROUP_COLUMNS: Final = tl.constexpr(len(GROUP))
SETTINGS_COLUMNS: Final = tl.constexpr(len(SETTINGS))


class EntryRegion(NamedTuple):
    """Rectangle of the global matrix that an entry covers."""

    rows: Any
    cols: Any
    row_origin: Any
    col_origin: Any


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


class TileOffsets(NamedTuple):
    """Position of a tile: its global row and column; the offset of its first element in the rectangle; offsets of all
    elements from the first; and the mask of elements inside the rectangle."""

    row: Any
    col: Any
    first: Any
    offsets: Any
    valid: Any


@triton.jit
def area_of(entry, ALIGNED: tl.constexpr):
    """The rectangle of an entry, in int32, which halves the registers of indices."""
    cols = tl.load(entry + 3).to(tl.int32)
    col_origin = tl.load(entry + 5).to(tl.int32)
    if ALIGNED:  # by shifts, so that the compiler sees the multiple across function calls
        cols = (cols >> 4) << 4
        col_origin = (col_origin >> 4) << 4
    return EntryRegion(tl.load(entry + 2).to(tl.int32), cols, tl.load(entry + 4).to(tl.int32), col_origin)


@triton.jit
def slot_of(entry, role):
    """The pointers of one role in an entry's table row."""
    s = entry + _ENTRIES + role * _SLOTS
    return StatePointers(
        tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + 4), tl.load(s + 5), tl.load(s + 6)
    )


@triton.jit
def pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Convert an address from a table to a pointer.

    Aligned pointers are declared as aligned to four elements of their dtype, not to 16 bytes. So a thread has the same
    four elements of every tensor, and no value changes threads. A warp still reads 128 consecutive bytes of the
    shortest dtype.
    """
    if ALIGNED:
        WIDTH: tl.constexpr = dtype.primitive_bitwidth // 2
        return tl.multiple_of(address.to(tl.pointer_type(dtype)), WIDTH)
    else:
        return address.to(tl.pointer_type(dtype))


@triton.jit
def load_plain(address, tile, DTYPE: tl.constexpr, H: tl.constexpr):
    """Load a tile of a plain tensor as float32; zero outside."""
    if DTYPE == tl.bfloat16:  # as bits, because Triton's interpreter flushes subnormal bfloat16s
        bits = tl.load(pointer(address, tl.int16, H.aligned) + tile.first + tile.offsets, mask=tile.valid, other=0)
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(pointer(address, DTYPE, H.aligned) + tile.first + tile.offsets, mask=tile.valid, other=0.0)
        return values.to(tl.float32)


@triton.jit
def tile_at(row, col, area, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the offsets of the tile at a global row and column."""
    i = row - area.row_origin + tl.arange(0, ROWS)
    j = col - area.col_origin + tl.arange(0, COLS)
    valid = ((i >= 0) & (i < area.rows))[:, None] & ((j >= 0) & (j < area.cols))[None, :]
    first = (row - area.row_origin).to(tl.int64) * area.cols + (col - area.col_origin)
    offsets = tl.arange(0, ROWS)[:, None] * area.cols + tl.arange(0, COLS)[None, :]
    return TileOffsets(row, col, first, offsets, valid)


@triton.jit
def blocks_at(tile, area, stride, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets of a tile's blocks in a grid, and the mask of blocks that the rectangle touches."""
    i = tl.arange(0, ROWS // S.rows)
    j = tl.arange(0, COLS // S.cols)
    if S.row_all:
        inside_rows = i < 1
    else:
        first = area.row_origin // S.block_rows
        i += tile.row // S.block_rows - first
        inside_rows = (i >= 0) & (i < (area.row_origin + area.rows + S.block_rows - 1) // S.block_rows - first)
    if S.col_all:
        inside_cols = j < 1
    else:
        first = area.col_origin // S.block_cols
        j += tile.col // S.block_cols - first
        inside_cols = (j >= 0) & (j < (area.col_origin + area.cols + S.block_cols - 1) // S.block_cols - first)
    return i[:, None] * stride.to(tl.int32) + j[None, :], inside_rows[:, None] & inside_cols[None, :]


# --------------------------------------------------------------------------------------------------------------- states


@triton.jit
def read_state(entry, role, tile, area, S: tl.constexpr, H: tl.constexpr):
    """Read float32 values of a state; zero outside."""
    slot = slot_of(entry, role)
    if S.kind == PLAIN:
        return load_plain(slot.codes, tile, S.dtype, H)
    elif S.kind == REMAINDER:
        weight = slot_of(entry, WEIGHT)
        high = tl.load(pointer(weight.codes, tl.int16, H.aligned) + tile.first + tile.offsets, mask=tile.valid, other=0)
        low = tl.load(pointer(slot.codes, tl.int16, H.aligned) + tile.first + tile.offsets, mask=tile.valid, other=0)
        upper = high.to(tl.int32) - (low < 0).to(tl.int32)
        return ((upper << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    elif S.kind == SPLIT:
        C: tl.constexpr = H.weight
        weight = slot_of(entry, WEIGHT)
        values = split_values(weight.codes, slot.codes, tile, C, H)
        return values * ql.expand(stored_scales(weight, tile, area, C, H), H.rows, H.cols, C.rows, C.cols)
    else:
        values = stored_values(slot, tile, area, S, H)
        return values * ql.expand(stored_scales(slot, tile, area, S, H), H.rows, H.cols, S.rows, S.cols)


@triton.jit
def stored_values(slot, tile, area, S: tl.constexpr, H: tl.constexpr):
    """Decode the codes of a tile, without the scale."""
    element: tl.constexpr = S.rule.element
    if element.bits == 16:
        return load_plain(slot.codes, tile, tl.float16, H)
    elif element.bits == 8:
        codes = tl.load(pointer(slot.codes, tl.uint8, H.aligned) + tile.first + tile.offsets, mask=tile.valid, other=0)
        return ql.decode(codes, element)
    else:
        offsets, valid = packed_at(tile, area, H)
        codes = tl.load(pointer(slot.codes, tl.uint8, H.aligned) + offsets, mask=valid, other=0)
        return ql.decode(ql.unpack(codes, H.rows, H.cols), element)


@triton.jit
def split_values(codes, low, tile, C: tl.constexpr, H: tl.constexpr):
    """Decode a weight's codes and the low bytes that extend them, without the scale: `split_codes.decode`."""
    element: tl.constexpr = C.rule.element
    MANTISSA: tl.constexpr = element.mantissa
    # half way between the largest number and NaN (the largest code): no remainder of another code reaches it
    BEYOND: tl.constexpr = (2 - 1.5 * 0.5**MANTISSA) * 2.0 ** (2 ** (7 - MANTISSA) - 2 + element.lowest)
    high = tl.load(pointer(codes, tl.uint8, H.aligned) + tile.first + tile.offsets, mask=tile.valid, other=0)
    rest = tl.load(pointer(low, tl.int8, H.aligned) + tile.first + tile.offsets, mask=tile.valid, other=0)
    high = high.to(tl.int32)
    magnitude = tl.maximum(((high & 0x7F) << 8) + rest.to(tl.int32), 0)
    bits = (magnitude << (15 - MANTISSA)) | ((high & 0x80) << 24)
    values = bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + element.lowest)  # from float32's lowest binades
    return ql.nan_where_infinite(values * (2.0**128 / (BEYOND * (1 - 0.5**14))), values)


@triton.jit
def packed_at(tile, area, H: tl.constexpr):
    """Offsets of a tile's bytes of two codes each, and the mask of existing bytes."""
    i = tile.row - area.row_origin + tl.arange(0, H.rows)
    if H.aligned:
        first = ((tile.col - area.col_origin) >> 4) << 3
        across = (area.cols >> 4) << 3
    else:
        first = (tile.col - area.col_origin) // 2
        across = (area.cols + 1) // 2
    j = first + tl.arange(0, H.cols // 2)
    valid = ((i >= 0) & (i < area.rows))[:, None] & ((j >= 0) & (j < across))[None, :]
    return i[:, None].to(tl.int64) * across + j[None, :], valid


@triton.jit
def stored_scales(slot, tile, area, S: tl.constexpr, H: tl.constexpr):
    """Load the factors of decoded codes: `numerics.dequantize`."""
    rule: tl.constexpr = S.rule
    entries, inside = blocks_at(tile, area, slot.stride, S, H.rows, H.cols)
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
def no_amaxes(H: tl.constexpr):
    """The initial value of `top` in `take_amaxes`."""
    ROWS: tl.constexpr = H.rows
    COLS: tl.constexpr = H.cols // 4
    return tl.zeros((ROWS, COLS), tl.int32)


@triton.jit
def take_amaxes(x, top, entry, role, tile, area, S: tl.constexpr, H: tl.constexpr):
    """Raise the amax grids that a later pass needs to the amaxes of this tile.

    `give_amaxes` writes amaxes of whole tensors: `top` is the running maximum of each four neighbours, which one thread
    has; the new maximum is returned.
    """
    if S.measures and not (S.row_all and S.col_all):
        slot = slot_of(entry, role)
        amax = ql.block_amax(x, H.rows, H.cols, S.rows, S.cols, FOURS=H.aligned).to(tl.int32, bitcast=True)
        entries, inside = blocks_at(tile, area, slot.stride, S, H.rows, H.cols)
        tl.atomic_max(pointer(slot.measured, tl.int32, False) + entries, amax, mask=inside, sem="relaxed")
    if S.measures_second or (S.measures and S.row_all and S.col_all):
        top = tl.maximum(top, ql.block_amax(x, H.rows, H.cols, 1, 4, FOURS=H.aligned).to(tl.int32, bitcast=True))
    return top


@triton.jit
def give_amaxes(top, entry, role, S: tl.constexpr):
    """Raise the amaxes of whole tensors that a later pass needs to the running maximum."""
    slot = slot_of(entry, role)
    if S.measures_second:
        tl.atomic_max(pointer(slot.new_second, tl.int32, False), tl.max(tl.max(top, 1), 0), sem="relaxed")
    if S.measures and S.row_all and S.col_all:
        tl.atomic_max(pointer(slot.measured, tl.int32, False), tl.max(tl.max(top, 1), 0), sem="relaxed")


@triton.jit
def multipliers(amax, slot, tile, area, S: tl.constexpr, H: tl.constexpr):
    """Multipliers of a tile's blocks, from their amaxes or from amaxes measured before; in the first case store the
    scales."""
    rule: tl.constexpr = S.rule
    entries, inside = blocks_at(tile, area, slot.stride, S, H.rows, H.cols)
    second = tl.load(pointer(slot.new_second, tl.float32, False)) if S.second else 0.0
    if S.given:
        amax = tl.load(pointer(slot.given, tl.float32, False) + entries, mask=inside, other=0.0)
    stored_scale, multiplier = sr.scales(amax, second, rule)
    if not S.given:
        dtype: tl.constexpr = tl.float32 if rule.kind == 0 else tl.uint8
        if H.cols == S.cols:  # a warp has a whole row, so its first thread stores the scale
            lane = tl.arange(0, 32)[None, :]
            stored_scale = tl.broadcast_to(stored_scale, (H.rows // S.rows, 32))
            tl.store(pointer(slot.scale, dtype, False) + (entries + lane), stored_scale, mask=inside & (lane == 0))
        else:
            tl.store(pointer(slot.scale, dtype, False) + entries, stored_scale, mask=inside)
    return multiplier


@triton.jit
def state_words(key, tile, S: tl.constexpr, H: tl.constexpr):
    """Random words of a tile, uint32, if its state is rounded stochastically; `key`: see `rw.words_of_tile`."""
    if S.stochastic and S.writes:
        return rw.words_of_tile(tile.row, tile.col, key, H.rows, H.cols, H.by_four)
    else:
        return 0


@triton.jit
def store_codes(x, multiplier, slot, tile, area, words, S: tl.constexpr, H: tl.constexpr):
    """Quantize a tile and store its codes; `words`: see `state_words`."""
    element: tl.constexpr = S.rule.element
    scaled = x * ql.expand(multiplier, H.rows, H.cols, S.rows, S.cols)
    if S.stochastic:
        codes = ql.encode_stochastic(scaled, words, element, S.keep_positive, x)
    else:
        tl.static_assert(not S.keep_positive)
        codes = ql.encode(scaled, element)
    if element.bits == 16:
        tl.store(
            pointer(slot.codes, tl.int16, H.aligned) + tile.first + tile.offsets, codes.to(tl.int16), mask=tile.valid
        )
    elif element.bits == 8:
        tl.store(
            pointer(slot.codes, tl.uint8, H.aligned) + tile.first + tile.offsets, codes.to(tl.uint8), mask=tile.valid
        )
    else:
        offsets, valid = packed_at(tile, area, H)
        codes = ql.pack(tl.where(tile.valid, codes, 0), H.rows, H.cols).to(tl.uint8)
        tl.store(pointer(slot.codes, tl.uint8, H.aligned) + offsets, codes, mask=valid)


@triton.jit
def store_split(x, multiplier, slot, master, tile, words, C: tl.constexpr, H: tl.constexpr):
    """Round a tile of a weight to 16 bits; store the high bytes as its codes and the low bytes as its master.

    See `split_codes.quantize`. `words`: see `state_words`.
    """
    W: tl.constexpr = H.master
    wide: tl.constexpr = W.rule.element
    code = ql.encode_stochastic(x * ql.expand(multiplier, H.rows, H.cols, C.rows, C.cols), words, wide)
    magnitude = tl.minimum(code & 0x7FFF, 0x7F7F)
    high = ((magnitude + 0x80) >> 8) | ((code >> 8) & 0x80)
    offsets = tile.first + tile.offsets
    tl.store(pointer(slot.codes, tl.uint8, H.aligned) + offsets, high.to(tl.uint8), mask=tile.valid)
    tl.store(pointer(master.codes, tl.uint8, H.aligned) + offsets, (magnitude & 0xFF).to(tl.uint8), mask=tile.valid)


@triton.jit
def write_weight(x, entry, tile, area, words, H: tl.constexpr):
    """Write the rowwise codes of a weight, zero outside, and a `SPLIT` master; `words`: see `weight_words`."""
    C: tl.constexpr = H.weight
    if C.kind == SCALED and C.writes:
        slot = slot_of(entry, WEIGHT)
        amax = ql.block_amax(x, H.rows, H.cols, C.rows, C.cols, FOURS=H.aligned)
        store_weight(x, multipliers(amax, slot, tile, area, C, H), slot, entry, tile, area, words, H)
    else:
        write_state(x, entry, WEIGHT, tile, area, words, C, H)


@triton.jit
def store_weight(x, multiplier, slot, entry, tile, area, words, H: tl.constexpr):
    """Quantize and store a tile of a weight for `write_weight`."""
    C: tl.constexpr = H.weight
    W: tl.constexpr = H.master
    if W.kind == SPLIT:
        store_split(x, multiplier, slot, slot_of(entry, MASTER), tile, words, C, H)
    else:
        store_codes(x, multiplier, slot, tile, area, words, C, H)


@triton.jit
def weight_words(key, tile, H: tl.constexpr):
    """Random words of a tile of a weight, or of the `SPLIT` master written with it; `key`: key of these words."""
    C: tl.constexpr = H.weight
    W: tl.constexpr = H.master
    if W.kind == SPLIT:
        return state_words(key, tile, W, H)
    else:
        return state_words(key, tile, C, H)


@triton.jit
def write_state(x, entry, role, tile, area, words, S: tl.constexpr, H: tl.constexpr):
    """Write the new values of a state or weight, zero outside, in the stored format; `words`: see `state_words`."""
    if S.writes:
        slot = slot_of(entry, role)
        if S.kind == PLAIN:
            write_plain(x, slot, tile, words, S, H)
        elif S.kind == REMAINDER:
            bits = x.to(tl.int32, bitcast=True)
            weight = slot_of(entry, WEIGHT)
            tl.store(
                pointer(weight.codes, tl.int16, H.aligned) + tile.first + tile.offsets,
                nearest_bfloat16(x),
                mask=tile.valid,
            )
            tl.store(
                pointer(slot.codes, tl.int16, H.aligned) + tile.first + tile.offsets, bits.to(tl.int16), mask=tile.valid
            )
        elif S.kind == SCALED:
            amax = ql.block_amax(x, H.rows, H.cols, S.rows, S.cols, FOURS=H.aligned)
            multiplier = multipliers(amax, slot, tile, area, S, H)
            store_codes(x, multiplier, slot, tile, area, words, S, H)


@triton.jit
def write_plain(x, slot, tile, words, S: tl.constexpr, H: tl.constexpr):
    """Round float32 to a plain tensor, as in `numerics.rounded` and `FloatState.write`."""
    if S.dtype == tl.bfloat16:
        if S.stochastic:
            bits = stochastic_bfloat16(x, words)
        else:
            bits = nearest_bfloat16(x)
        if S.keep_positive:
            bits = tl.where((bits == 0) & (x > 0), 1, bits).to(tl.int16)
        tl.store(pointer(slot.codes, tl.int16, H.aligned) + tile.first + tile.offsets, bits, mask=tile.valid)
    elif S.dtype == tl.float16 and S.stochastic:
        element: tl.constexpr = S.rule.element
        codes = ql.encode_stochastic(x, words, element)
        tl.store(
            pointer(slot.codes, tl.int16, H.aligned) + tile.first + tile.offsets, codes.to(tl.int16), mask=tile.valid
        )
    else:
        tl.store(pointer(slot.codes, S.dtype, H.aligned) + tile.first + tile.offsets, x.to(S.dtype), mask=tile.valid)


@triton.jit
def nearest_bfloat16(x):
    """Round to bfloat16 bits, int16, with ties away from zero: `numerics.split_bfloat16`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits >> 16) + ((bits >> 15) & 1)).to(tl.int16)


@triton.jit
def stochastic_bfloat16(x, words):
    """Round to saturated bfloat16 bits, int16: `numerics.rounded`. NaN stays NaN for any word."""
    bits = ql.saturate(x, 3.3895313892515355e38).to(tl.int32, bitcast=True)
    carried = (bits + (words >> 16).to(tl.int32)) >> 16
    return tl.where(x != x, 0x7FC0, carried).to(tl.int16)
