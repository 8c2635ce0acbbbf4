"""Saving a model and its optimizer with stock `torch.distributed.checkpoint` (DCP).

It does what the plain idiom does (state dicts, DCP's save), and looks first: before anything is overwritten.
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
from quantshard.argument_kinds import MAPPING, MODULE, OPTIMIZER, PATH, check_kinds, suggests_names
from quantshard.checkpoints import fit, optimizer_states
from quantshard.checkpoints.disk import agreement, commit
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.parameter_numbers import ParameterNumbers, check_alike
from quantshard.checkpoints.untrusted import extras
from quantshard.checkpoints.untrusted.extras import EXTRA
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, LostRankError
from quantshard.tensor import state_keys


@suggests_names
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
            plain data; the optimizer's `step()` needs a closure, or it is of other weights than the model's.
        RankMismatchError: an entry of `extra` is not equal on all ranks.
        UnsupportedOperationError: experts are spread over ranks, and the optimizer is one of `torch.optim`, or has
            other parameters than the model, so that its states cannot be numbered as in one process.
    """
    states = {"model": (MODULE, model), "optimizer": (OPTIMIZER.or_none, optimizer)}
    agreement.alike(lambda: check_kinds("save", path=(PATH, path), extra=(MAPPING.or_none, extra), **states))
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
    fit.check_places(model)
    state = {"model": agreement.alike(model.state_dict), EXTRA: extras.checked_extra(extra)}
    return state if optimizer is None else state | {"optimizer": _optimizer_state(model, optimizer)}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    def own() -> tuple[dict[str, Any], str | None]:
        fit.check_members("save", model, optimizer)
        numbers = ParameterNumbers.of(model, optimizer)
        return optimizer_states.saved(optimizer, numbers), None if numbers is None else numbers.digest

    (state, _), digests = agreement.exchanged(own, lambda found: found[1])
    check_alike(digests, optimizer)
    return state


def facts_of(model: nn.Module, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's facts: a parameter's largest mesh, `step` and `recipe` of `extra`, zero-centered gammas."""
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    step, recipe = extra.get("step"), extra.get("recipe")
    names = () if mesh is None else mesh.mesh_dim_names or [f"axis {dim}" for dim in range(mesh.ndim)]
    return {
        "step": step if type(step) is int else None,
        "recipe": recipe if isinstance(recipe, str) else None,
        "mesh": None if mesh is None else dict(zip(names, mesh.shape, strict=True)),
        "zero_centered": state_keys.zero_centered_gammas(model),
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
