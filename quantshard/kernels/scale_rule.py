"""Scales from amaxes, on tiles of amaxes: the oracle's `numerics.scales_and_multipliers` in Triton."""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from quantshard.formats import E8M0, FP32, OrientedCodes, Scaling
from quantshard.kernels import language as ql

FLOAT32_MAX: Final = torch.finfo(torch.float32).max
LARGEST_FLOAT32 = tl.constexpr(FLOAT32_MAX)


@triton.jit
def e8m0_round_up(x):
    """Convert nonnegative float32 to E8M0 codes, uint8: `numerics.encode_e8m0_round_up`."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    fraction = bits & 0x7FFFFF
    up = fraction > tl.where(exponent == 0, 0x400000, 0)
    code = tl.minimum(exponent + up.to(tl.int32), 0xFE)
    return tl.where(x != x, 0xFF, code).to(tl.uint8)


@triton.jit
def decode_e8m0(codes):
    """Decode E8M0 codes, uint8, exactly to float32; 0xFF is NaN, and 0 is the subnormal 2**-127."""
    code = codes.to(tl.int32)
    quiet = ((code + 1) >> 8) << 22  # set only for 0xFF, without a comparison: see `language.nan_where_infinite`
    return (tl.maximum(code << 23, 0x00400000) | quiet).to(tl.float32, bitcast=True)


class ScaleRule(NamedTuple):
    """The rule that derives scales from amaxes (`numerics.scales_and_multipliers`); a constant of a kernel.

    `kind`: encoding of the stored scale: 0 for float32, 1 for E8M0, 2 for FP8 under a second scale of the whole tensor.
    `element`, `stored`: encodings of codes and of scales. `top`: largest code, reduced by the margin. `largest`:
    replacement for a float32 scale that overflows.
    """

    kind: int
    element: ql.KernelEncoding
    stored: ql.KernelEncoding
    top: float
    largest: float
    power_of_two: bool
    epsilon: float


def scale_rule(copy: OrientedCodes, scaling: Scaling, dtype: torch.dtype, device: torch.device) -> ScaleRule:
    kind = {FP32.name: 0, E8M0.name: 1}.get(copy.scale.encoding.name, 2)
    return ScaleRule(
        kind,
        ql.element(copy.codes.encoding, device),
        ql.element(copy.scale.encoding, device),
        copy.codes.encoding.max * 2.0**-scaling.margin,
        FLOAT32_MAX if copy.is_per_tensor else min(torch.finfo(dtype).max, FLOAT32_MAX),
        scaling.power_of_two,
        scaling.epsilon,
    )


@triton.jit
def scales(amax, second, R: tl.constexpr):
    """Scales to store, and multipliers of values, from amaxes; `second`: amax of the whole tensor, if R.kind is 2."""
    if R.kind == 0 and R.power_of_two and R.top >= 4:  # below 4, top / amax could be subnormal
        return powers_of_two(amax, R)
    elif R.kind == 0:
        multiplier = fp32_encode_scale(amax, R)
        return tl.div_rn(tl.zeros_like(amax) + 1.0, multiplier), multiplier
    elif R.kind == 1:
        stored_scale = e8m0_round_up(amax * (1.0 / R.element.max))
        return stored_scale, decode_e8m0(254 - stored_scale)
    else:
        encoding: tl.constexpr = R.stored
        second_multiplier = tensor_encode_scale(second, R)
        stored_scale = ql.encode(amax * (second_multiplier * (1.0 / R.element.max)), encoding).to(tl.uint8)
        product = ql.decode(stored_scale, encoding) * tl.div_rn(
            tl.zeros_like(second_multiplier) + 1.0, second_multiplier
        )
        multiplier = tl.div_rn(tl.zeros_like(product) + 1.0, product)
        # like fmin, which drops NaN
        return stored_scale, tl.where(multiplier < LARGEST_FLOAT32, multiplier, LARGEST_FLOAT32)


@triton.jit
def powers_of_two(amax, R: tl.constexpr):
    """`scales` without a division, for scales that are powers of two.

    The difference of two floats' bits, without the fraction, is the exponent of their quotient rounded down. For a
    subnormal amax it exceeds the largest, so the quotient is infinite, as it should be.
    """
    if R.epsilon > 0:
        amax = tl.maximum(amax, R.epsilon, propagate_nan=tl.PropagateNan.ALL)
    bits = amax.to(tl.int32, bitcast=True)
    top = (tl.zeros_like(amax) + R.top).to(tl.int32, bitcast=True)
    largest = (tl.zeros_like(amax) + R.largest).to(tl.int32, bitcast=True) & 0x7F800000
    power = ((top - bits) & -0x800000) + (127 << 23)
    power = tl.where(power.to(tl.uint32, bitcast=True) > 254 << 23, largest, power)
    power = tl.where((bits > 0) & (bits < 0x7F800000), power, 127 << 23)  # 1 for 0, infinity and NaN
    inverse = tl.maximum((254 << 23) - power, 0x400000)  # the inverse of 2**127 is subnormal
    return inverse.to(tl.float32, bitcast=True), power.to(tl.float32, bitcast=True)


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
