"""Gradient release: parameters take their part of a step during backward, and their gradients are freed.

Gradients that arrive one after another form a unit of at least `UNIT_ELEMENTS` elements. A unit is updated like a whole
step: by the same kernels, with the same random bits and, where parameters are sharded, in collective calls. Gradients
must therefore arrive in the same order on all ranks, as FSDP2 requires too.

A gradient can be scaled only by a norm that is known before backward ends: that of the backward before it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError
from quantshard.optimizers import clipping
from quantshard.optimizers.base import GRAD_NORM, ParameterOptimizer
from quantshard.optimizers.guards import MAIN_GRAD, GradientFlags, gradient_of, gradient_parts
from quantshard.optimizers.kernel_step import ParameterStep, StepPlan
from quantshard.optimizers.state import OptimizerState

UNIT_ELEMENTS: Final = 1 << 25
"""Gradients are kept until they have this many elements on all ranks, so that kernels have enough work."""


class GradientRelease:
    """The gradients of one optimizer that are released during backward.

    `step_unit`: updates some parameters that have gradients, and returns their flags. `max_norm`, `max_value`: bounds
    of the norm of all gradients and of their values; 0: none. `flags`, `stepped`: flags and parameters of the units of
    this backward. `is_measuring`: whether gradients are only measured (`measure_grad_norm`).
    """

    def __init__(
        self, name: str, step_unit: Callable[[list[Tensor]], GradientFlags], max_norm: float, max_value: float
    ) -> None:
        self.name, self.max_norm, self.max_value = name, max_norm, max_value
        self.flags: list[GradientFlags] = []
        self.stepped: dict[Tensor, None] = {}
        self.is_measuring = False
        self._step_unit = weakref.WeakMethod(step_unit)
        self._hooks: list[Any] = []
        self._pending: dict[Tensor, None] = {}
        self._norms: dict[Tensor, Tensor | None] = {}

    def watch(self, param: Tensor, name: str) -> None:
        """Release the gradients of a parameter from now on."""
        hooks = _live_hooks(param)
        if any(isinstance(hook, ReleaseHook) and hook.release() is self for hook in hooks):
            return
        if hooks:
            gc.collect()  # an optimizer that is no longer used lives until then
        for hook in _live_hooks(param):
            release = hook.release() if isinstance(hook, ReleaseHook) else None
            problem = f"another {release.name} releases it" if release else f"{hook!r:.60} runs after it; remove it"
            raise ConfigurationError(f"{self.name}(release_gradients=True): the gradient of {name}: {problem}")
        self._hooks.append(param.register_post_accumulate_grad_hook(ReleaseHook(self)))

    def forget(self) -> None:
        """Release no gradients of the parameters so far."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def reset(self) -> None:
        """Forget an unfinished backward."""
        self.flags, self.stepped, self._pending, self._norms = [], {}, {}, {}

    def check_ended(self) -> None:
        """Raise if a backward has updated parameters and no step has followed."""
        if self.stepped or self._pending:
            raise ConfigurationError(f"{self.name}: backward has updated a part of the parameters; call step() first")

    def add(self, param: Tensor) -> None:
        """Take a parameter whose gradient is complete."""
        if param in self.stepped or param in self._pending:
            remedy = "to accumulate gradients use FSDP2's set_requires_gradient_sync, or do not release them"
            raise ConfigurationError(f"{self.name}(release_gradients=True): a second backward before step(); {remedy}")
        self._pending[param] = None
        if sum(pending.numel() for pending in self._pending) >= UNIT_ELEMENTS:
            self.flush()

    def flush(self) -> None:
        """Update the parameters that have gradients."""
        params, self._pending = [*self._pending], {}
        step_unit = self._step_unit()
        if not params or step_unit is None:
            return
        if self.is_measuring:
            self.measure(params)
        else:
            self.flags.append(step_unit(params))
        self.stepped |= dict.fromkeys(params)
        for param in params:
            param.grad = None

    def measure(self, params: Iterable[Tensor]) -> None:
        for param in params:
            grad = gradient_of(param, decoupled=False)
            if grad is not None:
                local = private_torch.local_tensor(grad)
                norm = torch.linalg.vector_norm(local, 2, dtype=torch.float64) if local.numel() else None
                self._norms[param] = norm

    def clip(self, params: Sequence[Tensor], norm: float | Tensor) -> None:
        """Measure gradients, scale them by the `norm` of the backward before (0: unknown), and clamp them."""
        grads = [grad for param in params for grad in gradient_parts(param, decoupled=False)]
        parts = list(map(private_torch.local_tensor, grads))
        if self.max_norm and parts:
            self.measure(params)
            previous = torch.as_tensor(norm, dtype=torch.float64, device=parts[0].device)
            factor = torch.where(previous > 0, clipping.scale_to(previous, self.max_norm), 1.0)
            for part in parts:
                part.mul_(factor.to(part.device))
        for part in parts if self.max_value else ():
            part.clamp_(-self.max_value, self.max_value)

    def update_norm(self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> None:
        """Put the norm of all gradients since the last call into the groups, float32, unless it is not finite.
        `params`: all parameters, in an order that is the same on all ranks. A collective call if they are sharded."""
        if not self._norms:
            return
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for param in params:
            norms = by_groups.setdefault(process_groups.summed_over(param), [])
            norms += [norm] if (norm := self._norms.get(param)) is not None else []
        norm = clipping.total_norm(by_groups, 2.0, private_torch.local_tensor(params[0]).device).float()
        self._norms = {}
        for group in groups:
            previous = torch.as_tensor(group[GRAD_NORM], dtype=norm.dtype, device=norm.device)
            norm = torch.where(norm.isfinite(), norm, previous)
            if isinstance(group[GRAD_NORM], Tensor):  # a captured step reads its address
                group[GRAD_NORM].copy_(norm)
            else:
                group[GRAD_NORM] = norm.clone()

    @contextmanager
    def measuring(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Only measure the norm of gradients, including those that backward does not release, and free them."""
        self.is_measuring = True
        try:
            yield
            self.flush()
            self.measure(param for param in params if param not in self.stepped)
            self.flags, self.stepped = [], {}
        except BaseException:
            self.reset()
            raise
        finally:
            self.is_measuring = False
            for param in params:
                param.grad = None
                if (main_grad := vars(param).get(MAIN_GRAD)) is not None:
                    main_grad.zero_()


class ReleaseHook:
    """Hands a gradient to a `GradientRelease`, and does not keep it alive."""

    def __init__(self, release: GradientRelease) -> None:
        self.release = weakref.ref(release)

    def __call__(self, param: Tensor) -> None:
        release = self.release()
        if release is not None:
            release.add(param)

    @property
    def releases_gradients(self) -> bool:
        return self.release() is not None


def _live_hooks(param: Tensor) -> list[Any]:
    """Hooks after a parameter's gradient, without those of optimizers that are gone."""
    hooks = private_torch.accumulate_grad_hooks(param)
    return [hook for hook in hooks if not isinstance(hook, ReleaseHook) or hook.releases_gradients]


class ReleasingOptimizer(ParameterOptimizer):
    """Base of optimizers that can take parts of a step during backward (`release_gradients`)."""

    _states: dict[Tensor, dict[str, OptimizerState]]
    _master_weights: bool
    _release: GradientRelease | None = None

    _current_plan: Callable[[tuple[Tensor, ...]], StepPlan]
    _take_gradients: Callable[[StepPlan], None]
    _start_updates: Callable[[StepPlan], tuple[GradientFlags, list[ParameterStep]]]

    @contextmanager
    def measure_grad_norm(self) -> Iterator[None]:
        """Free the gradients of the backward inside without updating anything, and keep their norm for the next one.

        With `release_gradients` and `max_grad_norm`, this is the first of two passes over the same batch, so that the
        second clips by the norm of its own gradients. A collective call if parameters are sharded.
        """
        if self._release is None or not self._release.max_norm:
            raise ConfigurationError(f"{self._name}.measure_grad_norm() needs release_gradients and max_grad_norm")
        with self._release.measuring(self._states):
            yield
        self._release.update_norm([*self._names], self.param_groups)

    @torch.no_grad()
    def _step_unit(self, params: list[Tensor]) -> GradientFlags:
        """Take the part of a step of some parameters that have gradients, unless one of these is bad."""
        assert self._release is not None
        if not self._release.flags:  # the first unit of this backward
            self._adopt_replaced_parameters()
            self._read_flags()
            self._check_reduced()
        plan = self._current_plan(tuple(params))
        self._release.clip(params, self.param_groups[0].get(GRAD_NORM, 0.0))
        try:
            self._take_gradients(plan)
            flags, remaining = self._start_updates(plan)
            on_device = self._capturable or (flags.deferred and self._master_weights)
            if on_device or not flags.bad():
                for item in remaining:
                    item.finish(flags.bad() if on_device else None)
                for item in plan.items:
                    item.record_kernel_write()
                    self._versions[item.param] = item.version()
        finally:
            for item in plan.items:
                item.grad, item.requantizations = None, {}
        return flags

    def _not_released(self) -> tuple[Tensor, ...]:
        """End the units of a backward, and return the parameters that are in none of them."""
        assert self._release is not None
        if self._release.is_measuring:
            raise ConfigurationError(f"{self._name}: call step() after measure_grad_norm(), not inside")
        self._release.flush()
        params = tuple(param for param in self._states if param not in self._release.stepped)
        self._release.clip(params, self.param_groups[0].get(GRAD_NORM, 0.0))
        if self._release.max_norm:
            self._release.update_norm([*self._names], self.param_groups)
        return params

    def _check_reduced(self) -> None:
        """Refuse plain parameters of several processes, whose gradients DDP or the caller would average too late."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for param, name in self._names.items():
            if not isinstance(param, DTensor) and not process_groups.is_expert_parallel(param):
                where = f"{self._name}(release_gradients=True): {name}"
                raise ConfigurationError(f"{where} is not sharded; use fully_shard for the whole model, not DDP")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step reads it first
        if self._release is not None:
            raise ConfigurationError(f"{self._name}(release_gradients=True) has used scaled gradients; omit GradScaler")
        return False
