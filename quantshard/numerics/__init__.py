"""The oracle: the definition of every operation on numbers, in plain PyTorch, on any device.

A Triton kernel of the same name must reproduce the oracle bit for bit, and CPU users run it. Only operations that IEEE
754 defines exactly are therefore used (+, -, *, /, comparisons, integers). torch.log, cos and sqrt are not used,
because their last bit differs between devices (see `sqrt`), and neither is `scalar / tensor` or `tensor / scalar`,
which PyTorch can replace by a product with a reciprocal.

Every operation works on a *rectangle* of the global tensor: `x` [R, C] with its top-left element at the global index
`origin`. The block grid and the random words belong to the global tensor, and a rectangle holds the grid entries that
it touches. Quantization has three steps:

    amaxes                   x -> one amax per block    (reduce with MAX over the ranks that share a block)
    scales_and_multipliers   amaxes -> the stored scales, and the multipliers of x
    quantize_codes           x, multipliers -> codes

Multipliers are no function of the stored scales: TransformerEngine multiplies by a scale and stores its reciprocal. The
rules for scales are those of its kernels.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from quantshard.formats import ALL, E8M0, FP32, Encoding, Format, Orientation, OrientedCodes, Role, Scaling
from quantshard.numerics.random_bits import (
    Pair as Pair,
    RandomBits as RandomBits,
    in_chunks as in_chunks,
    philox as philox,
    random_words as random_words,
    swap_halves as swap_halves,
)
from quantshard.numerics.transforms import (
    hadamard16 as hadamard16,
    join_bfloat16 as join_bfloat16,
    split_bfloat16 as split_bfloat16,
    swizzled as swizzled,
    unswizzled as unswizzled,
)

Grids = Mapping[str, Tensor]  # keys: names of scale and amax components

_FLOAT32_MAX: Final = torch.finfo(torch.float32).max


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of a float32 tensor, from a float64 root that may be off by two ulps.
    torch.sqrt is off by an ulp in 1 of 5 values on CPUs with MKL."""
    return torch.sqrt(x.double()).float()


def exceeds(x: Tensor, largest: float) -> Tensor:
    """Return how x exceeds `largest`, rounded to x's dtype: float32 scalar, 0: not, 1: finite, 2: infinite or NaN."""
    finite = torch.finfo(x.dtype).max
    top = x.abs().amax() if x.numel() else x.new_zeros(())
    # ~(<=), so that NaN exceeds the limit; min, so that the limit does not round to infinity.
    beyond = ~(top <= min(largest, finite))
    return beyond.float() + (~(top <= finite)).float()


# Encodings


def encode(x: Tensor, encoding: Encoding) -> Tensor:
    """Encode `x` (any float dtype, any shape) as uint8, one code per byte; FP16 as float16, FP32 as float32.

    The float32 value is rounded to nearest, ties to even, and saturates at +-max, also if infinite. NaN becomes the
    positive NaN code, because devices produce NaNs of either sign. E2M1 has no NaN: it becomes +max, as in CUDA's
    `__nv_cvt_float_to_fp4`. E8M0 rounds up. Encodings without a sign map negative values to 0.
    """
    if encoding == FP32:
        return x.float()
    if encoding == E8M0:
        return encode_e8m0_round_up(x)
    if encoding.native is None or encoding.bits > 8:
        return in_chunks(lambda v: _round(v, encoding), x)
    codes = x.float().clamp(-encoding.max, encoding.max).to(encoding.native).view(torch.uint8)
    return codes.masked_fill_(codes == 0xFF, 0x7F)  # 0xFF is only NaN here: infinities were clamped


def encode_stochastic(x: Tensor, encoding: Encoding, words: Tensor) -> Tensor:
    """Encode like `encode`, but round to either neighbor with a probability proportional to the distance to the other.

    The float32 bits that the encoding lacks, n = 23 - mantissa_bits of them, are the fraction of the way to the
    neighbor of larger magnitude, which is chosen if this fraction and the highest n bits of the random word (int64 in
    [0, 2**32)) add up to at least 1. Representable values never change, and magnitudes above max saturate.
    """
    return in_chunks(lambda v, w: _round_stochastically(v, encoding, w), x, words)


def _round_stochastically(x: Tensor, encoding: Encoding, words: Tensor) -> Tensor:
    """Add the word to the bits of |x| that the encoding lacks, then drop these bits: a carry rounds up."""
    lowest, mantissa = 1 - encoding.bias, encoding.mantissa_bits
    lacking = 23 - mantissa
    x = _encodable(x, encoding)
    magnitude = x.abs().clamp_(max=encoding.max)
    # below the normal range the lowest normal number is added first: the encoding lacks the same bits of the sum
    subnormal = magnitude < 2.0**lowest
    bits = magnitude.add_(subnormal, alpha=2.0**lowest).view(torch.int32)
    bits.add_(words >> (32 - lacking))
    # The lowest normal number has the exponent field 127 + lowest in a float32, and 1 in a code.
    code = (bits >> lacking).sub_((126 + lowest) << mantissa).sub_(subnormal.int(), alpha=1 << mantissa)
    return _coded(x, code, encoding)


