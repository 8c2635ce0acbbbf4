"""Lion's formula: a pure function of gradient, master and one moment."""

from dataclasses import dataclass

from torch import Tensor

from quantshard.numerics.adam import EXP_AVG, float32
from quantshard.numerics.states import StateSpec

STATES = (StateSpec(EXP_AVG),)


@dataclass(frozen=True)
class LionSettings:
    """The numbers of one step. `lr`: a float32 scalar tensor is not read back from its device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float


def lion(grad: Tensor, master: Tensor, exp_avg: Tensor, settings: LionSettings) -> tuple[Tensor, Tensor]:
    """Compute one Lion step in float32, out of place: the new master and moment.

        w = w - lr (sign(b1 m + (1 - b1) g) + wd w)
        m = b2 m + (1 - b2) g

    Algorithm 2 of Chen et al., 2023 (arXiv:2302.06675), with decoupled weight decay. b is float32, also in 1 - b, as in
    `adam`. The sign of 0 is 0. Each operation is correctly rounded on its own.
    """
    grad = grad.float()
    beta1, beta2 = float32(settings.beta1), float32(settings.beta2)
    update = (beta1 * exp_avg + (1.0 - beta1) * grad).sign()
    if settings.weight_decay != 0:
        update = update + settings.weight_decay * master
    return master - settings.lr * update, beta2 * exp_avg + (1.0 - beta2) * grad
