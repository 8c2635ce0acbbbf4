"""Command lines in processes of their own that are forked from one that has imported PyTorch, as the pool's ranks are.

To import it takes seconds of each process of a tree: of a launcher, torchrun's or ours, and of its ranks. What is sent
to these processes, how they end, and what a launcher makes of it are as of those that are typed (`started`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.distributed.pool import IMPORTED

SECONDS = 240
"""How long a test waits for a rank."""


class _Process:
    """What the tests and torchrun's agent use of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        process.start()
        self.pid = process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if (code := self.process.exitcode) is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()


class Forked(_Process):
    """`python ...` as a process whose children of torchrun's agent are forked too."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.folder = tempfile.TemporaryDirectory()
        super().__init__(context.Process(target=_launcher, args=(arguments, env, self.folder.name)))

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it printed, and its errors, once it has ended."""
        self.wait(timeout)
        with self.folder as folder:
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return out, err


class _ForkedRank(_Process):
    """Stands for `subprocess.Popen` in torchrun's agent."""

    def __init__(self, args: list[str], env: dict[str, str], start_new_session: bool, **streams: Any) -> None:
        assert start_new_session and not any(streams.values())
        sys.stdout.flush()
        sys.stderr.flush()
        super().__init__(multiprocessing.get_context("fork").Process(target=_rank, args=(args, env)))


def started(arguments: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """As a user types it: `python ...`."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], env=env, text=True, **pipes)


STARTS = [pytest.param(Forked, id="forked"), pytest.param(started, id="started", marks=pytest.mark.exhaustive)]
"""Ways to start a command, for a test that is to show both."""


def _launcher(arguments: list[str], env: dict[str, str], folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    gc.freeze()  # what was imported is no garbage
    with mock.patch.object(subprocess_handler, "Popen", _ForkedRank):
        _run(arguments, env)


def _rank(args: list[str], env: dict[str, str]) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGQUIT):  # which its launcher handles
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run(args[1:], env)


def _run(arguments: list[str], env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    site = Path(env["PYTHONPATH"].split(os.pathsep)[0], "sitecustomize.py")
    if site.exists():
        runpy.run_path(str(site))
    while arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        # collected tests have imported it
        sys.modules.pop(f"{arguments[1]}.__main__", None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        runpy.run_path(arguments[0], run_name="__main__")


# Processes that save


def fork_server() -> dict[str, Any]:
    """How a process that this one's server has forked finds the server."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    found = vars(forkserver._forkserver)
    return {name: found[name] for name in ("_forkserver_address", "_forkserver_authkey") if name in found}


def forked_savers(server: dict[str, Any]) -> Any:
    """In a rank: until the patch ends, a process that saves for it is forked by the server and not spawned, which
    takes seconds to import PyTorch."""
    vars(forkserver._forkserver).update(server, ensure_running=lambda: None)
    context = multiprocessing.get_context("forkserver")
    return mock.patch.object(torch.multiprocessing, "get_context", lambda method: context)


# Ranks that may have children, which those of the pool may not


def on_new_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function returns on each of some new processes, by rank; of one that raised, the traceback."""
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:
        told = (count, f"{meeting}/store", function, arguments, answers)
        processes = [context.Process(target=_serve, args=(rank, *told)) for rank in range(count)]
        for process in processes:
            process.start()
        try:
            found = dict(answers.get(timeout=SECONDS) for _ in processes)
        finally:
            for process in processes:
                process.join(30)
                process.kill()
    return [found[rank] for rank in range(count)]


def _serve(
    rank: int, count: int, meeting: str, function: Callable[..., Any], arguments: tuple[Any, ...], answers: Any
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(meeting, count), rank=rank, world_size=count)
        answers.put((rank, function(*arguments)))
        dist.barrier()
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise
