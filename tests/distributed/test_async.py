"""`dcp.async_save` and the Manager in the background, by a thread and by a process: the bits are those of the call.

2 ranks, in processes of their own: those of the pool may not have children, which saving by a process needs.
"""

from __future__ import annotations

import errno
import os
import re
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
from torch.distributed.checkpoint import FileSystemWriter, _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from quantshard import private_torch, recipe
from quantshard.checkpoints import Manager
from quantshard.checkpoints import manager as managers
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.commit import CommitWriter, SaveTarget
from quantshard.checkpoints.inspection import verify
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.tools.trainer.loop import make_optimizer
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec
from tests.distributed import durability
from tests.distributed.forked import SECONDS, fork_server, forked_savers, on_new_ranks
from tests.distributed.models import RECIPES
from tests.distributed.shelf import SCHEME

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
        self.model = models.build(
            models.ModelSpec(settings, recipe=recipe.resolve(RECIPES[name])), MeshSpec.parse(mesh).device_mesh("cpu")
        )
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


def failed_in_a_process(folder: str) -> list[str]:
    """What is said on this rank when the process that saves cannot write, and of what it is not given to write; then
    the checkpoints that are there, and the entries of the last."""
    run = Run("nvfp4", "dp_shard=2")
    said = []
    with Manager(folder, async_="process") as manager:
        manager.save(1, run.model, run.optimizer)
        manager.wait()
        nowhere = SaveTarget("/proc/none/step-000002", "0" * 16)
        with mock.patch.object(Manager, "_prepare", lambda manager, step: nowhere):
            manager.save(2, run.model, run.optimizer)
        try:
            manager.wait()
        except CheckpointError as error:
            said.append(str(error))
        try:
            manager.save(3, run.model, run.optimizer, {"folder": Path(folder)})
        except ConfigurationError as error:
            said.append(str(error))
        manager.save(3, run.model, run.optimizer, {"seen": {1: {}, "last": [torch.ones(2)]}})
        manager.wait()
        said.append(str(manager.steps()))
        restored = manager.restore(run.model, run.optimizer)
        said.append(repr(None if restored is None else restored.extra))
    return said


