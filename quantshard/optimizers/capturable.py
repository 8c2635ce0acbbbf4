"""Steps from which nothing is read back (`capturable`): counts and learning rates are tensors.

What is wrong with a step is then known to the device alone: the step is undone there, and said later, when somebody
reads the counts.
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
"""What a group counts."""


def make_tensors(group: Group, device: torch.device, rate_dtype: torch.dtype) -> None:
    """Put a group's counts and learning rate into tensors of its own."""
    group["lr"] = torch.as_tensor(group["lr"], dtype=rate_dtype, device=device).clone()
    group.update({key: torch.tensor(int(group[key]), dtype=torch.int64, device=device) for key in COUNTERS})


def make_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Read the entries of groups that are tensors in the optimizer, as a hook after `state_dict`."""
    for group in state_dict["param_groups"]:
        group.update({key: group[key].item() for key in (*COUNTERS, "lr") if isinstance(group[key], Tensor)})


def wrong_rates(groups: list[Group], count: int) -> Tensor:
    """Float32 [count], `guards.RATE` in the first if a learning rate makes no step."""
    rates = torch.stack([group["lr"] for group in groups])
    bad = ~((rates >= 0) & (rates <= guards.LARGEST_RATE)).all()
    return functional.pad((bad * guards.RATE).view(1), (0, count))[:count]


class BadStepRecord:
    """The flags of the last bad step. They say which it was, too large or not finite, in one number of a parameter, on
    the device; it is read where somebody asks, after a bad step, and a step makes no launch and waits for nothing
    more."""

    def __init__(self) -> None:
        self._flags: guards.GradientFlags | None = None

    def keep(self, flags: guards.GradientFlags) -> None:
        """The same of a step that the host has found to be bad."""
        self._flags = flags

    def large_gradient(self) -> str:
        """As of the flags."""
        return "" if self._flags is None else self._flags.large_gradient()

    def finish(self, left: list[ParameterStep], flags: guards.GradientFlags, groups: list[Group]) -> None:
        """What a step does after the reduction: a bad step is undone, not left out."""
        bad, table = flags.bad(), flags.table
        if self._flags is None or self._flags.table.shape != table.shape:
            self._flags, flags.table = flags, torch.zeros_like(table)
        remembered = self._flags.table
        remembered.copy_(torch.where(bad, table, remembered))
        for item in left:
            item.finish(skip=bad)
        for group in groups:
            skipped = bad.to(group["step"].device).to(torch.int64)
            group["step"].add_(1 - skipped)
            group["skipped_steps"].add_(skipped)
            group["skipped_in_a_row"].add_(1).mul_(skipped)

    def check(self, groups: list[Group], most_in_a_row: int) -> None:
        """Raise what the steps since the last good one could not.

        Raises:
            NonFiniteGradientError, RankMismatchError, ConfigurationError: see `GradientFlags`.
        """
        if self._flags is not None:
            self._flags.check_missing()
            self._flags.check_skipped(groups, most_in_a_row)
