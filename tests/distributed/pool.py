"""Real processes on gloo (and NCCL, where there is a GPU for each) for the distributed tests.

They are started once and used by many cases.

`run_ranks(n, function, *args)` runs `function(*args)` on n processes of one process group, and returns their results by
rank. Each n has processes of its own, whose group lives as long as they do, and with it what DTensor has found out
about operations on it, which takes longer than most cases; groups that a case makes end with it. A case that fails,
hangs or kills a process costs a new set.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.interpreter import prepared_once
from tests.once import draw_weights_once, seed_cpu_only

TIMEOUT_SECONDS = 420
GROUP_SECONDS = 240
"""How long a rank waits for another: the machine may be busy with other things."""
MAX_THREADS = 24
LIBRARY = [
    "quantshard", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "quantshard.tools.trainer.worker",
]  # fmt: skip
IMPORTED = [*LIBRARY, "transformers.models.llama.modeling_llama", "accelerate"]
"""By the process that ranks are forked from, once for all of them, where `fork_server` does not start it."""
# torch.cuda.is_available() then starts no CUDA, which forked ranks could not use
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
STOPPED = sys.platform == "linux" and not torch.cuda.is_available()
"""Whether ranks are stopped between cases: each thread of a group of gloo wakes up a hundred times a second."""


_PR_SET_PDEATHSIG = 1


def fork_server() -> None:
    """Fork the process that ranks are forked from, so that no rank imports what the tests of this process import.

    Before a test has run: autograd in a forked process needs one that has not run backward. A process that is forked
    could use no GPU, so where there is one the server is a new process.
    """
    if not STOPPED:
        return

    def fork(path: str, arguments: list[str], kept: list[int]) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which the child needs none
            child = os.fork()
        if child:
            return child
        try:
            for number in _open_files() - before - {*kept}:  # the pipe by whose end the server knows that of its owner
                os.closerange(number, number + 1)
            _as_in_a_new_process()
            exec(arguments[-1], {})
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)

    multiprocessing.get_context("forkserver").set_forkserver_preload(LIBRARY)
    with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore"):  # of semaphores of ranks, which are killed at the end
        resource_tracker.ensure_running()
    before = _open_files()
    with mock.patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


def _as_in_a_new_process() -> None:
    """Undo what pytest has changed: warnings are no errors, and streams and hooks are Python's."""
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]


def _open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


case = 0
"""How many calls of `run_ranks` this rank has had, for what is kept as long as one."""

Rank = tuple[Connection, Any]
"""A pipe to a process, and the process."""


class _Pool:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.folder = tempfile.TemporaryDirectory()
        self.sets = 0
        self.context = context
        self.ranks: dict[int, list[Rank]] = {}
        """By the number of ranks."""

    def _start(self, rank: int, world_size: int, rendezvous: str) -> Rank:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(rank, world_size, rendezvous, theirs), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _ranks(self, world_size: int) -> list[Rank]:
        if world_size not in self.ranks:
            self.sets += 1
            rendezvous = str(Path(self.folder.name) / str(self.sets))
            self.ranks[world_size] = [self._start(rank, world_size, rendezvous) for rank in range(world_size)]
        return self.ranks[world_size]

    def run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        ranks = self._ranks(world_size)
        _signal(ranks, signal.SIGCONT)
        for pipe, _ in ranks:
            pipe.send((function, args))
        replies = []
        for rank, (pipe, _) in enumerate(ranks):
            if not pipe.poll(TIMEOUT_SECONDS):
                raise TimeoutError(f"rank {rank} of {world_size} has not answered {function.__name__}{args}")
            replies.append(pipe.recv())
        errors = [f"rank {rank}:\n{error}" for rank, (_, error, _) in enumerate(replies) if error]
        if errors:
            raise RankError("\n".join(errors))
        if any(worn for *_, worn in replies):
            self._end(world_size)
        else:
            _signal(ranks, signal.SIGSTOP)
        return [result for result, *_ in replies]

    def _end(self, world_size: int) -> None:
        for _, process in self.ranks.pop(world_size):
            process.kill()

    def close(self) -> None:
        for world_size in list(self.ranks):
            self._end(world_size)
        self.folder.cleanup()


def _signal(ranks: list[Rank], number: signal.Signals) -> None:
    for _, process in ranks if STOPPED else ():
        os.kill(process.pid, number)


def _serve(rank: int, world_size: int, rendezvous: str, pipe: Connection) -> None:
    global case
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    draw_weights_once()
    seed_cpu_only()
    gc.freeze()  # what was imported is no garbage; to look through it takes longer than most cases
    gc.set_threshold(100_000, 20, 100)  # as in tests/conftest.py
    # The server ends when nothing refers to this pipe but the process that started it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), vars(forkserver._forkserver)["_forkserver_alive_fd"])
    if STOPPED:
        # A stopped rank does not see its pipe close: it is killed when the server that forked it ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    backend = "gloo"
    if torch.cuda.device_count() >= world_size:
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(rendezvous, world_size)
    timeout = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    with prepared_once() if find_spec("triton") else nullcontext():
        while True:
            try:
                function, args = pipe.recv()
            except (EOFError, OSError):
                return
            result, error = None, None
            case += 1
            try:
                torch.manual_seed(0)
                result = function(*args)
                dist.barrier()
                _end_groups()
            except BaseException:
                error = traceback.format_exc()
            pipe.send((result, error, _is_worn()))


def _end_groups() -> None:
    """Destroy the groups that a case made beside that of all ranks."""
    made = [group for group in list(distributed_c10d._world.pg_map) if group is not dist.group.WORLD]
    for group in made:
        dist.destroy_process_group(group)
    if made:
        # DTensor would give the next case's parameters meshes that are equal and have the groups of this one
        _clear_sharding_prop_cache()


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
_starting = threading.Lock()
"""Of threads that run ranks at the same time, one starts the pool."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` on `world_size` processes of one process group; return their results by rank."""
    global _pool
    with _starting:
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
