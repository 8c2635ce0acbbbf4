"""Starting the processes of a run on this machine, with torchrun's own agent, and ending them well.

What torchrun does as a command is done here through its Python API, for the sake of what the user sees: a process that
fails ends the run with one line that names it, not with a wall of tracebacks; Ctrl-C and SIGTERM let the processes
finish their step and save; and when this process is killed, they notice and end (see `die_with_parent`). Under torchrun
itself, or any launcher that sets RANK, nothing is started: the process is already one of several.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from quantshard.errors import ConfigurationError, LostRankError, QuantshardError
from quantshard.tools.terminal import outputs

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a run to finish its step, save and end."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

_MONITOR_SECONDS = 0.1
_SHUTDOWN_SECONDS = 20
_PROCESSES, _PROCESSES_A_CORE = 64, 4
"""The most processes that are started here: so many, or so many for each core if that is more."""
_PARENT_CHECK_SECONDS = 0.2
_MOST_RANKS = 1 << 20
_LAUNCHER_ADVICE = "start with torchrun, or unset RANK to have the processes started here"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ON_PURPOSE, _CRASHED, _FOLLOWS = 0, 1, 2
_LOST_PEER = re.compile(r"closed by peer|reset by peer|broken pipe|socket timeout|timed out|nccl|gloo", re.IGNORECASE)


class LaunchError(QuantshardError):
    """A process of the run failed; the message is the one line to show.

    `crashed`: it did not say why on purpose, as quantshard's own errors do.
    """

    def __init__(self, message: str, crashed: bool) -> None:
        super().__init__(message)
        self.crashed = crashed


class RunStoppedError(QuantshardError):
    """The run was told to stop when it could not save. `exit_code`: of the command."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_worker() -> bool:
    """True if a launcher (torchrun, or a script for SLURM) started this process as one of several."""
    return "RANK" in os.environ


def is_other_worker() -> bool:
    """True if this process is one of several, and not the first, whose word counts."""
    return is_worker() and os.environ["RANK"] != "0"


def process_numbers() -> tuple[int, int, int]:
    """The rank of this process, the number of ranks, and its number on this machine, as its launcher set them.

    Raises:
        ConfigurationError: a variable is missing, or is not such a number.
    """
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"RANK is set, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not; {_LAUNCHER_ADVICE}"
        )
    ranks = _process_number("WORLD_SIZE", 1, _MOST_RANKS)
    _process_number("MASTER_PORT", 0, 65535)
    rank = _process_number("RANK", 0, ranks - 1)
    return rank, ranks, _process_number("LOCAL_RANK", 0, ranks - 1) if "LOCAL_RANK" in os.environ else rank


def _process_number(name: str, least: int, most: int) -> int:
    text = os.environ[name]
    if not (text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise ConfigurationError(f"{name} = {text[:80]!r} is not a number from {least} to {most}; {_LAUNCHER_ADVICE}")
    return int(text)


def is_of_torchrun() -> bool:
    """True if the parent of this process is an agent of torchrun."""
    return is_worker() and "TORCHELASTIC_RUN_ID" in os.environ


def default_processes() -> int:
    """Processes on this machine unless the user says otherwise: one for each GPU, or one."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 1


def check_processes(processes: int) -> None:
    """Refuse more processes than a machine such as this one runs.

    Raises:
        ConfigurationError: with the numbers.
    """
    cores = os.cpu_count() or 1
    most = max(_PROCESSES, _PROCESSES_A_CORE * cores, default_processes())
    if processes > most:
        raise ConfigurationError(
            f"{processes} processes are too many for this machine of {cores} CPU cores, on which at most {most} are "
            "started; name fewer with --nproc-per-node or --mesh, or start them on several machines with torchrun"
        )


def command_script() -> str:
    """The file to start a quantshard command with: `python -m` would import from the working directory."""
    return str(Path(__file__).parents[2] / "__main__.py")


def launch(processes: int, arguments: list[str]) -> None:
    """Run Python with `arguments` as `processes` ranks and wait for them.

    Raises:
        LaunchError: a process failed; the others have been ended.
        RunStoppedError: a signal came before the processes could heed it, or a second one came.
        SystemExit: with `INTERRUPTED`, after Ctrl-C, when the processes have saved and ended: what a script was to do
            after the command is not done. SIGTERM, which says that the machine is needed, is no failure.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torch's own handlers would cut the saving short
    with tempfile.TemporaryDirectory(prefix="quantshard-") as logs:
        parameters = RendezvousParameters(
            backend="c10d", endpoint="localhost:0", run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1,
            local_addr="localhost",
        )  # fmt: skip
        spec = WorkerSpec(
            role="trainer",
            local_world_size=processes,
            entrypoint=sys.executable,
            args=tuple(arguments),
            rdzv_handler=registry.get_rendezvous_handler(parameters),
            max_restarts=0,
            monitor_interval=_MONITOR_SECONDS,
            local_addr="localhost",
        )
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=logs), **_agent_options())
        with _forwarded_signals(agent) as received:
            result = agent.run()
        failures = dict(result.failures) if result is not None else {}
        spec.rdzv_handler.shutdown()
        _raise_what_failed(failures, received)


