"""Gradient flags: which gradients are missing or bad on any rank, so that all ranks skip the same steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantshard import kernel_dispatch, private_torch
from quantshard.collectives import process_groups
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.collectives.flags import PendingFlag
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups
from quantshard.errors import ConfigurationError, NonFiniteGradientError, RankMismatchError, warn_user

DECOUPLED_GRAD = "decoupled_grad"
"""Attribute for a gradient of any floating-point dtype, which optimizers with `use_decoupled_grad` read."""

MAIN_GRAD = "main_grad"
"""Attribute for a gradient that layers add to, under the name that Megatron and TransformerEngine gave it."""

LARGEST_GRADIENT = 1e19
"""Largest gradient accepted. The square of a larger one overflows, and an infinite second moment freezes the weight."""

LARGEST_RATE = 1e30
"""Largest learning rate accepted. An update reaches about 10 learning rates, and weights near 1e38 overflow float32."""

TOO_LARGE, NOT_FINITE, WEIGHT, RATE = 1.0, 2.0, 3.0, 4.0
"""Problems of a parameter in a step, the worst last: a gradient above `LARGEST_GRADIENT`, one that is not finite, a
master that the previous update made infinite or NaN, or an invalid learning rate (a flag of the first parameter)."""


def gradient_parts(param: Tensor, decoupled: bool = True) -> list[Tensor]:
    """The tensors whose sum is a gradient: `decoupled_grad`, if wanted and set, else `grad` and `main_grad`."""
    if decoupled and (decoupled_grad := getattr(param, DECOUPLED_GRAD, None)) is not None:
        return [decoupled_grad]
    grad, main_grad = param.grad, getattr(param, MAIN_GRAD, None)
    return [part for part in (None if grad is main_grad else grad, main_grad) if part is not None]


def gradient_of(param: Tensor, decoupled: bool = True) -> Tensor | None:
    parts = gradient_parts(param, decoupled)
    return parts[0] + parts[1] if len(parts) > 1 else parts[0] if parts else None


def wrong_rates(groups: list[dict[str, Any]], count: int) -> Tensor:
    """Return float32 [count], zeros; if a learning rate on the device is invalid, the first element is `RATE`."""
    rates = torch.stack([group["lr"] for group in groups])
    bad = ~((rates >= 0) & (rates <= LARGEST_RATE)).all()
    return functional.pad((bad * RATE).view(1), (0, count))[:count]


def too_large(name: str) -> str:
    problem = f"the gradient of {name} is finite, but above {LARGEST_GRADIENT:g}, so its square overflows"
    return f"{problem}; scale the loss down, or call quantshard.optimizers.clip_grad_norm_ before the step"


def in_order(parts: Iterable[tuple[Sequence[int], Tensor]], count: int, device: torch.device) -> Tensor:
    """Return float32 [count] with the numbers of all `parts`, which are (indices, numbers) pairs, and 0 elsewhere."""
    columns = [torch.zeros((), dtype=torch.float32, device=device)] * count
    for indices, numbers in parts:
        for index, number in zip(indices, numbers.to(device).unbind(), strict=True):
            columns[index] = number
    return torch.stack(columns)


class FlagLayout:
    """The parameters of `GradientFlags`, by sharding group, and the groups of all ranks that step together."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        names, params = zip(*entries, strict=True) if (entries := list(named)) else ((), ())
        self.indices: dict[Groups, list[int]] = {}
        for index, param in enumerate(params):
            self.indices.setdefault(process_groups.sharding_group(param), []).append(index)
        self.names = [names[index] for indices in self.indices.values() for index in indices]
        self.ranks = process_groups.united(dict.fromkeys(map(process_groups.stepping_group, params)))
        self.has_experts = any(map(process_groups.is_expert_parallel, params))
        self.device = private_torch.local_tensor(params[0]).device if params else torch.device("cpu")

    def local_flags(self, grads: Sequence[Tensor | None], exceeding: Tensor | None) -> Tensor:
        """Return the flags of this rank's gradients, float32 [3, parameters]; see `GradientFlags`."""
        flags, index = torch.zeros(3, len(grads), dtype=torch.float32, device=self.device), 0
        # Filling runs on the device; a copy from the host would synchronize.
        for is_present, run in groupby([grad is not None for grad in grads]):
            end = index + len(list(run))
            flags[0 if is_present else 1, index:end].fill_(1.0)
            index = end
        if exceeding is None:
            present = {i: private_torch.local_tensor(grad) for i, grad in enumerate(grads) if grad is not None}
            if not present:
                return flags
            problems = kernel_dispatch.exceeding([*present.values()], LARGEST_GRADIENT)
            exceeding = in_order([([*present], problems)], len(grads), self.device)
        flags[2].copy_(exceeding)
        return flags


