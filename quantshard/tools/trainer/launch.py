"""Starts the ranks of a run on this machine with torchrun's agent, and ends them cleanly.

The agent is driven through its Python API: a failing rank ends the run with one line that names the rank, and Ctrl-C
and SIGTERM let the ranks finish their step and save. Under torchrun, or any launcher that sets RANK, nothing is
started: the process is already one of several.
"""

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
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from quantshard.errors import ConfigurationError, LostRankError, QuantshardError
from quantshard.tools.terminal import outputs

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells."""

_ON_PURPOSE, _CRASHED, _FOLLOWS = 0, 1, 2
_LOST_PEER = re.compile(r"closed by peer|reset by peer|broken pipe|socket timeout|timed out|nccl|gloo", re.IGNORECASE)


class LaunchError(QuantshardError):
    """A rank failed, or the run was stopped before it could save. `crashed`: not by one of quantshard's own errors."""

    def __init__(self, message: str, crashed: bool, exit_code: int = 1) -> None:
        super().__init__(message)
        self.crashed, self.exit_code = crashed, exit_code


def is_worker() -> bool:
    """Return True if a launcher (torchrun, or a SLURM script) started this process as one of several."""
    return "RANK" in os.environ


def process_numbers() -> tuple[int, int, int]:
    rank = int(os.environ["RANK"])
    return rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank))


def default_processes() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 1


def check_processes(processes: int) -> None:
    cores = os.cpu_count() or 1
    most = max(64, 4 * cores, default_processes())
    if processes > most:
        raise ConfigurationError(f"{processes} processes are too many for {cores} CPU cores; start at most {most}")


def command_script() -> str:
    """Return the file that starts quantshard commands; `python -m` would import from the working directory."""
    return str(Path(__file__).parents[2] / "__main__.py")


def launch(processes: int, arguments: list[str]) -> None:
    """Run Python with `arguments` as `processes` ranks and wait for them."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # torch's own handlers would cut the save short
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
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
            monitor_interval=0.1,
            local_addr="localhost",
        )
        # before torch 2.12 the agent waits a fixed 30 s for workers to exit
        has_timeout = "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters
        options: dict[str, Any] = {"shutdown_timeout": 20} if has_timeout else {}
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=logs), **options)
        with _forwarded_signals(agent) as received:
            result = agent.run()
        failures = dict(result.failures) if result is not None else {}
        spec.rdzv_handler.shutdown()
        _raise_what_failed(failures, received)


def _raise_what_failed(failures: Mapping[int, ProcessFailure], received: list[int]) -> None:
    code = INTERRUPTED if received[:1] == [signal.SIGINT] else 0
    if failures and len(received) > 1:
        lost = "steps since the last checkpoint are lost"
        raise LaunchError(f"stopped at once by a second signal; {lost}", False, code or 1)
    error = _explain(failures) if failures else None
    if error and error.crashed and any(f.exitcode == -signal.SIGTERM for f in failures.values()):
        raise LaunchError("stopped before training began; nothing was saved", False, code or 1)
    if error:
        raise error
    if code:
        raise SystemExit(code)


@contextmanager
def _forwarded_signals(agent: LocalElasticAgent) -> Iterator[list[int]]:
    """Forward the first stop signal to the workers and kill them at the second. Yields the list of received signals."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        kind = signal.SIGTERM if len(received) == 1 else signal.SIGKILL
        for worker in agent.get_worker_group().workers:
            if worker.id:
                with suppress(ProcessLookupError):
                    os.kill(int(worker.id), kind)

    old_handlers = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _explain(failures: Mapping[int, ProcessFailure]) -> LaunchError:
    """Return the root cause: deliberate errors first, then crashes, then lost peers, which follow from either."""
    reasons: list[tuple[int, float, int, str]] = []
    for rank, failure in failures.items():
        data: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {}
        extra = data.get("extraInfo", {})
        if data.get("message"):
            text = f": {data['message']}"
        elif failure.exitcode < 0:
            text = f" was killed by {failure.signal_name()}"
        else:
            text = f" ended with exit code {failure.exitcode}"
        reasons.append((extra.get("kind", _CRASHED), float(extra.get("time", 0)), rank, text))
    kind, _, rank, text = min(reasons)
    if kind == _ON_PURPOSE and len({reason[-1] for reason in reasons}) == 1:
        # the same error on every failed rank: no single rank to name
        return LaunchError(text.removeprefix(": "), crashed=False)
    return LaunchError(f"process {rank}{text}", crashed=kind != _ON_PURPOSE)


def report_failure(error: BaseException, logs: Path) -> str:
    """Report the failure of this rank, and return it as one line. Crashes write their traceback into `logs`."""
    rank = os.environ.get("RANK", "0").replace("/", "_")
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, QuantshardError):
        kind, message = _ON_PURPOSE, " ".join(lines)
    else:
        kind, file = _CRASHED, logs / f"rank-{rank}.txt"
        message = f"{type(error).__name__}: {lines[0]}"
        with suppress(ConfigurationError):
            content = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace")
            outputs.write_file(file, content, within=logs.parent)
            message += f" (traceback: {file})"
    if isinstance(error, LostRankError) or (kind == _CRASHED and _LOST_PEER.search(str(error))):
        kind = _FOLLOWS
    if target := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        now = time.time()
        extra: dict[str, Any] = {"timestamp": str(int(now)), "time": now, "kind": kind, "py_callstack": ""}
        outputs.write_file(Path(target), json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return "" if kind == _FOLLOWS and target else message


def die_with_parent() -> None:
    """Kill this process soon after its parent process is gone, so that no run continues unattended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
