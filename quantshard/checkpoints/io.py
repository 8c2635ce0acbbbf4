"""Saving and loading a model and its optimizer with stock `torch.distributed.checkpoint` (DCP).

These do what the plain idiom does (state dicts, `dcp.save`, `dcp.load`, `load_state_dict`), and look first: before
anything is overwritten, and before anything is loaded, so that a checkpoint of another model or recipe, or a damaged
one, ends in one sentence on every rank.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from quantshard import components, limits
from quantshard.checkpoints import commit, ranks
from quantshard.checkpoints.commit import CommitWriter
from quantshard.checkpoints.metadata import read_metadata
from quantshard.checkpoints.reader import SafePlanner, SafeReader
from quantshard.errors import CheckpointError, UnsupportedOperationError

EXTRA = "extra"

Path_ = str | os.PathLike[str]


class DamagedError(CheckpointError):
    """The files of a checkpoint cannot be read, whatever the model."""


def save(
    path: Path_, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint to a new directory, wholly or not at all. A collective call.

    It is written beside the directory, under a hidden name, and renamed when it is durable; where a URL leads to a
    store that cannot do so, in place, with `manifest.json` last.

    Args:
        path: the directory, or a URL that fsspec knows; it may exist if it holds an incomplete checkpoint or nothing.
        model, optimizer: what to save; without an optimizer what is loaded can only begin a training.
        extra: a few more entries, e.g. the step: tensors, numbers or strings, equal on all ranks.

    Raises:
        CheckpointError: the directory holds a complete checkpoint or other files, or cannot be written; the same on
            every rank.
        ConfigurationError: the pieces of a parameter are not where PyTorch would save them.
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
    """What is saved: two trees and the caller's entries, as the plain idiom has them; the tensors are the live ones.

    Raises:
        ConfigurationError, UnsupportedOperationError: as `save` does.
    """
    _check_numbers(model)
    components.check_offsets(model.named_parameters())
    state = {"model": model.state_dict(), EXTRA: dict(extra or {})}
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
            dcp.save(state, storage_writer=writer, process_group=group)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{writer.target.path} could not be written: {commit.reason(error)}") from error


def load(path: Path_, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Load a checkpoint written on any number of ranks into a model and its optimizer. A collective call.

    Returns:
        The `extra` entries that were saved.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another model or recipe; the model is not touched unless data
            turn out to be damaged while they are read.
        ConfigurationError: the pieces of a parameter are not where PyTorch would load them to.
        UnsupportedOperationError: experts are spread over ranks.
    """
    _check_numbers(model)
    components.check_offsets(model.named_parameters())
    metadata = read_metadata(path)
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    _check_same_model(path, metadata, state)
    state[EXTRA] = {
        key.removeprefix(f"{EXTRA}."): _placeholder(stored)
        for key, stored in metadata.state_dict_metadata.items()
        if key.startswith(f"{EXTRA}.")
    }
    _read(path, metadata, state)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return dict(state[EXTRA])


def read_tensors(path: Path_, metadata: Metadata, keys: Iterable[str]) -> dict[str, Tensor]:
    """Entries of a checkpoint that are plain tensors, whole and on the CPU; each rank reads for itself.

    Raises:
        CheckpointError: they cannot be read.
    """
    state: dict[str, Any] = {key: _placeholder(metadata.state_dict_metadata[key]) for key in keys}
    if state:
        _read(path, metadata, state, no_dist=True)
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


def _check_same_model(path: Path_, metadata: Metadata, state: dict[str, Any]) -> None:
    stored = metadata.state_dict_metadata
    wanted = {f"model.{key}": value for key, value in state["model"].items()}
    _check_formats(path, metadata, wanted)
    for index, entries in state.get("optimizer", {}).get("state", {}).items():
        wanted.update({f"optimizer.state.{index}.{key}": value for key, value in entries.items()})
    prefixes = ("model.", "optimizer.state.") if "optimizer" in state else ("model.",)
    missing = sorted(wanted.keys() - stored.keys())
    unknown = sorted(key for key in stored.keys() - wanted.keys() if key.startswith(prefixes))
    if missing or unknown:
        raise CheckpointError(
            f"{path} is of another model: it lacks {len(missing)} of this model's tensors (first: "
            f"{missing[:1] or '-'}) and has {len(unknown)} that this one lacks (first: {unknown[:1] or '-'})"
        )
    for key, value in wanted.items():
        size = getattr(stored[key], "size", None)
        if isinstance(value, Tensor) and size is not None and size != value.shape:
            raise CheckpointError(
                f"{path} is of another model: {key} has shape {tuple(size)} there and {tuple(value.shape)} here"
            )


def _check_formats(path: Path_, metadata: Metadata, wanted: Mapping[str, Tensor]) -> None:
    suffix, stored = components.FORMAT_SUFFIX, metadata.state_dict_metadata
    theirs = [key for key, value in stored.items() if key.startswith("model.") and _is_tag(key, value)]
    tags: dict[str, Any] = {key: torch.zeros(components.FORMAT_TAG_BYTES, dtype=torch.uint8) for key in theirs}
    if tags:
        _read(path, metadata, tags, no_dist=True)
    for key in sorted({*theirs, *(key for key in wanted if key.endswith(suffix))}):
        weight = key.removesuffix(suffix)
        if weight not in stored or weight not in wanted:
            continue  # of another model, which is said better elsewhere
        saved = components.read_format_tag(tags[key]) if key in tags else "high precision"
        own = components.read_format_tag(wanted[key]) if key in wanted else "high precision"
        if saved != own:
            raise CheckpointError(
                f"{path} is of another recipe: {weight.removeprefix('model.')} is stored as {saved} there and as {own} "
                "in this model; build the model with the recipe that the checkpoint was written with"
            )


def _is_tag(key: str, stored: Any) -> bool:
    size = torch.Size([components.FORMAT_TAG_BYTES])
    return key.endswith(components.FORMAT_SUFFIX) and getattr(stored, "size", None) == size


def _read(path: Path_, metadata: Metadata, state: dict[str, Any], no_dist: bool = False) -> None:
    try:
        with quiet():
            dcp.load(state, storage_reader=SafeReader(path, metadata), planner=SafePlanner(), no_dist=no_dist)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise DamagedError(
            f"{path} is damaged or incomplete: {commit.reason(error)}; restore its files or choose another checkpoint"
        ) from error


class quiet(warnings.catch_warnings):
    """Without DCP's remarks on running in a single process, which is intended here."""

    def __enter__(self) -> Any:
        result = super().__enter__()
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        return result