def _round(x: Tensor, encoding: Encoding) -> Tensor:
    """Round to nearest even by arithmetic, for any encoding.

    The gap between neighbors is 2**(k - mantissa_bits), where k is the exponent of |x| or, below the normal range, the
    lowest normal exponent. |x| / gap is exact, and within a binade codes are linear in it.
    """
    x = _encodable(x, encoding).clamp(-encoding.max, encoding.max)
    lowest, mantissa = 1 - encoding.bias, encoding.mantissa_bits
    magnitude = x.abs()
    k = (magnitude.view(torch.int32) >> 23).sub_(127).clamp_(min=lowest)
    in_gaps = magnitude.mul_((127 + mantissa - k).bitwise_left_shift_(23).view(torch.float32))
    code = in_gaps.round_().to(torch.int32).add_(k.sub_(lowest).bitwise_left_shift_(mantissa))
    return _coded(x, code, encoding)


def _encodable(x: Tensor, encoding: Encoding) -> Tensor:
    """Convert x to float32, with negative values replaced by zero if the encoding has no sign."""
    return x.float() if encoding.is_signed else x.float().clamp(min=0.0)


def _coded(x: Tensor, code: Tensor, encoding: Encoding) -> Tensor:
    """Add the sign of x to the int32 codes of |x| and convert them to the storage dtype."""
    if encoding.is_signed:
        code |= (x.view(torch.int32) >> 31).bitwise_and_(encoding.magnitude + 1)
    bits = torch.uint8 if encoding.bits <= 8 else torch.int16
    return torch.where(torch.isnan(x), encoding.magnitude, code).to(bits).view(encoding.storage)


def encode_e8m0_round_up(x: Tensor) -> Tensor:
    """Return the smallest power of two >= x (float32, nonnegative) as uint8 E8M0. NaN -> 0xFF, inf -> 0xFE, 0 -> 0x00.
    Equal to PTX's cvt.rp.satfinite.ue8m0 (TransformerEngine, common/util/ptx_arch_spec.cuh, float_to_e8m0)."""
    bits = x.float().view(torch.int32)
    code = (bits + 0x7FFFFF).bitwise_right_shift_(23).clamp_(max=0xFE)  # a fraction carries into the exponent
    code.mul_(bits > 0x400000)  # the float32 subnormal 2**-127 is E8M0's 0
    return code.masked_fill_(torch.isnan(x), 0xFF).to(torch.uint8)


def decode(codes: Tensor, encoding: Encoding) -> Tensor:
    """Decode codes, uint8 (one per byte) or 16-bit, exactly to float32 of the same shape."""
    if encoding.bits > 8:
        return codes.float() if encoding.native else _decode_by_definition(codes.to(torch.int32) & 0xFFFF, encoding)
    if encoding.native is not None:
        return codes.view(encoding.native).float()
    values = _decode_by_definition(torch.arange(1 << encoding.bits, dtype=torch.int32, device=codes.device), encoding)
    return values.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _decode_by_definition(code: Tensor, encoding: Encoding) -> Tensor:
    """(-1)**s * 2**(e - bias) * 1.m, or 2**(1 - bias) * 0.m if e = 0. Encodings without a sign have a NaN, all ones."""
    mantissa = encoding.mantissa_bits
    e = (code >> mantissa) & ((1 << encoding.exponent_bits) - 1)
    m = (code & ((1 << mantissa) - 1)) + (e > 0).int() * (1 << mantissa)
    gap = ((e.clamp(min=1) - encoding.bias - mantissa + 127) << 23).view(torch.float32)
    if not encoding.is_signed:
        return (m.float() * gap).masked_fill_(code == encoding.magnitude, math.nan)
    return m.float() * gap * (1 - 2 * (code >> (encoding.bits - 1))).float()


def pack(codes: Tensor, encoding: Encoding) -> Tensor:
    """Convert codes uint8 [..., C], one per byte, to storage: E2M1 [..., ceil(C / 2)], even index in the low nibble."""
    if encoding.bits >= 8:
        return codes
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(stored: Tensor, encoding: Encoding, num_cols: int) -> Tensor:
    """Inverse of `pack`: uint8 codes, one per byte, [..., num_cols]."""
    if encoding.bits >= 8:
        return stored
    return torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)[..., :num_cols]


# Amaxes and scales


