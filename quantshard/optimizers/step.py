"""One parameter's part of a step: reads, updates and writes its states.

All ranks first agree, in one flat collective, on the amaxes of shared blocks and on whether any gradient is missing or
not finite (`guards.GradientFlags`). Parameters with shared blocks are computed twice, once to measure and once to
write, so that no copy of the model is needed in between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics import adam
from quantshard.numerics.states import AVERAGE, MASTER, WEIGHT, StateSpec
from quantshard.optimizers.guards import FlagLayout
from quantshard.optimizers.rounding import StateDraw
from quantshard.optimizers.state import OptimizerState
from quantshard.tensor.requantize import Requantization
from quantshard.tensor.storage import DRAWS

Update = tuple[Tensor, Mapping[str, Tensor]]
"""New values of a master, and new values of its states by role."""


def rounded_roles(targets: Mapping[str, OptimizerState]) -> list[str]:
    """Return the roles (states, master or weight) that are rounded stochastically.

    Small updates must add up in the master, or in the parameter if it has no master. A parameter with a master is
    rounded to nearest.
    """
    return [role for role, state in targets.items() if state.rounds and not (role == WEIGHT and MASTER in targets)]


@dataclass(frozen=True)
class UpdateFormula:
    """The update rule of a group: `states` and `update` of its `ElementwiseOptimizer`."""

    optimizer: str
    states: tuple[StateSpec, ...]
    update: Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor], Any], Update]

    @cached_property
    def words(self) -> dict[str, tuple[int, bool]]:
        """Stream number of each role's random bits, and whether the two halves of each word are swapped."""
        streams = {role: number for number, role in enumerate([*(spec.role for spec in self.states), MASTER, WEIGHT])}
        shared_with = {spec.role: spec.words_of for spec in self.states if spec.words_of is not None}
        return {role: (streams[shared_with.get(role, role)], role in shared_with) for role in streams}


@dataclass(frozen=True)
class GroupSettings:
    """A group's settings in one step.

    `number`: index of the group. `step`: step number, from 1. `settings`: argument of `update`. `ema_decay`: decay of
    the averages, 0 if there are none.
    """

    number: int
    step: int | Tensor
    settings: Any
    ema_decay: float = 0.0

    @cached_property
    def share(self) -> float | Tensor:
        """Share of the new values in the averages."""
        return adam.average_share(self.ema_decay, self.step)


