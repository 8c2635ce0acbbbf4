"""What optimizers have that step some or all of their parameters by Adam's formula: the formula."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from quantshard.errors import warn_user
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, STATES, Hyperparameters, adam
from quantshard.numerics.states import EMA_DECAY, StateSpec
from quantshard.optimizers import options
from quantshard.optimizers.kernel_optimizer import KernelOptimizer
from quantshard.optimizers.state import floor_of
from quantshard.optimizers.step import GroupSettings, ParameterStep, Update

LATE_UPDATE = 1.5
"""Learning rates that an update may have before there is a warning; where moments began with the count it is 1."""


def largest_late_update(beta1: float, beta2: float, step: int) -> float:
    """The largest update, in learning rates, by gradients that are all alike and begin in this step of a count.

    Kingma and Ba's bias corrections divide moments by 1 - beta^t, of t steps; of k gradients they are 1 - beta^k. Where
    t is large the largest is that of some 1.26 / (1 - beta1) gradients.
    """

    def update(k: int) -> float:
        t = step + k - 1
        first, second = (1 - beta1**k) / (1 - beta1**t), (1 - beta2**k) / (1 - beta2**t)
        return first / math.sqrt(second)

    return max(map(update, range(1, min(math.ceil(3 / (1 - beta1)), 10_000) + 1)))


class AdamOptimizer(KernelOptimizer):
    """Base of `FusedAdam`, whose groups are all Adam's, and of `Muon`, which has others beside them."""

    states: ClassVar[tuple[StateSpec, ...]] = STATES
    _has_told_of_late = False

    # The formula -----------------------------------------------------------------------------------------------------

    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Hyperparameters
    ) -> Update:
        """See `numerics.adam.adam`."""
        new = adam(grad, master, states[EXP_AVG], states[EXP_AVG_SQ], settings, self._is_bounded(param))
        return new.master, {EXP_AVG: new.exp_avg, EXP_AVG_SQ: new.exp_avg_sq}

    kernel_formula = update

    def settings(self, group: dict[str, Any]) -> Hyperparameters:
        """The numbers of a group in this step."""
        beta1, beta2 = map(float, group["betas"])
        return Hyperparameters(
            step=group["step"] + 1,
            lr=group["lr"] if self._capturable else float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group["adam_w_mode"],
            bias_correction=group["bias_correction"],
            ema_decay=float(group.get(EMA_DECAY, 0.0)),
        )

    def _begin(self, groups: list[GroupSettings]) -> Iterator[ParameterStep]:
        late: list[tuple[Tensor, GroupSettings]] = []
        for item in super()._begin(groups):
            if self._blank and item.grad is not None and item.param in self._blank:
                self._blank.discard(item.param)
                late.append((item.param, item.group))
            yield item
        if late and not self._capturable and not self._has_told_of_late:
            self._warn_of_late(late)

    def _warn_of_late(self, late: list[tuple[Tensor, GroupSettings]]) -> None:
        """Warn, once, of parameters whose moments begin so late in their group's count that updates are too large."""
        found = [
            (self._names[param], of.step, largest_late_update(of.settings.beta1, of.settings.beta2, of.step))
            for param, of in late
            if isinstance(of.step, int) and of.step > 1
            if EXP_AVG_SQ in self._states[param] and of.settings.bias_correction
        ]
        if not any(largest >= LATE_UPDATE for *_, largest in found):
            return
        self._has_told_of_late = True
        name, step, largest = max(found, key=lambda each: each[2])
        others = f" and {len(found) - 1} more have" if len(found) > 1 else " has"
        warn_user(
            f"{self._name}: {name}{others} a first gradient in step {step} of the group, and the bias correction "
            f"counts the group's steps, so the next updates are up to {largest:.1f} learning rates, where Adam's first "
            "is 1; give what begins late a group of its own then (add_param_group), which counts for itself, or take "
            "MasterWeights(torch.optim.AdamW, ...), which counts for each parameter",
            is_counted=True,
        )

    def check_group(self, where: str, group: Mapping[str, Any], reads_rate: bool = True) -> None:
        """Check that the numbers of a group make a step; see `options.check_adam`.

        Raises:
            ConfigurationError: they make none, or would make weights infinite.
        """
        options.check_adam(where, group, self._bounds_ratio, reads_rate)

    @cached_property
    def _bounds_ratio(self) -> bool:
        """Whether scaled first moments are so much coarser than the second, which is of squares, that an update needs a
        bound."""
        return floor_of(self._dtypes[EXP_AVG]) ** 2 > floor_of(self._dtypes[EXP_AVG_SQ], nonnegative=True)

    def _is_bounded(self, param: Tensor) -> bool:
        return self._bounds_ratio and self._states[param][EXP_AVG].storage is not None
