"""Saving and loading a model and its optimizer with stock `torch.distributed.checkpoint` (DCP).

These do what the plain idiom does (state dicts, DCP's save and load, `load_state_dict`), and look first: before
anything is overwritten, and before anything is loaded, so that a checkpoint of another model or recipe, or a damaged
one, ends in one sentence on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from quantshard import limits, numerics, private_torch
from quantshard.checkpoints import fit, optimizer_states
from quantshard.checkpoints import requantize as requantization
from quantshard.checkpoints.disk import agreement, commit, manifest
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.checkpoints.disk.manifest import Manifest
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.partial_load import loading
from quantshard.checkpoints.requantize import HIGH_PRECISION, ParameterConversion
from quantshard.checkpoints.untrusted import checksums, extras
from quantshard.checkpoints.untrusted.extras import EXTRA
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.checkpoints.untrusted.reader import DamagedError, files_of, read_into
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, LostRankError, UnsupportedOperationError
from quantshard.tensor import components


def save(
    path: Path_, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint to a new directory, wholly or not at all. A collective call.

    It is written beside the directory, under a hidden name, and renamed when it is durable; where a URL leads to a
    store that cannot do so, in place, with `manifest.json` last.

    Args:
        path: the directory, or a URL that fsspec knows; it may exist if it holds an incomplete checkpoint or nothing.
        model, optimizer: what to save; without an optimizer what is loaded can only begin a training.
        extra: a few more entries, e.g. the step, equal on all ranks: tensors, and plain data however nested (numbers,
            strings, bytes, None, lists, tuples, sets, dicts, with whole tensors in them).

    Raises:
        CheckpointError: the directory holds a complete checkpoint or other files, or cannot be written; the same on
            every rank.
        ConfigurationError: the pieces of a parameter are not where PyTorch would save them; an entry of `extra` is no
            plain data; the optimizer's `step()` needs a closure.
        RankMismatchError: an entry of `extra` is not equal on all ranks.
        UnsupportedOperationError: experts are spread over ranks.
    """
    state = checkpoint_state(model, optimizer, extra)
    target = commit.begin(path)
    writer = CommitWriter(target, facts_of(model, extra or {}))
    with commit.abandoned_if_it_fails(target):
        write_checkpoint(state, writer)


def checkpoint_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What is saved: two trees and the caller's entries; tensors of the trees are the live ones. A collective call.

    Raises:
        ConfigurationError, RankMismatchError, UnsupportedOperationError: as `save` does.
    """
    _check_numbers(model)
    components.check_offsets(model.named_parameters())
    state = {"model": agreement.alike(model.state_dict), EXTRA: extras.checked_extra(extra)}
    return (
        state
        if optimizer is None
        else state | {"optimizer": agreement.alike(lambda: optimizer_states.saved(optimizer))}
    )


def facts_of(model: nn.Module, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of the run: a parameter's largest mesh, and `step` and `recipe` of the extra entries."""
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    step, recipe = extra.get("step"), extra.get("recipe")
    names = () if mesh is None else mesh.mesh_dim_names or [f"axis {dim}" for dim in range(mesh.ndim)]
    return {
        "step": step if type(step) is int else None,
        "recipe": recipe if isinstance(recipe, str) else None,
        "mesh": None if mesh is None else dict(zip(names, mesh.shape, strict=True)),
    }


def write_checkpoint(state: dict[str, Any], writer: CommitWriter, group: dist.ProcessGroup | None = None) -> None:
    """Write and commit a checkpoint now. A collective call of the group, or of all ranks.

    Raises:
        CheckpointError: the same on every rank.
        KeyboardInterrupt, SystemExit: it was this rank that was interrupted; the others raise a CheckpointError.
    """
    alone = process_groups.world() is None
    try:
        private_torch.save_checkpoint(
            state,
            storage_writer=writer,
            planner=extras.ExtraSavePlanner(),
            process_group=group,
            no_dist=alone,
        )
    except (CheckpointException, OSError, RuntimeError) as error:  # the last where a rank is gone
        if isinstance(error, CheckpointException):
            agreement.raise_interrupt(error, 0 if alone else dist.get_rank(group))
        kind = LostRankError if agreement.is_loss_of_a_rank(error) else CheckpointError
        raise kind(commit.said_of(writer.target.path, error)) from error


