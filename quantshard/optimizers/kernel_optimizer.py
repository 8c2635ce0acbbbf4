"""Elementwise optimizers whose formula also exists as a kernel (`kernels.optimizer.formulas`)."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from quantshard.collectives.flat_max import FlatMax
from quantshard.optimizers import guards
from quantshard.optimizers.elementwise import ElementwiseOptimizer
from quantshard.optimizers.kernel_step import KernelStep
from quantshard.optimizers.step import ParameterStep


class KernelOptimizer(ElementwiseOptimizer):
    """Base of `FusedAdam`, `Lion` and `Muon`. Steps run in kernels where possible, with the bits of `update`."""

    kernel_formula: ClassVar[Any] = None
    """The `update` that the kernels implement. A subclass that overrides `update` runs in PyTorch."""

    @cached_property
    def _kernels(self) -> KernelStep:
        return KernelStep()

    @property
    def _has_kernels(self) -> bool:
        return type(self).update is type(self).kernel_formula

    def _is_bounded(self, param: Tensor) -> bool:
        """Return the argument `bounded` of `numerics.adam.adam` for a parameter."""
        return False

    def _measured(self, work: list[ParameterStep]) -> tuple[guards.GradientFlags, list[ParameterStep]]:
        if not self._has_kernels or not self._kernels.take(work, self._seed, self._is_bounded):
            return super()._measured(work)
        flags = self._flags(work, FlatMax(), self._kernels.exceeding())
        return flags, self._kernels.update(flags.bad() if self._capturable else flags.send())

    def _finished(self, applied: bool) -> None:
        self._kernels.finished(applied)
