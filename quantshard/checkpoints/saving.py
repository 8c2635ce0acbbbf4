"""Saves a model and its optimizer with stock `torch.distributed.checkpoint` (DCP).

`save` does the same as state dicts and `dcp.save`, but checks everything first, before a file is overwritten. The
caller's own entries are plain data, equal on all ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.checkpoints import optimizer_states
from quantshard.checkpoints.disk import agreement, commit
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.optimizer_states import ParameterNumbers
from quantshard.checkpoints.safe_read import checked_entry
from quantshard.errors import CheckpointError, ConfigurationError, LostRankError, RankMismatchError
from quantshard.tensor import components

EXTRA = "extra"


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
    """
    state = checkpoint_state(model, optimizer, extra or {})
    target = agreement.from_rank0(lambda: commit.prepare_target(path))
    writer = CommitWriter(target, facts_of(model, extra or {}))
    with commit.abandoned_if_it_fails(target):
        write_checkpoint(state, writer)


def checkpoint_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The entries of a checkpoint: live state dicts of model and optimizer, and `extra`. A collective call."""
    components.check_offsets(model.named_parameters())

    # an optimizer's state dict can be collective, so all ranks first agree that they have a model's
    plain = agreement.run_on_all_ranks(lambda: {"model": model.state_dict(), EXTRA: readable(extra)})

    def state_of_rank() -> tuple[dict[str, Any], str | None]:
        if optimizer is None:
            return plain, None
        optimizer_states.check_members("save", model, optimizer)
        numbers = ParameterNumbers.of(model, optimizer)
        state = {**plain, "optimizer": optimizer_states.saved(optimizer, numbers)}
        return state, None if numbers is None else numbers.digest

    (state, _), digests = agreement.exchange_results(
        state_of_rank, lambda result: ({key: digest(value) for key, value in plain[EXTRA].items()}, result[1])
    )
    check_equal([extra_digests for extra_digests, _ in digests])
    optimizer_states.check_alike([digest_of_names for _, digest_of_names in digests], optimizer)
    return state


def facts_of(model: nn.Module, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's facts about a run; of several meshes, the one with the most dims."""
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
    """Write and commit a checkpoint. A collective call of `group`, or of all ranks; if one fails, all raise."""
    alone = not dist.is_initialized()
    try:
        private_torch.save_checkpoint(
            state, storage_writer=writer, planner=ExtraSavePlanner(), process_group=group, no_dist=alone
        )
    except (CheckpointException, OSError, RuntimeError) as error:  # RuntimeError: a rank is gone
        agreement.raise_interrupt(error, 0 if alone else dist.get_rank(group))
        kind = LostRankError if agreement.is_loss_of_a_rank(error) else CheckpointError
        raise kind(commit.save_failure(writer.target.path, error)) from error


def readable(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries as they will be read: live tensors, and copies of all else. Each is stored whole."""
    entries: dict[str, Any] = {}
    for key, value in extra.items():
        if type(key) is not str:
            raise ConfigurationError(f"extra: the key {key!r} is a {type(key).__name__}; use strings as keys")
        if not isinstance(value, Tensor):
            entries[key] = checked_entry(f"extra[{key!r}]", value)[1]
            continue
        # Whether a tensor can be read depends on its kind only, so check an empty one.
        checked_entry(f"extra[{key!r}]", private_torch.local_tensor(value).new_empty(0))
        entries[key] = value if isinstance(value, DTensor) else value.resolve_conj().resolve_neg()
    return entries


def check_equal(digests: Sequence[Mapping[str, bytes]]) -> None:
    for rank, rank_digests in enumerate(digests):
        differing = [key for key, _ in sorted({*digests[0].items()} ^ {*rank_digests.items()})]
        if differing:
            raise RankMismatchError(f"extra[{differing[0]!r}] differs on rank {rank}; save it through Manager(state=)")


def digest(value: Any) -> bytes:
    """Hash a plain value, independent of the order of sets and dicts; for a DTensor only its dtype and global shape."""
    if isinstance(value, DTensor):
        parts = [repr((value.dtype, value.shape)).encode()]
    elif isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts = [repr((value.dtype, value.shape)).encode(), content]
    elif isinstance(value, dict):
        parts = sorted(digest(key) + digest(item) for key, item in value.items())
    elif isinstance(value, list | tuple | set):
        parts = [digest(item) for item in value]
        parts = sorted(parts) if isinstance(value, set) else parts
    else:
        parts = [repr(value).encode()]
    return xxhash.xxh3_128(b"".join([type(value).__name__.encode(), *parts])).digest()


class ExtraSavePlanner(DefaultSavePlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        without_extra = {key: value for key, value in state_dict.items() if key != EXTRA}
        super().set_up_planner(without_extra, storage_meta, is_coordinator)
        for key, value in state_dict.get(EXTRA, {}).items():
            self.state_dict[f"{EXTRA}.{key}"] = value
            self.mappings[f"{EXTRA}.{key}"] = (EXTRA, key)
