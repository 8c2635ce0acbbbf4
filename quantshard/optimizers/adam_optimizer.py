"""Adam's update rule, shared by FusedAdam and Muon."""

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
"""Largest update, in learning rates, without a warning. It is at most 1 if the moments start with the step count."""


def largest_late_update(beta1: float, beta2: float, step: int) -> float:
    """Return the largest update, in learning rates, of a parameter whose gradients are constant and start at `step`.

    Kingma and Ba's bias correction divides moments by 1 - beta^t for t steps, but moments of k gradients sum to
    1 - beta^k. For large t the largest update comes after about 1.26 / (1 - beta1) gradients.
    """

    def update(k: int) -> float:
        t = step + k - 1
        first, second = (1 - beta1**k) / (1 - beta1**t), (1 - beta2**k) / (1 - beta2**t)
        return first / math.sqrt(second)

    return max(map(update, range(1, min(math.ceil(3 / (1 - beta1)), 10_000) + 1)))


class AdamOptimizer(KernelOptimizer):
    """Base of `FusedAdam` and `Muon`. All groups of `FusedAdam`, and the "adamw" groups of `Muon`, use Adam."""

    states: ClassVar[tuple[StateSpec, ...]] = STATES
    _has_told_of_late = False

    # The formula -----------------------------------------------------------------------------------------------------

    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Hyperparameters
    ) -> Update:
        """Apply `numerics.adam.adam` to one parameter."""
        new = adam(grad, master, states[EXP_AVG], states[EXP_AVG_SQ], settings, self._is_bounded(param))
        return new.master, {EXP_AVG: new.exp_avg, EXP_AVG_SQ: new.exp_avg_sq}

    kernel_formula = update

    def settings(self, group: dict[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of a group for this step."""
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
        late_params: list[tuple[Tensor, GroupSettings]] = []
        for item in super()._begin(groups):
            if self._blank and item.grad is not None and item.param in self._blank:
                self._blank.discard(item.param)
                late_params.append((item.param, item.group))
            yield item
        if late_params and not self._capturable and not self._has_told_of_late:
            self._warn_of_late(late_params)

    def _warn_of_late(self, late: list[tuple[Tensor, GroupSettings]]) -> None:
        """Warn once about parameters that start late in their group's step count, so that updates are too large."""
        largest_updates = [
            (
                self._names[param],
                group.step,
                largest_late_update(group.settings.beta1, group.settings.beta2, group.step),
            )
            for param, group in late
            if isinstance(group.step, int) and group.step > 1
            if EXP_AVG_SQ in self._states[param] and group.settings.bias_correction
        ]
        if not any(largest >= LATE_UPDATE for *_, largest in largest_updates):
            return
        self._has_told_of_late = True
        name, step, largest = max(largest_updates, key=lambda entry: entry[2])
        subject = f" and {len(largest_updates) - 1} more have" if len(largest_updates) > 1 else " has"
        warn_user(
            f"{self._name}: {name}{subject} a first gradient in step {step} of the group, and the bias correction "
            f"counts the group's steps, so the next updates are up to {largest:.1f} learning rates, where Adam's first "
            "is 1; give what begins late a group of its own then (add_param_group), which counts for itself, or take "
            "MasterWeights(torch.optim.AdamW, ...), which counts for each parameter",
            is_counted=True,
        )

    def check_group(self, where: str, group: Mapping[str, Any], reads_rate: bool = True) -> None:
        """Validate a group's hyperparameters with `options.check_adam`.

        Raises:
            ConfigurationError: a value is invalid, or large enough to make weights infinite.
        """
        options.check_adam(where, group, self._bounds_ratio, reads_rate)

    @cached_property
    def _bounds_ratio(self) -> bool:
        """Whether updates need a bound: scaled first moments are much coarser than second moments, which hold
        squares."""
        return floor_of(self._dtypes[EXP_AVG]) ** 2 > floor_of(self._dtypes[EXP_AVG_SQ], nonnegative=True)

    def _is_bounded(self, param: Tensor) -> bool:
        return self._bounds_ratio and self._states[param][EXP_AVG].storage is not None
