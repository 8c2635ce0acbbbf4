"""FSDP2's all-gather of a quantized weight, which carries codes and scales instead of values.

Each time FSDP2 gathers a weight, it calls `QuantizedTensor.fsdp_pre_all_gather` for this rank's tensors
(`gather_inputs`), runs one collective for all parameters of a module, and calls `fsdp_post_all_gather` for the weight
in its buffers (`unsharded_storage`). The first all-gather fixes the number and sizes of the inputs.

A slot is one input: a component that other ranks lack, padded to one size on all ranks and in both passes. A format
with two copies of the codes reads the rowwise copy in forward and the columnwise copy in backward.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import kernel_dispatch, limits, private_torch, sharding
from quantshard.errors import ConfigurationError
from quantshard.formats import Orientation
from quantshard.sharding import GatherSlot
from quantshard.tensor.storage import QuantizedStorage


class GatherMetadata(NamedTuple):
    """What the first hook passes to the second one. `slots` is empty on a mesh of one rank."""

    local_storage: QuantizedStorage
    slots: tuple[GatherSlot, ...]
    mesh: DeviceMesh


def gather_inputs(shard: QuantizedStorage, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], GatherMetadata]:
    """This rank's inputs: the components that other ranks lack, of the copies that the coming pass reads."""
    plan = _fsdp_plan(shard, mesh)
    if plan.settings.reshards_to_other_mesh:
        raise ConfigurationError(limits.refusal("reshard to fewer ranks", _described(shard)))
    if not plan.slots:
        # FSDP2 copies the first input and gathers nothing
        return (next(iter(shard.components.values())).reshape(-1)[:1],), GatherMetadata(shard, (), mesh)
    slots = plan.slots[private_torch.in_backward()]
    return tuple(_padded(shard, slot) for slot in slots), GatherMetadata(shard, slots, mesh)


class _FsdpPlan(NamedTuple):
    """FSDP2's settings for a weight, and the slots of a forward and of a backward; none on a mesh of one rank."""

    settings: private_torch.FsdpPlan
    slots: tuple[tuple[GatherSlot, ...], ...]


_plans: WeakKeyDictionary[QuantizedStorage, _FsdpPlan] = WeakKeyDictionary()


def _fsdp_plan(shard: QuantizedStorage, mesh: DeviceMesh) -> _FsdpPlan:
    """The plan of the first all-gather of a weight. Later changes must not change which copies are sent."""
    source = shard.sharded_source  # `shard` itself, or under CPU offload what it was moved from
    if source not in _plans:
        settings = private_torch.fsdp_plan(source)
        copies = tuple(shard.spec.format.copies)
        # by pass: all copies, unless FSDP2 frees the weight between forward and backward
        passes = (copies[:1], copies[-1:]) if settings.frees_between_passes else (copies, copies)
        gathered = passes if mesh.size() > 1 else ()
        by_pass = [sharding.gather_slots(shard.spec.format, shard.shard, which, passes) for which in gathered]
        _plans[source] = _FsdpPlan(settings, tuple(map(tuple, by_pass)))
    plan = _plans[source]
    if len(source.spec.format.copies) > 1 and plan.settings.frees_between_passes and not plan.settings.frees_now():
        raise ConfigurationError(limits.refusal("changed resharding", _described(shard)))
    return plan


def _described(shard: QuantizedStorage) -> str:
    return f"a {shard.spec.tag} weight {shard.shard.global_shape}"


def _padded(shard: QuantizedStorage, slot: GatherSlot) -> Tensor:
    """The input of a slot, with uninitialized padding."""
    if slot.name is None:
        # only formats of two copies have such slots, and they store bytes: any component has the right dtype
        return next(iter(shard.components.values())).new_empty(slot.numel)
    part = shard.components[slot.name]
    if part.numel() == slot.numel:
        return part.reshape(-1)
    padded = part.new_empty(slot.numel)
    padded[: part.numel()] = part.reshape(-1)
    return padded


def unsharded_storage(metadata: GatherMetadata, outputs: tuple[Tensor, ...]) -> QuantizedStorage:
    """The gathered weight. Gathered components alias FSDP2's buffers."""
    local = metadata.local_storage
    lasts_one_pass = private_torch.in_backward() and _fsdp_plan(local, metadata.mesh).settings.frees_now()
    # draws are counted in the shard itself, not in a copy that CPU offload moved
    source = ref(local.sharded_source)
    return QuantizedStorage(
        local.spec, local.shard.before_cut(), _whole_components(metadata, outputs, lasts_one_pass),
        local.sharded_source.state, version=local.version, gathered=True, captured=kernel_dispatch.is_capturing(),
        fetch=partial(_gather_copy, source, metadata.mesh, local.device), source=source,
    )  # fmt: skip


def _whole_components(metadata: GatherMetadata, outputs: Sequence[Tensor], lasts_one_pass: bool) -> dict[str, Tensor]:
    """The components of the gathered weight, by name: gathered, or local if this rank has all entries."""
    local, slots = metadata.local_storage, metadata.slots
    whole, by_name = local.shard.before_cut(), local.spec.format.by_name
    components = {}
    for slot, output in zip(slots, outputs if slots else (), strict=True):
        if slot.name is not None:
            pieces = output.view(-1, slot.numel)[:, : slot.rows * slot.cols]  # a view unless the slot is padded
            rows = whole.component_shape(by_name[slot.name])[0]
            components[slot.name] = pieces.reshape(-1, slot.cols)[:rows]
    for name, part in local.components.items():
        if part.is_cuda and local.sharded_source is not local:
            # CPU offload allocated it on FSDP2's stream, which must not reuse it before this stream is done
            part.record_stream(torch.cuda.current_stream(part.device))
        if not slots:
            components[name] = part
        elif not local.shard.gathers(by_name[name]):
            # FSDP2 may keep gathered codes over an optimizer's step, which writes the shard's scales in place: old
            # codes must not be read with new scales
            components[name] = part if lasts_one_pass else part.clone()
    return components


def _gather_copy(
    source: ReferenceType[QuantizedStorage], mesh: DeviceMesh, device: torch.device, which: Orientation
) -> dict[str, Tensor]:
    """Gather the copy that FSDP2 did not gather for this pass, as recomputation of a forward in backward needs."""
    shard = source()
    assert shard is not None
    storage = shard.map(lambda part: part.to(device))  # FSDP2's copy under CPU offload no longer exists
    slots = sharding.gather_slots(storage.spec.format, storage.shard, (which,), ((which,),))
    outputs = []
    for slot in slots:
        part = _padded(storage, slot)
        outputs.append(part.new_empty(mesh.size() * slot.numel))
        private_torch.all_gather_single(outputs[-1], part, group=mesh.get_group())
    return _whole_components(GatherMetadata(storage, tuple(slots), mesh), outputs, lasts_one_pass=False)
