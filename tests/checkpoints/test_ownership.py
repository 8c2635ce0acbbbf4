"""One run at a time on a directory of this machine: with real processes, which are forked and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, Dataset

from quantshard.checkpoints import Manager
from quantshard.checkpoints.disk import ownership
from quantshard.errors import CheckpointError
from tests.distributed.pool import IMPORTED

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no flock, no fork")


class Slow(Dataset[None]):
    """Busy for ten minutes with its one item, in a worker whose number it tells."""

    def __init__(self, told: Connection) -> None:
        self.told = told

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        self.told.send(os.getpid())
        time.sleep(600)


def own_with_a_worker(told: Connection, run: Path) -> None:
    manager = Manager(run)
    next(iter(DataLoader(Slow(told), num_workers=1, multiprocessing_context="fork")))
    manager.close()


def started(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process that is forked from one that has imported what it needs, as ranks are."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    return process, ours


@contextmanager
def owner_with_a_worker(tmp_path: Path) -> Iterator[Any]:
    """A run that owns `run`, while a worker of its DataLoader is busy."""
    owner, told = started(own_with_a_worker, tmp_path / "run")
    worker = told.recv()
    try:
        yield owner
        os.kill(worker, 0)  # it lives, or nothing was shown
    finally:
        owner.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        owner.join()


def test_a_killed_run_is_resumed_while_its_data_workers_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "LOCK_SECONDS", 1.0)
    with owner_with_a_worker(tmp_path) as owner:
        with pytest.raises(CheckpointError, match="in use by another run"):
            Manager(tmp_path / "run")
        owner.kill()
        owner.join()
        monkeypatch.setattr(ownership, "LOCK_SECONDS", 60)
        Manager(tmp_path / "run").close()


def let_go_in_a_child(told: Connection, run: Path) -> None:
    manager = Manager(run)
    child = os.fork()
    if child == 0:
        taken = os.open(os.devnull, os.O_RDONLY)  # under the number that the lock had
        manager.close()
        del manager
        os.fstat(taken)
        os._exit(0)
    told.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    told.recv()


def test_a_child_that_lets_go_leaves_the_run_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "LOCK_SECONDS", 0.2)
    owner, told = started(let_go_in_a_child, tmp_path)
    try:
        assert told.recv() == 0
        with pytest.raises(CheckpointError, match="in use by another run"):
            Manager(tmp_path)
        told.send("end")
        owner.join()
    finally:
        owner.kill()
    Manager(tmp_path).close()


def replace_and_die(_: Connection, run: Path) -> None:
    """Save step 2 a second time, after going back to step 1, and die between the two renames of the replacement."""
    model = nn.Linear(3, 5)
    manager = Manager(run)
    manager.restore(model, step=1)
    nn.init.constant_(model.weight, 3.0)
    rename = os.rename

    def rename_and_die(old: Any, new: Any) -> None:
        rename(old, new)
        if str(new).endswith(".old"):
            os.kill(os.getpid(), signal.SIGKILL)

    os.rename = rename_and_die
    manager.save(2, model, None)


def test_a_kill_between_the_renames_of_a_replacement_loses_neither_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(3, 5)
    with Manager(tmp_path) as manager:
        for step in (1, 2):
            nn.init.constant_(model.weight, float(step))
            manager.save(step, model, None)
    process, _ = started(replace_and_die, tmp_path)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "step-000002").exists()
    with Manager(tmp_path) as manager:
        assert manager.steps() == [1, 2]
        manager.restore(model)
        assert model.weight.unique().tolist() == [3.0]
        manager.save(3, model, None)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.endswith((".old", ".tmp"))) == []
