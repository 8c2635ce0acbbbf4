"""The mathematics of Adam, once: a pure function of gradient, master, moments and step."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.numerics.states import MASTER, WEIGHT, StateSpec

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
ROLES = (EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT)
"""What a step reads and writes of a parameter: running means of the gradient and of its square, and the weight."""

STATES = (StateSpec(EXP_AVG), StateSpec(EXP_AVG_SQ, nonnegative=True, words_of=EXP_AVG))
"""A zero under the square root would blow up the step of an element whose first moment survived."""

NONNEGATIVE = frozenset(spec.role for spec in STATES if spec.nonnegative)
"""The roles of those that are."""

SMALL_EPS = 2.0**-60
"""From here on, eps keeps updates of less than a learning rate where v vanishes, which it does for gradients below
1e-21."""


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of one step. `step` counts from 1; `decoupled` chooses AdamW, else weight decay is added to the
    gradient (L2); `ema_decay` is of the average of the weights, where one is kept (`numerics.averages`).

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
    ema_decay: float = 0.0

    @cached_property
    def corrections(self) -> tuple[Tensor, Tensor]:
        """1 / (1 - beta**step) for both betas, or ones: float32 scalars on the device of `step`."""
        powers = (power(float32(beta), self.step) for beta in (self.beta1, self.beta2))
        device = self.step.device if isinstance(self.step, Tensor) else "cpu"
        first, second = (torch.as_tensor(1.0 - p, dtype=torch.float64, device=device) for p in powers)
        ones = torch.ones_like(first)
        if not self.bias_correction:
            return ones.float(), ones.float()
        return (ones / first).float(), (ones / second).float()

    @cached_property
    def largest_ratio(self) -> float:
        """A bound of |m| / sqrt(v), whatever the gradients were: see the function of this name."""
        return largest_ratio(self.beta1, self.beta2)


def largest_ratio(beta1: float, beta2: float) -> float:
    """C = (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), float32; `math.inf` if b1^2 >= b2 and b1 > 0.

    By Cauchy and Schwarz's inequality, of m = (1 - b1) sum b1^i g_i and v = (1 - b2) sum b2^i g_i^2 over past steps i:

        m^2 <= (1 - b1)^2 (sum b1^2i / b2^i) (sum b2^i g_i^2) <= C^2 v

    so that an update, m c1 / (sqrt(v c2) + eps), stays below C c1 / sqrt(c2). (Section 2.1 of Kingma and Ba, 2015, has
    it for a gradient that is zero in all steps but one.)
    """
    beta1, beta2 = float32(beta1), float32(beta2)
    if beta1 == 0:
        return float32(1 / math.sqrt(1 - beta2))
    if beta1 * beta1 >= beta2:
        return math.inf
    return float32((1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2)))


class AdamUpdate(NamedTuple):
    """What one step makes of a parameter: float32, of its shape."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def adam(
    grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, h: Hyperparameters, bounded: bool = False
) -> AdamUpdate:
    """One Adam step in float32; the arguments are not changed.

        m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
        w = w - lr (m c1 / (sqrt(v c2) + eps) + wd w),   c = 1 / (1 - b^step)

    Kingma and Ba, 2015; decoupled weight decay: Loshchilov and Hutter, 2019. The order of operations is
    TransformerEngine's (common/multi_tensor/adam.cu), whose b are float32, in 1 - b and c too; but where it divides
    each element by 1 - b^step, here it is multiplied by the inverse, from float64: two divisions fewer an element. Only
    operations that IEEE 754 rounds correctly are used, so every device and every shard gets the same bits: not
    `torch.sqrt`, which on CPUs is sometimes an ulp off, and no division by a Python number, which on GPUs multiplies by
    its inverse.

    Where v is 0 and eps is below `SMALL_EPS`, there is no update but weight decay's: the gradients were zero, or so
    small that their squares vanished, and the quotient would be NaN or mean nothing.

    `bounded`: m is first brought within C sqrt(v), where every true one is (`largest_ratio`). For moments of which the
    first is stored so that small values beside large ones are rounded up to values that are far too large for them, and
    the second is not: without it an update could be thousands of learning rates.
    """
    grad = grad.float()
    if not h.decoupled and h.weight_decay != 0:
        grad = grad + h.weight_decay * master
    beta1, beta2 = float32(h.beta1), float32(h.beta2)
    if bounded:
        limit = h.largest_ratio * numerics.sqrt(exp_avg_sq)
        exp_avg = torch.where(exp_avg > limit, limit, exp_avg)
        exp_avg = torch.where(exp_avg < -limit, -limit, exp_avg)
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
    correction1, correction2 = (correction.to(master.device) for correction in h.corrections)
    update = (exp_avg * correction1) / (numerics.sqrt(exp_avg_sq * correction2) + h.eps)
    if float32(h.eps) < SMALL_EPS:
        update = torch.where(exp_avg_sq == 0, 0.0, update)
    if h.decoupled and h.weight_decay != 0:
        update = update + h.weight_decay * master
    return AdamUpdate(master - h.lr * update, exp_avg, exp_avg_sq)


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


def float32(value: float) -> float:
    """The nearest float32, as kernels have it of a Python number."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
