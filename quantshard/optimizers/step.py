"""One parameter's part of a step: read, updated and written by itself, and measured before where ranks share blocks.

All ranks first agree, in one flat collective, on the amaxes of blocks that they share and on whether any gradient is
missing or not finite (`guards.GradientFlags`). Parameters with shared blocks are computed twice, once to measure and
once to write, so that no copy of the model is held between the two.
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
"""New values of a master, and of states by role."""


def rounded_roles(targets: Mapping[str, OptimizerState]) -> list[str]:
    """Which of a parameter's states, and it itself, are rounded stochastically.

    Small updates must add up in the master, or where there is none in the parameter; beside a master the parameter is
    that rounded to nearest.
    """
    return [role for role, state in targets.items() if state.rounds and not (role == WEIGHT and MASTER in targets)]


@dataclass(frozen=True)
class UpdateFormula:
    """What an optimizer is to a step: the `states` of a parameter and `update`, as `ElementwiseOptimizer` has them."""

    optimizer: str
    states: tuple[StateSpec, ...]
    update: Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor], Any], Update]

    @cached_property
    def words(self) -> dict[str, tuple[int, bool]]:
        """Of each role: the number of its stream of random words, and whether their halves are exchanged."""
        streams = {role: at for at, role in enumerate([*(spec.role for spec in self.states), MASTER, WEIGHT])}
        drawn_by = {spec.role: spec.words_of for spec in self.states if spec.words_of is not None}
        return {role: (streams[drawn_by.get(role, role)], role in drawn_by) for role in streams}


@dataclass(frozen=True)
class GroupSettings:
    """What a step is given of a group: its number, the step (from 1), what `update` is told of it, and the decay of
    averages of its weights, where there are any."""

    number: int
    step: int | Tensor
    settings: Any
    ema_decay: float = 0.0

    @cached_property
    def share(self) -> float | Tensor:
        """Of the new values in these averages."""
        return averages.share(self.ema_decay, self.step)


class ParameterStep:
    """One parameter's part of a step: `measure`d where ranks share blocks, and finished after the reduction.

    `targets`: by role, what is written; a parameter whose master writes it is left out. `stream`: number of the random
    words of the first role, under the `seed`; those of the others follow.
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
        """The average of the parameter, if one is kept."""
        return self.targets.get(AVERAGE)

    def measure(self, reduction: FlatMax) -> None:
        """Register the amaxes of blocks that other ranks share."""
        if any(state.shares_blocks for state in self.targets.values()):
            # Without a gradient, zeros hold the place: all ranks must register the same shapes.
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
        """Write states and parameter. With `skip`, a boolean scalar, everything stays as it is where it is true."""
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
        """Without a gradient the weight stays, and its average comes nearer."""
        if self.average is None:
            return
        before = self.average.read()
        after = averages.moved(before, self.source.read(), self.group.share)
        self.average.write(after if skip is None else torch.where(skip, before, after), None)
