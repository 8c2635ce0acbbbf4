"""Optimizers whose update is an elementwise formula: everything but the formula.

`FusedAdam` and `Lion` are examples; docs/optimizers.md writes another one in a few lines.

In a step all ranks first agree, in one flat collective, on the amaxes of shared blocks and on whether any gradient is
missing or not finite (`guards.GradientFlags`). Parameters with shared blocks are computed twice, once to measure and
once to write, so that no copy of the model is needed in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics import adam
from quantshard.numerics.states import AVERAGE, EMA_DECAY, MASTER, WEIGHT, StateSpec
from quantshard.optimizers.base import check_alike
from quantshard.optimizers.guards import DECOUPLED_GRAD, FlagLayout, GradientFlags, wrong_rates
from quantshard.optimizers.masters import MasterOptimizer
from quantshard.optimizers.state import OptimizerState, StateDraw, rounded_roles
from quantshard.tensor.parameter_state import RNG_DRAWS
from quantshard.tensor.requantize import Requantization

Update = tuple[Tensor, Mapping[str, Tensor]]
"""New values of a master, and new values of its states by role."""


@dataclass(frozen=True)
class GroupSettings:
    """A group's settings in one step.

    `step`: step number, from 1. `settings`: argument of `update`. `ema_decay`: decay of the averages, 0 if there are
    none.
    """

    step: int | Tensor
    settings: Any
    ema_decay: float = 0.0

    @cached_property
    def average_share(self) -> float | Tensor:
        """Share of the new values in the averages."""
        return adam.average_share(self.ema_decay, self.step)


class ParameterStep:
    """One parameter's part of a step: set the inputs, call `measure`, run the reduction, then call `finish`.

    Args:
        states: the parameter's states by role, including the parameter itself as `WEIGHT`.
        specs: the states that `update` reads and returns.
        stream: stream number of the first role's random bits; the other roles follow.

    Attributes:
        source: the state that the formula reads as master: a master, or the weight.
        targets: the states to write, by role, including the weight unless its master writes it.
        local: this rank's tensor of the parameter.
        streams: stream number of each role's random bits, and whether the two halves of each number are swapped.
        grad, group, seed: inputs of a step. Without a seed nothing is rounded stochastically.
        in_kernels: whether kernels do the present step.
    """

    def __init__(
        self,
        param: Tensor,
        states: Mapping[str, OptimizerState],
        specs: tuple[StateSpec, ...],
        optimizer: ElementwiseOptimizer,
        group_index: int,
        stream: int,
    ) -> None:
        self.param, self.local, self.group_index = param, private_torch.local_tensor(param), group_index
        self.specs, self.optimizer, self.stream = specs, optimizer, stream
        self.weight, self.source = states[WEIGHT], states.get(MASTER, states[WEIGHT])
        self.targets = {role: state for role, state in states.items() if role != WEIGHT}
        if not self.source.writes_weight:
            self.targets[WEIGHT] = self.weight
        roles = [*(spec.role for spec in specs), MASTER, WEIGHT]
        shared_with = {spec.role: spec.words_of for spec in specs if spec.words_of is not None}
        self.streams = {
            role: (stream + roles.index(shared_with.get(role, role)), role in shared_with) for role in roles
        }
        self.storage = self.weight.storage
        self.depends_on_dtype = self.source.writes_weight and self.storage is None  # holds what its dtype lacks
        self.has_draws = self.storage is not None and self.source is self.weight
        self.grad: Tensor | None = None
        self.group: GroupSettings
        self.seed: int | None = None
        self.in_kernels = False
        self.requantizations: dict[str, Requantization | None] = {}

    def version(self) -> int:
        """See `base.weight_version`."""
        if self.storage is None:
            return private_torch.in_place_changes(self.param)
        return self.storage.seen_version()

    def record_kernel_write(self) -> None:
        """Record that kernels wrote the parameter, if they did."""
        if self.grad is None or not self.in_kernels:
            return
        torch.autograd.graph.increment_version(self.local)
        if self.storage is not None:
            self.storage.mark_written()
            if self.has_draws:
                self.storage.state[RNG_DRAWS].add_(1)

    def measure(self, reduction: FlatMax) -> None:
        """Register the amaxes of blocks shared with other ranks."""
        if any(state.shared for state in self.targets.values()):
            # All ranks must register the same shapes, so a missing gradient counts as zeros.
            self._measure(self._new_values(), reduction)

    def _measure(self, values: dict[str, Tensor], reduction: FlatMax) -> None:
        self.requantizations = {role: state.measure(values[role], reduction) for role, state in self.targets.items()}

    def _new_values(self) -> dict[str, Tensor]:
        master = self.source.read()
        grad = torch.zeros_like(master) if self.grad is None else self.grad.float()
        states = {spec.role: self.targets[spec.role].read() for spec in self.specs}
        master, updated = self.optimizer.update(self.param, grad, master, states, self.group.settings)
        if updated.keys() != states.keys():
            raise ConfigurationError(
                f"{type(self.optimizer).__name__}.update returned the states {sorted(updated)}; `states` declares "
                f"{sorted(states)}"
            )
        new = {role: updated.get(role, master) for role in self.targets}
        if AVERAGE in self.targets:
            new[AVERAGE] = adam.moved_average(self.targets[AVERAGE].read(), master, self.group.average_share)
        return new

    def finish(self, skip: Tensor | None = None) -> None:
        """Write states and parameter. Where `skip` (a bool scalar tensor) is true, nothing changes."""
        if self.grad is None:
            self._move_average(skip)
            return
        live = [tensor for state in self.targets.values() for tensor in state.live()]
        before = [] if skip is None else [tensor.clone() for tensor in live]
        values = self._new_values()
        if not self.requantizations:
            self._measure(values, FlatMax())
        rounded = rounded_roles(self.targets)
        for role, state in self.targets.items():
            draw = None
            if self.seed is not None and role in rounded:
                draw = StateDraw(self.seed, self.group.step, *self.streams[role])
            state.write(values[role], self.requantizations[role], draw)
        if skip is not None:
            for tensor, old in zip(live, before, strict=True):
                tensor.copy_(torch.where(skip.to(old.device), old, tensor))

    def _move_average(self, skip: Tensor | None) -> None:
        """Update the average of a parameter without a gradient: the weight stays, the average approaches it."""
        if AVERAGE in self.targets:
            before = self.targets[AVERAGE].read()
            after = adam.moved_average(before, self.source.read(), self.group.average_share)
            self.targets[AVERAGE].write(after if skip is None else torch.where(skip, before, after), None)


class StepPlan(NamedTuple):
    """The parameters of an optimizer's steps, with their names and ranks; made again if a state, or a local tensor of a
    parameter, is replaced."""

    items: list[ParameterStep]
    flags: FlagLayout

    def is_current(self) -> bool:
        """Return whether all parameters still have their local tensors and storages."""
        for item in self.items:
            local = private_torch.local_tensor(item.param)
            if local is not item.local or getattr(local, "quantized_storage", None) is not item.storage:
                return False
        return True


class ElementwiseOptimizer(MasterOptimizer, ABC):
    """Base of optimizers for models with quantized weights whose update is an elementwise formula.

    A subclass declares its `states` and implements the formula as `update`. Gradient descent with momentum is

        class Momentum(ElementwiseOptimizer):
            states = (StateSpec("momentum_buffer"),)

            def update(self, param, grad, master, states, settings):
                momentum = settings["momentum"] * states["momentum_buffer"] + grad
                return master - settings["lr"] * momentum, {"momentum_buffer": momentum}

        optimizer = Momentum(model.parameters(), {"lr": 0.1, "momentum": 0.9})

    The base class provides masters, states in 32, 16 or 8 bits with stochastic rounding, skipped steps, and state dicts
    that load on any number of ranks, all as in `FusedAdam`. Results are bitwise the same on any number of ranks. A
    formula sees one element at a time. For norms of whole tensors (LAMB) or matrix products use `MasterWeights`.

    Args:
        params: parameters, (name, parameter) pairs or groups, as in `FusedAdam`.
        defaults: group entries for groups that do not set them; must include `lr`.
        state_dtypes: dtype of each state, by role: `torch.float32` (default), `torch.bfloat16`, `torch.float16` (with a
            power-of-two scale per 128 elements of a row) or `torch.uint8` (FP8 with the same scales: E4M3, or UE5M3 for
            nonnegative states). Only 2-D parameters have scaled states; other parameters use float32 instead.
        capturable: keep lr and step counts in tensors on the parameters' device and never synchronize in `step`. The
            formula must not synchronize either.
        master_weights: False keeps no masters: weights are read, updated and rounded to their own format.
        master_weight_dtype: float32, float16 or bfloat16; parameters with at least this precision have no master.
        use_decoupled_grad, store_param_remainders, max_skipped_in_a_row, ema_decay: see `FusedAdam`.
    """

    @abstractmethod
    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Any
    ) -> Update:
        """Compute the new values of the master and of all `states`, by role.

        `grad`, `master`, the states and the results are float32 with the shape of the parameter's local shard, which
        can be empty. Each element of the results must depend on the same element of the arguments only, or results
        depend on the mesh. Must not modify its arguments, and can be called twice in a step.

        Args:
            param: the parameter, as an identity only; its values are in `master`.
            grad: gradient of the parameter.
            master: values to train: the master's, or the parameter's if it has no master.
            states: values of the states, by role.
            settings: result of `settings` for the parameter's group.
        """

    def settings(self, group: dict[str, Any]) -> Any:
        """Return the settings that `update` gets for a group: its entries, with the number of this step as `step`.

        Called once per step. `step` counts from 1. `step` and `lr` are tensors if `capturable`.
        """
        return {**group, "step": group["step"] + 1}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: None = None) -> Any:  # type: ignore[override]
        """Take one optimizer step, and return the result of `closure`. A collective call where parameters are sharded.

        `grad_scaler` must be None: call `grad_scaler.unscale_(optimizer)` before, and `grad_scaler.step(optimizer)`.

        On a GPU, optimizers with kernels and masters do not wait. If gradients were bad, the device skips the step, and
        the next step counts it and raises; reading `skipped_steps` or a state dict counts it earlier. Until then `step`
        in a group includes the skipped step.

        Raises a RankMismatchError if a parameter has a gradient on some ranks only, and a NonFiniteGradientError if too
        many consecutive steps were skipped, on a GPU one step later.
        """
        if grad_scaler is not None:
            raise ConfigurationError(
                f"{self._name}.step(grad_scaler=...) is not supported; call grad_scaler.step(optimizer) instead"
            )
        self._adopt_replaced_parameters()
        self._raise_late_error()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [self._group_settings(index, group) for index, group in enumerate(self.param_groups)]
        plan = self._current_plan()
        try:
            self._take_gradients(plan, groups)
            flags, remaining = self._start_updates(plan)
            flags.warn_of_no_gradient()
            if self._finish_or_skip(flags, remaining):
                for item in plan.items:
                    item.record_kernel_write()
                    self._versions[item.param] = item.version()
        finally:
            for item in plan.items:
                item.grad, item.requantizations = None, {}  # frees their memory
        return loss

    def _group_settings(self, index: int, group: dict[str, Any]) -> GroupSettings:
        self.check_group(f"{self._name}: param_groups[{index}]", group)
        if self._capturable and not isinstance(group["lr"], Tensor):
            raise ConfigurationError(
                f"{self._name}: param_groups[{index}]: lr={group['lr']!r} has replaced the tensor that "
                f"capturable=True reads; use group['lr'].fill_({group['lr']!r})"
            )
        return GroupSettings(group["step"] + 1, self.settings(group), float(group.get(EMA_DECAY, 0.0)))

    def _current_plan(self) -> StepPlan:
        plan = self._plan
        if plan is None:
            self._warn_of_replaced_parameters()
        if plan is None or not plan.is_current():
            # One stream of random bits for each state, the master and the weight.
            streams = {param: index * (len(self.states) + 2) for index, param in enumerate(self._names)}
            items = [
                ParameterStep(param, self._states[param], self.group_states(group), self, group_index, streams[param])
                for group_index, group in enumerate(self.param_groups)
                for param in group["params"]
                if param in self._states
            ]
            self._plan = StepPlan(items, FlagLayout((self._names[item.param], item.param) for item in items))
        return self._plan

    def _take_gradients(self, plan: StepPlan, groups: Sequence[GroupSettings]) -> None:
        """Give each parameter's step its gradient, after checking that only this optimizer changed the parameter."""
        attribute = DECOUPLED_GRAD if self._use_decoupled_grad else "grad"
        seed = self._seed
        for param in self._names:
            if param not in self._states and getattr(param, attribute, None) is not None:
                self._raise_for_frozen(param)
        for item in plan.items:
            param = item.param
            grad: Tensor | None = getattr(param, attribute, None)
            if grad is not None:
                check_alike(param, grad, self._names[param], "gradient" if attribute == "grad" else attribute)
            has_master = item.source is not item.weight
            # Without a master the parameter could need one in another dtype.
            depends_on_dtype = item.depends_on_dtype or (self._master_weights and not has_master)
            if self._is_overwritten(param, grad, item.version(), has_master, depends_on_dtype):
                item.source.adopt()
            item.grad = None if grad is None else private_torch.local_tensor(grad)
            item.group, item.seed = groups[item.group_index], seed
            item.in_kernels, item.requantizations = False, {}

    def _start_updates(self, plan: StepPlan) -> tuple[GradientFlags, list[ParameterStep]]:
        """Return the gradient flags of all ranks, and the measured parameter steps that are still to be finished.

        A subclass with kernels overrides this and launches its part of the step, which does nothing if a gradient is
        bad.
        """
        reduction = FlatMax()
        for item in plan.items:
            item.measure(reduction)
        return self._reduce_flags(plan, reduction), plan.items

    def _reduce_flags(self, plan: StepPlan, reduction: FlatMax, exceeding: Tensor | None = None) -> GradientFlags:
        """Return the gradient flags of all ranks, reduced together with what is pending in `reduction`."""
        rate_flags = wrong_rates(self.param_groups, len(plan.items)) if self._capturable else None
        return GradientFlags(plan.flags, [item.grad for item in plan.items], reduction, exceeding, rate_flags)

    def _finish_or_skip(self, flags: GradientFlags, remaining: list[ParameterStep]) -> bool:
        """Finish the updates that no kernel has written, unless a gradient is bad. Return False if the host skips the
        step.

        When the host learns of a bad gradient depends:

        - `capturable`: never. The device undoes the step and counts it.
        - deferred: in the next step. The device undoes the step, and until then the host counts it as applied.
        - otherwise: now. A weight without a master counts its random draws on the host, in state that can be saved
          before the flags are read; so without masters all ranks wait.
        """
        if self._capturable:
            bad = flags.bad()
            for item in remaining:
                item.finish(bad)
            self._count_on_device(bad, flags)
            return True
        deferred = flags.deferred and self._master_weights
        if not deferred and self._skips(flags):
            return False
        for item in remaining:
            item.finish(flags.bad() if deferred else None)
        for group in self.param_groups:
            group["step"] += 1
        self._unread = flags if deferred else None
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients (and `decoupled_grad`, if used): set them to None (default) or to zero."""
        super().zero_grad(set_to_none)
        for param in self._names if self._use_decoupled_grad else ():
            grad = getattr(param, DECOUPLED_GRAD, None)
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            elif grad is not None:
                grad.detach().zero_()
