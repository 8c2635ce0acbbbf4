"""What a load will do, as a value: a checkpoint is read, compared with what is loaded, and planned.

Nothing here writes, and no rank asks another; what can fail before the first byte is written fails here, and `loading`
lets all ranks know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from quantshard import numerics, private_torch
from quantshard.argument_kinds import PATH, check_arguments
from quantshard.checkpoints import fit, optimizer_states, rank_state, state_conversion
from quantshard.checkpoints import requantize as requantization
from quantshard.checkpoints.disk import agreement, manifest
from quantshard.checkpoints.disk.manifest import Manifest
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.parameter_numbers import ParameterNumbers
from quantshard.checkpoints.requantize import HIGH_PRECISION, ParameterConversion
from quantshard.checkpoints.state_conversion import StateConversion
from quantshard.checkpoints.tied_weights import check_ties
from quantshard.checkpoints.untrusted import checksums
from quantshard.checkpoints.untrusted.extras import EXTRA
from quantshard.checkpoints.untrusted.metadata import NoMetadataError, read_metadata
from quantshard.checkpoints.untrusted.reader import DamagedError, MissingError, placeholder, read_into, read_whole
from quantshard.errors import CheckpointError
from quantshard.tensor import components

_TAG_SIZE = torch.Size([components.FORMAT_TAG_BYTES])


@dataclass(frozen=True)
class LoadRequest:
    """What is to be loaded into what, as `checkpoints.load` says it.

    `objects`: what loads a state that each rank has for itself, by name, as of `Manager(state=)`.
    """

    path: Path_
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    requantize: bool = False
    lossy: bool = False
    verify: bool = True
    objects: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def numbers(self) -> ParameterNumbers | None:
        """Those of the optimizer's parameters, where they are not its own.

        Raises:
            UnsupportedOperationError: see `ParameterNumbers.of`.
        """
        return None if self.optimizer is None else ParameterNumbers.of(self.model, self.optimizer)


@dataclass(frozen=True)
class CheckpointContents:
    """What a rank reads of a checkpoint to plan its load.

    `manifest`: None if there is none. `tags`: of each quantized weight, its format. `other_scales`: the weights whose
    scales are not the powers of two that this model's are to be, by what this rank read of them.
    """

    metadata: Metadata
    manifest: Manifest | None
    tags: Mapping[str, str]
    other_scales: Collection[str]


@dataclass(frozen=True)
class LoadPlan:
    """What a load will do with each entry, by its key in the checkpoint, whose pieces the metadata name.

    Args:
        state: the state dicts of the model and the optimizer; the tensors in it are the live ones, or take their place.
        places: the path in `state` of each entry of it.
        reading: what is read as it is stored: the tensor that is read in place, and cast if its dtype is another, which
            only `lossy` allows; or what an object will replace.
        extra: the caller's entries by name, likewise.
        conversions: the parameters that are made anew, with their formats there and here and from what.
        states: the optimizer's states that are kept in another dtype here.
        settings: the optimizer's entries that are no tensors, and what each becomes.
        ignored: entries of either side that are not read: what conversions make, and what stays as it is here.
        rank_states: of each of this rank's objects, by name, the key and the state that it loads.
        left: the names of those that are left as they are.
    """

    request: LoadRequest
    metadata: Metadata
    manifest: Manifest | None
    state: dict[str, Any]
    places: Mapping[str, Sequence[str | int]]
    reading: Mapping[str, Any]
    extra: Mapping[str, Tensor | None]
    conversions: list[ParameterConversion]
    states: list[StateConversion]
    ignored: Collection[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rank_states: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    left: tuple[str, ...] = ()


# Reading


def read_contents(request: LoadRequest) -> CheckpointContents:
    """What planning needs to know of a checkpoint; each rank reads for itself.

    Raises:
        CheckpointError: it is of a newer version, by its number; a DamagedError, if it cannot be read.
    """
    check_arguments("load", PATH, path=request.path)  # here, where other ranks are told of it
    described = manifest.read_manifest(request.path)
    try:
        metadata = read_metadata(request.path)
    except CheckpointError as error:
        kind = MissingError if isinstance(error, NoMetadataError) else DamagedError
        raise kind(str(error)) from error
    tags = _tags(request, metadata)
    return CheckpointContents(metadata, described, tags, _other_scales(request, metadata, tags))


def _tags(request: LoadRequest, metadata: Metadata) -> dict[str, str]:
    """The format of each weight of the model that is quantized in the checkpoint."""
    stored, tags = metadata.state_dict_metadata, dict[str, Any]()
    for name in request.model.state_dict():
        key = f"model.{name}{components.FORMAT_SUFFIX}"
        if f"model.{name}" in stored and getattr(stored.get(key), "size", None) == _TAG_SIZE:
            tags[key] = torch.zeros(_TAG_SIZE, dtype=torch.uint8, device="cpu")
    if tags:
        read_into(request.path, metadata, tags, no_dist=True)
    names = {key: key.removeprefix("model.").removesuffix(components.FORMAT_SUFFIX) for key in tags}
    return {names[key]: components.read_format_tag(tag) for key, tag in tags.items()}


def _other_scales(request: LoadRequest, metadata: Metadata, tags: Mapping[str, str]) -> list[str]:
    """The weights of the same format whose stored scales are not the powers of two that this model's are to be, which
    their values alone tell. Each rank reads some of them.

    Raises:
        DamagedError: they cannot be read.
    """
    stored = metadata.state_dict_metadata
    wanted = {
        f"model.{name}{suffix}": name
        for name, param in components.named_parameters(request.model).items()
        for suffix in components.power_of_two_scales(param)
        if tags.get(name) == components.storage_of(param).cell.tag
    }
    float32 = sorted(key for key in wanted if key in stored and _dtype(stored[key]) == torch.float32)
    mine = float32[agreement.rank() :: agreement.rank_count()]
    scales = read_whole(request.path, metadata, mine)
    return [wanted[key] for key, scale in scales.items() if not numerics.are_powers_of_two(scale)]


def _dtype(entry: STORAGE_TYPES) -> torch.dtype | None:
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None


# Planning


def plan_load(request: LoadRequest, contents: CheckpointContents) -> LoadPlan:
    """What this rank will do, if the checkpoint fits; `contents`: with the scales that all ranks read.

    The files are compared before an object in them is decoded.

    Raises:
        CheckpointError: the checkpoint cannot be loaded; a DamagedError, if a file is not as the manifest says, or an
            entry cannot be read.
    """
    plan = _planned_entries(request, contents)
    if request.verify and contents.manifest is not None:
        checksums.check_share(request.path, contents.manifest, _files(request, contents.metadata))
    groups = [] if request.optimizer is None else request.optimizer.param_groups
    check_ties(request.path, contents.metadata, request.model, (param for each in groups for param in each["params"]))
    if request.optimizer is not None:
        plan = _with_settings(plan, request.optimizer)
    return _with_rank_states(plan) if request.objects else plan


def _planned_entries(request: LoadRequest, contents: CheckpointContents) -> LoadPlan:
    """The plan of what is read and made anew; the checks need no byte of the entries."""
    path, model, optimizer = request.path, request.model, request.optimizer
    every = contents.metadata.state_dict_metadata
    state, numbers = {"model": model.state_dict()}, request.numbers
    if optimizer is not None:
        fit.check_members("load", model, optimizer)
        state["optimizer"] = optimizer_states.to_load(optimizer, every, numbers)
    conversions = _conversions(request, contents, state["model"])
    convertible = state_conversion.state_conversions(contents.metadata, model, optimizer)
    states = [change for change in convertible if request.requantize or change.is_earlier]
    wanted, places = private_torch.flatten_state_dict(state)
    others = fit.elsewhere(every, model, numbers)
    stored = {
        key: entry for key, entry in every.items() if key.startswith(("model.", "optimizer.")) and key not in others
    }
    ignored = fit.kept(stored, wanted, optimizer, own_seed=request.requantize) | {
        key
        for key in (stored | wanted if request.requantize else ())
        if requantization.left_out(conversions, key, stored.get(key), wanted.get(key))
    }
    ignored |= {key for change in states for key in change.keys}
    stored, wanted = ({k: v for k, v in entries.items() if k not in ignored} for entries in (stored, wanted))
    casts = {f"model.{change.name}" for change in conversions if change.sets_master}
    fit.check_model(path, stored, wanted, None if request.requantize and request.lossy else casts)
    if optimizer is not None:
        fit.check_optimizer(path, stored, wanted, optimizer, can_convert=len(convertible) > len(states))
    extra = {
        key.removeprefix(f"{EXTRA}."): placeholder(entry) for key, entry in every.items() if key.startswith(f"{EXTRA}.")
    }
    ignored |= stored.keys() - wanted.keys()
    return LoadPlan(
        request, contents.metadata, contents.manifest, state, places, wanted, extra, conversions, states, ignored
    )


def _formats(contents: CheckpointContents, model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Of each weight that is quantized in the checkpoint or in this model: its format there and here."""
    suffix, found = components.FORMAT_SUFFIX, {}
    here = {key.removesuffix(suffix): components.read_format_tag(own[key]) for key in own if key.endswith(suffix)}
    for name in sorted({*contents.tags, *here}, key=lambda name: name + suffix):
        if f"model.{name}" in contents.metadata.state_dict_metadata and name in own:  # else of another model
            found[name] = contents.tags.get(name, HIGH_PRECISION), here.get(name, HIGH_PRECISION)
    params = components.named_parameters(model)
    for name in contents.other_scales:
        cell = components.storage_of(params[name]).cell
        found[name] = cell.tag, str(cell)
    return found


