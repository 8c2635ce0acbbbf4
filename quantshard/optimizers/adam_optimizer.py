"""What optimizers have that step some or all of their parameters by Adam's formula: the formula, and its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from quantshard.collectives.flat_max import FlatMax
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, STATES, Hyperparameters, adam
from quantshard.numerics.states import EMA_DECAY, StateSpec
from quantshard.optimizers import guards, options
from quantshard.optimizers.elementwise import ElementwiseOptimizer
from quantshard.optimizers.kernel_step import KernelStep
from quantshard.optimizers.state import floor_of
from quantshard.optimizers.step import GroupSettings, ParameterStep, Update


class AdamOptimizer(ElementwiseOptimizer):
    """Base of `FusedAdam`, whose groups are all Adam's, and of `Muon`, which has others beside them."""

    states: ClassVar[tuple[StateSpec, ...]] = STATES

    @cached_property
    def _kernels(self) -> KernelStep:
        return KernelStep()

    # The formula -----------------------------------------------------------------------------------------------------

    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Hyperparameters
    ) -> Update:
        """See `numerics.adam.adam`."""
        new = adam(grad, master, states[EXP_AVG], states[EXP_AVG_SQ], settings, self._is_bounded(param))
        return new.master, {EXP_AVG: new.exp_avg, EXP_AVG_SQ: new.exp_avg_sq}

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
        """Whether scaled first moments are so much coarser than the second that an update needs a bound."""
        return floor_of(self._dtypes[EXP_AVG]) > floor_of(self._dtypes[EXP_AVG_SQ])

    def _is_bounded(self, param: Tensor) -> bool:
        return self._bounds_ratio and self._states[param][EXP_AVG].storage is not None

    # Kernels ---------------------------------------------------------------------------------------------------------

    def _measured(
        self, work: list[ParameterStep], groups: list[GroupSettings]
    ) -> tuple[guards.GradientFlags, list[ParameterStep]]:
        if not self._kernels.take(work, [group.settings for group in groups], self._seed, self._is_bounded):
            return super()._measured(work, groups)
        flags = self._flags(work, FlatMax(), self._kernels.exceeding())
        return flags, self._kernels.update(flags.bad() if self._capturable else flags.send())

    def _finished(self, is_made: bool) -> None:
        self._kernels.finished(is_made)
