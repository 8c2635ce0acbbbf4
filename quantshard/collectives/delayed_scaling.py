"""Delayed scaling: histories of amaxes, and the amaxes of a step until they are reduced and recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard.collectives.flat_max import FlatMax, rank_digest, was_alike
from quantshard.collectives.process_groups import Groups
from quantshard.errors import RankMismatchError


def history_amax(history: Tensor, most_recent: bool) -> Tensor:
    """The amax that a history [len], newest last, stands for: its maximum or its newest; 0 if none is recorded."""
    return history[-1].clone() if most_recent else history.max()


def history_amaxes(histories: Sequence[Tensor], most_recent: bool) -> Tensor:
    """`history_amax` of n histories on one device, float32 [n]: together where kernels run."""
    found = kernel_dispatch.past_amaxes(histories, most_recent)
    if found is not None:
        return found
    return torch.stack([history_amax(history, most_recent) for history in histories])


def record_amax_(history: Tensor, amax: Tensor) -> None:
    """Append an amax to a history [len], newest last. Zero, infinite and NaN amaxes are not recorded."""
    record_amaxes_([history], amax.view(1))


def record_amaxes_(histories: Sequence[Tensor], amaxes: Tensor) -> None:
    """Append amaxes [n], float32, to n different histories: all at once where kernels run, else by length."""
    if kernel_dispatch.record_amaxes(histories, amaxes):
        return
    keep = torch.isfinite(amaxes) & (amaxes > 0)
    alike: dict[tuple[int, torch.device], list[int]] = {}
    for index, history in enumerate(histories):
        alike.setdefault((history.numel(), history.device), []).append(index)
    for (_, device), members in alike.items():
        of_members = torch.stack([histories[index] for index in members])
        seen, kept = (x if len(alike) == 1 else x[members] for x in (amaxes.to(device), keep.to(device)))
        rolled = torch.cat([of_members[:, 1:], seen[:, None]], 1)
        recorded = torch.where(kept[:, None], rolled, of_members)
        for index, row in zip(members, recorded.unbind(), strict=True):
            histories[index].copy_(row)


class PendingAmaxes:
    """Amaxes that delayed scaling saw and has yet to record, each with its history and the group to reduce it over.

    Each has an identity that is equal on all ranks. They are reduced in the order of identities, and a digest of these
    goes with them, so that ranks that used different modules learn of it instead of mixing them up; the vector is
    padded so that most such ranks meet in one collective.
    """

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], tuple[Tensor, Tensor, Groups]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def note(self, identity: int, history: Tensor, amax: Tensor, group: Groups) -> None:
        """Note an amax (float32 scalar) for a history; a second one before `flush` is merged with the first by MAX."""
        self.note_all([identity], [history], amax.view(1), group)

    def note_all(self, identities: Sequence[int], histories: Sequence[Tensor], amaxes: Tensor, group: Groups) -> None:
        """Note amaxes [n] for n different histories, in a few launches."""
        later, earlier = [], []
        for identity, history, amax in zip(identities, histories, amaxes.detach().clone().split(1), strict=True):
            key = self._key(identity, history)
            if key in self._pending:
                later.append(amax)
                earlier.append(self._pending[key][1])
            self._pending[key] = (history, amax, group)
        if later:
            torch.ops.aten._foreach_maximum_.List(later, earlier)

    def _key(self, identity: int, history: Tensor) -> tuple[int, int]:
        """Modules that share a weight share its identity, and are told apart by their order."""
        tied = 0
        while (seen := self._pending.get((identity, tied))) is not None and seen[0] is not history:
            tied += 1
        return identity, tied

    def flush(self) -> None:
        """Reduce all of them, one collective per group, and append each to its history.

        Raises:
            RankMismatchError: on every rank, if ranks of a group saw different modules.
        """
        by_group: dict[Groups, list[tuple[int, int]]] = {}
        for identity in sorted(self._pending):
            by_group.setdefault(self._pending[identity][2], []).append(identity)
        pending, self._pending = self._pending, {}
        for group, identities in by_group.items():
            amaxes = torch.cat([pending[identity][1] for identity in identities])
            amaxes = amaxes if group is None else _reduced_alike(amaxes, identities, group)
            record_amaxes_([pending[identity][0] for identity in identities], amaxes)

    def drop(self) -> None:
        """Forget all of them."""
        self._pending.clear()


def _reduced_alike(amaxes: Tensor, identities: list[tuple[int, int]], group: Groups) -> Tensor:
    """Maxima over the group of amaxes [n] that belong to the given identities, which must be the same on all ranks."""
    flat = torch.cat([rank_digest(identities, amaxes.device), amaxes])
    reduction = FlatMax(padded=True)
    reduction.add(flat, group)
    reduction.reduce()
    if not was_alike(*flat[:2].tolist()):
        raise RankMismatchError(
            "delayed scaling: ranks used different modules between entering and leaving the outermost autocast, or in "
            "one backward, so their amaxes cannot be reduced together; use the same modules on all ranks, or give "
            "autocast(amax_reduction_group=) the ranks that do"
        )
    return flat[2:]
