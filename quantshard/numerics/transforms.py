"""Other forms of the same numbers: float32 in two halves, Hadamard transforms, and tensor cores' layout of scales."""

from typing import Final

import torch
from torch import Tensor

from quantshard.numerics.random_bits import Pair


def split_bfloat16(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into the nearest bfloat16 and the low 16 bits (int16). `join_bfloat16` restores the same float32.

    Ties are rounded away from zero: with ties to even, an even bfloat16 would stand for 2**16 + 1 float32s, one more
    than 16 bits can distinguish. A NaN stays a NaN.
    """
    bits = values.view(torch.int32)
    high = torch.where(values.isnan(), 0x7FC0, (bits >> 16) + (bits >> 15 & 1))
    return high.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_bfloat16(high: Tensor, low: Tensor) -> Tensor:
    """Inverse of `split_bfloat16`: float32."""
    upper = high.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return (upper << 16 | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


HADAMARD_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's fixed signs (pytorch/tensor/nvfp4_tensor.py)."""

HADAMARD_NEGATIVE: Final = sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0)
"""Bit mask of the negative signs. Devices compute the signs from it, without a copy that the host would wait for."""


def hadamard16(x: Tensor) -> Tensor:
    """Multiply each group of 16 elements along the last dim by diag(HADAMARD_SIGNS) @ H16 / 4, an orthogonal matrix.

    x is a floating-point [..., C]. The last group is padded with zeros, which does not change dot products of two such
    rows. Sums are computed in float32 in four butterfly stages (strides 1, 2, 4, 8), then rounded once.
    """
    out = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    negative = HADAMARD_NEGATIVE >> torch.arange(16, device=x.device) & 1
    out = out * (1.0 - 2.0 * negative.float())
    for stride in (1, 2, 4, 8):
        a, b = out.unflatten(-1, (-1, 2, stride)).unbind(-2)
        out = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return (out * 0.25).flatten(-2).to(x.dtype)


def swizzled(grid: Tensor) -> Tensor:
    """Rearrange bytes [R, C] into flat tiles of 128 x 4, in which rows i, i + 32, i + 64 and i + 96 are adjacent.

    Tensor cores of compute capability 10 read block scales in this layout (cuBLAS, "1D block scaling factors layout").
    The last tiles are padded with zeros.
    """
    more = (0, -grid.shape[1] % 4, 0, -grid.shape[0] % 128)
    padded = torch.nn.functional.pad(grid, more) if any(more) else grid  # can have any strides
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzled(flat: Tensor, shape: Pair) -> Tensor:
    """Inverse of `swizzled`: the bytes of a grid [R, C]."""
    tiles = flat.view(-(shape[0] // -128), -(shape[1] // -4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tiles.shape[0] * 128, -1)[: shape[0], : shape[1]]
