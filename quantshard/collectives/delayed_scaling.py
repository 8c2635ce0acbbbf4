"""Delayed scaling: histories of amaxes, and the amaxes of a step until they are reduced and recorded."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from functools import reduce
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, private_torch
from quantshard.collectives.flags import MismatchRecord
from quantshard.collectives.flat_max import FlatMax, rank_digest, was_alike
from quantshard.collectives.process_groups import Groups
from quantshard.kernels import workspace
from quantshard.kernels.workspace import LaunchQueue


def history_amax(history: Tensor, most_recent: bool) -> Tensor:
    """The amax that a history [len], newest last, stands for: its maximum or its newest; 0 if none is recorded."""
    return history[-1].clone() if most_recent else history.max()


def history_amaxes(histories: Sequence[Tensor], most_recent: bool, stride: int = 1) -> Tensor:
    """`history_amax` of n histories on one device, float32 [n]: together where kernels run, and `stride` apart."""
    found = kernel_dispatch.past_amaxes(histories, most_recent, stride)
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


MISMATCHES = MismatchRecord(
    "delayed scaling: ranks used different modules between entering and leaving the outermost autocast, or in one "
    "backward, so their amaxes cannot be reduced together; use the same modules on all ranks, or give "
    "autocast(amax_reduction_group=) the ranks that do"
)
"""What `PendingAmaxes.flush` found out on a GPU and has yet to say."""

_MOST_ORDERS = 64
"""So many are remembered of the orders in which passes read histories."""


class PendingHistory(NamedTuple):
    """A history whose amaxes were noted in this pass, by which name ranks know it, and where the amaxes lie."""

    history: Tensor
    key: Tensor
    number: int
    group: Groups
    slots: list[Tensor]


class FlatHistory(NamedTuple):
    """Histories whose amaxes were noted together, in tensors [histories], each time that they were; else as
    `PendingHistory`."""

    histories: Sequence[Tensor]
    keys: Sequence[Tensor]
    number: int
    group: Groups
    amaxes: list[Tensor]


class PendingAmaxes:
    """The amaxes of one pass under delayed scaling, forward or backward: those of the past, which it scales by, and
    those that it saw and has yet to record, each with its history and the group to reduce it over.

    Each of the latter has a name that is equal on all ranks: the `key` of a weight, int64 [1] on the CPU, and a number
    below 3. They are reduced in the order of names, and a digest of all goes with them, so that ranks that used
    different modules learn of it instead of mixing them up; the vector is padded so that most such ranks meet in one
    collective.
    """

    def __init__(self) -> None:
        self._noted: dict[int, PendingHistory] = {}  # by id of the history
        self._joint: dict[tuple[int, ...], FlatHistory] = {}  # by ids of the histories
        self._slots: dict[Hashable, Tensor] = {}
        self._free: dict[Hashable, list[Tensor]] = {}
        self._past: dict[Hashable, tuple[Tensor, Tensor, int]] = {}  # history, what it stands for, and changes before
        self._orders: dict[Hashable, list[weakref.ReferenceType[Tensor]]] = {}
        self._first: Hashable = None

    def __bool__(self) -> bool:
        return bool(self._noted or self._joint)

    # To scale by -----------------------------------------------------------------------------------------------------

    def past(self, history: Tensor, most_recent: bool, queue: LaunchQueue) -> Tensor:
        """`history_amax`: where kernels run, from one launch for all histories that are read in a pass.

        Which these are the last pass tells that began with the same one. A captured CUDA graph reads each by itself, as
        it may be replayed without what was captured before. `queue`: on the history's device.
        """
        known = self._past.get((queue, most_recent, id(history)))
        if known is not None and known[2] == private_torch.count_in_place_changes((history,)):
            return known[1]
        if queue[2] or not kernel_dispatch.has_kernels(history):
            return history_amax(history, most_recent)
        return self._read(history, most_recent, queue)

    def _read(self, history: Tensor, most_recent: bool, queue: LaunchQueue) -> Tensor:
        read = [history]
        if self._first is None:
            self._first = queue, most_recent, id(history)
            others = [other() for other in self._orders.get(self._first, ())]
            if others and others[0] is history:  # and not one that has got its id
                read = [other for other in others if other is not None and other.device == history.device]
        if len(read) > 1:
            amaxes = history_amaxes(read, most_recent, workspace.APART).unbind()
        else:
            amaxes = (history_amax(history, most_recent),)
        for each, amax in zip(read, amaxes, strict=True):
            changes = private_torch.count_in_place_changes((each,))
            self._past[queue, most_recent, id(each)] = each, amax, changes
        return amaxes[0]

    # To be recorded --------------------------------------------------------------------------------------------------

    def slot(
        self, keys: Sequence[Tensor], number: int, histories: Sequence[Tensor], group: Groups, queue: LaunchQueue
    ) -> Tensor:
        """Where kernels of a queue note the amax of a tensor for some different histories, by atomic maxima of bits:
        float32 scalar, zero until the first of a pass is noted."""
        name = queue, *map(id, histories)
        found = self._slots.get(name)
        if found is None:
            if not self._free.get(queue):
                self._free[queue] = workspace.zero_scalars(queue[0])
            found = self._slots[name] = self._free[queue].pop()
            self._add(keys, number, histories, [found] * len(histories), group)
            if queue[2]:
                self._keep(found, histories)
        return found

    def _keep(self, slot: Tensor, histories: Sequence[Tensor]) -> None:
        """CUDA graphs hold its address, several if they are captured within one pass: it goes with the histories,
        without which none of them is replayed."""
        for history in histories:
            private_torch.keep_with(history, slot)

    def note(self, key: Tensor, number: int, history: Tensor, amax: Tensor, group: Groups) -> None:
        """Note an amax (float32 scalar) for a history; a second one before `flush` is merged with the first by MAX."""
        slot = self.slot([key], number, [history], group, kernel_dispatch.launch_queue(amax.device))
        with torch.no_grad():
            torch.maximum(slot, amax, out=slot)

    def note_all(
        self, keys: Sequence[Tensor], number: int, histories: Sequence[Tensor], amaxes: Tensor, group: Groups
    ) -> None:
        """Note amaxes [n] for n different histories; the tensor is no longer the caller's."""
        name = tuple(map(id, histories))
        noted = self._joint.get(name)
        if noted is None:
            noted = self._joint[name] = FlatHistory(histories, keys, number, group, [])
        noted.amaxes.append(amaxes.detach())

    def _add(
        self,
        keys: Sequence[Tensor],
        number: int,
        histories: Sequence[Tensor],
        slots: Sequence[Tensor],
        group: Groups,
    ) -> None:
        for key, history, slot in zip(keys, histories, slots, strict=True):
            noted = self._noted.get(id(history))
            if noted is None:
                self._noted[id(history)] = PendingHistory(history, key, number, group, [slot])
            else:
                noted.slots.append(slot)

    def histories(self) -> list[PendingHistory]:
        """All that amaxes are noted for, one by one."""
        for each in self._joint.values():
            for amaxes in each.amaxes:
                self._add(each.keys, each.number, each.histories, amaxes.unbind(), each.group)
        self._joint.clear()
        return list(self._noted.values())

    def take_joint(self) -> list[FlatHistory]:
        """Those that were noted together and never apart, with the largest of their amaxes; `histories` has the
        others from here on."""
        ids = [*self._noted, *chain.from_iterable(self._joint)]
        if len(set(ids)) < len(ids):
            return []
        joint = [each._replace(amaxes=[reduce(torch.maximum, each.amaxes)]) for each in self._joint.values()]
        self._joint.clear()
        return joint

    # The end of a pass -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Reduce all of them, one collective per group, and append each to its history.

        It does not wait for a GPU to say whether ranks of this pass agree: if they do not, it records nothing, and the
        next flush, an optimizer's step or who saves the state (`MISMATCHES`) raises the error. For what the pass before
        found it waits, but for nothing that the GPU was given later.

        Raises:
            RankMismatchError: on every rank, if ranks of a group saw different modules, now or on a GPU in the flush
                before this one.
        """
        by_group: dict[Groups, list[PendingHistory]] = {}
        joint = self.take_joint() if all([each.group is None for each in self._joint.values()]) else []
        for each in self.histories():
            by_group.setdefault(each.group, []).append(each)
        self._end(is_whole=True)
        MISMATCHES.check()
        for several in joint:
            record_amaxes_(several.histories, several.amaxes[0])
        for group, members in by_group.items():
            identities: list[tuple[int, int]] = []
            if group is not None:
                identities, members = _in_order(members)
            amaxes = torch.stack(merged_slots([each.slots for each in members]))
            amaxes = amaxes if group is None else _reduced_alike(amaxes, identities, group)
            record_amaxes_([each.history for each in members], amaxes)
        MISMATCHES.check(waits=False)

    def drop(self) -> None:
        """Forget all of them."""
        self._end(is_whole=False)

    def _end(self, is_whole: bool) -> None:
        if is_whole and self._first is not None:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            read = {id(history): history for history, _, _ in self._past.values()}
            self._orders[self._first] = [weakref.ref(history) for history in read.values()]
        self._first = None
        for part in (self._noted, self._joint, self._slots, self._free, self._past):
            part.clear()


def merged_slots(noted: list[list[Tensor]]) -> list[Tensor]:
    """The largest of the slots of each history; not in place: several histories may have been noted in one slot."""
    while several := [slots for slots in noted if len(slots) > 1]:
        pairs = [slots.pop() for slots in several], [slots.pop() for slots in several]
        for slots, amax in zip(several, torch.ops.aten._foreach_maximum.List(*pairs), strict=True):
            slots.append(amax)
    return [slot for (slot,) in noted]


def _in_order(members: Sequence[PendingHistory]) -> tuple[list[tuple[int, int]], list[PendingHistory]]:
    """Identities, equal on all ranks, and their owners in this order. Modules that share a weight share its key, and
    are told apart by the order in which they were noted."""
    keys = torch.cat([each.key for each in members]).tolist()
    found: dict[tuple[int, int], PendingHistory] = {}
    seen: dict[int, int] = {}
    for key, each in zip(keys, members, strict=True):
        name = key * 3 + each.number
        seen[name] = tied = seen.get(name, -1) + 1
        found[name, tied] = each
    identities = sorted(found)
    return identities, [found[identity] for identity in identities]


def _reduced_alike(amaxes: Tensor, identities: list[tuple[int, int]], group: Groups) -> Tensor:
    """Maxima over the group of amaxes [n] that belong to the given identities: zeros, which are not recorded, if these
    are not the same on all ranks, which `MISMATCHES` then knows."""
    flat = torch.cat([rank_digest(identities, amaxes.device), amaxes])
    reduction = FlatMax(padded=True)
    reduction.add(flat, group)
    reduction.reduce()
    alike = was_alike(flat[0], flat[1])
    MISMATCHES.add(~alike)
    return torch.where(alike, flat[2:], 0.0)