def _conversions(
    request: LoadRequest, contents: CheckpointContents, own: Mapping[str, Tensor]
) -> list[ParameterConversion]:
    """The parameters that are made anew, which must be none unless that was asked for."""
    formats = _formats(contents, request.model, own)
    if not request.requantize:
        for weight, (saved, here) in formats.items():
            if saved != here:
                raise CheckpointError(
                    f"{request.path} is of another recipe: {weight} is stored as {saved} there and as {here} in this "
                    "model; build the model with the recipe that the checkpoint was written with, or load it with "
                    "requantize=True"
                )
        return []
    try:
        return requantization.changes(contents.metadata, request.model, request.optimizer, formats, request.lossy)
    except CheckpointError as error:
        raise CheckpointError(f"{request.path}: {error}") from None


def _files(request: LoadRequest, metadata: Metadata) -> set[str]:
    """The files that ranks will read, as all ranks find alike; where weights may be made anew, all."""
    roots = ("model.", f"{EXTRA}.") if request.optimizer is None else ("model.", f"{EXTRA}.", "optimizer.")
    return {
        info.relative_path
        for index, info in metadata.storage_data.items()
        if request.requantize or index.fqn.startswith(roots)
    }


def _with_settings(plan: LoadPlan, optimizer: torch.optim.Optimizer) -> LoadPlan:
    """The plan with what the optimizer's entries become that are no tensors; whose the groups are stays as it is here.

    Raises:
        CheckpointError: one cannot stand there, or is of other parameters; a DamagedError, if it cannot be read.
    """
    path, stored = plan.request.path, plan.metadata.state_dict_metadata
    found = read_whole(path, plan.metadata, [key for key in plan.reading if fit.is_object(key, stored)])
    named = fit.parameter_entries(found)
    numbers = plan.request.numbers
    fit.check_groups(path, found, optimizer.param_groups if numbers is None else numbers.groups)
    settings = {key: value for key, value in found.items() if key not in named}
    fit.check_settings(path, settings, plan.reading, optimizer)
    return replace(
        plan,
        reading={key: value for key, value in plan.reading.items() if key not in found},
        settings={key: components.as_setting(value, plan.reading[key]) for key, value in settings.items()},
        ignored={*plan.ignored, *named},
    )


def _with_rank_states(plan: LoadPlan) -> LoadPlan:
    """The plan with what this rank's objects load."""
    path, objects, stored = plan.request.path, plan.request.objects, plan.metadata.state_dict_metadata
    keys = rank_state.wanted_keys(stored)
    for key in keys:
        if not isinstance(stored[key], TensorStorageMetadata):
            raise CheckpointError(f"{path} is damaged: {key} is no tensor there; choose another checkpoint")
    states, left = rank_state.to_load(objects, read_whole(path, plan.metadata, keys), rank_state.writers(stored))
    return replace(plan, rank_states=states, left=left)
