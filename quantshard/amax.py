"""Amax reduction: the one collective that makes sharding invisible to the numbers.

A block that straddles ranks must get one scale, so the amaxes of all blocks that ranks share are reduced (MAX) before
any code is written. `FlatMax` does it for everything that is registered in one flat collective per process group;
`Requantization` is the two halves, measure and write, of giving a weight new values around it.

Where several mesh axes shard a weight (FSDP over tensor parallelism), each component is reduced over those of them
that left its grid whole, axis by axis: one collective for each axis, whatever the components need.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch as compute, limits, private_torch, sharding
from quantshard.tensor import storage as storages
from quantshard.kernel_dispatch import RandomWords
from quantshard.errors import ConfigurationError, RankMismatchError, UnsupportedOperationError
from quantshard.tensor.storage import AMAX_HISTORY, QuantizedStorage

Group = dist.ProcessGroup | None
Groups = Group | tuple[dist.ProcessGroup, ...]
"""Whom to reduce over: a process group; the ranks that several span together, one for each mesh axis; or None or an
empty tuple, this rank alone."""

_OTHERS = "_quantshard_others"


class _SpreadGroup:
    """The ranks that hold other parameters in the place of the one whose attribute this is; not pickled with it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __reduce__(self) -> tuple[type[_SpreadGroup], tuple[()]]:
        return _SpreadGroup, ()


