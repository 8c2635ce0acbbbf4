"""Saving and loading a model and its optimizer with stock `torch.distributed.checkpoint` (DCP).

These do what the plain idiom does (state dicts, `dcp.save`, `dcp.load`, `load_state_dict`), and look first: before
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
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from quantshard import components, limits
from quantshard.checkpoints import commit, extras, manifest, ranks
from quantshard.checkpoints import requantize as requantization
from quantshard.checkpoints.commit import CommitWriter
from quantshard.checkpoints.extras import EXTRA
from quantshard.checkpoints.metadata import read_metadata
from quantshard.checkpoints.reader import DamagedError, quiet, read_into
from quantshard.checkpoints.requantize import HIGH_PRECISION, Change
from quantshard.checkpoints.store import Path_
from quantshard.errors import CheckpointError, UnsupportedOperationError


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
            plain data.
        RankMismatchError: an entry of `extra` is not equal on all ranks.
        UnsupportedOperationError: experts are spread over ranks.
    """
    state = state_of(model, optimizer, extra)
    target = commit.begin(path)
    writer = CommitWriter(target, facts_of(model, extra or {}))
    try:
        write(state, writer)
    except CheckpointError:
        if ranks.rank() == 0:
            commit.abandon(target)
        raise


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What is saved: two trees and the caller's entries; tensors of the trees are the live ones. A collective call.

    Raises:
        ConfigurationError, RankMismatchError, UnsupportedOperationError: as `save` does.
    """
    _check_numbers(model)
    components.check_offsets(model.named_parameters())
    state = {"model": model.state_dict(), EXTRA: extras.checked(extra)}
    return state if optimizer is None else state | {"optimizer": optimizer.state_dict()}


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


def write(state: dict[str, Any], writer: CommitWriter, group: dist.ProcessGroup | None = None) -> None:
    """Write and commit a checkpoint now. A collective call of the group, or of all ranks.

    Raises:
        CheckpointError: the same on every rank.
    """
    try:
        with quiet():
            dcp.save(state, storage_writer=writer, planner=extras.Planner(), process_group=group)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{writer.target.path} could not be written: {ranks.first_failure(error)}") from error


def load(
    path: Path_,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    requantize: bool = False,
    lossy: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint written on any number of ranks into a model and its optimizer. A collective call.

    Args:
        path: the directory. It may come from anybody: nothing in it is run (docs/security.md).
        requantize: whether weights of another recipe are quantized anew, to the nearest, from the masters that the
            checkpoint has; warns of it. Moments are loaded as they are, so they must be of the same kinds.
        lossy: whether those without masters are quantized from what their codes stand for.

    Returns:
        The `extra` entries that were saved. One that needs code to be read, which an earlier version or another library
        saved, is left out with a warning that names it.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another model or recipe; the model is not touched unless data
            turn out to be damaged while they are read.
        ConfigurationError: the pieces of a parameter are not where PyTorch would load them to.
        UnsupportedOperationError: experts are spread over ranks.
    """
    return load_and_tell(path, model, optimizer, requantize, lossy)[0]


def load_and_tell(
    path: Path_, model: nn.Module, optimizer: torch.optim.Optimizer | None, requantize: bool, lossy: bool
) -> tuple[dict[str, Any], str]:
    """What `load` does; gives the extra entries, and which weights were quantized anew, in words."""
    _check_numbers(model)
    components.check_offsets(model.named_parameters())
    plan = ranks.alike(lambda: _planned(path, model, optimizer, lossy if requantize else None))
    left_out = read_into(path, plan.metadata, plan.reading)
    masters = list(requantization.write_weights(path, plan.metadata, plan.changes))
    try:
        model.load_state_dict(plan.state["model"])
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if optimizer is not None:
        optimizer.load_state_dict(plan.state["optimizer"])
        requantization.set_masters(optimizer, masters)
    if left_out and ranks.rank() == 0:
        warnings.warn(f"{path} is loaded without entries of `extra`: {'; '.join(left_out.values())}", stacklevel=3)
    extra = {key: value for key, value in plan.reading[EXTRA].items() if f"{EXTRA}.{key}" not in left_out}
    return extra, requantization.tell(path, plan.changes)


