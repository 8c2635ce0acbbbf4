"""Plans a load: reads a checkpoint, compares it with the objects to load, and describes the load as a value.

Planning writes nothing and communicates with no other rank. Every error that can be detected before the first byte is
written is raised here, and `loading` raises it on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from quantshard import numerics, private_torch
from quantshard.checkpoints import checksums, fit, optimizer_states, rank_state, state_conversion
from quantshard.checkpoints import requantize as requantization
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.extras import EXTRA
from quantshard.checkpoints.parameter_numbers import ParameterNumbers
from quantshard.checkpoints.requantize import HIGH_PRECISION, ParameterConversion
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.checkpoints.state_conversion import StateConversion
from quantshard.checkpoints.tied_weights import check_ties
from quantshard.errors import CheckpointError
from quantshard.tensor import components

_TAG_SIZE = torch.Size([components.FORMAT_TAG_BYTES])


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of `checkpoints.load`.

    `objects`: objects with a state per rank, by name; see `Manager(state=)`.
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
        """The checkpoint's numbers for the optimizer's parameters; None if they are the optimizer's own.

        Raises:
            UnsupportedOperationError: see `ParameterNumbers.of`.
        """
        return None if self.optimizer is None else ParameterNumbers.of(self.model, self.optimizer)


@dataclass(frozen=True)
class CheckpointContents:
    """The parts of a checkpoint that a rank reads to plan its load.

    `tags`: the format tag of each quantized weight. `other_scales`:
    weights with scales that are not powers of two although this model requires such scales; only those that this rank
    read.
    """

    reader: SafeReader
    tags: Mapping[str, str]
    other_scales: Collection[str]


@dataclass(frozen=True)
class LoadPlan:
    """The action of a load for each entry. Keys are the checkpoint's keys.

    Args:
        state: the state dicts of the model and the optimizer; their tensors are the live ones, or replace live ones.
        places: the path of each entry in `state`.
        reading: entries that are read as they are stored. Tensors are read in place, with a cast if the dtype differs
            (only with `lossy`). Placeholders are replaced by objects.
        extra: the caller's entries by name, in the same form as `reading`.
        conversions: the parameters to requantize, with both formats and the source of their values.
        states: the optimizer states that this optimizer keeps in another dtype.
        settings: the new values of the optimizer's entries that are not tensors.
        ignored: keys of either side that are not read: the results of conversions, and entries that keep their live
            value.
        rank_states: the key and the state that each of this rank's objects loads, by the object's name.
        left: the names of the objects that keep their state.
    """

    request: LoadRequest
    reader: SafeReader
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
    """Read what planning needs from a checkpoint. Each rank reads for itself.

    Raises:
        CheckpointError: the checkpoint has a newer version number; a DamagedError if it cannot be read.
    """
    reader = SafeReader(request.path)
    tags = _tags(request, reader)
    return CheckpointContents(reader, tags, _other_scales(request, reader, tags))


def _tags(request: LoadRequest, reader: SafeReader) -> dict[str, str]:
    """The format of each weight of the model that is quantized in the checkpoint, by name."""
    names = {f"model.{name}{components.FORMAT_SUFFIX}": name for name in request.model.state_dict()}
    keys = [
        key
        for key, name in names.items()
        if f"model.{name}" in reader.entries and getattr(reader.entries.get(key), "size", None) == _TAG_SIZE
    ]
    return {names[key]: components.read_format_tag(tag) for key, tag in reader.read(keys).items()}


def _other_scales(request: LoadRequest, reader: SafeReader, tags: Mapping[str, str]) -> list[str]:
    """The weights of the same format whose stored scales are not powers of two, although this model requires that.

    Only the values show the difference, so scales must be read. Each rank reads some of them.

    Raises:
        DamagedError: a scale cannot be read.
    """
    entries = reader.entries
    weight_names = {
        f"model.{name}{suffix}": name
        for name, param in components.named_parameters(request.model).items()
        for suffix in components.power_of_two_scales(param)
        if tags.get(name) == components.storage_of(param).cell.tag
    }
    float32 = sorted(key for key in weight_names if key in entries and _dtype(entries[key]) == torch.float32)
    local_keys = float32[agreement.rank() :: agreement.rank_count()]
    return [
        weight_names[key] for key, scale in reader.read(local_keys).items() if not numerics.are_powers_of_two(scale)
    ]


def _dtype(entry: STORAGE_TYPES) -> torch.dtype | None:
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None


# Planning


def plan_load(request: LoadRequest, contents: CheckpointContents) -> LoadPlan:
    """Plan this rank's part of a load, and check that the checkpoint fits.

    Checksums are verified before any object of a file is decoded. `contents` includes the `other_scales` of all ranks.

    Raises:
        CheckpointError: the checkpoint cannot be loaded; a DamagedError if a file differs from the manifest, or an
            entry cannot be read.
    """
    plan = _planned_entries(request, contents)
    if request.verify and contents.reader.manifest is not None:
        checksums.check_share(request.path, contents.reader.manifest, _files(request, contents.reader))
    groups = [] if request.optimizer is None else request.optimizer.param_groups
    check_ties(contents.reader, request.model, (param for group in groups for param in group["params"]))
    if request.optimizer is not None:
        plan = _with_settings(plan, request.optimizer)
    return _with_rank_states(plan) if request.objects else plan


def _planned_entries(request: LoadRequest, contents: CheckpointContents) -> LoadPlan:
    """Plan the entries to read and to convert. The checks here need only metadata, not the entries' data."""
    path, model, optimizer = request.path, request.model, request.optimizer
    all_entries = contents.reader.entries
    state, numbers = {"model": model.state_dict()}, request.numbers
    if optimizer is not None:
        fit.check_members("load", model, optimizer)
        state["optimizer"] = optimizer_states.to_load(optimizer, all_entries, numbers)
    conversions = _conversions(request, contents, state["model"])
    convertible = state_conversion.state_conversions(contents.reader, model, optimizer)
    states = convertible if request.requantize else []
    targets, places = private_torch.flatten_state_dict(state)
    other_ranks_keys = fit.elsewhere(all_entries, model, numbers)
    stored_entries = {
        key: entry
        for key, entry in all_entries.items()
        if key.startswith(("model.", "optimizer.")) and key not in other_ranks_keys
    }
    ignored = fit.kept(stored_entries, targets, optimizer, own_seed=request.requantize) | {
        key
        for key in (stored_entries | targets if request.requantize else ())
        if requantization.left_out(conversions, key, stored_entries.get(key), targets.get(key))
    }
    ignored |= {key for change in states for key in change.keys}
    stored_entries, targets = (
        {k: v for k, v in entries.items() if k not in ignored} for entries in (stored_entries, targets)
    )
    casts = {f"model.{change.name}" for change in conversions if change.sets_master}
    fit.check_model(path, stored_entries, targets, None if request.requantize and request.lossy else casts)
    if optimizer is not None:
        fit.check_optimizer(path, stored_entries, targets, optimizer, can_convert=len(convertible) > len(states))
    extra = {
        key.removeprefix(f"{EXTRA}."): _placeholder(entry)
        for key, entry in all_entries.items()
        if key.startswith(f"{EXTRA}.")
    }
    ignored |= stored_entries.keys() - targets.keys()
    return LoadPlan(request, contents.reader, state, places, targets, extra, conversions, states, ignored)


