"""16-bit numbers with an FP8 code as their rounded high byte: a weight, and the rest of its master.

x -> 16-bit codes (`Encoding.extended`) -> the codes of the weight, and the low bytes
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.formats import Encoding, OrientedCodes
from quantshard.numerics import Grids, Pair


def split(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Split codes of an `Encoding.extended`, int16, into the nearest 8-bit codes and the low bytes, both uint8.

    `join` restores the same codes. Ties are rounded away from zero, as in `split_bfloat16`. NaN, which is all ones,
    stays NaN.
    """
    bits = codes.to(torch.int32)
    magnitude = bits.bitwise_and(0x7FFF).clamp_(max=0x7F7F)
    high = (magnitude + 0x80 >> 8).bitwise_or_(bits >> 8 & 0x80)
    return high.to(torch.uint8), magnitude.bitwise_and_(0xFF).to(torch.uint8)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Inverse of `split`: int32 in [0, 2**16)."""
    top = high.to(torch.int32)
    magnitude = (top.bitwise_and(0x7F) << 8).add_(low.view(torch.int8)).clamp_(min=0)
    return magnitude.bitwise_or_(top.bitwise_and_(0x80) << 8)


def decode(high: Tensor, low: Tensor, encoding: Encoding) -> Tensor:
    """Decode codes of `encoding` and their low bytes, uint8, to float32."""
    values = numerics.decode(join(high, low), encoding.extended)
    return values.masked_fill_(high & 0x7F == 0x7F, math.nan)


def quantize(
    x: Tensor, copy: OrientedCodes, multipliers: Grids, origin: Pair = (0, 0), words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_codes` in 16 bits: the codes of one copy, and their low bytes (`split`)."""
    encoding, grid = copy.codes.encoding.extended, multipliers[copy.scale.name]
    scaled = x.float() * numerics.expand(grid, copy.block, (x.shape[0], x.shape[1]), origin)
    codes = numerics.encode(scaled, encoding) if words is None else numerics.encode_stochastic(scaled, encoding, words)
    return split(codes)


def low_bytes(x: Tensor, copy: OrientedCodes, parts: Mapping[str, Tensor], origin: Pair = (0, 0)) -> Tensor:
    """Return the low bytes that bring the existing codes of one copy closest to x [R, C]: uint8 [R, C]."""
    encoding, codes = copy.codes.encoding, parts[copy.codes.name].to(torch.int32)
    scales = numerics.expand(numerics.stored_scales(copy, parts), copy.block, (x.shape[0], x.shape[1]), origin)
    nearest = numerics.encode(x.float() / scales, encoding.extended).to(torch.int32)
    rest = (nearest & 0x7FFF) - ((codes & 0x7F) << 8)
    same_sign = (nearest >> 8 ^ codes) & 0x80 == 0
    return (rest.clamp_(-128, 127) * same_sign).to(torch.int8).view(torch.uint8)


def dequantize(copy: OrientedCodes, parts: Mapping[str, Tensor], low: Tensor, origin: Pair = (0, 0)) -> Tensor:
    """Dequantize the components of one copy and the low bytes of its codes to float32 [R, C]."""
    scales = numerics.expand(numerics.stored_scales(copy, parts), copy.block, (low.shape[0], low.shape[1]), origin)
    return decode(parts[copy.codes.name], low, copy.codes.encoding).mul_(scales)
