"""Saves a model and its optimizer with stock `torch.distributed.checkpoint` (DCP).

`save` does the same as state dicts and `dcp.save`, but checks everything first, before a file is overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.checkpoints import extras, optimizer_states
from quantshard.checkpoints.disk import agreement, commit
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.extras import EXTRA
from quantshard.checkpoints.optimizer_states import ParameterNumbers, check_alike
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, LostRankError
from quantshard.tensor import components


def save(
    path: Path_, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None = None
) -> None:
    """Save a checkpoint to a new directory: all of it or nothing. A collective call.

    The files are written to a hidden directory next to `path`, which is renamed once all files are durable. In a store
    that cannot rename directories, the files are written in place, and `manifest.json` is the last of them.

    Args:
        path: the directory, or a URL that fsspec supports; it can exist if it is empty or holds an incomplete
            checkpoint.
        model, optimizer: the objects to save. A checkpoint without an optimizer can only start a training, not resume
            one.
        extra: additional entries, e.g. the step, equal on all ranks: tensors and nested plain data (numbers, strings,
            bytes, None, lists, tuples, sets and dicts, which can contain unsharded tensors).

    Raises:
        CheckpointError: the directory holds a complete checkpoint or other files, or cannot be written; the same on
            every rank.
        ConfigurationError: a shard of a parameter is not at the offset where PyTorch would save it; an entry of `extra`
            is not plain data; the optimizer's `step()` needs a closure, or its parameters are not the model's.
        RankMismatchError: an entry of `extra` is not equal on all ranks.
        UnsupportedOperationError: the model uses expert parallelism, and its optimizer states cannot be numbered as in
            one process: the optimizer is from `torch.optim`, or has parameters that are not the model's.
    """
    state = checkpoint_state(model, optimizer, extra)
    target = commit.begin(path)
    writer = CommitWriter(target, facts_of(model, extra or {}))
    with commit.abandoned_if_it_fails(target):
        write_checkpoint(state, writer)


def checkpoint_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The entries of a checkpoint: the state dicts of model and optimizer, and `extra`. A collective call.

    The state dicts hold the live tensors, not copies.

    Raises:
        ConfigurationError, RankMismatchError, UnsupportedOperationError: see `save`.
    """
    components.check_offsets(model.named_parameters())
    state = {"model": agreement.run_on_all_ranks(model.state_dict), EXTRA: extras.checked_extra(extra)}
    return state if optimizer is None else state | {"optimizer": _optimizer_state(model, optimizer)}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    def own() -> tuple[dict[str, Any], str | None]:
        optimizer_states.check_members("save", model, optimizer)
        numbers = ParameterNumbers.of(model, optimizer)
        return optimizer_states.saved(optimizer, numbers), None if numbers is None else numbers.digest

    (state, _), digests = agreement.exchange_results(own, lambda result: result[1])
    check_alike(digests, optimizer)
    return state


def facts_of(model: nn.Module, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's facts about a run.

    These are the mesh with the most dims, `step` and `recipe` of `extra`, and the names of zero-centered gammas.
    """
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    step, recipe = extra.get("step"), extra.get("recipe")
    names = () if mesh is None else mesh.mesh_dim_names or [f"axis {dim}" for dim in range(mesh.ndim)]
    return {
        "step": step if type(step) is int else None,
        "recipe": recipe if isinstance(recipe, str) else None,
        "mesh": None if mesh is None else dict(zip(names, mesh.shape, strict=True)),
        "zero_centered": components.zero_centered_gammas(model),
    }


def write_checkpoint(state: dict[str, Any], writer: CommitWriter, group: dist.ProcessGroup | None = None) -> None:
    """Write and commit a checkpoint synchronously. A collective call of `group`, or of all ranks.

    Raises:
        CheckpointError: the write failed; the same on every rank.
        KeyboardInterrupt, SystemExit: this rank was interrupted; the others raise a CheckpointError.
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
    except (CheckpointException, OSError, RuntimeError) as error:  # RuntimeError: a rank is gone
        if isinstance(error, CheckpointException):
            agreement.raise_interrupt(error, 0 if alone else dist.get_rank(group))
        kind = LostRankError if agreement.is_loss_of_a_rank(error) else CheckpointError
        raise kind(commit.save_failure(writer.target.path, error)) from error
