"""A small real training job that can be killed at a named moment: FSDP2 over gloo, real files, `checkpoints.Manager`.

Every line of its losses, of every attempt, must have the bits of the job that was never killed; so data come from the
random generators and a counter that the checkpoint holds, and are wrong if one of them is not restored.
"""

from __future__ import annotations

import json
import os
import random
import signal
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from quantshard import private_torch
from quantshard.checkpoints import loading, manager, rank_states, saving
from quantshard.checkpoints.disk import checksums, commit, manifest, store
from quantshard.optimizers import FusedAdam
from tests.distributed.models import Case, build, optimizer_of
from tests.distributed.shelf import SCHEME

SHAPES = ((40, 150), (150, 33), (33, 1))
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is saved. `mode`: as the Manager's `async_`."""

    folder: str
    recipe: str = "mxfp8"
    mode: str | None = None
    ranks: int = 2
    steps: int = 8
    every: int = 2
    keep_last: int = 2
    copy: bool = False  # of what was restored, as it is loaded here
    behind_url: bool = False

    @property
    def checkpoints(self) -> Path:
        return Path(self.folder, "checkpoints")

    def lines(self) -> list[dict[str, Any]]:
        """Every step of every attempt."""
        file = Path(self.folder, "losses.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@dataclass(frozen=True)
class Fault:
    """The process of `rank` kills itself at the `call`-th time that it comes to a point."""

    point: str
    call: int
    rank: int


# Points ---------------------------------------------------------------------------------------------------------------
# (where, name, whether it dies before or after the call)

POINTS: dict[str, tuple[Any, str, str]] = {
    "step: before the optimizer": (FusedAdam, "step", "before"),
    "step: after the optimizer": (FusedAdam, "step", "after"),
    "staging: what each rank has": (rank_states, "rank_states", "after"),
    "staging: before the copy": (manager.BackgroundSaver, "copied", "before"),
    "staging: after the copy": (manager.BackgroundSaver, "copied", "after"),
    "writing: the folder is made": (store.LocalStore, "mkdir", "after"),
    "writing: in a file": (checksums.ChecksumFile, "write", "half"),
    "writing: the data are there": (commit.CommitWriter, "write_data", "after"),
    "writing: the metadata are there": (commit.CommitWriter, "_check", "before"),
    "writing: in the manifest": (store.LocalStore, "write", "half"),
    "rename: before": (commit, "put_in_place", "before"),
    "rename: after, not yet durable": (store.LocalStore, "sync", "before"),
    "rename: after": (commit, "put_in_place", "after"),
    "retiring: before": (commit, "remove", "before"),
    "retiring: renamed, not yet removed": (store.LocalStore, "remove", "before"),
    "restore: looking": (manager.Manager, "steps", "before"),
    "restore: verifying": (manifest, "wrong_file", "after"),
    "restore: before the load": (loading, "load_checkpoint", "before"),
    "restore: in the load": (FusedAdam, "load_state_dict", "before"),
    "restore: after the load": (loading, "load_checkpoint", "after"),
}

ON_ANY_RANK = {point for point in POINTS if point.startswith(("step", "staging", "restore: before", "restore: in"))} | {
    "writing: in a file",
    "writing: the data are there",
}
"""The points that every rank comes to; to the others, only the first."""


def arm(fault: Fault, folder: str) -> None:
    """Patch the point, for the rest of this process."""
    where, name, moment = POINTS[fault.point]
    whole, calls = getattr(where, name), []

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) != fault.call:
            return whole(*args, **kwargs)
        if moment == "after":
            whole(*args, **kwargs)
        elif moment == "half":
            *same, data = args
            whole(*same, bytes(memoryview(data).cast("B")[: memoryview(data).nbytes // 2]))
        Path(folder, "hit").write_text(fault.point)
        os.kill(os.getpid(), signal.SIGKILL)

    mock.patch.object(where, name, dying).start()


# Training -------------------------------------------------------------------------------------------------------------


class Position:
    """The order of the data: how many batches this rank has drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]

    def batch(self) -> torch.Tensor:
        """Of three generators and the position."""
        self.drawn += 1
        shift = random.random() + float(np.random.random()) + self.drawn / 8
        return (torch.randn(4, SHAPES[0][0]) + shift).bfloat16()


def train(job: Job) -> None:
    rank = dist.get_rank()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    case = Case(job.recipe, (job.ranks,), shapes=SHAPES)
    with torch.random.fork_rng():
        model = build(case)
        optimizer = optimizer_of(model, case)
    data = Position()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    keeper = manager.Manager(
        f"{SCHEME if job.behind_url else ''}{job.checkpoints}",
        keep_last=job.keep_last,
        async_=job.mode,
        state={"data": data, "schedule": schedule},
    )
    with keeper:
        restored = keeper.restore(model, optimizer)
        done = 0 if restored is None else restored.step
        if rank == 0:
            Path(job.folder, "from").write_text(str(done))
        if job.copy:
            saving.save(Path(job.folder, "copy"), model, optimizer, {"step": done})
        for step in range(done + 1, job.steps + 1):
            loss = model(data.batch()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            total = private_torch.local_tensor(loss.detach()).double()
            dist.all_reduce(total)
            if rank == 0:
                with open(Path(job.folder, "losses.jsonl"), "a") as file:
                    line = {"step": step, "loss": total.item().hex(), "lr": optimizer.param_groups[0]["lr"]}
                    file.write(json.dumps(line) + "\n")
            if step % job.every == 0:
                keeper.save(step, model, optimizer, {"step": step})


def rank_main(rank: int, job: Job, rendezvous: str, fault: Fault | None) -> None:
    """One process of the job; ends with 0 or 1, or by SIGKILL."""
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks))
        if fault is not None and fault.rank == rank:
            arm(fault, job.folder)
        made = dist.FileStore(rendezvous, job.ranks)
        dist.init_process_group("gloo", store=made, rank=rank, world_size=job.ranks, timeout=TIMEOUT)
        train(job)
        code = 0
    except BaseException:
        Path(job.folder, f"error-{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)
