"""Saving in the background beside training, in one process: what training sees of it."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from quantshard.checkpoints import Manager, manager as managers
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.optimizers import FusedAdam


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, FusedAdam(model.named_parameters(), lr=1e-3)


@contextmanager
def held_back() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Writers say that they have begun, and write when they may."""
    begun, may_write, write = threading.Event(), threading.Event(), CommitWriter.write_data

    def late(*args: Any) -> Any:
        begun.set()
        assert may_write.wait(240)
        return write(*args)

    with mock.patch.object(CommitWriter, "write_data", late):
        yield begun, may_write


def test_the_warnings_of_training_are_its_own(tmp_path: Path, trained: Any) -> None:
    """Filters are of the whole process: while a save runs, and after it, they are those that training has set."""
    with held_back() as (begun, may_write), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Manager(tmp_path, async_="thread") as manager:
            manager.save(1, *trained)
            assert begun.wait(240)
            warnings.warn("of training", FutureWarning, stacklevel=1)
            warnings.filterwarnings("error", message="training set this")
            may_write.set()
            manager.wait()
            with pytest.raises(UserWarning, match="training set this"):
                warnings.warn("training set this", stacklevel=1)
            manager.restore(*trained)
    assert [str(warning.message) for warning in caught] == ["of training"]


def raising(manager: Manager) -> None:
    with pytest.raises(ZeroDivisionError), manager:
        raise ZeroDivisionError


def interrupted(manager: Manager) -> None:
    """At the end of the `with`, where the save is waited for."""
    wait, interrupts = managers.wait_for, [KeyboardInterrupt()]

    def interrupted_once(*args: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return wait(*args)

    with mock.patch.object(managers, "wait_for", interrupted_once), pytest.raises(KeyboardInterrupt), manager:
        pass


def closing(manager: Manager) -> None:
    manager.close()


def dropping(manager: Manager) -> None:
    """The caller lets go of it."""


ENDS = (raising, interrupted, closing, dropping)


@pytest.mark.parametrize("end", ENDS[:3])
def test_a_save_under_way_is_finished_when_the_run_ends(
    end: Callable[[Manager], None], tmp_path: Path, trained: Any
) -> None:
    """The next run finds it."""
    with held_back() as (begun, may_write):
        manager = Manager(tmp_path, async_="thread")
        manager.save(1, *trained)
        assert begun.wait(240)
        threading.Timer(0.3, may_write.set).start()
        end(manager)
        assert manager.steps() == [1]
    with Manager(tmp_path) as following:
        restored = following.restore(*trained)
        assert restored is not None and restored.step == 1
        following.save(2, *trained)
    assert following.steps() == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
@pytest.mark.parametrize("end", ENDS)
def test_the_directory_is_the_runs_while_it_writes_there(
    end: Callable[[Manager], None], tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: a second run would remove what is being written, or find a step appear under it."""
    monkeypatch.setattr(managers, "CLOSE_SECONDS", 0.1)
    with held_back() as (begun, may_write):
        manager = Manager(tmp_path, async_="thread")
        manager.save(1, *trained)
        assert begun.wait(240)
        end(manager)
        del manager
        gc.collect()
        monkeypatch.setattr(ownership, "LOCK_SECONDS", 0.2)
        with pytest.raises(CheckpointError, match="in use by another run"):
            Manager(tmp_path)
        may_write.set()
        monkeypatch.setattr(ownership, "LOCK_SECONDS", 240)
        with Manager(tmp_path) as following:
            assert following.steps() == [1]


def test_what_is_closed_writes_nothing_more(tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be asked how its last save went, and removes nothing, for the directory may be another run's by then."""
    monkeypatch.setattr(managers, "CLOSE_SECONDS", 0.1)
    manager = Manager(tmp_path, async_="thread", keep_last=1)
    manager.save(1, *trained)
    manager.wait()
    with held_back() as (_, may_write):
        manager.save(2, *trained)
        manager.close()
        may_write.set()
        report = manager.wait()
    assert report is not None and report.step == 2 and report.background_seconds is not None
    assert manager.steps() == [1, 2] and manager.wait() is None
    for mode in (None, "thread"):
        closed = Manager(tmp_path, async_=mode)
        closed.close()
        with pytest.raises(ConfigurationError, match="is read_only or closed; make another"):
            closed.save(3, *trained)
    assert manager.steps() == [1, 2]
