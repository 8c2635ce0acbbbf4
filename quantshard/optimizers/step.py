"""One parameter's part of a step: reads, updates and writes its states.

All ranks first agree, in one flat collective, on the amaxes of shared blocks and on whether any gradient is missing or
not finite (`guards.GradientFlags`). Parameters with shared blocks are computed twice, once to measure and once to
write, so that no copy of the model is needed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics import averages
from quantshard.numerics.states import AVERAGE, MASTER, WEIGHT, StateSpec
from quantshard.optimizers.rounding import StateDraw
from quantshard.optimizers.state import OptimizerState
from quantshard.tensor.requantize import Requantization

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
        return averages.share(self.ema_decay, self.step)


class ParameterStep:
    """One parameter's part of a step: call `measure` first, run the reduction, then call `finish`.

    `targets`: the states to write, by role, including the weight unless its master writes it. `stream`: stream number
    of the first role's random bits under `seed`; the other roles follow.
    """

    def __init__(
        self,
        param: Tensor,
        grad: Tensor | None,
        states: Mapping[str, OptimizerState],
        weight: OptimizerState,
        group: GroupSettings,
        formula: UpdateFormula,
        seed: int | None,
        stream: int,
    ) -> None:
        self.param = param
        self.grad = None if grad is None else private_torch.local_tensor(grad)
        self.group, self.formula = group, formula
        self.seed, self.stream = seed, stream
        self.weight, self.source = weight, states.get(MASTER, weight)
        self.targets = dict(states)
        if not self.source.writes_weight:
            self.targets[WEIGHT] = weight
        self.begun: dict[str, Requantization | None] = {}

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
            new[AVERAGE] = averages.moved(self.average.read(), master, self.group.share)
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
        after = averages.moved(before, self.source.read(), self.group.share)
        self.average.write(after if skip is None else torch.where(skip, before, after), None)