class FullWriter(CommitWriter):
    """The disk of the second rank is full."""

    def write_data(self, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{self.target.written_in}/__1_0.distcp")
        return super().write_data(*args)


def on_a_disk(folder: str) -> list[str]:
    """What is not durable in time of a save by a process; what is said of one into a full disk, and left."""
    run = Run("nvfp4", "dp_shard=2")
    with (
        mock.patch.object(managers, "CommitWriter", durability.RecordingWriter),
        Manager(f"{folder}/run", async_="process") as manager,
    ):
        manager.save(1, run.model, run.optimizer)
        manager.wait()
    dist.barrier()
    said = durability.not_durable(Path(f"{folder}/run/step-000001"), sorted(Path(folder).glob("run.*.log")))
    with mock.patch.object(managers, "CommitWriter", FullWriter), Manager(f"{folder}/run", async_="process") as manager:
        manager.save(2, run.model, run.optimizer)
        try:
            manager.wait()
        except CheckpointError as error:
            said.append(re.sub(r"[.]step-000002[.][0-9a-f]*", "HIDDEN", str(error)))
    dist.barrier()
    return [*said, str(sorted(path.name for path in Path(f"{folder}/run").glob("*step*")))]


def behind_urls(folder: str) -> list[str]:
    """What is there after two saves by a process on a store without renames, and whether the process lives until the
    Manager is closed."""
    run = Run("nvfp4", "dp_shard=2")
    with Manager(f"{SCHEME}{folder}", async_="process", keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, run.model, run.optimizer)
        manager.wait()
        found = [str(manager.steps()), *verify(manager.path(2)).problems]
        saves = _async_process_executor._CHECKPOINT_PROCESS is not None
    return [*found, f"saves: {saves}, then: {_async_process_executor._CHECKPOINT_PROCESS}"]


class LateWriter(CommitWriter):
    """Commits nothing before a file is there."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        deadline = time.monotonic() + SECONDS
        while not os.path.exists(f"{os.path.dirname(self.target.path)}.gate"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        super().finish(*args, **kwargs)


def left_by_an_error(folder: str) -> list[str]:
    """The steps that are there after a run that raised while a process saved for it; of one that closed before the save
    was done, whether the next run could start before, and its steps."""
    run = Run("nvfp4", "dp_shard=2")
    try:
        with Manager(folder, async_="process") as manager:
            manager.save(1, run.model, run.optimizer)
            raise ZeroDivisionError
    except ZeroDivisionError:
        said = [str(manager.steps())]
    with mock.patch.object(managers, "CommitWriter", LateWriter), mock.patch.object(managers, "CLOSE_SECONDS", 0.1):
        manager = Manager(folder, async_="process")
        manager.save(2, run.model, run.optimizer)
        manager.close()
    try:
        with mock.patch.object(ownership, "LOCK_SECONDS", 0.2):
            Manager(folder)
    except CheckpointError as error:
        said.append(str(error))
    Path(f"{folder}.gate").touch()
    with mock.patch.object(ownership, "LOCK_SECONDS", 60), Manager(folder, async_="process") as following:
        said.append(str(following.steps()))
        following.save(3, run.model, run.optimizer)
    return [*said, str(following.steps())]


def two_at_once(folder: str) -> list[str]:
    """Whether the one save by the process is done when another Manager's has begun, and the steps of both."""
    run = Run("nvfp4", "dp_shard=2")
    with mock.patch.object(managers, "CommitWriter", LateWriter):
        first = Manager(f"{folder}/first", async_="process")
        first.save(1, run.model, run.optimizer)
    assert first._pending is not None
    threading.Timer(1, Path(f"{folder}/first.gate").touch).start()
    with first, Manager(f"{folder}/second", async_="process") as second:
        second.save(2, run.model, run.optimizer)
        done = first._pending.future.done()
    return [str(done), str(first.steps()), str(second.steps())]


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
    """In one set of processes. The first two functions share those that save, in the second turn spawned as users have
    it."""
    with nullcontext() if turn == 1 else forked_savers(server):
        said = [plain_saves(f"{folder}/plain_saves", turn), failed_in_a_process(f"{folder}/failed_in_a_process")]
    with forked_savers(server):
        for function in (on_a_disk, behind_urls, left_by_an_error, two_at_once, one_cannot_begin):
            said.append(function(f"{folder}/{function.__name__}"))
    return tuple(said)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_saved_by_a_thread_and_by_a_process(tmp_path: Path, turn: int) -> None:
    """2 ranks: by stock PyTorch, recipes by both, on FSDP2 or tensor-parallel; a process fails, and a run."""
    by_rank = on_new_ranks(2, all_of_them, str(tmp_path), turn, fork_server())
    assert by_rank[0] == by_rank[1]
    plain, failed, disk, urls, left, two, begun = by_rank[0]
    assert plain == []
    assert failed[0].startswith("/proc/none/step-000002 could not be written: "), failed
    assert failed[1].startswith("extra['folder'], a PosixPath, cannot be saved as plain data"), failed
    assert failed[2:] == ["[1, 3]", "{'seen': {1: {}, 'last': [tensor([1., 1.])]}}"], failed
    run = f"{tmp_path}/on_a_disk/run"
    assert disk == [
        f"{run}/step-000002 could not be written: on rank 1: No space left on device: {run}/HIDDEN.tmp/__1_0.distcp; "
        "other checkpoints are unchanged",
        "['step-000001']",
    ]
    assert urls == ["[2]", "saves: True, then: None"]
    assert (left[0], *left[2:]) == ("[1]", "[1, 2]", "[1, 2, 3]") and "in use by another run" in left[1], left
    assert two == ["True", "[1]", "[2]"]
    assert begun[0].startswith(f"{tmp_path}/one_cannot_begin/step-000001 could not be written: Address already in use")
    assert begun[1] == "[]"
