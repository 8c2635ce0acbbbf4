"""The mathematics of Adam, once: a pure function of gradient, master, moments and step."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import numerics


@dataclass(frozen=True)
class Hyperparameters:
    """Of one step. `step` counts from 1; `decoupled` chooses AdamW, else weight decay is added to the gradient (L2).

    `step` (int64) and `lr` (float32) may be scalar tensors, and then no value is read back from their device.
    """

    step: int | Tensor
    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool

    @cached_property
    def corrections(self) -> tuple[Tensor, Tensor]:
        """1 / (1 - beta**step) for both betas, or ones: float32 scalars on the device of `step`."""
        powers = (power(_float32(beta), self.step) for beta in (self.beta1, self.beta2))
        first, second = (torch.as_tensor(1.0 - p, dtype=torch.float64) for p in powers)
        ones = torch.ones_like(first)
        if not self.bias_correction:
            return ones.float(), ones.float()
        return (ones / first).float(), (ones / second).float()


class Updated(NamedTuple):
    """What one step makes of a parameter: float32, of its shape."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def adam(grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, h: Hyperparameters) -> Updated:
    """One Adam step in float32; the arguments are not changed.

        m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
        w = w - lr (m c1 / (sqrt(v c2) + eps) + wd w),   c = 1 / (1 - b^step)

    Kingma and Ba, 2015; decoupled weight decay: Loshchilov and Hutter, 2019. The order of operations is
    TransformerEngine's (common/multi_tensor/adam.cu), whose b are float32, in 1 - b and c too; but where it divides
    each element by 1 - b^step, here it is multiplied by the inverse, from float64: two divisions fewer an element. Only
    operations that IEEE 754 rounds correctly are used, so every device and every shard gets the same bits: not
    `torch.sqrt`, which on CPUs is sometimes an ulp off, and no division by a Python number, which on GPUs multiplies by
    its inverse.
    """
    grad = grad.float()
    if not h.decoupled and h.weight_decay != 0:
        grad = grad + h.weight_decay * master
    beta1, beta2 = _float32(h.beta1), _float32(h.beta2)
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
    correction1, correction2 = (correction.to(master.device) for correction in h.corrections)
    update = (exp_avg * correction1) / (numerics.sqrt(exp_avg_sq * correction2) + h.eps)
    if h.decoupled and h.weight_decay != 0:
        update = update + h.weight_decay * master
    return Updated(master - h.lr * update, exp_avg, exp_avg_sq)


def power(base: float, exponent: int | Tensor) -> float | Tensor:
    """`base ** exponent` in float64 by squaring, for 0 <= exponent < 2**32; of an int64 tensor on its device.

    A sequence of multiplications, whose bits are the same on every device, as those of `pow` are not.
    """
    result: float | Tensor = 1.0
    if isinstance(exponent, Tensor):
        result = torch.ones((), dtype=torch.float64, device=exponent.device)
    for bit in range(32):
        if isinstance(exponent, Tensor):
            result = torch.where((exponent >> bit & 1).bool(), result * base, result)
        elif exponent >> bit & 1:
            result *= base
        base *= base
    return result


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
