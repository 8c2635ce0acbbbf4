"""Adam's update rule, shared by FusedAdam and Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from quantshard.errors import ConfigurationError
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, STATES, Hyperparameters, adam, largest_ratio
from quantshard.numerics.states import EMA_DECAY, StateSpec
from quantshard.optimizers.kernel_step import KernelOptimizer
from quantshard.optimizers.step import Update
from quantshard.state_storage import floor_of


class AdamOptimizer(KernelOptimizer):
    """Base of `FusedAdam` and `Muon`. All groups of `FusedAdam`, and the "adamw" groups of `Muon`, use Adam."""

    states: ClassVar[tuple[StateSpec, ...]] = STATES
    checked_numbers = ("lr", "weight_decay", "betas", "eps", EMA_DECAY)

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

    def check_group(self, where: str, group: Mapping[str, Any]) -> None:
        """Validate a group's values.

        Raises:
            ConfigurationError: a value is invalid, or updates need a bound and have none.
        """
        super().check_group(where, group)
        if self._bounds_ratio and largest_ratio(*map(float, group["betas"])) == math.inf:
            raise ConfigurationError(
                f"{where}: betas={group['betas']}: with beta1**2 >= beta2 updates have no bound, but they need one, "
                "because exp_avg_dtype is coarser than exp_avg_sq_dtype; use a larger beta2 or the same dtype"
            )

    @cached_property
    def _bounds_ratio(self) -> bool:
        """Whether updates need a bound: scaled first moments are much coarser than second moments, which hold
        squares."""
        return floor_of(self._dtypes[EXP_AVG]) ** 2 > floor_of(self._dtypes[EXP_AVG_SQ], nonnegative=True)

    def _is_bounded(self, param: Tensor) -> bool:
        return self._bounds_ratio and self._states[param][EXP_AVG].storage is not None