@dataclass(frozen=True)
class _Plan:
    """What a load will do: `state` is the model's and the optimizer's, `reading` what of it is read as it is stored."""

    metadata: Metadata
    state: dict[str, Any]
    reading: dict[str, Any]
    changes: list[Change]


def _planned(path: Path_, model: nn.Module, optimizer: torch.optim.Optimizer | None, lossy: bool | None) -> _Plan:
    """Look at a checkpoint, as each rank does for itself. `lossy`: None if it must be of this model's recipe.

    Raises:
        CheckpointError: it cannot be loaded; a DamagedError, if its metadata cannot be read.
    """
    manifest.read(path)  # one of a newer version is refused, by its number
    try:
        metadata = read_metadata(path)
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    formats = _formats(path, metadata, state["model"])
    changes = _changes(path, metadata, model, optimizer, formats, lossy)
    wanted = _wanted(state)
    stored = {key for key in metadata.state_dict_metadata if key.startswith(("model.", "optimizer."))}
    skipped = {
        key
        for key in (stored | wanted.keys() if changes else ())
        if requantization.left_out(changes, key, key in stored, key in wanted)
    }
    _check_same_model(path, metadata, wanted, skipped, "optimizer" in state)
    extra = {
        key.removeprefix(f"{EXTRA}."): _placeholder(stored)
        for key, stored in metadata.state_dict_metadata.items()
        if key.startswith(f"{EXTRA}.")
    }
    return _Plan(metadata, state, {**_without(state, skipped), EXTRA: extra}, changes)


def _changes(
    path: Path_,
    metadata: Metadata,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    formats: Mapping[str, tuple[str, str]],
    lossy: bool | None,
) -> list[Change]:
    """The weights that are made anew; `lossy`: None if there must be none."""
    if lossy is None:
        _check_formats(path, formats)
        return []
    try:
        return requantization.changes(metadata, model, optimizer, formats, lossy)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _wanted(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the model and of the optimizer's states, by their keys in a checkpoint."""
    wanted = {f"model.{key}": value for key, value in state["model"].items()}
    for index, entries in state.get("optimizer", {}).get("state", {}).items():
        wanted.update({f"optimizer.state.{index}.{key}": value for key, value in entries.items()})
    return wanted


def _without(state: dict[str, Any], skipped: set[str]) -> dict[str, Any]:
    """A state dict of the same tensors and groups, but for some entries."""
    found = {"model": {key: value for key, value in state["model"].items() if f"model.{key}" not in skipped}}
    if "optimizer" in state:
        states = {
            index: {key: value for key, value in held.items() if f"optimizer.state.{index}.{key}" not in skipped}
            for index, held in state["optimizer"]["state"].items()
        }
        found["optimizer"] = {**state["optimizer"], "state": states}
    return found


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


def _check_numbers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        mesh = getattr(module, "ep_mesh", None)
        if mesh is not None and mesh.size() > 1:
            raise UnsupportedOperationError(limits.refusal("numbered states", name or type(module).__name__))


def _placeholder(stored: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return None


def _check_same_model(
    path: Path_, metadata: Metadata, wanted: Mapping[str, Any], skipped: set[str], with_optimizer: bool
) -> None:
    """Refuse a checkpoint that has other tensors than those wanted, `skipped` apart."""
    stored = metadata.state_dict_metadata
    prefixes = ("model.", "optimizer.state.") if with_optimizer else ("model.",)
    missing = sorted(wanted.keys() - stored.keys() - skipped)
    unknown = sorted(key for key in stored.keys() - wanted.keys() - skipped if key.startswith(prefixes))
    if missing or unknown:
        raise CheckpointError(
            f"{path} is of another model: it lacks {len(missing)} of this model's tensors (first: "
            f"{missing[:1] or '-'}) and has {len(unknown)} that this one lacks (first: {unknown[:1] or '-'})"
        )
    for key in wanted.keys() - skipped:
        value, size = wanted[key], getattr(stored[key], "size", None)
        if isinstance(value, Tensor) and size is not None and size != value.shape:
            raise CheckpointError(
                f"{path} is of another model: {key} has shape {tuple(size)} there and {tuple(value.shape)} here"
            )


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
