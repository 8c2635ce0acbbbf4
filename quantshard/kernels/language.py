"""Functions that kernels are put together from, on tiles of values: the oracle's steps in Triton.

An encoding reaches a kernel as an `Element`, the rule of a scale as a `Rule`, so that none of these names a format.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from quantshard import kernels
from quantshard.formats import ALL, E4M3, E5M2, E8M0, FP32, Encoding, QuantizedCopy, Scaling
from quantshard.numerics import HADAMARD_SIGNS

FLOAT32_MAX: Final = torch.finfo(torch.float32).max
LARGEST_FLOAT32 = tl.constexpr(FLOAT32_MAX)
INTERPRETED = tl.constexpr(kernels.INTERPRETED)  # the interpreter truncates to bfloat16, and gets its subnormals wrong

# instructions that the compiler would not choose, or make more of
TOWARDS_ZERO = tl.constexpr("cvt.rz.f32.u32 $0, $1;")
MERGE_SIGN = tl.constexpr("lop3.b32 $0, $1, $2, 0x7FFFFFFF, 0xE4;")
ROUND_TWO = tl.constexpr("{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xFFFF0000;}")
HIGHEST_BYTES = tl.constexpr(
    "{.reg .b32 p, q; prmt.b32 p, $1, $2, 0x0073; prmt.b32 q, $3, $4, 0x0073; prmt.b32 $0, p, q, 0x5410;}"
)

CAST_TO: Final = {E4M3.name: 1, E5M2.name: 2}
"""Encodings that a GPU converts to in one instruction, by the number under which `encode` knows them."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch kernels on this device, where it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Element(NamedTuple):
    """What a kernel knows of an encoding; a constant of the kernel.

    `lowest`: exponent of the smallest normal number. `cast`: the instruction that converts to it, 0 for none.
    """

    max: float
    mantissa: int
    lowest: int
    bits: int
    cast: int


def element(encoding: Encoding, device: torch.device) -> Element:
    """There is no instruction before compute capability 8.9, nor under the interpreter, whose conversion truncates."""
    has_cast = not kernels.INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)
    cast = CAST_TO.get(encoding.name, 0) if has_cast else 0
    return Element(encoding.max, encoding.mantissa_bits, 1 - encoding.bias, encoding.bits, cast)


# ------------------------------------------------------------------------------------------------------------ elements


