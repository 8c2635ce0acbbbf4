"""One run at a time on a directory of this machine: with real processes, which are forked and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantshard.checkpoints import Manager
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.store import LocalStore
from quantshard.errors import CheckpointError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no flock, no fork")

WORKER = """
import os, sys, time
from torch.utils.data import DataLoader, Dataset
from quantshard.checkpoints import Manager
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.store import LocalStore

class Slow(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        print(os.getpid(), flush=True)
        time.sleep(600)

if __name__ == "__main__":
    manager = Manager(sys.argv[1])
    with ownership.being_read(LocalStore(), sys.argv[2]):
        next(iter(DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")))
"""


@contextmanager
def owner_with_a_worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that owns `run` and reads `file`, while a worker of its DataLoader is busy."""
    program = tmp_path / "program.py"
    program.write_text(WORKER)
    (tmp_path / "file").touch()
    arguments = [sys.executable, str(program), str(tmp_path / "run"), str(tmp_path / "file")]
    owner = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    try:
        yield owner
        os.kill(worker, 0)  # it lives, or nothing was shown
    finally:
        owner.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        owner.communicate()


def test_a_killed_run_is_resumed_while_its_data_workers_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "LOCK_SECONDS", 1.0)
    with owner_with_a_worker(tmp_path) as owner:
        with pytest.raises(CheckpointError, match="in use by another run"):
            Manager(tmp_path / "run")
        assert ownership.is_being_read(LocalStore(), str(tmp_path / "file"))
        owner.kill()
        owner.wait()
        monkeypatch.setattr(ownership, "LOCK_SECONDS", 60)
        Manager(tmp_path / "run").close()
        assert not ownership.is_being_read(LocalStore(), str(tmp_path / "file"))


CHILD = """
import os, sys
from quantshard.checkpoints import Manager

manager = Manager(sys.argv[1])
child = os.fork()
if child == 0:
    taken = os.open(os.devnull, os.O_RDONLY)  # under the number that the lock had
    manager.close()
    del manager
    os.fstat(taken)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
input()
"""


def test_a_child_that_lets_go_leaves_the_run_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "LOCK_SECONDS", 0.2)
    arguments = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "0\n"
        with pytest.raises(CheckpointError, match="in use by another run"):
            Manager(tmp_path)
    Manager(tmp_path).close()