def _touched(origin: int, size: int, block_shape: int) -> tuple[int, int]:
    """Return the first grid entry that [origin, origin + size) touches along a dim, and the number of entries."""
    if block_shape == ALL:
        return 0, 1  # also for an empty dim: its rank joins the reduction of that entry
    first = origin // block_shape
    return first, -((origin + size) // -block_shape) - first if size else 0


def _amax_along(x: Tensor, dim: int, block_shape: int, origin: int) -> Tensor:
    size = x.shape[dim]
    count = _touched(origin, size, block_shape)[1]
    if block_shape == 1:
        return x
    if size == 0:
        return x.new_zeros([count if d == dim else length for d, length in enumerate(x.shape)])
    if count == 1:
        return x.amax(dim, keepdim=True)
    lead = -origin % block_shape
    whole = (size - lead) // block_shape
    end = lead + whole * block_shape
    # (start, length, number of blocks); the rectangle can cut off the first and the last block.
    spans = ((0, lead, 1), (lead, end - lead, whole), (end, size - end, 1))
    pieces = [
        x.narrow(dim, start, length).unflatten(dim, (blocks, -1)).amax(dim + 1)
        for start, length, blocks in spans
        if length
    ]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]


def block_amax(x: Tensor, block_shape: Pair, origin: Pair = (0, 0)) -> Tensor:
    """Return the largest |x| of each block of `block_shape` elements that the rectangle touches: float32.

    Along dim d the grid is range(origin // block, ceil((origin + size) / block)). If the block is ALL there is one
    entry, 0 for an empty dim; otherwise an empty dim has none. NaN propagates.
    """
    along_cols = _amax_along(x.abs(), 1, block_shape[1], origin[1])
    return _amax_along(along_cols, 0, block_shape[0], origin[0]).float()


def expand(grid: Tensor, block_shape: Pair, shape: Pair, origin: Pair) -> Tensor:
    """Repeat grid entries so that they broadcast with the elements of the rectangle [R, C]."""
    for dim in (0, 1):
        first, count = _touched(origin[dim], shape[dim], block_shape[dim])
        assert grid.shape[dim] == count, (tuple(grid.shape), block_shape, shape, origin)
        if count > 1 and block_shape[dim] != 1:
            start = origin[dim] - first * block_shape[dim]
            grid = grid.repeat_interleave(block_shape[dim], dim).narrow(dim, start, shape[dim])
    return grid


def amaxes(x: Tensor, fmt: Format, origin: Pair = (0, 0)) -> dict[str, Tensor]:
    """Compute `block_amax` over the grid of each SCALE and AMAX component of the format, by component name."""
    return {c.name: block_amax(x, c.block_shape, origin) for c in fmt.components if c.role is not Role.CODES}


