"""What optimizers have that step some or all of their parameters by Adam's formula: the formula."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, STATES, Hyperparameters, adam
from quantshard.numerics.states import EMA_DECAY, StateSpec
from quantshard.optimizers import options
from quantshard.optimizers.kernel_optimizer import KernelOptimizer
from quantshard.optimizers.state import floor_of
from quantshard.optimizers.step import Update


class AdamOptimizer(KernelOptimizer):
    """Base of `FusedAdam`, whose groups are all Adam's, and of `Muon`, which has others beside them."""

    states: ClassVar[tuple[StateSpec, ...]] = STATES

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