class ParameterStep:
    """One parameter's part of a step: call `begin` and `measure`, run the reduction, then call `finish`.

    Args:
        param: the parameter.
        states: its states by role.
        weight: the parameter as a state.
        number: index of its group.
        formula: the update rule.
        stream: stream number of the first role's random bits; the other roles follow.

    Attributes:
        source: the state that the formula reads as master: a master, or the weight.
        targets: the states to write, by role, including the weight unless its master writes it.
        local: this rank's tensor of the parameter.
    """

    def __init__(
        self,
        param: Tensor,
        states: Mapping[str, OptimizerState],
        weight: OptimizerState,
        number: int,
        formula: UpdateFormula,
        stream: int,
    ) -> None:
        self.param, self.local = param, private_torch.local_tensor(param)
        self.number, self.formula, self.stream = number, formula, stream
        self.states, self.weight, self.source = states, weight, states.get(MASTER, weight)
        self.targets = dict(states)
        if not self.source.writes_weight:
            self.targets[WEIGHT] = weight
        self.storage = weight.storage
        self.has_draws = self.storage is not None and self.source is weight
        self.grad: Tensor | None = None
        self.begun: dict[str, Requantization | None] = {}

    @property
    def is_quantized(self) -> bool:
        """Whether the parameter is quantized."""
        return self.storage is not None

    @property
    def depends_on_dtype(self) -> bool:
        """Whether the master holds only the bits that a plain parameter of its dtype lacks."""
        return self.storage is None and self.source.writes_weight

    def version(self) -> int:
        """See `guards.weight_version`."""
        if self.storage is None:
            return private_torch.in_place_changes(self.param)
        return self.storage.seen_version()

    def written(self) -> None:
        """Record that kernels wrote the parameter."""
        torch.autograd.graph.increment_version(self.local)
        if self.storage is not None:
            self.storage.mark_written()
            if self.has_draws:
                self.storage.state[DRAWS].add_(1)

    def begin(self, grad: Tensor | None, group: GroupSettings, seed: int | None) -> None:
        """Begin a step. `seed`: of the optimizer's random bits; None if nothing is rounded stochastically."""
        self.grad = None if grad is None else private_torch.local_tensor(grad)
        self.group, self.seed, self.begun = group, seed, {}

    @property
    def average(self) -> OptimizerState | None:
        """The average of the parameter, or None if averages are off."""
        return self.targets.get(AVERAGE)

    def measure(self, reduction: FlatMax) -> None:
        """Register the amaxes of blocks shared with other ranks."""
        if any(state.shares_blocks for state in self.targets.values()):
            # All ranks must register the same shapes, so a missing gradient counts as zeros.
            self._begin(self._new_values(), reduction)

    def _draws(self) -> dict[str, StateDraw]:
        if self.seed is None:
            return {}
        return {role: self._draw(self.seed, role) for role in rounded_roles(self.targets)}

    def _draw(self, seed: int, role: str) -> StateDraw:
        number, swapped = self.formula.words[role]
        return StateDraw(seed, self.group.step, self.stream + number, swapped)

    def _new_values(self) -> dict[str, Tensor]:
        master = self.source.read()
        grad = torch.zeros_like(master) if self.grad is None else self.grad.float()
        states = {spec.role: self.targets[spec.role].read() for spec in self.formula.states}
        master, updated = self.formula.update(self.param, grad, master, states, self.group.settings)
        if updated.keys() != states.keys():
            raise ConfigurationError(
                f"{self.formula.optimizer}.update returned the states {sorted(updated)}; `states` declares "
                f"{sorted(states)}"
            )
        new = {role: updated.get(role, master) for role in self.targets}
        if self.average is not None:
            new[AVERAGE] = adam.moved_average(self.average.read(), master, self.group.share)
        return new

    def _begin(self, values: dict[str, Tensor], reduction: FlatMax) -> None:
        self.begun = {role: state.begin(values[role], reduction) for role, state in self.targets.items()}

    def finish(self, skip: Tensor | None = None) -> None:
        """Write states and parameter. Where `skip` (a bool scalar tensor) is true, nothing changes."""
        if self.grad is None:
            self._move_average(skip)
            return
        live = [tensor for state in self.targets.values() for tensor in state.live()]
        before = [] if skip is None else [tensor.clone() for tensor in live]
        values = self._new_values()
        if not self.begun:
            self._begin(values, FlatMax())
        draws = self._draws()
        for role, state in self.targets.items():
            state.write(values[role], self.begun[role], draws.get(role))
        if skip is not None:
            for tensor, old in zip(live, before, strict=True):
                tensor.copy_(torch.where(skip.to(old.device), old, tensor))

    def _move_average(self, skip: Tensor | None) -> None:
        """Update the average of a parameter without a gradient: the weight stays, the average approaches it."""
        if self.average is None:
            return
        before = self.average.read()
        after = adam.moved_average(before, self.source.read(), self.group.share)
        self.average.write(after if skip is None else torch.where(skip, before, after), None)


@dataclass(frozen=True)
class StepPlan:
    """What all steps of an optimizer share, until a state or a local tensor of a parameter is replaced.

    `items`: the parameters with states. `frozen`: those without. `flags`: the names and ranks of `items`.
    """

    items: list[ParameterStep]
    frozen: list[Tensor]
    flags: FlagLayout

    def release_gradients(self) -> None:
        """Drop the references to gradients and new values of a step."""
        for item in self.items:
            item.grad, item.begun = None, {}

    def is_current(self) -> bool:
        """Return whether all parameters still have their local tensors and storages."""
        locals_now = [*map(private_torch.local_tensor, [item.param for item in self.items])]
        storages_now = [getattr(local, "quantized_storage", None) for local in locals_now]
        return all(map(operator.is_, locals_now, [item.local for item in self.items])) and all(
            map(operator.is_, storages_now, [item.storage for item in self.items])
        )
