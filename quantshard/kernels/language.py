"""Building blocks of kernels, on tiles of values: the oracle's steps in Triton.

Kernels receive an encoding as a `KernelEncoding` and the rule of a scale as a `ScaleRule` (`scale_rule`), so no kernel
names a format. Divisions use `tl.div_rn`, because Triton's own `/` is an approximation.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from quantshard import kernels
from quantshard.formats import E4M3, E5M2, Encoding

INTERPRETED = tl.constexpr(kernels.INTERPRETED)  # the interpreter truncates to bfloat16, and gets its subnormals wrong

# Instructions that the compiler would not choose, or would expand. MERGE_SIGN: bits of $1 where the mask is one, else
# bits of $2. ROUND_TWO: two float32 to two bfloat16 and back. HIGHEST_BYTES: byte 3 of four words, in order. CAST_TO_*:
# four codes in one word; the second operand of a `cvt` becomes the lower code.
MERGE_SIGN = tl.constexpr("lop3.b32 $0, $1, $2, 0x7FFFFFFF, 0xE4;")
ROUND_TWO = tl.constexpr("{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xFFFF0000;}")
HIGHEST_BYTES = tl.constexpr(
    "{.reg .b32 p, q; prmt.b32 p, $1, $2, 0x0073; prmt.b32 q, $3, $4, 0x0073; prmt.b32 $0, p, q, 0x5410;}"
)
CAST_TO_E4M3 = tl.constexpr(
    "{.reg .b16 p, q; cvt.rn.satfinite.e4m3x2.f32 p, $2, $1; cvt.rn.satfinite.e4m3x2.f32 q, $4, $3; "
    "mov.b32 $0, {p, q};}"
)
CAST_TO_E5M2 = tl.constexpr(CAST_TO_E4M3.value.replace("e4m3", "e5m2"))

CAST_TO: Final = {E4M3.name: 1, E5M2.name: 2}
"""Encodings with a conversion instruction on GPUs, and their numbers in `KernelEncoding.cast`."""


class KernelEncoding(NamedTuple):
    """Properties of an encoding; a constant of a kernel. `lowest`: exponent of the smallest normal number.

    `cast`: number of the conversion instruction, or 0. `signed`: if not, negative values become zero.
    """

    max: float
    mantissa: int
    lowest: int
    bits: int
    cast: int
    signed: bool
    magnitude: int


def element(encoding: Encoding, device: torch.device) -> KernelEncoding:
    """Return the kernel constant of an encoding. The interpreter's conversion truncates and is not used."""
    has_cast = not (kernels.INTERPRETED or device.type == "meta") and torch.cuda.get_device_capability(device) >= (8, 9)
    cast = CAST_TO.get(encoding.name, 0) if has_cast else 0
    lowest, magnitude = 1 - encoding.bias, encoding.magnitude
    return KernelEncoding(
        encoding.max, encoding.mantissa_bits, lowest, encoding.bits, cast, encoding.is_signed, magnitude
    )


def takes_pairs(device: torch.device) -> bool:
    """Return True if the device supports `line_amax`, which needs an instruction of compute capability 8.0."""
    return kernels.INTERPRETED or device.type == "meta" or torch.cuda.get_device_capability(device) >= (8, 0)


@triton.jit
def saturate(x, MAX: tl.constexpr):
    """Clamp x to +-MAX, keeping NaN."""
    low = tl.maximum(x, -MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def as_bits(ptr):
    """Cast a float32 pointer to int32. Bits of nonnegative numbers sort like the numbers, and NaN is largest."""
    return ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def mask_where(condition, mask):
    """A block's mask combined with a scalar condition; `&` alone would return integers in Triton's interpreter."""
    return (mask & condition) != 0


@triton.jit
def largest_bits(x):
    """The bits of the largest |x| of a float32 tile, int32; NaN is larger than infinity."""
    return tl.max(tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1), 0)