@triton.jit
def saturate(x, MAX: tl.constexpr):
    """x clamped to +-MAX; NaN stays."""
    low = tl.maximum(x, -MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def widen(x):
    """Any float dtype -> float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 -> dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def encode(x, E: tl.constexpr):
    """Float32 tile of products -> codes, one for each element, rounded to nearest even: `numerics.encode`.

    Codes are uint8 or int32; those of 4 bits are the highest bits of a uint32, for `pack`. These are right for NaN
    because a GPU's product that is NaN is positive.
    """
    if E.cast == 1:  # the instruction saturates
        return chosen(x, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    elif E.cast == 2:
        return chosen(x, x.to(tl.float8e5).to(tl.uint8, bitcast=True))
    else:
        # the last place of a sum with this power is the gap of x's binade, in units of which it ends with |x| rounded
        x, magnitude, power = parts_of(x, E)
        if E.bits == 4:
            # ... and with 6 more; twice its exponent, which is the binade's number + 149, makes the code and a multiple
            # of 8
            gaps = tl.fma(power, 4194307.0, magnitude).to(tl.int32, bitcast=True)
            return with_sign(x, gaps * ((1 << 28) + (1 << 6)))
        else:
            gaps = tl.fma(power, 8388608.0 * 0.5**E.mantissa, magnitude).to(tl.int32, bitcast=True)
            return assemble(x, gaps, power, E)


@triton.jit
def chosen(x, codes):
    """Codes of FP8, but 0x7F where x is NaN.

    Without the choice, which the instruction makes too, Triton 3.6 gives wrong bytes: where it puts words together from
    the pairs that the instruction makes, to change a layout, its assembler loses some of them (seen on an H200).
    """
    return tl.where(x != x, 0x7F, codes.to(tl.int32))


@triton.jit
def encode_stochastic(x, words, E: tl.constexpr):
    """Float32 tile and uint32 words -> codes as of `encode`, rounded stochastically: `numerics.encode_stochastic`."""
    x, magnitude, power = parts_of(x, E)
    inverse = ((127 + E.mantissa) << 23) - (power.to(tl.int32, bitcast=True) - (127 << 23))
    in_gaps = magnitude * inverse.to(tl.float32, bitcast=True)
    below = tl.floor(in_gaps)
    up = is_below(words, (in_gaps - below) * 4294967296.0)  # exact
    gaps = (below + tl.where(up, 8388609.0, 8388608.0)).to(tl.int32, bitcast=True)
    if E.bits == 4:
        return with_sign(x, (gaps << 28) + ((power.to(tl.int32, bitcast=True) - (127 << 23)) << 6))
    else:
        return assemble(x, gaps, power, E)


@triton.jit
def is_below(words, bound):
    """Uint32 < float32, exactly.

    Words are rounded towards zero, to the largest float r <= word. If word < bound, r < bound. If r < bound, the next
    float after r is at most bound, and larger than word.
    """
    if INTERPRETED:
        return words.to(tl.float64) < bound.to(tl.float64)
    else:
        return tl.inline_asm_elementwise(TOWARDS_ZERO, "=f,r", [words], tl.float32, is_pure=True, pack=1) < bound


@triton.jit
def parts_of(x, E: tl.constexpr):
    """x, NaN of 4 bits as what it becomes; |x|, at most E.max; and the power of two of its binade: `numerics._round`.

    Numbers smaller than normal ones are in the lowest binade. The gap between neighbours is this power * 2**-mantissa.
    """
    if E.bits == 4 and INTERPRETED:  # a GPU's minimum of NaN and a number is the number
        x = tl.where(x != x, E.max, x)
    magnitude = tl.minimum(tl.abs(x), E.max)
    bits = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    return x, magnitude, tl.maximum(bits, (127 + E.lowest) << 23).to(tl.float32, bitcast=True)


@triton.jit
def assemble(x, gaps, power, E: tl.constexpr):
    """Sign of x, whole gaps in the low 23 bits, and the power of the binade -> codes of 8 or 16 bits, int32.

    A code is the gaps and, times 2**mantissa, the binade's number. NaN becomes the largest positive code.
    """
    SIGN: tl.constexpr = 1 << (E.bits - 1)
    binade = power.to(tl.int32, bitcast=True) - ((127 + E.lowest) << 23)
    code = (gaps & 0x7FFFFF) + (binade >> (23 - E.mantissa))
    code |= (x.to(tl.int32, bitcast=True) >> 31) & SIGN
    return tl.where(x != x, SIGN - 1, code)


@triton.jit
def with_sign(x, code):
    """Codes of 4 bits: that of |x| in the highest bits but one -> uint32."""
    bits = x.to(tl.int32, bitcast=True)
    if INTERPRETED:
        return ((code & 0x7FFFFFFF) | (bits & -0x80000000)).to(tl.uint32, bitcast=True)
    else:  # one instruction, of which the compiler makes two
        return tl.inline_asm_elementwise(MERGE_SIGN, "=r,r,r", [code, bits], tl.uint32, is_pure=True, pack=1)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Float32 -> float32, rounded to dtype between."""
    if INTERPRETED or dtype != tl.bfloat16:
        return widen(narrow(x, dtype))
    else:  # two at once, which the compiler does for values that it stores alone
        return tl.inline_asm_elementwise(ROUND_TWO, "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2)


@triton.jit
def decode(codes, E: tl.constexpr):
    """Codes, uint8, one for each element -> float32, exactly: `numerics.decode`."""
    if E.cast == 1:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif E.cast == 2:
        return codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        code = codes.to(tl.int32)
        sign = (code << (32 - E.bits)) & -0x80000000
        bits = ((code << (23 - E.mantissa)) & (((1 << (E.bits - 1)) - 1) << (23 - E.mantissa))) | sign
        value = bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + E.lowest)  # from the lowest binades of float32
        if E.bits == 8:
            magnitude = code & 0x7F
            if E.mantissa == 3:  # NaN is the largest magnitude alone
                value = tl.where(magnitude == 0x7F, float("nan"), value)
            else:  # infinity and NaN as in IEEE 754
                infinite = (0x7F800000 | sign).to(tl.float32, bitcast=True)
                value = tl.where(magnitude == 0x7C, infinite, value)
                value = tl.where(magnitude > 0x7C, float("nan"), value)
        return value


# -------------------------------------------------------------------------------------------------------------- scales


@triton.jit
def e8m0_round_up(x):
    """Float32, not negative -> E8M0 codes, uint8: `numerics.encode_e8m0_round_up`."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    fraction = bits & 0x7FFFFF
    up = fraction > tl.where(exponent == 0, 0x400000, 0)
    code = tl.minimum(exponent + up.to(tl.int32), 0xFE)
    return tl.where(x != x, 0xFF, code).to(tl.uint8)


@triton.jit
def decode_e8m0(codes):
    """E8M0 codes, uint8 -> float32, exactly; 0xFF is NaN and 0 the subnormal 2**-127."""
    code = codes.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)


class Rule(NamedTuple):
    """How scales derive from amaxes: `numerics.scales`; a constant of a kernel.

    `kind`: by the encoding of the stored scale, 0 for float32, 1 for E8M0, 2 for an FP8 scale under one of the whole
    tensor. `element`: of the codes, `stored`: of the scale. `top`: largest code, the margin taken off. `largest`: what
    a float32 scale that overflows becomes.
    """

    kind: int
    element: Element
    stored: Element
    top: float
    largest: float
    power_of_two: bool
    epsilon: float


def rule(copy: QuantizedCopy, scaling: Scaling, dtype: torch.dtype, device: torch.device) -> Rule:
    """Of one copy of a format, for values of `dtype`."""
    kind = {FP32.name: 0, E8M0.name: 1}.get(copy.scale.encoding.name, 2)
    return Rule(
        kind,
        element(copy.codes.encoding, device),
        element(copy.scale.encoding, device),
        copy.codes.encoding.max * 2.0**-scaling.margin,
        FLOAT32_MAX if copy.block == (ALL, ALL) else min(torch.finfo(dtype).max, FLOAT32_MAX),
        scaling.power_of_two,
        scaling.epsilon,
    )


@triton.jit
def scales(amax, second, R: tl.constexpr):
    """Amaxes -> what is stored, and what values are multiplied by; `second`: amax of the whole tensor, if it counts."""
    if R.kind == 0:
        multiplier = fp32_encode_scale(amax, R)
        return tl.div_rn(tl.zeros_like(amax) + 1.0, multiplier), multiplier
    elif R.kind == 1:
        stored = e8m0_round_up(amax * (1.0 / R.element.max))
        return stored, decode_e8m0(254 - stored)
    else:
        encoding: tl.constexpr = R.stored
        whole = tensor_encode_scale(second, R)
        stored = encode(amax * (whole * (1.0 / R.element.max)), encoding).to(tl.uint8)
        product = decode(stored, encoding) * tl.div_rn(tl.zeros_like(whole) + 1.0, whole)
        multiplier = tl.div_rn(tl.zeros_like(product) + 1.0, product)
        return stored, tl.where(multiplier < LARGEST_FLOAT32, multiplier, LARGEST_FLOAT32)  # as fmin: NaN is dropped


@triton.jit
def fp32_encode_scale(amax, R: tl.constexpr):
    """`numerics._fp32_encode_scale`."""
    if R.epsilon > 0:
        amax = tl.maximum(amax, R.epsilon, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(tl.zeros_like(amax) + R.top, amax)
    scale = tl.where(scale == float("inf"), R.largest, scale)
    if R.power_of_two:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((amax < float("inf")) & (amax != 0), scale, 1.0)


@triton.jit
def tensor_encode_scale(amax, R: tl.constexpr):
    """NVFP4's S_enc: `numerics._tensor_encode_scale`."""
    scale = tl.div_rn(tl.zeros_like(amax) + R.stored.max * R.element.max, amax)
    scale = tl.where(scale < LARGEST_FLOAT32, scale, LARGEST_FLOAT32)
    return tl.where((amax == 0) | (scale == 0), 1.0, scale)


@triton.jit
def held(SIZE: tl.constexpr, TOGETHER: tl.constexpr):
    """The rows of a tile in the order in which it holds them: so many neighbours lie as far apart as they can.

    A layout gives the elements of a row to neighbouring threads, then rows to others, and then more rows, far from the
    first, to each thread: in this order they are neighbours, whose codes lie together in the transpose.
    """
    if TOGETHER == 1:
        return tl.arange(0, SIZE)
    else:
        at = tl.arange(0, SIZE)
        return (at % (SIZE // TOGETHER)) * TOGETHER + at // (SIZE // TOGETHER)


@triton.jit
def block_amax(
    x, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    TOGETHER: tl.constexpr = 1,
):  # fmt: skip
    """Tile -> the largest |x| of each block, [ROWS / BLOCK_ROWS, COLS / BLOCK_COLS]; NaN, of the most bits, wins."""
    NEAR: tl.constexpr = BLOCK_ROWS if BLOCK_ROWS < TOGETHER else TOGETHER
    FAR: tl.constexpr = BLOCK_ROWS // NEAR
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    if BLOCK_COLS > 1:
        bits = tl.max(tl.reshape(bits, (ROWS, COLS // BLOCK_COLS, BLOCK_COLS)), 2)
    if BLOCK_ROWS > 1:
        shape: tl.constexpr = (TOGETHER // NEAR, NEAR, ROWS // TOGETHER // FAR, FAR, COLS // BLOCK_COLS)
        bits = tl.max(tl.max(tl.reshape(bits, shape), 1), 2)
    return tl.reshape(bits, (ROWS // BLOCK_ROWS, COLS // BLOCK_COLS)).to(tl.float32, bitcast=True)


@triton.jit
def expand(
    grid, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    TOGETHER: tl.constexpr = 1,
):  # fmt: skip
    """Inverse in shape of `block_amax`: the entry of each element's block."""
    NEAR: tl.constexpr = BLOCK_ROWS if BLOCK_ROWS < TOGETHER else TOGETHER
    FAR: tl.constexpr = BLOCK_ROWS // NEAR
    shape: tl.constexpr = (
        TOGETHER // NEAR, NEAR, ROWS // TOGETHER // FAR, FAR, COLS // BLOCK_COLS, BLOCK_COLS,
    )  # fmt: skip
    blocks = tl.reshape(grid, (TOGETHER // NEAR, 1, ROWS // TOGETHER // FAR, 1, COLS // BLOCK_COLS, 1))
    return tl.reshape(tl.broadcast_to(blocks, shape), (ROWS, COLS))


# ------------------------------------------------------------------------------------------------------ along the rows


@triton.jit
def hadamard16(x, SIGNS, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr):
    """Float32 [ROWS, COLS], times SIGNS -> each 16 elements, so far apart, transformed: `numerics.hadamard16`."""
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


SIGN_MASK = tl.constexpr(sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0))


@triton.jit
def hadamard_signs(columns):
    """+1 or -1 for each of these global columns."""
    mask = tl.zeros_like(columns) + SIGN_MASK
    return 1.0 - 2.0 * ((mask >> (columns % 16)) & 1).to(tl.float32)


@triton.jit
def pack(codes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Codes of 4 bits, as of `encode`, [ROWS, COLS] -> bytes [ROWS, COLS / 2], the even column in the low nibble."""
    low, high = tl.split(tl.reshape(codes, (ROWS, COLS // 2, 2)))
    bytes = (low >> 4) + high  # no bits but the highest and few of the lowest are set
    if INTERPRETED:
        return (bytes >> 24).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(HIGHEST_BYTES, "=r,r,r,r,r", [bytes], tl.uint8, is_pure=True, pack=4)


@triton.jit
def unpack(stored, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Bytes [ROWS, COLS / 2] -> codes of 4 bits [ROWS, COLS]."""
    return tl.reshape(tl.join(stored & 0xF, stored >> 4), (ROWS, COLS))


# -------------------------------------------------------------------------------------------------------- random words


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 tiles: `numerics.philox`."""
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53  # one instruction for both halves
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def words_of_tile(
    row, col, words, ROWS: tl.constexpr, COLS: tl.constexpr, BY_FOUR: tl.constexpr, TOGETHER: tl.constexpr = 1,
    INDEX: tl.constexpr = tl.int64,
):  # fmt: skip
    """Random words, uint32 [ROWS, COLS], of the tile at a global row and column: `numerics.random_words`.

    `words`: (k0, k1, draw, stream, width of the global matrix); BY_FOUR if the width is a multiple of 4. INDEX: a type
    that holds the number of elements of that matrix.
    """
    width = words[4]
    rows = (row + held(ROWS, TOGETHER)).to(INDEX)[:, None]
    if BY_FOUR:
        calls = rows * (width // 4) + (col // 4 + tl.arange(0, COLS // 4))[None, :]
        return tl.reshape(_four_words(calls, words), (ROWS, COLS))
    else:
        return _one_word(rows * width + (col + tl.arange(0, COLS))[None, :], words)


@triton.jit
def words_of_turned_tile(
    row, col, words, ROWS: tl.constexpr, COLS: tl.constexpr, BY_FOUR: tl.constexpr, TOGETHER: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """The same of a tile that is held as its transpose, uint32 [COLS, ROWS]."""
    width = words[4]
    if BY_FOUR:
        tl.static_assert(TOGETHER % 4 == 0)
        # calls in an order in which each thread makes those of its elements: of 4 neighbours of ROWS, in turn
        LANES: tl.constexpr = 32 if ROWS > 128 else ROWS // 4
        TIMES: tl.constexpr = ROWS // (4 * LANES)
        FAR: tl.constexpr = COLS // TOGETHER
        at = tl.arange(0, TOGETHER // 4 * TIMES * 4 * FAR)
        four = at % FAR * (TOGETHER // 4) + at // (FAR * 4 * TIMES)
        line = at // FAR % 4 + at // (FAR * 4) % TIMES * (4 * LANES)
        lines = line[:, None] + 4 * tl.arange(0, LANES)[None, :]
        drawn = _four_words((row + lines).to(INDEX) * (width // 4) + (col // 4 + four)[:, None], words)
        drawn = tl.reshape(drawn, (TOGETHER // 4, TIMES, 4, FAR, LANES, 4))
        return tl.reshape(tl.permute(drawn, (0, 5, 3, 1, 4, 2)), (COLS, ROWS))
    else:
        rows = (row + tl.arange(0, ROWS)).to(INDEX)[None, :] * width
        return _one_word(rows + (col + held(COLS, TOGETHER))[:, None], words)


@triton.jit
def _philox_at(call, words):
    k0, k1, draw, stream, _ = words
    zero = tl.zeros_like(call).to(tl.uint32)
    high = zero if call.dtype == tl.uint32 else (call >> 32).to(tl.uint32)
    return philox(
        call.to(tl.uint32), high, zero + draw.to(tl.uint32), zero + stream.to(tl.uint32), k0.to(tl.uint32),
        k1.to(tl.uint32),
    )  # fmt: skip


@triton.jit
def _four_words(call, words):
    """Each call of Philox gives the words of four neighbours: one dim of 4 more, as two of 2."""
    w0, w1, w2, w3 = _philox_at(call, words)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def _one_word(element_index, words):
    w0, w1, w2, w3 = _philox_at(element_index >> 2, words)
    which = element_index & 3
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