def _raise_what_failed(failures: Mapping[int, ProcessFailure], received: list[int]) -> None:
    code = INTERRUPTED if received[:1] == [signal.SIGINT] else 0
    if failures and len(received) > 1:
        raise RunStoppedError("stopped at once by a second signal; steps since the last checkpoint are lost", code or 1)
    error = _explain(failures) if failures else None
    if error and error.crashed and any(f.exitcode == -signal.SIGTERM for f in failures.values()):
        raise RunStoppedError("stopped before training began; nothing was saved", code or 1)
    if error:
        raise error
    if code:
        raise SystemExit(code)


def _agent_options() -> dict[str, Any]:
    """How long the agent waits for workers to end; before torch 2.12 it takes no such argument, and waits 30 s."""
    known = inspect.signature(LocalElasticAgent.__init__).parameters
    return {"shutdown_timeout": _SHUTDOWN_SECONDS} if "shutdown_timeout" in known else {}


@contextmanager
def _forwarded_signals(agent: LocalElasticAgent) -> Iterator[list[int]]:
    """Hand the first stop signal on to the workers; a second one ends them at once. Yields the signals received."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        kind = signal.SIGTERM if len(received) == 1 else signal.SIGKILL
        for worker in agent.get_worker_group().workers:
            if worker.id:
                try:
                    os.kill(int(worker.id), kind)
                except ProcessLookupError:
                    pass

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(failures: Mapping[int, ProcessFailure]) -> LaunchError:
    """What went wrong first: errors raised on purpose, then crashes, then lost peers, which only follow from either."""
    found = []
    for rank, failure in failures.items():
        data: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {}
        extra = data.get("extraInfo", {})
        if message := str(data.get("message", "")):
            told = _FailureReason(extra.get("kind", _CRASHED), float(extra.get("time", 0)), rank, f": {message}")
        elif failure.exitcode < 0:
            told = _FailureReason(_CRASHED, 0.0, rank, f" was killed by {failure.signal_name()}")
        else:
            told = _FailureReason(_CRASHED, 0.0, rank, f" ended with exit code {failure.exitcode}")
        found.append(told)
    first = min(found)
    if first.kind == _ON_PURPOSE and all(told.what == first.what for told in found):
        return LaunchError(first.what.removeprefix(": "), crashed=False)  # raised on all that failed: no one's own
    return LaunchError(f"process {first.rank}{first.what}", crashed=first.kind != _ON_PURPOSE)


class _FailureReason(NamedTuple):
    """Why a process failed; in the order in which such reasons come first."""

    kind: int
    time: float
    rank: int
    what: str


# In the processes that were started


def report_failure(error: BaseException, logs: Path) -> str:
    """Tell the launcher why this process fails, in one line, which is returned; a traceback goes to a file of `logs`.

    Errors that quantshard raises on purpose say everything in their message, and leave no traceback.
    """
    rank = os.environ.get("RANK", "0").replace("/", "_")
    kind = _ON_PURPOSE if isinstance(error, QuantshardError) else _CRASHED
    if isinstance(error, LostRankError) or (kind == _CRASHED and _LOST_PEER.search(str(error))):
        kind = _FOLLOWS
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, QuantshardError):
        message = " ".join(lines)
    else:
        file = logs / f"rank-{rank}.txt"
        message = f"{type(error).__name__}: {lines[0]} (traceback: {file})"
        try:
            content = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace")
            outputs.write_file(file, content, within=logs.parent)
        except ConfigurationError:
            message = f"{type(error).__name__}: {lines[0]}"
    if target := os.environ.get(_ERROR_FILE):
        now = time.time()
        extra: dict[str, Any] = {"timestamp": str(int(now)), "time": now, "kind": kind, "py_callstack": ""}
        outputs.write_file(Path(target), json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return "" if kind == _FOLLOWS and target else message


def die_with_parent() -> None:
    """End this process, as by SIGKILL, soon after the process that started it is gone: no run goes on unattended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