def sharding_group(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The ranks over which a parameter is sharded, as the process groups of its sharding axes.

    Replicating axes are left out, since replicas compute the same values.
    """
    if not isinstance(tensor, DTensor):
        return ()
    axes = [axis for axis, dim in enumerate(private_torch.cut_dims(tensor.placements)) if dim is not None]
    return private_torch.axis_groups(tensor.device_mesh, axes)


def spread_over(param: Tensor, group: dist.ProcessGroup) -> None:
    """Note that other ranks of a group hold other parameters in the place of this one, as they do other experts.

    Whoever puts another tensor in a parameter's place notes it again.
    """
    setattr(param, _OTHERS, _SpreadGroup(group))


def is_spread(param: Tensor) -> bool:
    """Whether other ranks hold other parameters in its place."""
    return _others(param) is not None


def spread_axis(module: nn.Module) -> DeviceMesh | None:
    """The axis whose ranks hold other parameters of a module in the place of these; None of most modules.

    It says so itself, since `fully_shard` puts other tensors in the place of those that it noted.
    """
    axis: DeviceMesh | None = getattr(module, "_spread_axis", None)
    return axis


def stepping_group(param: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that must take or skip a step of a parameter together: those of its mesh, and those that hold others in
    its place, since what all of them hold alike must stay so."""
    return united([private_torch.mesh_group(param), _others(param)])


def _others(param: Tensor) -> dist.ProcessGroup | None:
    found: _SpreadGroup | None = vars(param).get(_OTHERS)  # getattr costs more where there is none, which is the rule
    return None if found is None else found.group


def united(groups: Iterable[Groups]) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that several groups span together."""
    return tuple(dict.fromkeys(member for group in groups for member in _members(group)))


def including(groups: Groups, group: Group) -> Groups:
    """The ranks that `groups` span, and those of one more; it comes last, so that its ranks agree in any case."""
    if group is None:
        return groups
    ranks = set(dist.get_process_group_ranks(group))
    if any(ranks.issubset(dist.get_process_group_ranks(member)) for member in _members(groups)):
        return groups
    return (*_members(groups), group)


def shared_scales(owner: Tensor, storage: QuantizedStorage) -> dict[str, tuple[dist.ProcessGroup, ...]]:
    """The components with amaxes whose blocks several ranks hold, each with the ranks to reduce them over.

    `owner`: the parameter whose storage, or a state of which, this is.
    """
    if not isinstance(owner, DTensor):
        return {}
    dims, by_name = private_torch.cut_dims(owner.placements), storage.cell.format.by_name
    axes = {
        name: sharding.whole_axes(storage.shard, by_name[name], dims) for name in storages.scale_names(storage.cell)
    }
    groups = {name: private_torch.axis_groups(owner.device_mesh, sorted(found)) for name, found in axes.items()}
    return {name: group for name, group in groups.items() if group}


_SMALLEST = 1024  # 4 KiB cost what 4 bytes cost


@dataclass
class FlatMax:
    """Tensors to be replaced by their maxima over process groups: one flat collective per group.

    Values are float32 and not negative. They are compared as the integers that their bits spell: the order is the
    same, and NaN, which a floating-point MAX may lose, stands above infinity and survives.

    `padded`: each collective is filled up to a power of two, so that ranks that are out of step mostly meet in one of
    the same size, and can learn of it.
    """

    padded: bool = False
    _pending: list[tuple[Tensor, tuple[dist.ProcessGroup, ...]]] = field(default_factory=list)

    def add(self, tensor: Tensor, group: Groups) -> None:
        """Register a float32 tensor; it is written in place by `reduce`. Without a group it stays as it is."""
        assert tensor.dtype is torch.float32, f"FlatMax compares the bits of float32, not of {tensor.dtype}"
        if _members(group):
            self._pending.append((tensor, _members(group)))

    def reduce(self) -> None:
        """Run the collectives. Every rank of a group must have registered the same shapes in the same order, empty
        tensors too: the order of the groups, which is part of what is computed, must be the same on all ranks."""
        pending, self._pending = self._pending, []
        for group in dict.fromkeys(group for _, groups in pending for group in groups):
            self._reduce_over(group, [tensor for tensor, groups in pending if group in groups])

    def _reduce_over(self, group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
        numel = sum(tensor.numel() for tensor in tensors)
        if numel == 0:
            return
        # abs: torch's vectorized amax gives NaN with a sign bit, which would be below all numbers
        device = collective_device(group)  # parameters that FSDP2 offloaded are on the CPU
        parts = [tensor.reshape(-1).to(device) for tensor in tensors]
        if self.padded:
            parts.append(parts[0].new_zeros(max(_SMALLEST, 2 ** math.ceil(math.log2(numel))) - numel))
        flat = torch.cat(parts).abs().view(torch.int32)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        reduced = flat.view(torch.float32)[:numel].split([tensor.numel() for tensor in tensors])
        views = [part.view(tensor.shape) for tensor, part in zip(tensors, reduced, strict=True)]
        torch.ops.aten._foreach_copy_.default(tensors, views)  # a few launches for all of them


_DIGEST = 0xFFFFFF  # a float32 holds integers of 24 bits exactly


def rank_digest(identity: object, device: torch.device) -> Tensor:
    """Float32 [2], for `FlatMax`: a digest of what must be equal on all ranks, by its `repr`, and its complement."""
    found = zlib.crc32(repr(identity).encode()) & _DIGEST
    return torch.tensor([found, _DIGEST - found], dtype=torch.float32, device=device)


def was_alike(highest: float, complement: float) -> bool:
    """Whether all ranks gave the same `rank_digest`, from what MAX made of it: else the two do not add up."""
    return highest + complement == _DIGEST


def _members(group: Groups) -> tuple[dist.ProcessGroup, ...]:
    if group is None:
        return ()
    return group if isinstance(group, tuple) else (group,)


class Requantization:
    """New values for one weight, or one optimizer state: measured at construction, written by `commit`.

    Between the two, the `reduction` given must have run. The values are not kept: `commit` takes them again. It drops
    the initial values that a weight may have kept (`get_high_precision_init_val`): it no longer has them.
    """

    def __init__(
        self, storage: QuantizedStorage, values: Tensor, shared: Mapping[str, Groups], reduction: FlatMax
    ) -> None:
        """`shared`: what `shared_scales` gives for the storage."""
        self.storage = storage
        self.amaxes = storage.measure(values)
        for name, grid in self.amaxes.items():
            reduction.add(grid, shared.get(name))

    def commit(self, values: Tensor, words: RandomWords | None = None) -> None:
        """Write codes and scales; under delayed scaling with the scale of past amaxes, then record this one."""
        self.storage.high_precision = None
        history = self.storage.state.get(AMAX_HISTORY)
        if history is None:
            self.storage.write(values, self.amaxes, words)
            return
        (name,) = storages.scale_names(self.storage.cell)
        amax = self.amaxes[name]
        past = history_amax(history, self.storage.cell.scaling.most_recent)
        used = torch.where(past > 0, past, amax)  # nothing recorded yet: the weight's own amax
        self.storage.write(values, {name: used.view(1, 1)}, words)
        record_amax_(history, amax.view(()))


def requantize_(weights: Iterable[tuple[Tensor, Tensor]], *, names: Sequence[str] = (), judged: bool = False) -> None:
    """Quantize new local values into weights, with one collective per sharding axis for all of them together.

    Args:
        weights: pairs of a `QuantizedTensor`, or a DTensor of one, and its local values in high precision. All ranks
            must pass the same weights in the same order, ranks with an empty shard too.
        names: of the weights, for messages.
        judged: the caller knows that all values are finite, as an optimizer does that judged its gradients: nobody
            waits for a GPU to say so.

    Raises:
        ConfigurationError: values are infinite or NaN, which codes would hide: they saturate. It is raised on every
            rank that holds a piece of one of the weights, and nothing is written. Or values are of another shape.
        UnsupportedOperationError: a weight is a gathered copy; or a CUDA graph is being captured, and values are not
            `judged`.
    """
    reduction, bad = FlatMax(), None
    weights = [(weight, _checked_values(weight, values)) for weight, values in weights]
    if weights and not judged:
        bad = _are_bad(weights)
        reduction.add(bad, united(sharding_group(weight) for weight, _ in weights))
    begun = [
        (Requantization(storage, values, shared_scales(weight, storage), reduction), values)
        for weight, values in weights
        for storage in (_storage_of(weight),)
    ]
    reduction.reduce()
    if bad is not None:
        _check_finite(weights, bad, names)
    for requantization, values in begun:
        requantization.commit(values)
    for weight, _ in weights:
        torch.autograd.graph.increment_version(private_torch.local_tensor(weight))


def _checked_values(weight: Tensor, values: Tensor) -> Tensor:
    storage = _storage_of(weight)
    if storage.gathered:
        raise UnsupportedOperationError(
            f"{private_torch.local_tensor(weight)!r} is the copy that FSDP gathered, and what is written to it is "
            "lost; call reshard() on the FSDP-wrapped module first, and write to its sharded parameter"
        )
    if values.shape != storage.shard.shape:
        raise ConfigurationError(
            f"requantize_: the values of {private_torch.local_tensor(weight)!r} have shape {tuple(values.shape)}, not "
            f"{storage.shard.shape}"
        )
    return values


def _are_bad(weights: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Float32 [weights]: 1 where not all values are finite here."""
    if compute.is_capturing():
        raise UnsupportedOperationError(limits.refusal("captured values", private_torch.local_tensor(weights[0][0])))
    device = weights[0][1].device
    return torch.stack([1 - torch.isfinite(values).all().to(device, torch.float32) for _, values in weights])


def _check_finite(weights: Sequence[tuple[Tensor, Tensor]], bad: Tensor, names: Sequence[str]) -> None:
    for index, (at_fault, (weight, values)) in enumerate(zip(bad.tolist(), weights, strict=True)):
        if at_fault:
            name = names[index] if names else repr(private_torch.local_tensor(weight))
            told = non_finite(values, _storage_of(weight).shard.origin)
            raise ConfigurationError(
                f"requantize_: {name}: {told or 'values that other ranks hold are infinite or NaN'}; codes saturate, "
                "which would hide it, so nothing was written. Look at where the values come from"
            )


def non_finite(values: Tensor, origin: tuple[int, ...]) -> str:
    """How many of some values are infinite or NaN, and where in the whole the first is; "" if none is.

    `origin`: of the values [R, C] in the whole. It waits for a GPU.
    """
    bad = ~torch.isfinite(values)
    if not bad.any():
        return ""
    first = int(bad.flatten().to(torch.uint8).argmax())
    at = [start + here for start, here in zip(origin, divmod(first, values.shape[1]), strict=True)]
    found = values.flatten()[first].item()
    return f"{int(bad.sum())} of {values.numel()} values are infinite or NaN, the first, {found}, at {at}"


def world() -> dist.ProcessGroup | None:
    """The group of all processes, or None where there are no process groups."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _storage_of(weight: Tensor) -> QuantizedStorage:
    local: Any = private_torch.local_tensor(weight)  # a QuantizedTensor, a class that imports this file
    storage: QuantizedStorage = local.quantized_storage
    return storage


def history_amax(history: Tensor, most_recent: bool) -> Tensor:
    """The amax that a history [len], newest last, stands for: its maximum or its newest; 0 if none is recorded."""
    return history[-1].clone() if most_recent else history.max()


def history_amaxes(histories: Sequence[Tensor], most_recent: bool) -> Tensor:
    """`history_amax` of n histories on one device, float32 [n]: together where kernels run."""
    found = compute.past_amaxes(histories, most_recent)
    if found is not None:
        return found
    return torch.stack([history_amax(history, most_recent) for history in histories])


def record_amax_(history: Tensor, amax: Tensor) -> None:
    """Append an amax to a history [len], newest last. Zero, infinite and NaN amaxes are not recorded."""
    record_amaxes_([history], amax.view(1))


def record_amaxes_(histories: Sequence[Tensor], amaxes: Tensor) -> None:
    """The same for n different histories and amaxes [n], float32: together where kernels run, or by length."""
    if compute.record_amaxes(histories, amaxes):
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
        """The same for amaxes [n] and n different histories, in a few launches."""
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


SEED_ALIKE = "seed torch alike on all ranks (torch.manual_seed(seed)) before the model is built, or load a checkpoint"


def check_equal_on_ranks(named: dict[str, Tensor], group: Groups, what: str, remedy: str = SEED_ALIKE) -> None:
    """Raise the same error on every rank if int64 tensors [1] differ between the ranks of `group`. One collective for
    each of its process groups.

    Raises:
        RankMismatchError: naming the first that differs.
    """
    if not _members(group) or not named:
        return
    values = torch.cat([v.reshape(1) for v in named.values()])
    extremes = torch.stack([values, ~values])
    for each in _members(group):
        extremes = extremes.to(collective_device(each))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=each)
    highest, lowest = extremes[0].cpu(), ~extremes[1].cpu()
    for name, high, low in zip(named, highest.tolist(), lowest.tolist(), strict=True):
        if high != low:
            raise RankMismatchError(f"{what} of {name!r} differs between ranks ({low} and {high}); {remedy}")


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must lie for a collective of the group."""
    # not get_backend: after init_process_group() without arguments it says "undefined"
    if "cuda:nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
