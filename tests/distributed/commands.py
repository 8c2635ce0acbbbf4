"""`quantshard` commands in the processes that there are: those of the pool stand for the ones that a command starts.

A process takes seconds to import torch, so only the tests that are about processes start their own.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from quantshard.determinism import deterministic
from quantshard.errors import QuantshardError
from quantshard.tools import cli
from quantshard.tools.trainer import launch, worker
from quantshard.tools.trainer.loop import ProcessInfo
from quantshard.tools.trainer.run_dir import RunDir
from tests.distributed import shelf  # noqa: F401 (in the ranks too, its URLs are known)
from tests.distributed.pool import run_ranks

WIDTH = "10000"
"""Columns of what is printed: sentences that hold long paths are not wrapped."""


def quantshard(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """A command line: what it prints and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    line = ["quantshard", *map(str, arguments)]
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, COLUMNS=WIDTH))
        stack.enter_context(patch.object(sys, "argv", line))
        stack.enter_context(patch.object(launch, "launch", in_the_pool))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            cli.main()
        except SystemExit as end:
            return subprocess.CompletedProcess(line, int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("main always exits")


def in_the_pool(processes: int, arguments: list[str]) -> None:
    """Stands for `launch.launch`."""
    command, run, order = arguments[-3:]
    assert command == "worker"
    told = run_ranks(processes, _work, run, order)
    print(told[0][0], end="")
    errors = [error for _, error in told if error]
    if errors:
        raise launch.LaunchError(errors[0], crashed=False)


def _hold(folder: RunDir) -> None:
    folder._is_locked = True


def _work(run: str, order: str) -> tuple[str, str]:
    """What a started process does: what it prints, and the error that it ends with."""
    out, place = io.StringIO(), ProcessInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    handlers = {number: signal.getsignal(number) for number in launch.STOP_SIGNALS}
    ordered = replace(worker.WorkerJob(**json.loads(order)), launched=False)
    with ExitStack() as stack:
        stack.enter_context(patch.object(worker, "_join", lambda wanted: place))
        stack.enter_context(patch.object(RunDir, "lock", _hold))  # it is held until the process ends
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(patch.dict(os.environ, COLUMNS=WIDTH))
        try:
            worker.train_run(RunDir(Path(run)), ordered)
        except QuantshardError as error:
            return out.getvalue(), str(error)
        finally:
            deterministic(False)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return out.getvalue(), ""
