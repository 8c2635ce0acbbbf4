"""`quantshard demo`: train with quantized weights, kill the run, resume it, and compare every bit.

The demo runs the commands that a user types (`train`, `resume`, `diff`) in separate processes, and fails if bits differ
that must be equal:

    1  train MXFP8 weights on 2 processes without interruption, as the reference
    2  train again, and kill the run with SIGKILL between two checkpoints
    3  resume on 2 processes: losses and the last checkpoint are bitwise equal to chapter 1
    4  resume on 1 process: the loaded bits are equal, and the first loss up to rounding
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from typer import Option

from quantshard.errors import ConfigurationError, QuantshardError
from quantshard.tools.report.records import read_records
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import Screen, say
from quantshard.tools.trainer import launch
from quantshard.tools.trainer.run_dir import RunDir

SETTINGS: dict[str, Any] = {
    "hidden": 128, "layers": 3, "heads": 4, "seq_length": 128, "steps": 120, "global_batch": 8, "lr": 3e-3,
    "warmup": 10, "save_every": 20, "eval_every": 20, "eval_sequences": 16, "device": "cpu", "threads": 1,
}  # fmt: skip

MEASURED = ("tokens_per_s", "memory_bytes", "mfu", "data_wait_s")
"""Entries of a metrics record that differ between bitwise equal runs."""

_POLL_SECONDS = 0.02
_BF16_ROUNDING = 2.0**-9


class DemoError(QuantshardError):
    """Raised if a claim of the demo fails, or one of its commands."""


def demo(out: Path = Option(Path("demo-run"), metavar="DIR", help="a new folder")) -> None:
    """Train a model with 8-bit weights, kill it, resume it on other process counts, and compare every bit.

    Needs no GPU and no download.
    """
    if os.path.lexists(out):
        raise ConfigurationError(f"{out} exists; remove it, or name another folder with --out")
    outputs.make_folder(out)
    run = Demo(out)
    say(
        "A language model learns Python's standard library, byte by byte. Its weights are 8-bit numbers (MXFP8), each "
        "process holds half of them, and the run is killed on the way. A CPU emulates the formats: slower than BF16, "
        "with the numbers of a GPU."
    )
    run.uninterrupted()
    run.kill()
    run.resume_on_two()
    run.resume_on_one()
    if run.failures:
        raise DemoError(f"the demo failed: {'; '.join(run.failures)}; logs and runs are in {out}")
    say("", f"All claims hold. To compare the losses: quantshard report {run.whole.path} {run.single.path}")


class Demo:
    """The chapters of the demo. `failures`: claims that failed. `resumed`: step of the last complete checkpoint."""

    def __init__(self, out: Path) -> None:
        self.out, self.steps, self.resumed = out, int(SETTINGS["steps"]), 0
        self.failures: list[str] = []
        names = ("uninterrupted", "killed", "on-1-process")
        self.whole, self.killed, self.single = (RunDir(out / name) for name in names)

    def claim(self, text: str, holds: bool) -> None:
        say(f"  {'ok' if holds else 'FAILED'}: {text}")
        if not holds:
            self.failures.append(text)

    def uninterrupted(self) -> None:
        say("", "[1/4] Train with MXFP8 weights on 2 processes")
        self.train(self.whole)
        losses = [float(record["loss"]) for record in read_records(self.whole.metrics)]
        say(f"  the loss fell from {losses[0]:.2f} to {losses[-1]:.2f} nats per byte")

    def kill(self) -> None:
        kill_step = self.steps // 2 + max(1, int(SETTINGS["save_every"]) // 2)
        say("", f"[2/4] Start the same training again, and kill it at step {kill_step}")
        last = self.train(self.killed, kill_at=kill_step)
        shutil.copytree(self.killed.path, self.single.path)
        self.resumed = self.single.last_complete()
        say(f"  killed after step {last}; the last complete checkpoint is of step {self.resumed}")

    def resume_on_two(self) -> None:
        say("", "[3/4] Resume on 2 processes")
        self.run(["resume", str(self.killed.path), "--nproc-per-node", "2"], self.killed)
        resumed, reference = (
            [facts(record) for record in read_records(run.metrics)] for run in (self.killed, self.whole)
        )
        self.claim("losses and gradient norms equal those of chapter 1 bit for bit", resumed == reference)
        is_equal = self.equal(self.whole.checkpoint(self.steps), self.killed.checkpoint(self.steps))
        self.claim("the last checkpoint is bitwise equal to that of chapter 1", is_equal)

    def resume_on_one(self) -> None:
        say("", "[4/4] Resume the killed run on 1 process")
        loaded = self.out / "loaded-on-1-process"
        arguments = ["resume", str(self.single.path), "--nproc-per-node", "1", "--copy-to", str(loaded)]
        self.run(arguments, self.single)
        self.claim("the loaded bits are those saved by 2", self.equal(self.single.checkpoint(self.resumed), loaded))
        runs = (self.single, self.whole)
        single, whole = ({r["step"]: float(r["loss"]) for r in read_records(run.metrics)} for run in runs)
        first, last = self.resumed + 1, self.steps
        within = abs(single[first] - whole[first]) <= _BF16_ROUNDING * whole[first]
        self.claim(f"the loss of step {first} is that of chapter 1 up to rounding", within)
        say(f"  later losses drift apart: {abs(single[last] - whole[last]):.5f} at step {last}")

    def train(self, run: RunDir, kill_at: int | None = None) -> int:
        """Run `quantshard train` on 2 processes, and return the last completed step."""
        config = self.out / "demo.toml"
        outputs.write_file(config, tomli_w.dumps(SETTINGS))
        arguments = ["train", "--run", str(run.path), "--recipe", "mxfp8", "--nproc-per-node", "2"]
        return self.run([*arguments, "--config", str(config)], run, kill_at)

    def run(self, arguments: list[str], run: RunDir, kill_at: int | None = None) -> int:
        """Run a training command, and return the last completed step. `kill_at`: step at which to kill the command."""
        log, start = self.out / f"{run.path.name}-{arguments[0]}.log", time.monotonic()
        say(f"  $ quantshard {' '.join(arguments)}")
        with started(arguments, log) as process, Screen(stderr=True).status("starting") as status:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                step = last_step(run)
                status.update(f"step {step} of {self.steps}")
                if kill_at is not None and step >= kill_at:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
            code = process.wait()
        if code != (0 if kill_at is None else -signal.SIGKILL):
            raise DemoError(f"`quantshard {arguments[0]}` ended with exit code {code}; see {log}")
        if kill_at is not None:
            # training processes check five times a second that their launcher exists
            time.sleep(1.0)
        say(f"  done in {time.monotonic() - start:.0f} s")
        return last_step(run)

    def equal(self, a: Path | str, b: Path | str) -> bool:
        say(f"  $ quantshard diff {a} {b}")
        result = subprocess.run(_command(["diff", str(a), str(b)]), env=_environment(), capture_output=True, text=True)
        if result.returncode not in (0, 1):
            raise DemoError(f"`quantshard diff` failed: {result.stderr.strip()}")
        say(f"  {result.stdout.strip().splitlines()[0]}")
        return result.returncode == 0


@contextmanager
def started(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a quantshard command in its own process group, which is killed at the end of the block."""
    with outputs.create_file(log) as output:
        process = subprocess.Popen(
            _command(arguments), env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, launch.command_script(), *arguments]


def _environment() -> dict[str, str]:
    """Environment with one thread per process, without variables of a launcher that started the demo."""
    launcher_names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in launcher_names}
    return variables | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}


def last_step(run: RunDir) -> int:
    entries = read_records(run.metrics)
    return int(entries[-1]["step"]) if entries else 0


def facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Reproducible part of a metrics record: everything except measurements such as speed and memory."""
    return {name: value for name, value in record.items() if name not in MEASURED}