@triton.jit
def widen(x):
    """Convert any float dtype to float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Convert float32 to dtype, rounding to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def encode(x, E: tl.constexpr):
    """Encode a float32 tile of products as codes, one per element, rounded to nearest even: `numerics.encode`.

    Codes are int32; 4-bit codes are the highest bits of a uint32, as `pack` needs them, and keep the sign of a NaN.
    That sign should be positive, as in every product that a GPU computes.
    """
    if E.cast:  # the instruction saturates; four codes at once, because the compiler would split pairs
        CAST: tl.constexpr = CAST_TO_E4M3 if E.cast == 1 else CAST_TO_E5M2
        codes = tl.inline_asm_elementwise(CAST, "=r,f,f,f,f", [x], tl.uint8, is_pure=True, pack=4)
        # Widened, because otherwise the compiler moves the float32 values into the layout of each store and converts
        # them there: more bytes, and twice the work. The mask keeps the compiler from undoing the widening.
        return codes.to(tl.int32) & 0xFF
    else:
        # A large multiple of the power of |x|'s binade is added to |x|, so that the last place of the sum is the gap
        # between codes: the addition rounds to nearest even, and the low bits count gaps. (The product is exact.)
        x, magnitude, power = parts_of(x, E)
        if E.bits == 4:
            # The addend is 2**22 + 3 powers; 3 powers are 6 gaps. The sum's exponent field is n + 149 in binade n.
            # The multiplication adds twice that to the gaps, at bit 28: 6 + gaps + 2 n + 298, which is the code plus a
            # multiple of 16.
            gaps = tl.fma(power, 4194307.0, magnitude).to(tl.int32, bitcast=True)
            return with_sign(x, gaps * ((1 << 28) + (1 << 6)))
        else:
            gaps = tl.fma(power, 8388608.0 * 0.5**E.mantissa, magnitude).to(tl.int32, bitcast=True)
            return assemble(x, gaps, power, E)


@triton.jit
def encode_stochastic(x, words, E: tl.constexpr, POSITIVE: tl.constexpr = False, original=None):
    """Encode a float32 tile by uint32 random words, with codes as in `encode`: `numerics.encode_stochastic`.

    A product with a power of two maps the encoding's subnormal numbers to float32's, so that every number has the same
    number of surplus bits. These bits are shifted until the code ends just below the sign bit. Then a word is added
    below the code, and carries into it.

    x: results of arithmetic, which on a GPU has no negative NaN. POSITIVE: the code is not 0 where `original` > 0.
    """
    LACKING: tl.constexpr = 23 - E.mantissa
    NAN: tl.constexpr = E.magnitude << LACKING  # 4-bit encodings have no NaN: the largest number
    x = only_encodable(x, E)
    magnitude = tl.minimum(tl.abs(x), E.max, propagate_nan=tl.PropagateNan.ALL) * 2.0 ** (-126 - E.lowest)
    bits = tl.minimum(magnitude.to(tl.int32, bitcast=True), NAN)
    if POSITIVE:
        bits = tl.where(original > 0, tl.maximum(bits, 1 << LACKING), bits)
    if INTERPRETED:  # a CPU makes negative NaNs too
        x = tl.where(x != x, 0.0, x)
    code = (bits << (32 - E.bits - LACKING)) + (words >> E.bits).to(tl.int32)
    code = with_sign(x, code) if E.signed else code.to(tl.uint32, bitcast=True)
    if E.bits == 4:
        return code
    elif E.bits == 8:
        return highest_bytes(code)
    else:
        return (code >> 16).to(tl.int32)


@triton.jit
def swap_halves(words):
    """`numerics.swap_halves`."""
    return (words >> 16) | (words << 16)


@triton.jit
def highest_bytes(x):
    """The highest byte of each uint32, as uint8."""
    if INTERPRETED:
        return (x >> 24).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(HIGHEST_BYTES, "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)


@triton.jit
def parts_of(x, E: tl.constexpr):
    """x; |x| limited to E.max; and the power of two of its binade: `numerics._round`.

    Numbers below the normal range belong to the lowest binade. The gap between neighbours is this power * 2**-mantissa.
    For 4-bit encodings NaN becomes E.max.
    """
    if E.bits == 4 and INTERPRETED:  # a GPU's minimum of NaN and a number is the number
        x = tl.where(x != x, E.max, x)
    x = only_encodable(x, E)
    magnitude = tl.minimum(tl.abs(x), E.max)
    bits = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    return x, magnitude, tl.maximum(bits, (127 + E.lowest) << 23).to(tl.float32, bitcast=True)


@triton.jit
def assemble(x, gaps, power, E: tl.constexpr):
    """Combine the sign of x, whole gaps in the low 23 bits, and the binade's power into codes of 8 or 16 bits, int32.

    A code is the gaps plus the binade's number times 2**mantissa. NaN becomes the largest positive code.
    """
    binade = power.to(tl.int32, bitcast=True) - ((127 + E.lowest) << 23)
    code = (gaps & 0x7FFFFF) + (binade >> (23 - E.mantissa))
    if E.signed:
        code |= (x.to(tl.int32, bitcast=True) >> 31) & (E.magnitude + 1)
    return tl.where(x != x, E.magnitude, code)


@triton.jit
def only_encodable(x, E: tl.constexpr):
    """x, with negative values set to zero if the encoding is unsigned: `numerics._encodable`."""
    if E.signed:
        return x
    else:
        return tl.where(x < 0, 0.0, x)


@triton.jit
def with_sign(x, code):
    """The bits of `code` below the highest, with x's sign as the highest bit, as uint32."""
    bits = x.to(tl.int32, bitcast=True)
    if INTERPRETED:
        return ((code & 0x7FFFFFFF) | (bits & -0x80000000)).to(tl.uint32, bitcast=True)
    else:  # one instruction instead of the compiler's two
        return tl.inline_asm_elementwise(MERGE_SIGN, "=r,r,r", [code, bits], tl.uint32, is_pure=True, pack=1)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 to the nearest values of dtype, returned as float32."""
    if INTERPRETED or dtype != tl.bfloat16:
        return widen(narrow(x, dtype))
    else:  # two at once, which the compiler does only for values that are stored
        return tl.inline_asm_elementwise(ROUND_TWO, "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2)


@triton.jit
def nan_where_infinite(bound, x):
    """x, or NaN where `bound` is not finite. By arithmetic: a comparison would make masked loads wait."""
    if INTERPRETED:
        return tl.where(bound - bound == 0, x, float("nan"))
    else:
        return tl.fma(bound, 0.0, x)


@triton.jit
def decode(codes, E: tl.constexpr, TO: tl.constexpr = tl.float32):
    """Decode uint8 codes, one per element, exactly to float32, or float16 for 8-bit codes: `numerics.decode`."""
    if E.cast == 1:
        return codes.to(tl.float8e4nv, bitcast=True).to(TO)
    elif E.cast == 2:
        return codes.to(tl.float8e5, bitcast=True).to(TO)
    else:
        code = codes.to(tl.int32)
        sign = (code << (32 - E.bits)) & -0x80000000
        bits = (code << (23 - E.mantissa)) & (E.magnitude << (23 - E.mantissa))
        if E.signed:
            bits |= sign
        # as float32 bits, codes are in the lowest binades
        value = bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + E.lowest)
        if E.bits == 8:
            if E.mantissa == 3:  # only the largest magnitude is NaN, 15 / 14 of the largest number
                value = nan_where_infinite(value * (1.925 * 2.0**127 / E.max), value)
            else:  # infinity and NaN as in IEEE 754
                magnitude = code & E.magnitude
                infinite = (0x7F800000 | sign).to(tl.float32, bitcast=True)
                value = tl.where(magnitude == 0x7C, infinite, value)
                value = tl.where(magnitude > 0x7C, float("nan"), value)
        return value.to(TO)


@triton.jit
def row_order(SIZE: tl.constexpr, TOGETHER: tl.constexpr):
    """The order of a tile's rows in registers: TOGETHER neighbouring rows are placed as far apart as possible.

    Only distant rows return to the same thread, so its rows are then neighbours, with adjacent codes in the transpose.
    """
    if TOGETHER == 1:
        return tl.arange(0, SIZE)
    else:
        index = tl.arange(0, SIZE)
        return (index % (SIZE // TOGETHER)) * TOGETHER + index // (SIZE // TOGETHER)


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(
    x, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    TOGETHER: tl.constexpr = 1, FOURS: tl.constexpr = False,
):  # fmt: skip
    """The largest |x| of each block of a tile, [ROWS / BLOCK_ROWS, COLS / BLOCK_COLS]; NaN, with the largest bits,
    wins.

    FOURS: each thread has four neighbours of a row.
    """
    NEAR: tl.constexpr = BLOCK_ROWS if BLOCK_ROWS < TOGETHER else TOGETHER
    FAR: tl.constexpr = BLOCK_ROWS // NEAR
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    if FOURS and BLOCK_COLS % 4 == 0 and not INTERPRETED:  # on floats, one instruction compares two magnitudes
        fours = tl.reduce(tl.reshape(tl.abs(x), (ROWS, COLS // 4, 4)), 2, nan_max)
        bits = tl.reshape(fours.to(tl.int32, bitcast=True), (ROWS, COLS // 4))
        if BLOCK_COLS > 4:
            bits = tl.max(tl.reshape(bits, (ROWS, COLS // BLOCK_COLS, BLOCK_COLS // 4)), 2)
    elif BLOCK_COLS > 1:
        bits = tl.max(tl.reshape(bits, (ROWS, COLS // BLOCK_COLS, BLOCK_COLS)), 2)
    if BLOCK_ROWS > 1:
        shape: tl.constexpr = (TOGETHER // NEAR, NEAR, ROWS // TOGETHER // FAR, FAR, COLS // BLOCK_COLS)
        bits = tl.max(tl.max(tl.reshape(bits, shape), 1), 2)
    return tl.reshape(bits, (ROWS // BLOCK_ROWS, COLS // BLOCK_COLS)).to(tl.float32, bitcast=True)


@triton.jit
def line_amax(
    x, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    TOGETHER: tl.constexpr = 1,
):  # fmt: skip
    """`block_amax` of bfloat16 values, stored as bfloat16 or float32, two at a time; blocks have one row or one column.

    (Compiling this for square blocks does not terminate in Triton 3.6.)
    """
    tl.static_assert(BLOCK_ROWS == 1 or BLOCK_COLS == 1)
    low, high = tl.split(tl.reshape(x, (ROWS, COLS // 2, 2)))
    if x.dtype == tl.bfloat16:
        pairs = low.to(tl.uint16, bitcast=True).to(tl.uint32) | high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    else:
        pairs = low.to(tl.uint32, bitcast=True) >> 16 | high.to(tl.uint32, bitcast=True) & 0xFFFF0000
    pairs &= 0x7FFF7FFF
    if BLOCK_COLS > 1:
        pairs = tl.reduce(tl.reshape(pairs, (ROWS, COLS // BLOCK_COLS, BLOCK_COLS // 2)), 2, _larger_pair)
        bits = tl.maximum(pairs & 0xFFFF, pairs >> 16) << 16
    else:
        NEAR: tl.constexpr = BLOCK_ROWS if BLOCK_ROWS < TOGETHER else TOGETHER
        FAR: tl.constexpr = BLOCK_ROWS // NEAR
        shape: tl.constexpr = (TOGETHER // NEAR, NEAR, ROWS // TOGETHER // FAR, FAR, COLS // 2)
        pairs = tl.reduce(tl.reduce(tl.reshape(pairs, shape), 1, _larger_pair), 2, _larger_pair)
        bits = tl.join(pairs << 16, pairs & 0xFFFF0000)
    return tl.reshape(bits, (ROWS // BLOCK_ROWS, COLS // BLOCK_COLS)).to(tl.float32, bitcast=True)


@triton.jit
def _larger_pair(a, b):
    """The larger of each half of two words with two nonnegative bfloat16 each; NaN wins."""
    if INTERPRETED:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | tl.maximum(a >> 16, b >> 16) << 16
    else:
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def expand(
    grid, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    TOGETHER: tl.constexpr = 1,
):  # fmt: skip
    """Expand a grid of blocks to a tile: the entry of each element's block."""
    NEAR: tl.constexpr = BLOCK_ROWS if BLOCK_ROWS < TOGETHER else TOGETHER
    FAR: tl.constexpr = BLOCK_ROWS // NEAR
    shape: tl.constexpr = (
        TOGETHER // NEAR, NEAR, ROWS // TOGETHER // FAR, FAR, COLS // BLOCK_COLS, BLOCK_COLS,
    )  # fmt: skip
    blocks = tl.reshape(grid, (TOGETHER // NEAR, 1, ROWS // TOGETHER // FAR, 1, COLS // BLOCK_COLS, 1))
    return tl.reshape(tl.broadcast_to(blocks, shape), (ROWS, COLS))


@triton.jit
def pack(codes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pack 4-bit codes [ROWS, COLS] from `encode` into bytes [ROWS, COLS / 2]; even columns are the low nibbles."""
    low, high = tl.split(tl.reshape(codes, (ROWS, COLS // 2, 2)))
    return highest_bytes((high & 0xF0000000) | ((low >> 4) & 0x0FFFFFFF))


@triton.jit
def unpack(stored, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Unpack bytes [ROWS, COLS / 2] into 4-bit codes [ROWS, COLS]."""
    return tl.reshape(tl.join(stored & 0xF, stored >> 4), (ROWS, COLS))
