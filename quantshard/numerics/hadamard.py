"""The random Hadamard transform of NVFP4: fixed signs, then a Hadamard matrix per group of 16 elements."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

HADAMARD_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's fixed signs (pytorch/tensor/nvfp4_tensor.py)."""

HADAMARD_NEGATIVE: Final = sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0)
"""Bit mask of the negative signs. Devices compute the signs from it, without a copy that the host would wait for."""


def hadamard16(x: Tensor) -> Tensor:
    """Multiply each group of 16 elements along the last dim by diag(HADAMARD_SIGNS) @ H16 / 4, an orthogonal matrix.

    x is a floating-point [..., C]. The result is [..., C'] of x.dtype, where C' is C rounded up to a multiple of 16:
    the last group is padded with zeros, which does not change dot products of two such rows. Sums are computed in
    float32 in four butterfly stages (strides 1, 2, 4, 8), then rounded once.
    """
    out = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    negative = HADAMARD_NEGATIVE >> torch.arange(16, device=x.device) & 1
    out = out * (1.0 - 2.0 * negative.float())
    for stride in (1, 2, 4, 8):
        a, b = out.unflatten(-1, (-1, 2, stride)).unbind(-2)
        out = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return (out * 0.25).flatten(-2).to(x.dtype)
