"""A save in the background that failed on one rank and runs on elsewhere: nothing meets it until it has ended.

2 and 3 ranks, in processes of their own.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from quantshard.checkpoints import Manager, manager as managers, saving
from quantshard.checkpoints.disk import ownership
from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam
from tests.distributed.forked import on_new_ranks

pytestmark = pytest.mark.distributed


def said_by(action: Callable[[], object], folder: str) -> str:
    """Its error, or its warnings, without the folder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except CheckpointError as error:
            return str(error).replace(folder, "")
    return "; ".join(str(each.message).replace(folder, "") for each in caught)


@contextmanager
def in_haste() -> Iterator[None]:
    with (
        mock.patch.object(managers, "POLL_SECONDS", 0.1),
        mock.patch.object(managers, "CLOSE_SECONDS", 0.1),
        mock.patch.object(ownership, "LOCK_SECONDS", 0.1),
    ):
        yield


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, FusedAdam(model.named_parameters(), lr=1e-3)


def by_threads(folder: str, failing: int) -> dict[str, Any]:
    """What is said on this rank while the writing of all but the failing rank goes on, and after it."""
    model, optimizer = trained()
    copies: list[torch.Tensor] = []
    may_end, write = threading.Event(), saving.write_checkpoint

    def held_up(state: dict[str, Any], *rest: Any) -> None:
        if dist.get_rank() == failing:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        copies.append(state["model"]["weight"])
        may_end.wait()

    manager, found = Manager(folder, async_="thread"), {}
    with in_haste():
        with mock.patch.object(managers.saving, "write_checkpoint", held_up):
            manager.save(1, model, optimizer)
            before = model.weight.detach().clone()
            found["wait"] = said_by(manager.wait, folder)
        with torch.no_grad():
            model.weight.add_(1.0)
        with mock.patch.object(managers.saving, "write_checkpoint", write):
            found["save"] = said_by(lambda: manager.save(2, model, optimizer), folder)
        found["elsewhere"] = said_by(lambda: saved_at(f"{folder}/elsewhere", model, optimizer), folder)
        manager.close()
        found["intact"] = all(torch.equal(copy, before) for copy in copies)
        dist.barrier()
        failed = manager._failed
        assert failed is not None
        found["lock"] = "free" if dist.get_rank() or failed.future.done() else lock_of(folder)
        dist.barrier()
        may_end.set()
        managers.wait_for([failed.future])
        dist.barrier()
        saved_at(folder, model, optimizer)
        found["steps"] = manager.steps()
    return found


def saved_at(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with Manager(folder, async_="thread") as manager:
        manager.save(3, model, optimizer)


def lock_of(folder: str) -> str:
    try:
        handle = ownership.lock(folder)
    except TimeoutError:
        return "held"
    assert handle is not None
    handle.release()
    return "free"


@pytest.mark.parametrize(("ranks", "failing"), [(2, 0), pytest.param(2, 1, marks=pytest.mark.exhaustive), (3, 1)])
def test_a_thread_that_still_writes(tmp_path: Path, ranks: int, failing: int) -> None:
    """Its memory, its collective calls and its directory are its own; then the run can go on."""
    by_rank = on_new_ranks(ranks, by_threads, str(tmp_path), failing)
    assert all(isinstance(found, dict) for found in by_rank), by_rank
    running = [rank for rank in range(ranks) if rank != failing]
    where = f"on rank {running[0]}: " if running[0] else ""
    for found in by_rank:
        assert "step-000001 could not be written: " in found["wait"] and "Address already in use" in found["wait"]
        assert found["save"].startswith(f"{where}the failed save of /step-000001 is still running; ")
        assert found["elsewhere"] == "" and found["intact"] and found["steps"] == [3]
    assert by_rank[0]["lock"] == ("held" if 0 in running else "free")