def load(
    path: Path_,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    requantize: bool = False,
    lossy: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint written on any number of ranks into a model and its optimizer. A collective call.

    Args:
        path: the directory. It may come from anybody: nothing in it is run (docs/security.md).
        requantize: whether weights of another recipe are quantized anew, to the nearest, from the masters that the
            checkpoint has; warns of it. Moments are loaded as they are, so they must be of the same kinds.
        lossy: whether those without masters are quantized from what their codes stand for, and plain tensors of
            another dtype cast.
        verify: whether the files that ranks will read are compared with the checksums of the manifest first, which
            reads them once more. A checkpoint without a manifest is loaded with a NoManifestWarning.

    Returns:
        The `extra` entries that were saved. One that needs code to be read, which an earlier version or another library
        saved, is left out with a warning that names it.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another model, recipe or optimizer; the same on every rank.
            Nothing was written, or, where it fails later (no manifest, a disk that fails), the model and the optimizer
            refuse to run, step and be saved until a load succeeds.
        ConfigurationError: the pieces of a parameter are not where PyTorch would load them to.
        UnsupportedOperationError: experts are spread over ranks.
    """
    return load_and_tell(path, model, optimizer, requantize, lossy, verify)[0]


def load_and_tell(
    path: Path_,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    requantize: bool,
    lossy: bool,
    verify: bool,
) -> tuple[dict[str, Any], str]:
    """What `load` does; gives the extra entries, and which weights were quantized anew, in words."""
    with loading(f"the load of {path}", model, optimizer) as load:
        _check_numbers(model)
        components.check_offsets(model.named_parameters())
        metadata, described = agreement.alike(lambda: _metadata(path))
        if described is None:
            checksums.warn_of_none(path, metadata, stacklevel=3)
        state = agreement.alike(lambda: _state_to_load(metadata, model, optimizer))
        formats = agreement.alike(lambda: _formats(path, metadata, state["model"]))
        formats |= _of_other_scales(path, metadata, model, formats)
        plan = agreement.alike(
            lambda: _planned(path, metadata, state, formats, model, optimizer, lossy if requantize else None)
        )
        if verify:
            checksums.check_files(path, described, agreement.alike(lambda: _files(plan)))
        objects = {} if optimizer is None else agreement.alike(lambda: _settings(path, plan, optimizer))
        reading = {key: value for key, value in plan.reading.items() if key not in objects}
        load.writes = True
        left_out = read_into(path, plan.metadata, reading)
        extra = reading.pop(EXTRA)
        for key, value in (objects | reading).items():
            if value is not plan.reading[key]:  # else it was read in place
                _put(plan.state, plan.places[key], value)
        masters = list(requantization.write_weights(path, plan.metadata, plan.changes))
        agreement.alike(lambda: _load_states(path, plan.state, model, optimizer, masters))
    if left_out and agreement.rank() == 0:
        warnings.warn(f"{path} is loaded without entries of `extra`: {'; '.join(left_out.values())}", stacklevel=3)
    extra = {key: value for key, value in extra.items() if f"{EXTRA}.{key}" not in left_out}
    return extra, requantization.tell(path, plan.changes)


def _files(plan: _LoadPlan) -> set[str]:
    """The files that this rank will read; where weights are made anew, all."""
    if plan.changes:
        return {info.relative_path for info in plan.metadata.storage_data.values()}
    return files_of(plan.metadata, plan.reading)


def _load_states(
    path: Path_,
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    masters: list[tuple[ParameterConversion, Tensor]],
) -> None:
    """Hand what was read to the model and the optimizer, which may refuse it on one rank alone."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if optimizer is not None:
        optimizer_states.load_optimizer(optimizer, state["optimizer"])
        requantization.set_masters(optimizer, masters)


@dataclass(frozen=True)
class _LoadPlan:
    """What a load will do: `state` is the model's and the optimizer's, `reading` what of it is read as it is stored.

    `reading` is flat, as a checkpoint is; `places`: the path of each of its entries in `state`.
    """

    metadata: Metadata
    state: dict[str, Any]
    reading: dict[str, Any]
    places: Mapping[str, Sequence[str | int]]
    changes: list[ParameterConversion]


def _metadata(path: Path_) -> tuple[Metadata, Manifest | None]:
    """The metadata of a checkpoint, which have been compared with its manifest, and that; each rank reads for itself.

    Raises:
        CheckpointError: it is of a newer version, by its number; a DamagedError, if it cannot be read.
    """
    described = manifest.read_manifest(path)
    try:
        return read_metadata(path), described
    except CheckpointError as error:
        raise DamagedError(str(error)) from error


def _state_to_load(metadata: Metadata, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer_states.to_load(optimizer, metadata.state_dict_metadata)
    return state


def _planned(
    path: Path_,
    metadata: Metadata,
    state: dict[str, Any],
    formats: Mapping[str, tuple[str, str]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    lossy: bool | None,
) -> _LoadPlan:
    """Compare a checkpoint with what is loaded, as each rank does for itself. `lossy`: None if it must be of this
    model's recipe.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    changes = _changes(path, metadata, model, optimizer, formats, lossy)
    wanted, places = private_torch.flatten_state_dict(state)
    stored = {k: entry for k, entry in metadata.state_dict_metadata.items() if k.startswith(("model.", "optimizer."))}
    skipped = fit.kept(stored, wanted, optimizer) | {
        key
        for key in (stored | wanted if changes else ())
        if requantization.left_out(changes, key, key in stored, key in wanted)
    }
    stored, wanted = ({k: v for k, v in entries.items() if k not in skipped} for entries in (stored, wanted))
    casts = {f"model.{change.name}" for change in changes if change.sets_master}
    fit.check_model(path, stored, wanted, None if lossy else casts)
    if optimizer is not None:
        fit.check_optimizer(path, stored, wanted, optimizer)
    extra = {
        key.removeprefix(f"{EXTRA}."): _placeholder(stored)
        for key, stored in metadata.state_dict_metadata.items()
        if key.startswith(f"{EXTRA}.")
    }
    return _LoadPlan(metadata, state, {**wanted, EXTRA: extra}, places, changes)


def _settings(path: Path_, plan: _LoadPlan, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the checkpoint has of an optimizer besides tensors, compared before anything is written, as each rank does
    for itself; whose the groups are is left as it is here.

    Raises:
        CheckpointError: it cannot stand there, or is of other parameters; a DamagedError, if it cannot be read.
    """
    stored = plan.metadata.state_dict_metadata
    found = _objects(path, plan.metadata, [key for key in plan.reading if fit.is_object(key, stored)])
    named = fit.parameter_entries(found)
    fit.check_groups(path, found, optimizer.param_groups)
    settings = {key: value for key, value in found.items() if key not in named}
    fit.check_settings(path, settings, plan.reading, optimizer)
    return {key: components.as_setting(value, plan.reading[key]) for key, value in settings.items()} | {
        key: plan.reading[key] for key in named
    }


def _changes(
    path: Path_,
    metadata: Metadata,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    formats: Mapping[str, tuple[str, str]],
    lossy: bool | None,
) -> list[ParameterConversion]:
    """The weights that are made anew; `lossy`: None if there must be none."""
    if lossy is None:
        _check_formats(path, formats)
        return []
    try:
        return requantization.changes(metadata, model, optimizer, formats, lossy)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _put(root: Any, path: Sequence[str | int], value: Any) -> None:
    """Put what was read where DCP's flattening found it; that makes strings of the numbers of an optimizer's states."""
    for part in path:
        at = part if isinstance(root, list) or part in root else int(part)
        holder, root = root, root[at]
    holder[at] = value


def read_tensors(path: Path_, metadata: Metadata, keys: Sequence[str]) -> dict[str, Tensor]:
    """Entries of a checkpoint that are plain tensors, whole and on the CPU; each rank reads for itself.

    Raises:
        CheckpointError: they are no tensors, or cannot be read.
    """
    for key in keys:
        if not isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata):
            raise CheckpointError(f"{path} is damaged: {key} is no tensor there; choose another checkpoint")
    state: dict[str, Any] = {key: _placeholder(metadata.state_dict_metadata[key]) for key in keys}
    if state:
        read_into(path, metadata, state, no_dist=True)
    return state


def _objects(path: Path_, metadata: Metadata, keys: Sequence[str]) -> dict[str, Any]:
    """Entries of a checkpoint that are plain objects; each rank reads for itself."""
    state: dict[str, Any] = dict.fromkeys(keys)
    if state:
        read_into(path, metadata, state, no_dist=True)
    return state


def _check_numbers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if process_groups.spread_axis(module) is not None:
            raise UnsupportedOperationError(limits.refusal("numbered states", name or type(module).__name__))


def _placeholder(stored: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return None


def _formats(path: Path_, metadata: Metadata, own: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Of each weight that is quantized in the checkpoint or in this model: its format there and here."""
    suffix, stored = components.FORMAT_SUFFIX, metadata.state_dict_metadata
    theirs = [key for key, value in stored.items() if key.startswith("model.") and _is_tag(key, value)]
    tags: dict[str, Any] = {key: torch.zeros(components.FORMAT_TAG_BYTES, dtype=torch.uint8) for key in theirs}
    if tags:
        read_into(path, metadata, tags, no_dist=True)
    found = {}
    for key in sorted({*theirs, *(f"model.{key}" for key in own if key.endswith(suffix))}):
        weight, name = key.removesuffix(suffix), key.removeprefix("model.")
        if weight not in stored or weight.removeprefix("model.") not in own:
            continue  # of another model, which is said better elsewhere
        saved = components.read_format_tag(tags[key]) if key in tags else HIGH_PRECISION
        here = components.read_format_tag(own[name]) if name in own else HIGH_PRECISION
        found[weight.removeprefix("model.")] = (saved, here)
    return found


def _of_other_scales(
    path: Path_, metadata: Metadata, model: nn.Module, formats: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """The same of the weights whose stored scales are not the powers of two that this model's are to be, which their
    values alone tell. Each rank reads some of them. A collective call.

    Raises:
        DamagedError: they cannot be read; the same on every rank.
    """
    stored = metadata.state_dict_metadata
    wanted = {
        f"model.{name}{suffix}": (name, components.storage_of(param).cell)
        for name, param in components.named_parameters(model).items()
        for suffix in components.power_of_two_scales(param)
        if len({*formats.get(name, ("there", "here"))}) == 1
    }
    float32 = [key for key in wanted if key in stored and _dtype(stored[key]) == torch.float32]
    every = sorted({key for keys in agreement.gathered(float32) for key in keys})
    mine = every[agreement.rank() :: agreement.rank_count()]
    read = agreement.alike(lambda: read_tensors(path, metadata, mine))
    others = [key for key, scale in read.items() if not numerics.are_powers_of_two(scale)]
    found = [wanted[key] for keys in agreement.gathered(others) for key in keys if key in wanted]
    return {name: (cell.tag, str(cell)) for name, cell in found}


def _dtype(entry: TensorStorageMetadata | BytesStorageMetadata) -> torch.dtype | None:
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None


def _check_formats(path: Path_, formats: Mapping[str, tuple[str, str]]) -> None:
    for weight, (saved, own) in formats.items():
        if saved != own:
            raise CheckpointError(
                f"{path} is of another recipe: {weight} is stored as {saved} there and as {own} in this model; build "
                "the model with the recipe that the checkpoint was written with, or load it with requantize=True"
            )


def _is_tag(key: str, stored: Any) -> bool:
    size = torch.Size([components.FORMAT_TAG_BYTES])
    return key.endswith(components.FORMAT_SUFFIX) and getattr(stored, "size", None) == size
