"""`dcp.async_save`, by a thread and by a process, and the Manager in the background: the bits are those of the call.

2 ranks, in processes of their own: those of the pool may not have children, which saving by a process needs.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from quantshard import private_torch, recipe
from quantshard.checkpoints import Manager, manager as managers
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.errors import CheckpointError
from quantshard.tools.trainer.loop import make_optimizer
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec
from tests.distributed.forked import SECONDS, fork_server, forked_savers, on_new_ranks
from tests.distributed.models import RECIPES

pytestmark = pytest.mark.distributed

MESHES = ("dp_shard=2", "tp=2")
TINY = {"hidden": 64, "heads": 2, "kv_heads": 2, "ffn": 96, "layers": 1, "seq_length": 8}


class WaitingWriter(FileSystemWriter):
    """Writes nothing before a file is there: the weights have changed by then."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.gate = f"{path}.gate"

    def write_data(self, *args: Any) -> Any:
        deadline = time.monotonic() + SECONDS
        while not os.path.exists(self.gate):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return super().write_data(*args)


class Run:
    """The model of the command line, on a mesh of 2."""

    def __init__(self, name: str, mesh: str) -> None:
        torch.manual_seed(3)
        settings = TrainSettings(**TINY, mesh=mesh, global_batch=2).resolved()
        assert asdict(settings)["hidden"] == 64
        with mock.patch.object(models, "recipes_of", return_value=recipe.resolve(RECIPES[name])):
            self.model = models.build(models.ModelSpec(settings), MeshSpec.parse(mesh).device_mesh("cpu"))
        self.optimizer = make_optimizer(self.model, settings)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self) -> None:
        tokens = torch.arange(2 * 9).reshape(2, 9) % 250
        models.loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def held(self) -> list[Tensor]:
        return [private_torch.local_tensor(value).clone() for value in self.model.state_dict().values()]


KINDS = (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS)
SOME = ("delayed", "nvfp4")
"""Recipes with a history and with draws; `make test` saves the others at once in test_saving.py, by the same state
dicts."""


def plain_saves(folder: str, turn: int) -> list[str]:
    """What is wrong with `dcp.async_save`: each recipe by a thread and by a process at once, on a mesh in turns; some
    recipes in turn 0."""
    wrong = []
    groups = [dist.new_group(backend="gloo") for _ in KINDS]
    for number, name in enumerate(RECIPES):
        if turn == 0 and name not in SOME:
            continue
        mesh = MESHES[(number + turn) % 2]
        now, *places = (f"{folder}/{name} {mesh} {kind}" for kind in ("now", "thread", "process"))
        run = Run(name, mesh)
        run.step()
        dcp.save(run.state(), checkpoint_id=now)
        before = run.held()
        futures = [
            dcp.async_save(
                run.state(), storage_writer=WaitingWriter(place), process_group=group, async_checkpointer_type=kind
            )
            for place, group, kind in zip(places, groups, KINDS, strict=True)
        ]
        run.step()
        changed = sum(not torch.equal(a, b) for a, b in zip(before, run.held(), strict=True))
        early = [place for place in places if os.path.exists(f"{place}/.metadata")]
        dist.barrier()
        for place, future in zip(places, futures, strict=True):
            Path(f"{place}.gate").touch()
            future.result()
        dist.barrier()
        found = compare(places[dist.get_rank()], now)  # each rank looks at one
        if early or changed < 3 or not found.equal or found.tensors < 20:
            wrong.append(f"{places[dist.get_rank()]}: {early=} {changed=} {found.first}")
    return wrong


class LateWriter(CommitWriter):
    """Commits nothing before a file is there."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        deadline = time.monotonic() + SECONDS
        while not os.path.exists(f"{os.path.dirname(self.target.path)}.gate"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        super().finish(*args, **kwargs)


def left_by_an_error(folder: str) -> list[str]:
    """The steps that are there after a run that raised while it saved in the background; of one that closed before the
    save was done, whether the next run could start before, and its steps."""
    run = Run("nvfp4", "dp_shard=2")
    try:
        with Manager(folder, async_="thread") as manager:
            manager.save(1, run.model, run.optimizer)
            raise ZeroDivisionError
    except ZeroDivisionError:
        said = [str(manager.steps())]
    with mock.patch.object(managers, "CommitWriter", LateWriter), mock.patch.object(managers, "CLOSE_SECONDS", 0.1):
        manager = Manager(folder, async_="thread")
        manager.save(2, run.model, run.optimizer)
        manager.close()
    try:
        with mock.patch.object(ownership, "LOCK_SECONDS", 0.2):
            Manager(folder)
    except CheckpointError as error:
        said.append(str(error))
    Path(f"{folder}.gate").touch()
    with mock.patch.object(ownership, "LOCK_SECONDS", 60), Manager(folder, async_="thread") as following:
        said.append(str(following.steps()))
        following.save(3, run.model, run.optimizer)
    return [*said, str(following.steps())]


def one_cannot_begin(folder: str) -> list[str]:
    """What is said when the writing of one rank fails while that of the other waits for it and does not end."""
    run, ended = Run("nvfp4", "dp_shard=2"), threading.Event()

    def write(*_: Any) -> None:
        if dist.get_rank() == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        ended.wait()

    with Manager(folder, async_="thread") as manager, mock.patch.object(managers.saving, "write_checkpoint", write):
        manager.save(1, run.model, run.optimizer)
        with mock.patch.object(managers, "POLL_SECONDS", 0.1), pytest.raises(CheckpointError) as raised:
            manager.wait()
        ended.set()
        return [str(raised.value), str(manager.steps())]


def all_of_them(folder: str, turn: int, server: dict[str, Any]) -> tuple[list[str], ...]:
    """In one set of processes. Those of `dcp.async_save` are in the second turn spawned as users have it."""
    with nullcontext() if turn == 1 else forked_savers(server):
        said = [plain_saves(f"{folder}/plain_saves", turn)]
    for function in (left_by_an_error, one_cannot_begin):
        said.append(function(f"{folder}/{function.__name__}"))
    return tuple(said)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_saved_by_a_thread_and_by_a_process(tmp_path: Path, turn: int) -> None:
    """2 ranks: by stock PyTorch, recipes by both, on FSDP2 or tensor-parallel; a run fails."""
    by_rank = on_new_ranks(2, all_of_them, str(tmp_path), turn, fork_server())
    assert by_rank[0] == by_rank[1]
    plain, left, begun = by_rank[0]
    assert plain == []
    assert (left[0], *left[2:]) == ("[1]", "[1, 2]", "[1, 2, 3]") and "in use by another run" in left[1], left
    assert begun[0].startswith(f"{tmp_path}/one_cannot_begin/step-000001 could not be written: Address already in use")
    assert begun[1] == "[]"