def _placeholder(entry: STORAGE_TYPES) -> Tensor | None:
    """The target to read a whole entry into: an empty CPU tensor, or None for an object."""
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    return None


def _formats(contents: CheckpointContents, model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """(stored format, live format) of each weight that is quantized in the checkpoint or in this model."""
    suffix, formats = components.FORMAT_SUFFIX, {}
    live_formats = {
        key.removesuffix(suffix): components.read_format_tag(own[key]) for key in own if key.endswith(suffix)
    }
    for name in sorted({*contents.tags, *live_formats}, key=lambda name: name + suffix):
        # a weight on one side only belongs to another model, which `fit.check_model` reports
        if f"model.{name}" in contents.reader.entries and name in own:
            formats[name] = contents.tags.get(name, HIGH_PRECISION), live_formats.get(name, HIGH_PRECISION)
    params = components.named_parameters(model)
    for name in contents.other_scales:
        cell = components.storage_of(params[name]).cell
        formats[name] = cell.tag, str(cell)
    return formats


def _conversions(
    request: LoadRequest, contents: CheckpointContents, own: Mapping[str, Tensor]
) -> list[ParameterConversion]:
    """The parameters to convert; none without `requantize`.

    Raises:
        CheckpointError: a format differs, and `requantize` is false; or see `requantize.changes`.
    """
    formats = _formats(contents, request.model, own)
    if not request.requantize:
        for weight, (old, new) in formats.items():
            if old != new:
                raise CheckpointError(
                    f"{request.path} is of another recipe: {weight} is stored as {old} there and as {new} in this "
                    "model; build the model with the recipe that the checkpoint was written with, or load it with "
                    "requantize=True"
                )
        return []
    try:
        return requantization.changes(contents.reader, request.model, request.optimizer, formats, request.lossy)
    except CheckpointError as error:
        raise CheckpointError(f"{request.path}: {error}") from None


def _files(request: LoadRequest, reader: SafeReader) -> set[str]:
    """The files that any rank will read, the same on all ranks; all files if weights can be requantized."""
    roots = ("model.", f"{EXTRA}.") if request.optimizer is None else ("model.", f"{EXTRA}.", "optimizer.")
    return {
        info.relative_path
        for index, info in reader.metadata.storage_data.items()
        if request.requantize or index.fqn.startswith(roots)
    }


def _with_settings(plan: LoadPlan, optimizer: torch.optim.Optimizer) -> LoadPlan:
    """Add the optimizer's entries that are not tensors to a plan. The groups keep their parameters.

    Raises:
        CheckpointError: an entry does not fit, or belongs to other parameters; a DamagedError if it cannot be read.
    """
    path, entries = plan.request.path, plan.reader.entries
    objects = plan.reader.read(key for key in plan.reading if fit.is_object(key, entries))
    parameter_keys = fit.parameter_entries(objects)
    numbers = plan.request.numbers
    fit.check_groups(path, objects, optimizer.param_groups if numbers is None else numbers.groups)
    settings = {key: value for key, value in objects.items() if key not in parameter_keys}
    fit.check_settings(path, settings, plan.reading, optimizer)
    return replace(
        plan,
        reading={key: value for key, value in plan.reading.items() if key not in objects},
        settings={key: components.as_setting(value, plan.reading[key]) for key, value in settings.items()},
        ignored={*plan.ignored, *parameter_keys},
    )


def _with_rank_states(plan: LoadPlan) -> LoadPlan:
    """Add the states of this rank's objects to a plan."""
    path, objects, entries = plan.request.path, plan.request.objects, plan.reader.entries
    keys = rank_state.wanted_keys(entries)
    for key in keys:
        if not isinstance(entries[key], TensorStorageMetadata):
            raise CheckpointError(f"{path} is damaged: {key} is no tensor there; choose another checkpoint")
    states, unloaded = rank_state.to_load(objects, plan.reader.read(keys), rank_state.writers(entries))
    return replace(plan, rank_states=states, left=unloaded)
