"""Adam's formula and the moving average of weights: pure functions of gradient, master, moments and step."""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.numerics.states import StateSpec

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
STATES = (StateSpec(EXP_AVG), StateSpec(EXP_AVG_SQ, nonnegative=True, words_of=EXP_AVG))
"""The second moment must not round to zero: that would blow up the step if the first moment is nonzero."""

SMALL_EPS = 2.0**-60
"""Smallest eps that keeps updates below a learning rate if v underflows, as for gradients below 1e-21."""


class Bound(IntEnum):
    """How a step is protected from stored moments that rounding has taken out of the range of exact ones.

    RATIO: m is first clamped to `largest_ratio` sqrt(v), the range of every exact m. For a storage format of m that
    rounds small values next to large ones up to far too large values, beside a format of v that does not.
    UPDATE: m c1 / (sqrt(v c2) + eps) is clamped to `Hyperparameters.largest_update`. For other scaled formats of m.
    """

    NONE = 0
    RATIO = 1
    UPDATE = 2


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of one step.

    step: counts from 1. Tensors of `step` (int64) and `lr` (float32) are not read back from their device.
    decoupled: AdamW. If False, weight decay is added to the gradient (L2).
    matrix_bound: bound of matrices, whose states can share scales.
    """

    step: int | Tensor
    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    matrix_bound: Bound = Bound.NONE

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
        """Upper bound of |m| / sqrt(v) for any gradients; see the function of this name."""
        return largest_ratio(self.beta1, self.beta2)

    @cached_property
    def largest_update(self) -> Tensor:
        """2 C c1 / sqrt(c2), twice the largest update that exact moments give: float32 scalar."""
        correction1, correction2 = self.corrections
        return 2.0 * self.largest_ratio * correction1 / correction2.double().sqrt().float()


def largest_ratio(beta1: float, beta2: float) -> float:
    """C = (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), float32; `math.inf` if b1^2 >= b2 and b1 > 0.

    With m = (1 - b1) sum b1^i g_i and v = (1 - b2) sum b2^i g_i^2 over past steps i, the Cauchy-Schwarz inequality
    gives

        m^2 <= (1 - b1)^2 (sum b1^2i / b2^i) (sum b2^i g_i^2) <= C^2 v
    """
    beta1, beta2 = float32(beta1), float32(beta2)
    if beta1 == 0:
        return float32(1 / math.sqrt(1 - beta2))
    if beta1 * beta1 >= beta2:
        return math.inf
    return float32((1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2)))


class AdamUpdate(NamedTuple):
    """The results of one step for a parameter: float32, of its shape."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def adam(
    grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, h: Hyperparameters, bound: Bound = Bound.NONE
) -> AdamUpdate:
    """Compute one Adam step in float32, out of place.

        m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
        w = w - lr (m c1 / (sqrt(v c2) + eps) + wd w),   c = 1 / (1 - b^step)

    Sources: Kingma and Ba, 2015; decoupled weight decay: Loshchilov and Hutter, 2019. The order of operations is that
    in TransformerEngine (common/multi_tensor/adam.cu), except that c is an inverse, computed in float64, where
    TransformerEngine divides each element. If v is 0 and eps is below `SMALL_EPS`, only weight decay is applied: the
    gradients were zero or their squares underflowed. Without a `bound` where the formats need one, an update could be
    thousands of learning rates.
    """
    grad = grad.float()
    if not h.decoupled and h.weight_decay != 0:
        grad = grad + h.weight_decay * master
    beta1, beta2 = float32(h.beta1), float32(h.beta2)
    if bound is Bound.RATIO:
        limit = h.largest_ratio * numerics.sqrt(exp_avg_sq)
        exp_avg = torch.where(exp_avg > limit, limit, exp_avg)
        exp_avg = torch.where(exp_avg < -limit, -limit, exp_avg)
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
    correction1, correction2 = (correction.to(master.device) for correction in h.corrections)
    update = (exp_avg * correction1) / (numerics.sqrt(exp_avg_sq * correction2) + h.eps)
    if float32(h.eps) < SMALL_EPS:
        update = torch.where(exp_avg_sq == 0, 0.0, update)
    if bound is Bound.UPDATE:
        most = h.largest_update.to(master.device)
        update = update.clamp(-most, most)
    if h.decoupled and h.weight_decay != 0:
        update = update + h.weight_decay * master
    return AdamUpdate(master - h.lr * update, exp_avg, exp_avg_sq)


def power(base: float, exponent: int | Tensor) -> float | Tensor:
    """`base ** exponent` in float64 by squaring, for 0 <= exponent < 2**32: unlike `pow`, the same bits everywhere."""
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
    """Round to the nearest float32, as kernels do with a Python number."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def average_share(decay: float, step: int | Tensor) -> float | Tensor:
    """Return the share of the new values in an exponential moving average of weights at `step`, counted from 1.

        a = a + share (w - a),   share = (1 - decay) / (1 - decay^step)

    An average that starts after step n starts with the values of that time, which count for all n steps. The result is
    a float32 number, or a float32 scalar on the device of `step`.
    """
    rest = 1.0 - power(decay, step)
    if isinstance(rest, Tensor):
        return (torch.full_like(rest, 1.0 - decay) / rest).float()
    return float32((1.0 - decay) / rest)


def moved_average(average: Tensor, values: Tensor, share: float | Tensor) -> Tensor:
    """Return the average after a step, in float32, out of place; `lerp` would fuse operations on some devices."""
    return average + (values - average) * share
