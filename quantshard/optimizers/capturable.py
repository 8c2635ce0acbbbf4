"""Steps that never synchronize with the host (`capturable`): step counts and learning rates are tensors.

Only the device knows if a step was bad. The device undoes the step, and reading the counts later raises the error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantshard.optimizers import guards
from quantshard.optimizers.step import ParameterStep

Group = dict[str, Any]

COUNTERS = ("step", "skipped_steps", "skipped_in_a_row")
"""Group entries that count steps."""


def make_tensors(group: Group, device: torch.device, rate_dtype: torch.dtype) -> None:
    """Replace a group's counts and learning rate by new tensors on `device`."""
    group["lr"] = torch.as_tensor(group["lr"], dtype=rate_dtype, device=device).clone()
    group.update({key: torch.tensor(int(group[key]), dtype=torch.int64, device=device) for key in COUNTERS})


def make_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace tensors in the groups of a state dict by numbers; a `state_dict` post hook."""
    for group in state_dict["param_groups"]:
        group.update({key: group[key].item() for key in (*COUNTERS, "lr") if isinstance(group[key], Tensor)})


def wrong_rates(groups: list[Group], count: int) -> Tensor:
    """Return float32 [count]: the first element is `guards.RATE` if a learning rate is invalid, all others are 0."""
    rates = torch.stack([group["lr"] for group in groups])
    bad = ~((rates >= 0) & (rates <= guards.LARGEST_RATE)).all()
    return functional.pad((bad * guards.RATE).view(1), (0, count))[:count]


class BadStepRecord:
    """The flags of the last bad step, kept on the device: one number per parameter that says what was wrong.

    They are read only on request after a bad step, so a normal step needs no extra launch and no synchronization.
    """

    def __init__(self) -> None:
        self._flags: guards.GradientFlags | None = None

    def keep(self, flags: guards.GradientFlags) -> None:
        """Record the flags of a bad step that the host already knows about."""
        self._flags = flags

    def large_gradient(self) -> str:
        """See `GradientFlags.large_gradient`."""
        return "" if self._flags is None else self._flags.large_gradient()

    def finish(self, left: list[ParameterStep], flags: guards.GradientFlags, groups: list[Group]) -> None:
        """Finish a step after the reduction: if it is bad, undo it on the device and count it as skipped."""
        bad, table = flags.bad(), flags.table
        if self._flags is None or self._flags.table.shape != table.shape:
            self._flags, flags.table = flags, torch.zeros_like(table)
        last_table = self._flags.table
        last_table.copy_(torch.where(bad, table, last_table))
        for item in left:
            item.finish(skip=bad)
        for group in groups:
            skipped = bad.to(group["step"].device).to(torch.int64)
            group["step"].add_(1 - skipped)
            group["skipped_steps"].add_(skipped)
            group["skipped_in_a_row"].add_(1).mul_(skipped)

    def check(self, groups: list[Group], most_in_a_row: int) -> None:
        """Raise errors of the steps since the last good one.

        Raises:
            NonFiniteGradientError, RankMismatchError, ConfigurationError: see `GradientFlags`.
        """
        if self._flags is not None:
            self._flags.check_missing()
            self._flags.check_skipped(groups, most_in_a_row)
