"""Delayed scaling: amax histories, and the amaxes of a pass until they are reduced and recorded."""

import weakref
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch, limits, private_torch
from quantshard.collectives.flags import MismatchRecord
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups, spanned, world
from quantshard.collectives.rank_checks import rank_digest, was_alike
from quantshard.errors import ConfigurationError
from quantshard.kernels import workspace
from quantshard.kernels.workspace import LaunchQueue
from quantshard.private_torch import RunningStage


def history_amax(history: Tensor, most_recent: bool) -> Tensor:
    """Return the amax of a history [len], newest last: its maximum or its newest entry, 0 if the history is empty."""
    return history[-1].clone() if most_recent else history.max()


def history_amaxes(histories: Sequence[Tensor], most_recent: bool, stride: int = 1) -> Tensor:
    """`history_amax` of n histories on one device, float32 [n]. With kernels: one launch, results `stride` apart."""
    amaxes = kernel_dispatch.past_amaxes(histories, most_recent, stride)
    if amaxes is not None:
        return amaxes
    return torch.stack([history_amax(history, most_recent) for history in histories])


def record_amax_(history: Tensor, amax: Tensor) -> None:
    """Append an amax to a history [len], newest last. Zero, infinite and NaN amaxes are not recorded."""
    record_amaxes_([history], amax.view(1))


def record_amaxes_(histories: Sequence[Tensor], amaxes: Tensor) -> None:
    """Append amaxes [n], float32, to n different histories: by one kernel, or grouped by length without kernels."""
    if kernel_dispatch.record_amaxes(histories, amaxes):
        return
    is_valid = torch.isfinite(amaxes) & (amaxes > 0)
    members_by_kind: dict[tuple[int, torch.device], list[int]] = {}
    for index, history in enumerate(histories):
        members_by_kind.setdefault((history.numel(), history.device), []).append(index)
    for (_, device), members in members_by_kind.items():
        stacked = torch.stack([histories[index] for index in members])
        new, valid = (x if len(members_by_kind) == 1 else x[members] for x in (amaxes.to(device), is_valid.to(device)))
        rolled = torch.cat([stacked[:, 1:], new[:, None]], 1)
        recorded = torch.where(valid[:, None], rolled, stacked)
        for index, row in zip(members, recorded.unbind(), strict=True):
            histories[index].copy_(row)


MISMATCHES = MismatchRecord(
    "delayed scaling: ranks used different modules in an autocast or a backward, so their amaxes cannot be reduced; "
    "use the same modules on all ranks, or pass autocast(amax_reduction_group=) the ranks that do"
)
"""Mismatches that `PendingAmaxes.flush` detected on a GPU and has not reported yet."""

_MOST_ORDERS = 64
"""Maximum number of remembered orders in which passes read histories."""


class PendingHistory(NamedTuple):
    """A history with pending amaxes of this pass (`slots`), the ranks to reduce them over, and the history's name."""

    history: Tensor
    key: Tensor
    number: int
    group: Groups
    slots: list[Tensor]


