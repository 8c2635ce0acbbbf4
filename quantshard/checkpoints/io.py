"""Saving and loading a model and its optimizer with stock `torch.distributed.checkpoint` (DCP).

These do what the plain idiom does (state dicts, `dcp.save`, `dcp.load`, `load_state_dict`), and look first: before
anything is overwritten, and before anything is loaded, so that a checkpoint of another model or recipe, or a damaged
one, ends in one sentence on every rank.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from quantshard import components, limits
from quantshard.checkpoints.metadata import read_metadata
from quantshard.errors import CheckpointError, UnsupportedOperationError

METADATA_FILE = ".metadata"
EXTRA = "extra"

Path_ = str | os.PathLike[str]


def is_complete(path: Path_) -> bool:
    """True if the checkpoint was written to its end: DCP writes its metadata last."""
    return (Path(path) / METADATA_FILE).is_file()


def save(
    path: Path_, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint to a new directory. A collective call.

    Args:
        path: the directory; it may exist if the checkpoint in it is not complete.
        model, optimizer: what to save; without an optimizer what is loaded can only begin a training.
        extra: a few more entries, e.g. the step: tensors, numbers or strings, equal on all ranks.

    Raises:
        CheckpointError: the directory holds a complete checkpoint, or cannot be written.
        ConfigurationError: the pieces of a parameter are not where PyTorch would save them.
        UnsupportedOperationError: experts are spread over ranks.
    """
    _check_numbers(model)
    components.check_offsets(model.named_parameters())
    if is_complete(path):
        raise CheckpointError(f"{path} holds a complete checkpoint and is not overwritten; save to another directory")
    _wait_for_all()  # no rank may find the metadata that a faster one has just written
    state = {"model": model.state_dict(), EXTRA: dict(extra or {})}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    try:
        with _quiet():
            dcp.save(state, checkpoint_id=path)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{path} could not be written: {_first_failure(error)}") from error


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
    if not is_complete(path):
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it has no {METADATA_FILE}, which is written last; choose another"
        )
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
    _read(path, state)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return dict(state[EXTRA])


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
    _check_formats(path, stored, wanted)
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


def _check_formats(path: Path_, stored: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    suffix = components.FORMAT_SUFFIX
    theirs = [key for key, value in stored.items() if key.startswith("model.") and _is_tag(key, value)]
    tags: dict[str, Any] = {key: torch.zeros(components.FORMAT_TAG_BYTES, dtype=torch.uint8) for key in theirs}
    if tags:
        _read(path, tags, no_dist=True)
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


def _read(path: Path_, state: dict[str, Any], no_dist: bool = False) -> None:
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=path, no_dist=no_dist)
    except (CheckpointException, OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete: {_first_failure(error)}; restore its files or choose another checkpoint"
        ) from error


def _first_failure(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


class _quiet(warnings.catch_warnings):
    """Without DCP's remarks on running in a single process, which is intended here."""

    def __enter__(self) -> Any:
        result = super().__enter__()
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        return result


def _wait_for_all() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