def scales_and_multipliers(
    amaxes: Grids, fmt: Format, scaling: Scaling, input_dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute from amax grids the stored SCALE and AMAX components, and the float32 multipliers of x by scale name."""
    components = {c.name: amaxes[c.name] for c in fmt.components if c.role is Role.AMAX}
    multipliers = {}
    for copy in fmt.copies.values():
        name = copy.scale.name
        components[name], multipliers[name] = _scale_and_multiplier(copy, amaxes, scaling, input_dtype)
    return components, multipliers


def _scale_and_multiplier(
    copy: OrientedCodes, amaxes: Grids, scaling: Scaling, input_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    amax, element = amaxes[copy.scale.name], copy.codes.encoding
    if copy.scale.encoding == FP32:
        multiplier = _fp32_encode_scale(amax, copy, scaling, input_dtype)
        return _reciprocal(multiplier), multiplier
    # TE multiplies by float32 constants in this order. Division or another order gives other codes for some amaxes.
    if copy.scale.encoding == E8M0:  # TE, cast/mxfp8/quantize_mxfp8.cuh, for E4M3; here E2M1 too
        scale = encode_e8m0_round_up(amax * (1.0 / element.max))
        return scale, decode(254 - scale, E8M0)  # 2**-(e - 127); 254 - 0xFF wraps to 0xFF, NaN
    tensor_scale = _of_blocks(_tensor_encode_scale(copy, amaxes), amax)
    scale = encode(amax * (tensor_scale * (1.0 / element.max)), copy.scale.encoding)  # TE, cast/nvfp4/core_nvfp4.cuh
    multiplier = _reciprocal(decode(scale, copy.scale.encoding) * _reciprocal(tensor_scale))
    return scale, torch.fmin(multiplier, torch.full_like(multiplier, _FLOAT32_MAX))  # 0 stored: 0 * inf would be NaN


def _fp32_encode_scale(amax: Tensor, copy: OrientedCodes, scaling: Scaling, input_dtype: torch.dtype) -> Tensor:
    """max / amax by TransformerEngine's rules (common/recipe/recipe_common.cuh), or 1 if amax is 0, inf or NaN.

    A scale that overflows becomes the largest float32 (per-tensor formats) or the largest value of the input's dtype
    (block formats). `power_of_two` then rounds it down. The margin divides max, as in common/recipe/delayed_scaling.cu.
    """
    amax = amax.clamp(min=scaling.epsilon) if scaling.epsilon else amax
    scale = torch.full_like(amax, copy.codes.encoding.max * 2.0**-scaling.margin) / amax
    largest = torch.finfo(torch.float32 if copy.is_per_tensor else input_dtype).max
    scale = scale.masked_fill_(scale == math.inf, min(largest, _FLOAT32_MAX))
    if scaling.power_of_two:
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)  # drop the fraction
    return torch.where((amax > 0) & (amax < math.inf), scale, 1.0)


def _tensor_encode_scale(copy: OrientedCodes, amaxes: Grids) -> Tensor:
    """NVFP4's S_enc: scale max * element max / amax, at most the largest float32. 1 if amax is 0 or inf."""
    assert copy.amax is not None
    amax = amaxes[copy.amax.name]
    scale = torch.full_like(amax, copy.scale.encoding.max * copy.codes.encoding.max) / amax
    # fmin drops NaN: the stored amax already makes values NaN
    scale = torch.fmin(scale, torch.full_like(amax, _FLOAT32_MAX))
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def _of_blocks(scale: Tensor, grid: Tensor) -> Tensor:
    """Repeat the second scale of each matrix of a stack for its rows of blocks in `grid`."""
    return scale if len(scale) < 2 else scale.repeat_interleave(len(grid) // len(scale), 0)


def _reciprocal(x: Tensor) -> Tensor:
    return torch.ones_like(x) / x


# Quantization


def quantize_codes(
    x: Tensor, copy: OrientedCodes, multipliers: Grids, origin: Pair = (0, 0), words: Tensor | None = None
) -> Tensor:
    """Quantize x [R, C], floating point, to the stored codes of one copy: uint8 [R, C] or packed [R, ceil(C / 2)].
    `multipliers`: the touched grids, from `scales_and_multipliers`. `words`: int64 [R, C], for stochastic rounding."""
    encoding, grid = copy.codes.encoding, multipliers[copy.scale.name]
    scaled = x.float() * expand(grid, copy.block, (x.shape[0], x.shape[1]), origin)
    codes = encode(scaled, encoding) if words is None else encode_stochastic(scaled, encoding, words)
    return pack(codes, encoding)


def dequantize(copy: OrientedCodes, parts: Mapping[str, Tensor], shape: Pair, origin: Pair = (0, 0)) -> Tensor:
    """Dequantize one copy to float32 [R, C]: code * scale; for NVFP4 code * (S_dec * amax * (1 / (6 * 448)))."""
    codes = decode(unpack(parts[copy.codes.name], copy.codes.encoding, shape[1]), copy.codes.encoding)
    return codes.mul_(expand(stored_scales(copy, parts), copy.block, shape, origin))


def stored_scales(copy: OrientedCodes, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 factor of each block's decoded codes, from the components of one copy."""
    scale = decode(parts[copy.scale.name], copy.scale.encoding)
    if copy.amax is not None:  # TE, cast/nvfp4/dequantize_nvfp4.cuh
        largest = copy.codes.encoding.max * copy.scale.encoding.max
        scale = scale * _of_blocks(parts[copy.amax.name], scale) * (1.0 / largest)
    return scale


def quantize(
    x: Tensor,
    fmt: Format,
    scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
    origin: Pair = (0, 0),
    words: Mapping[Orientation, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Quantize x [R, C], floating point, to every component of the format, with scales from x's own amaxes.

    x is the whole tensor, or a rectangle that shares no block with other ranks (otherwise reduce `amaxes` first). With
    `random_hadamard`, which requires blocks along dim 1 only, `hadamard16(x)` is quantized. `words`: one per copy.
    """
    if scaling.random_hadamard:  # groups of 16 are counted in the global row, wherever a rectangle begins
        assert len(fmt.copies) == 1 and fmt.copies[Orientation.ROWWISE].block[0] == 1 and origin[1] % 16 == 0, fmt.name
        x = hadamard16(x)
    assert words is not None or not scaling.stochastic_rounding, "stochastic rounding needs words"
    grids = amaxes(x, fmt, origin)
    parts, multipliers = scales_and_multipliers(grids, fmt, scaling, x.dtype)
    for orientation, copy in fmt.copies.items():
        copy_words = words[orientation] if words is not None and scaling.stochastic_rounding else None
        parts[copy.codes.name] = quantize_codes(x, copy, multipliers, origin, copy_words)
    return parts