class PendingAmaxes:
    """Amaxes of one forward or backward pass under delayed scaling: past ones that the pass scales by, and new ones.

    Each new amax has a name that is equal on all ranks: the `key` of a weight, int64 [1] on the CPU, and a number below
    3. New amaxes are reduced in the order of their names, together with a digest of all names, so that ranks that used
    different modules detect it instead of mixing amaxes.
    """

    def __init__(self) -> None:
        self._noted: dict[int, PendingHistory] = {}  # by id of the history
        self._slots: dict[Hashable, Tensor] = {}
        self._free: dict[Hashable, list[Tensor]] = {}
        self._past: dict[Hashable, tuple[Tensor, Tensor, int]] = {}  # history, its amax, its count of in-place changes
        self._orders: dict[Hashable, list[weakref.ReferenceType[Tensor]]] = {}
        self._first: Hashable = None

    def __bool__(self) -> bool:
        return bool(self._noted)

    def past(self, history: Tensor, most_recent: bool, queue: LaunchQueue) -> Tensor:
        """Return `history_amax`. With kernels, one launch reads all histories that the pass will read.

        They are predicted from the last pass that began with the same history. While a CUDA graph is captured, each
        history is read separately, because the graph can be replayed without earlier launches.
        """
        cached = self._past.get((queue, most_recent, id(history)))
        if cached is not None and cached[2] == private_torch.count_in_place_changes((history,)):
            return cached[1]
        if queue[2] or not kernel_dispatch.has_kernels(history):
            return history_amax(history, most_recent)
        return self._read(history, most_recent, queue)

    def _read(self, history: Tensor, most_recent: bool, queue: LaunchQueue) -> Tensor:
        histories = [history]
        if self._first is None:
            self._first = queue, most_recent, id(history)
            predicted = [candidate() for candidate in self._orders.get(self._first, ())]
            if predicted and predicted[0] is history:  # not another tensor with the same id
                histories = [item for item in predicted if item is not None and item.device == history.device]
        if len(histories) > 1:
            amaxes = history_amaxes(histories, most_recent, workspace.APART).unbind()
        else:
            amaxes = (history_amax(history, most_recent),)
        for past, amax in zip(histories, amaxes, strict=True):
            changes = private_torch.count_in_place_changes((past,))
            self._past[queue, most_recent, id(past)] = past, amax, changes
        return amaxes[0]

    def slot(
        self, keys: Sequence[Tensor], number: int, histories: Sequence[Tensor], group: Groups, queue: LaunchQueue
    ) -> Tensor:
        """Return the slot in which the kernels of a queue record a tensor's amax for several different histories.
        It is a float32 scalar, 0 until the first amax of a pass; kernels update it by an atomic maximum of its bits."""
        name = queue, *map(id, histories)
        slot = self._slots.get(name)
        if slot is None:
            if not self._free.get(queue):
                self._free[queue] = workspace.zero_scalars(queue[0])
            slot = self._slots[name] = self._free[queue].pop()
            self._add(keys, number, histories, [slot] * len(histories), group)
            if queue[2]:
                self._keep(slot, histories)
        return slot

    def _keep(self, slot: Tensor, histories: Sequence[Tensor]) -> None:
        """Keep the slot alive as long as the histories, without which no captured CUDA graph is replayed."""
        for history in histories:
            private_torch.keep_with(history, slot)

    def note_all(
        self, keys: Sequence[Tensor], number: int, histories: Sequence[Tensor], amaxes: Tensor, group: Groups
    ) -> None:
        """Record amaxes [n] for n different histories. Takes ownership of the tensor."""
        self._add(keys, number, histories, amaxes.detach().unbind(), group)

    def _add(
        self, keys: Sequence[Tensor], number: int, histories: Sequence[Tensor], slots: Sequence[Tensor], group: Groups
    ) -> None:
        for key, history, slot in zip(keys, histories, slots, strict=True):
            pending = self._noted.get(id(history))
            if pending is None:
                self._noted[id(history)] = PendingHistory(history, key, number, group, [slot])
            else:
                pending.slots.append(slot)

    def histories(self) -> list[PendingHistory]:
        return list(self._noted.values())

    def flush(self) -> None:
        """Reduce all pending amaxes with one collective per group, and append each to its history.

        If ranks disagree, nothing is recorded; on a GPU the next flush, optimizer step or save raises (`MISMATCHES`).
        """
        by_group: dict[Groups, list[PendingHistory]] = {}
        for pending in self.histories():
            by_group.setdefault(pending.group, []).append(pending)
        self._end(is_whole=True)
        MISMATCHES.check()
        for group, members in by_group.items():
            names: list[int] = []
            if group is not None:
                names, members = _in_order(members)
            amaxes = torch.stack(merged_slots([pending.slots for pending in members]))
            if group is not None:
                reduction, flat = FlatMax(padded=True), torch.cat([rank_digest(names, amaxes.device), amaxes])
                reduction.add(flat, group)
                reduction.reduce()
                agree = was_alike(flat[0], flat[1])
                MISMATCHES.add(~agree)
                amaxes = torch.where(agree, flat[2:], 0.0)  # zeros are never recorded
            record_amaxes_([pending.history for pending in members], amaxes)
        MISMATCHES.check(waits=False)

    def drop(self) -> None:
        self._end(is_whole=False)

    def _end(self, is_whole: bool) -> None:
        if is_whole and self._first is not None:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            by_id = {id(history): history for history, _, _ in self._past.values()}
            self._orders[self._first] = [weakref.ref(history) for history in by_id.values()]
        self._first = None
        for part in (self._noted, self._slots, self._free, self._past):
            part.clear()


def merged_slots(noted: list[list[Tensor]]) -> list[Tensor]:
    """Return the maximum of each history's slots. Out of place, because several histories can share a slot."""
    while several := [slots for slots in noted if len(slots) > 1]:
        pairs = [slots.pop() for slots in several], [slots.pop() for slots in several]
        for slots, amax in zip(several, torch.ops.aten._foreach_maximum.List(*pairs), strict=True):
            slots.append(amax)
    return [slot for (slot,) in noted]


def _in_order(members: Sequence[PendingHistory]) -> tuple[list[int], list[PendingHistory]]:
    """Sort pending histories by their names, and return the names too; members of one name stay in order."""
    keys = torch.cat([member.key for member in members]).tolist()
    names = [key * 3 + member.number for key, member in zip(keys, members, strict=True)]
    order = sorted(range(len(names)), key=names.__getitem__)
    return [names[index] for index in order], [members[index] for index in order]


def check_same_stage(group: Groups, stage: RunningStage) -> None:
    """Check that amaxes are not reduced over ranks that run other stages of a pipeline, which would deadlock.

    Stages run backward once per micro-batch, at different times, so their collectives would wait for each other. A
    stage that infers shapes records no amaxes.
    """
    pipeline = world() if stage.group is None else stage.group
    if pipeline is None or stage.infers:
        return
    other_ranks = {*dist.get_process_group_ranks(pipeline)} - {dist.get_rank()}
    if any(not other_ranks.isdisjoint(dist.get_process_group_ranks(members)) for members in spanned(group)):
        raise ConfigurationError(limits.refusal("other stages", "torch.distributed.pipelining"))