class GradientFlags:
    """For each gradient, whether any rank has it, whether any rank lacks it, and its worst problem (`TOO_LARGE`, ...).

    The constructor reduces the flags (`table`, float32 [3, parameters]) together with what is pending in `reduction`;
    only `skips`, `large_gradient` and the checks wait for the device. `exceeding`: problems of the gradients, float32
    [parameters]; computed here if None. `wrong`: other problems of the first len(wrong) parameters.
    """

    def __init__(
        self, layout: FlagLayout, grads: Sequence[Tensor | None], reduction: FlatMax, exceeding: Tensor | None = None,
        wrong: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._names = layout.names
        self._has_none = all([grad is None for grad in grads])
        self._sent: PendingFlag | None = None
        self._changed = "nothing"
        flags = layout.local_flags(grads, exceeding)
        if wrong is not None:
            flags[2, : len(wrong)] = torch.maximum(flags[2, : len(wrong)], wrong.to(flags.device))
        parts = [flags]
        if len(layout.indices) > 1:
            columns = flags.unbind(1)  # indexing by a list would copy it to the device and synchronize
            parts = [torch.stack([columns[i] for i in indices], dim=1) for indices in layout.indices.values()]
        for group, part in zip(layout.indices, parts, strict=False):  # none without parameters
            if group:
                reduction.add(part, group)
        if layout.ranks:
            reduction.reduce()
        self.table = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if len(parts) > 1 or layout.has_experts:
            # A rank outside the group of a bad gradient must skip too: add a column that summarizes all parameters.
            present, missing = self.table[0].amax(), (self.table[0] * self.table[1]).amax()
            any_parameter = torch.stack([present, missing, self.table[2].amax()]).unsqueeze(1)
            reduction.add(any_parameter, layout.ranks)
            reduction.reduce()
            self.table = torch.cat([self.table, any_parameter], dim=1)
            self._names = [*self._names, "a parameter of other ranks"]

    def joined(self, earlier: Sequence[GradientFlags]) -> GradientFlags:
        """Return the flags of all parameters of a step, of which `earlier` are parts."""
        parts = [*earlier, self]
        flags = copy(self)
        flags._changed = "only what backward had updated before" if earlier else "nothing"
        flags._names = [name for part in parts for name in part._names]
        flags._has_none = all([part._has_none for part in parts])
        device = parts[0].table.device
        flags.table = torch.cat([part.table.to(device) for part in parts], dim=1)
        flags._sent = PendingFlag(flags.bad()) if any([part._sent is not None for part in parts]) else None
        return flags

    def warn_of_no_gradient(self) -> None:
        """Warn if no parameter has a gradient. Call it from `step`, so that the warning points at its caller."""
        capturing = self.table.is_cuda and torch.cuda.is_current_stream_capturing()
        # Waits for the device only if this rank has no gradient.
        if not self._has_none or capturing or self.table[0].any():
            return
        if not self._names:
            warn_user("this optimizer has no parameter that is trained, so the step changes nothing")
        else:
            problem = f"none of this optimizer's {len(self._names)} parameters ({self._names[0]}, ...) has a gradient"
            remedy = "if they were replaced in the model, as by fully_shard, build it after"
            warn_user(f"{problem}, so the step changes nothing; {remedy}")

    def bad(self) -> Tensor:
        """Return a bool scalar on the device: a gradient is missing on some ranks only, or has a problem."""
        return (self.table[0] * self.table[1] + self.table[2]).any()

    def send(self) -> Tensor:
        """Return `bad`, and start copying it to the host, so that `skips` does not wait for work queued from now on."""
        bad = self.bad()
        self._sent = PendingFlag(bad)
        return bad

    @property
    def deferred(self) -> bool:
        """Whether `skips` would wait for the device: the copy started by `send` has not arrived."""
        return self._sent is not None and not self._sent.is_here

    def skips(self, groups: list[dict[str, Any]], most_in_a_row: int, deferred: bool = False) -> bool:
        """Return whether the step must be skipped, and count it in every group, after all checks.
        `deferred`: the step was counted as applied, and the device can be several steps ahead."""
        bad = bool(PendingFlag(self.bad()) if self._sent is None else self._sent)
        if not deferred:
            MISMATCHES.settle()  # does not wait: the device has already reached this point
        if not bad:
            for group in groups:
                group["skipped_in_a_row"] = 0
            return False
        if deferred:
            for group in groups:
                group["step"] -= 1
        self.check_missing()
        for group in groups:
            group["skipped_steps"] += 1
            group["skipped_in_a_row"] += 1
        self.check_skipped(groups, most_in_a_row)
        which = "the step before this one was" if deferred else "this step is"
        if name := self.large_gradient():
            warn_user(f"{too_large(name)}; {which} skipped")
        elif groups[0]["skipped_in_a_row"] == 1:
            problem = f"the gradient of {self._first(self.table[2] > 0)} is infinite or NaN; {which} skipped"
            warn_user(f"{problem}, and {self._changed} changed ({most_in_a_row} in a row are an error)")
        return True

    def large_gradient(self) -> str:
        """Return the first parameter with a finite but too large gradient; "" on all ranks after a worse problem."""
        is_worst = self.table.numel() > 0 and bool(self.table[2].amax() == TOO_LARGE)
        return self._first(self.table[2]) if is_worst else ""

    def check_missing(self) -> None:
        """Raise a RankMismatchError on every rank, once, if a gradient is missing on some ranks."""
        missing = self.table[0] * self.table[1]
        if missing.any():
            name = self._first(missing)
            self.table.zero_()
            raise RankMismatchError(f"{name} has a gradient on some ranks only; use the same parameters on all")

    def check_skipped(self, groups: list[dict[str, Any]], most_in_a_row: int) -> None:
        """Raise if `most_in_a_row` steps in a row were skipped, the rate was invalid, or only a checkpoint can help."""
        in_a_row = int(groups[0]["skipped_in_a_row"])
        worst = float(self.table[2].amax()) if in_a_row > 0 and self.table.numel() else 0.0
        if worst == 0 or (in_a_row < most_in_a_row and worst < WEIGHT):
            return
        if worst == RATE:
            raise ConfigurationError(f"the last step was skipped: its learning rate was not in [0, {LARGEST_RATE:g}]")
        name = self._first(self.table[2] == worst)
        remedy = "load an older checkpoint, and lower the learning rate"
        problems = {
            TOO_LARGE: f"{in_a_row} steps in a row were skipped: {too_large(name)}",
            NOT_FINITE: f"{in_a_row} steps in a row had infinite or NaN gradients, first in {name}; {remedy}",
            WEIGHT: f"the update before this one made the master of {name} infinite or NaN; {remedy}",
        }
        raise NonFiniteGradientError(problems[worst])

    def _first(self, mask: Tensor) -> str:
        return self._names[int(mask.nonzero()[0])]
