"""The random Hadamard transform of NVFP4: fixed signs, and a Hadamard matrix of each 16 elements."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

HADAMARD_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's fixed signs (pytorch/tensor/nvfp4_tensor.py)."""

HADAMARD_NEGATIVE: Final = sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0)
"""A bit for each that is negative: what a device makes the signs of, with no copy that a host would wait for."""


def hadamard16(x: Tensor) -> Tensor:
    """Multiply each group of 16 along the last dim by diag(HADAMARD_SIGNS) @ H16 / 4, an orthogonal matrix.

    x [..., C] floating -> x.dtype [..., C'], C' = C rounded up to a multiple of 16: the zeros appended to the last
    group are transformed with it, and a dot product of two such rows is kept. Sums are taken in float32 as four
    butterfly stages (strides 1, 2, 4, 8), then rounded once.
    """
    out = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    negative = HADAMARD_NEGATIVE >> torch.arange(16, device=x.device) & 1
    out = out * (1.0 - 2.0 * negative.float())
    for stride in (1, 2, 4, 8):
        a, b = out.unflatten(-1, (-1, 2, stride)).unbind(-2)
        out = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return (out * 0.25).flatten(-2).to(x.dtype)
