"""One parameter's part of a step: read, updated and written by itself, and measured before where ranks share blocks.

All ranks first agree, in one flat collective, on the amaxes of blocks that they share and on whether any gradient is
missing or not finite (`guards.GradientFlags`). Parameters with shared blocks are computed twice, once to measure and
once to write, so that no copy of the model is held between the two.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.numerics.adam import Hyperparameters, adam
from quantshard.optimizers.rounding import StateDraw
from quantshard.optimizers.state import EXP_AVG, EXP_AVG_SQ, MASTER, ROLES, WEIGHT, OptimizerState, RemainderState
from quantshard.tensor.requantize import Requantization


def rounded_roles(targets: Mapping[str, OptimizerState]) -> list[str]:
    """Which of a parameter's states, and it itself, are rounded stochastically.

    Small updates must add up in the master, or where there is none in the parameter; beside a master the parameter is
    that rounded to nearest.
    """
    return [role for role, state in targets.items() if state.rounds and not (role == WEIGHT and MASTER in targets)]


class ParameterStep:
    """One parameter's part of a step: `measure`d where ranks share blocks, and finished after the reduction.

    `targets`: by role, what is written; a parameter whose master writes it is left out. `group`: the number of its
    group. `stream`: number of the random words of the first role, under the `seed`; those of the others follow.
    """

    def __init__(
        self,
        param: Tensor,
        grad: Tensor | None,
        states: Mapping[str, OptimizerState],
        weight: OptimizerState,
        group: int,
        hyperparameters: Hyperparameters,
        seed: int | None,
        stream: int,
    ) -> None:
        self.param = param
        self.grad = None if grad is None else private_torch.local_tensor(grad)
        self.group, self.hyperparameters = group, hyperparameters
        self.seed, self.stream = seed, stream
        self.weight, self.source = weight, states.get(MASTER, weight)
        self.targets = dict(states)
        if not isinstance(self.source, RemainderState):
            self.targets[WEIGHT] = weight
        self.bounded = states[EXP_AVG].floor > states[EXP_AVG_SQ].floor
        self.begun: dict[str, Requantization | None] = {}

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
        """The moments share their words, which take a good part of a step's time."""
        swapped = role == EXP_AVG_SQ
        stream = self.stream + ROLES.index(EXP_AVG if swapped else role)
        return StateDraw(seed, self.hyperparameters.step, stream, swapped)

    def _new_values(self) -> dict[str, Tensor]:
        master = self.source.read()
        grad = torch.zeros_like(master) if self.grad is None else self.grad
        moments = (self.targets[EXP_AVG].read(), self.targets[EXP_AVG_SQ].read())
        updated = adam(grad, master, *moments, self.hyperparameters, self.bounded)
        by_role = {EXP_AVG: updated.exp_avg, EXP_AVG_SQ: updated.exp_avg_sq}
        return {role: by_role.get(role, updated.master) for role in self.targets}

    def _begin(self, values: dict[str, Tensor], reduction: FlatMax) -> None:
        self.begun = {role: state.begin(values[role], reduction) for role, state in self.targets.items()}

    def finish(self, skip: Tensor | None = None) -> None:
        """Write states and parameter. With `skip`, a boolean scalar, everything stays as it is where it is true."""
        if self.grad is None:
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
                tensor.copy_(torch.where(skip, old, tensor))
