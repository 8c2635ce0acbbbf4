"""Real processes on gloo (and NCCL, where there is a GPU for each) for the distributed tests.

They are started once and used by many cases.

`run_ranks(n, function, *args)` runs `function(*args)` on n processes that form a fresh process group, and returns their
results by rank. The processes live as long as the test session; a case that hangs or kills one costs a new set.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

MAX_RANKS = 4
TIMEOUT_SECONDS = 420
GROUP_SECONDS = 240
"""How long a rank waits for another: the machine may be busy with other things."""
MAX_THREADS = 24
IMPORTED = ["quantshard", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
"""By the process that ranks are forked from, once for all of them, which takes as long as many a file of tests."""


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class _Pool:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.folder = tempfile.TemporaryDirectory()
        self.calls = 0
        self.context = context
        self.ranks = [self._start(rank) for rank in range(MAX_RANKS)]

    def _start(self, rank: int) -> tuple[Connection, Any]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        self.calls += 1
        rendezvous = str(Path(self.folder.name) / str(self.calls))
        for pipe, _ in self.ranks[:world_size]:
            pipe.send((world_size, rendezvous, function, args))
        replies = []
        for rank, (pipe, process) in enumerate(self.ranks[:world_size]):
            if not pipe.poll(TIMEOUT_SECONDS):
                raise TimeoutError(f"rank {rank} of {world_size} has not answered {function.__name__}{args}")
            replies.append(pipe.recv())
            if replies[-1][2]:
                pipe.send(None)
                process.join()
                self.ranks[rank] = self._start(rank)
        errors = [f"rank {rank}:\n{reply[1]}" for rank, reply in enumerate(replies) if reply[0] == "error"]
        if errors:
            raise RankError("\n".join(errors))
        return [reply[1] for reply in replies]

    def close(self) -> None:
        for _, process in self.ranks:
            process.kill()
        self.folder.cleanup()


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no garbage; to look through it takes longer than most cases
    while True:
        try:
            world_size, rendezvous, function, args = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            store = dist.FileStore(rendezvous, world_size)
            backend = "gloo"
            if torch.cuda.device_count() >= world_size:
                torch.cuda.set_device(rank)
                backend = "cpu:gloo,cuda:nccl"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_SECONDS)
            )
            torch.manual_seed(0)
            reply = ("ok", function(*args))
            dist.barrier()
        except BaseException:
            reply = ("error", traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # DTensor would give the next case's parameters meshes that are equal and have the groups of this one
            _clear_sharding_prop_cache()
        worn = _is_worn()
        pipe.send((*reply, worn))
        if worn:
            pipe.recv()  # until the reply has arrived: its tensors are sent through this process
            return


def _is_worn() -> bool:
    """True if this process has too many threads of groups that were destroyed and are still held.

    A group of gloo has threads as long as something refers to it, if only in a cycle, and each wakes up a hundred times
    a second: with some hundred groups, processes that wait take all of the machine.
    """
    tasks = Path("/proc/self/task")
    if not tasks.exists() or len(list(tasks.iterdir())) <= MAX_THREADS:
        return False
    gc.collect()
    return len(list(tasks.iterdir())) > MAX_THREADS


_pool: _Pool | None = None


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` on `world_size` processes of one process group; return their results by rank."""
    global _pool
    if _pool is None:
        _pool = _Pool()
        atexit.register(_close)
    try:
        return _pool.run(world_size, function, args)
    except BaseException:
        _close()  # the group's other processes may be stuck in a collective
        raise


def _close() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None
