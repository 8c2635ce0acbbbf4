"""`quantshard demo`: train with quantized weights, kill the run, resume it, and compare every bit.

The demo runs the commands that a user types (`train`, `resume`, `diff`) in separate processes, and verifies its claims:
it fails if bits differ that must be equal. Chapters, in order:

    1  train MXFP8 weights on 2 processes without interruption, as the reference
    2  train again, and kill the run with SIGKILL between two checkpoints
    3  resume on 2 processes: losses are bitwise equal to chapter 1
    4  load the checkpoint in 1 process: the bits are equal
    5  resume on 1 process: losses equal the ones in chapter 1 up to rounding
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import torch
import typer

from quantshard import checkpoints, recipe
from quantshard.errors import ConfigurationError, QuantshardError, printable
from quantshard.tools.observe.table import GATHERED, WEIGHTS, plain_table
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import Screen, say
from quantshard.tools.trainer import launch
from quantshard.tools.trainer.models.decoder import LanguageModel
from quantshard.tools.trainer.optimizer import make_optimizer
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TABLES, TrainSettings, from_mapping, read_settings_file

SETTINGS: dict[str, Any] = {
    "hidden": 128,
    "layers": 3,
    "heads": 4,
    "seq_length": 128,
    "steps": 120,
    "global_batch": 8,
    "lr": 3e-3,
    "warmup": 10,
    "save_every": 20,
    "eval_every": 20,
    "eval_sequences": 16,
    "device": "cpu",
    "threads": 1,
}
"""Settings of all runs; the demo takes about two minutes on two cores."""

SAMPLE_BYTES = 200
MEASURED = ("tokens_per_s", "memory_bytes", "mfu", "data_wait_s")
"""Entries of a metrics record that differ between bitwise equal runs."""

MARK = "demo.toml"
_POLL_SECONDS = 0.02
_END_SECONDS = 1.0
"""Time for training processes to exit after a kill: five times a second they check that their launcher exists."""
_KILL_AFTER = 0.5
"""Share of the steps before the kill, which comes half a checkpoint interval later."""

_BF16_ROUNDING = 2.0**-9
"""Maximum relative error of rounding to BF16."""


class DemoError(QuantshardError):
    """Raised if a claim of the demo fails; the message names the claim and the log."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="output folder")] = Path("demo-run"),
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file with settings of `train`")] = None,
) -> None:
    """Train a model with 8-bit weights, kill it, resume it on other process counts, and compare every bit.

    Takes less than four minutes on two CPU cores, and needs no GPU and no download.
    """
    settings = _settings(config)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # lets `started` clean up
    _prepare(out, settings)
    run = DemoRun(out, settings)
    run.tell()
    run.summary()
    if run.failures:
        raise DemoError(f"the demo failed: {'; '.join(run.failures)}; logs and runs are in {out}")


def _settings(config: Path | None) -> dict[str, Any]:
    """Settings of all runs, in the form of the TOML file."""
    if config is None:
        return SETTINGS
    overrides = {name: value for name, value in read_settings_file(config, follow=True).items() if name not in TABLES}
    TrainSettings(**(SETTINGS | from_mapping(overrides, str(config)))).check(str(config))
    return SETTINGS | overrides


def _prepare(out: Path, settings: Mapping[str, Any]) -> None:
    """Create the output folder, removing an earlier demo; any other non-empty folder is an error."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        if out.is_symlink() or not (out / MARK).is_file():
            raise ConfigurationError(f"{out} exists and is not of an earlier demo; name another folder with --out")
        outputs.check_no_links(out, (MARK,))
        say(f"(removing the earlier demo in {out})")
        shutil.rmtree(out)
    outputs.make_folder(out)
    outputs.write_file(out / MARK, tomli_w.dumps(dict(settings)), within=out)


class DemoRun:
    """One run of the demo: the chapters and their shared state."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.out, self.steps = out, int(settings["steps"])
        self.save_every = int(settings["save_every"])
        self.console = Screen(soft_wrap=True)
        self.results: list[tuple[str, str, bool | None]] = []
        """Claim or figure, what was found, and whether a claim is true (None: a figure)."""
        self.resumed = self.parameters = 0
        self.whole, self.killed, self.single = (
            RunDir(out / name) for name in ("uninterrupted", "killed", "on-1-process")
        )

    def add(self, what: str, found: str, holds: bool | None = None) -> None:
        """Record a result."""
        self.results.append((what, found, holds))

    @property
    def failures(self) -> list[str]:
        """Claims that failed."""
        return [what for what, _, holds in self.results if holds is False]

    def tell(self) -> None:
        """Run all chapters."""
        self.say(
            "quantshard demo: a language model learns Python's standard library, byte by byte. Its weights are 8-bit\n"
            "numbers (MXFP8), each process holds half of them, and the run is killed on the way.",
            "",
            f"All that is written goes to {self.out}. This is a CPU: it has no 8-bit arithmetic, so the formats are",
            "emulated: the numbers are exactly those of the format. What 8 bits save here, as on a GPU, is memory and",
            "traffic; only a GPU computes faster with them.",
        )
        self.uninterrupted()
        self.kill()
        self.resume_on_two()
        self.load_on_one()
        self.resume_on_one()

    # Chapters --------------------------------------------------------------------------------------------------------

    def uninterrupted(self) -> None:
        """Chapter 1: the uninterrupted reference run."""
        self.chapter(1, "Train with MXFP8 weights on 2 processes, without interruption")
        self.say(
            f"  {self.steps} steps, with a checkpoint every {self.save_every}. All else is compared with this run."
        )
        self.train(self.whole, "--sample-tokens", str(SAMPLE_BYTES))
        losses = self.losses(self.whole)
        self.seen(f"the loss fell from {losses[1]:.2f} to {losses[self.steps]:.2f} nats a byte.")
        weights, gathered = (self.figures(self.whole, label) for label in (WEIGHTS, GATHERED))
        self.seen(
            f"each process holds {weights[0]} of weights, {weights[1]} if they were BF16, and in each step gives "
            f"{gathered[0]} to the all-gathers instead of {gathered[1]}."
        )
        self.add("weights, bytes on each process", f"{weights[0]} ({weights[2]} of BF16's {weights[1]})")
        self.add("on the wire, bytes a step", f"{gathered[0]} ({gathered[2]} of BF16's {gathered[1]})")
        for sample in records(self.whole.samples):
            self.say(f"  what it writes after {sample['step']} steps:")
            self.say(*(f"    | {printable(line)}" for line in sample["text"].splitlines()))

    def kill(self) -> None:
        """Chapter 2: a run that is killed."""
        kill_step = int(self.steps * _KILL_AFTER) + max(1, self.save_every // 2)
        self.chapter(2, f"Start the same training again, and kill it at step {kill_step}")
        self.say("  SIGKILL gives no process a chance to save anything: all since the last checkpoint is lost.")
        last = self.train(self.killed, kill_at=kill_step)
        shutil.copytree(self.killed.path, self.single.path)
        self.resumed = self.single.last_complete()[0]
        self.seen(f"killed when step {last} was done; the last complete checkpoint is of step {self.resumed}.")
        self.say(f"  A copy of what is left goes to {self.single.path}, for chapter 5.")

    def resume_on_two(self) -> None:
        """Chapter 3: the killed run resumed on 2 processes."""
        self.chapter(3, "Resume on 2 processes")
        self.expected(f"steps {self.resumed + 1} to {self.steps} repeat the uninterrupted run to the last bit.")
        self.resume(self.killed, 2)
        resumed, reference = (self.metrics(run) for run in (self.killed, self.whole))
        equal = [step for step in reference if step in resumed and facts(resumed[step]) == facts(reference[step])]
        differing = sorted(reference.keys() - set(equal))
        self.seen(
            f"loss, held-out loss and gradient norm are equal in {len(equal)} of {len(reference)} steps"
            + (f"; the first that differs is step {differing[0]}." if differing else ".")
        )
        is_equal = self.diff(self.whole.checkpoint(self.steps), self.killed.checkpoint(self.steps))
        self.add("resumed on 2: losses bitwise equal", f"{len(equal)} of {len(reference)} steps", not differing)
        self.add("resumed on 2: last checkpoint bitwise equal", "yes" if is_equal else "no", is_equal)

    def load_on_one(self) -> None:
        """Chapter 4: its checkpoint loaded by 1 process."""
        self.chapter(4, "Load the checkpoint of 2 processes in 1")
        self.expected("the bits of a weight do not depend on how many processes hold it.")
        checkpoint, resaved = self.killed.checkpoint(self.resumed), self.out / f"resaved-step-{self.resumed:06d}"
        self.say(f"  checkpoints.load({str(checkpoint)!r}, model, optimizer); checkpoints.save({str(resaved)!r}, ...)")
        self.parameters = load_and_save(self.killed, checkpoint, resaved)
        is_equal = self.diff(checkpoint, resaved)
        self.add("loaded by 1: weights and optimizer bitwise equal", "yes" if is_equal else "no", is_equal)

    def resume_on_one(self) -> None:
        """Chapter 5: the killed run resumed on 1 process."""
        self.chapter(5, "Resume the killed run on 1 process")
        bounds = self.rounding_bounds()
        self.expected(
            f"the losses of chapter 1 up to rounding: within {bounds[self.resumed + 1]:.4f} at first, when the weights "
            f"are the same, and {bounds[self.steps]:.2f} at the end."
        )
        self.resume(self.single, 1)
        resumed, reference = self.losses(self.single), self.losses(self.whole)
        gaps = {step: abs(resumed[step] - reference[step]) for step in bounds}
        within = all(gaps[step] <= bounds[step] for step in bounds)
        largest = max(gaps, key=lambda step: gaps[step])
        self.seen(
            f"they differ by at most {gaps[largest]:.5f}, at step {largest}: {'within' if within else 'OUT OF'} bounds."
        )
        self.add("resumed on 1: losses within the bound", f"differ by at most {gaps[largest]:.5f}", within)

    def train(self, run: RunDir, *more: str, kill_at: int | None = None) -> int:
        """Run `quantshard train` on 2 processes, and return the last completed step."""
        arguments = ["train", "--run", str(run.path), "--recipe", "mxfp8", "--nproc-per-node", "2"]
        return self.follow([*arguments, "--config", str(self.out / MARK), *more], run, kill_at)

    def resume(self, run: RunDir, processes: int) -> None:
        """Run `quantshard resume`."""
        self.follow(["resume", str(run.path), "--nproc-per-node", str(processes)], run, None)

    def follow(self, arguments: list[str], run: RunDir, kill_at: int | None) -> int:
        """Run a training command, and return the last completed step. `kill_at`: step at which to kill the command."""
        log = self.out / f"{run.path.name}-{arguments[0]}.log"
        quarter, reported, step, start = max(1, self.steps // 4), 0, 0, time.monotonic()
        self.say(f"  $ quantshard {' '.join(arguments)}")
        with started(arguments, log) as process:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                step = last_step(run)
                if kill_at is not None and step >= kill_at:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
                if step // quarter > reported // quarter:
                    reported = step
                    self.say(f"    step {step}/{self.steps}, loss {self.losses(run)[step]:.4f}")
            code = process.wait()
        if kill_at is not None:
            if code != -signal.SIGKILL:
                raise DemoError(
                    f"the run ended before it could be killed at step {kill_at} ({_last_line(log)}); see {log}"
                )
            time.sleep(_END_SECONDS)
        elif code:
            raise DemoError(f"`quantshard {arguments[0]}` failed: {_last_line(log)} (see {log})")
        else:
            self.say(f"    done in {time.monotonic() - start:.0f} s")
        return last_step(run)

    def diff(self, a: Path | str, b: Path | str) -> bool:
        """Run `quantshard diff`, and return whether the checkpoints are equal."""
        self.say(f"  $ quantshard diff {a} {b}")
        result = subprocess.run(_command(["diff", str(a), str(b)]), env=_environment(), capture_output=True, text=True)
        if result.returncode not in (0, 1):
            raise DemoError(f"`quantshard diff` failed: {result.stderr.strip()}")
        self.seen(result.stdout.strip().splitlines()[0])
        return result.returncode == 0

    def metrics(self, run: RunDir) -> dict[int, dict[str, Any]]:
        """Metrics records of a run by step."""
        return {record["step"]: record for record in records(run.metrics)}

    def losses(self, run: RunDir) -> dict[int, float]:
        """Losses of a run by step."""
        return {step: float(record["loss"]) for step, record in self.metrics(run).items()}

    def figures(self, run: RunDir, label: str) -> list[str]:
        """Parse a total from the table printed by `train`: the amount, the BF16 amount, and their ratio."""
        text = (self.out / f"{run.path.name}-train.log").read_text(encoding="utf-8")
        match = re.search(rf"^ *{re.escape(label)}.*?  +(\S+ \w+)  +(\S+ \w+)  +([\d.]+)$", text, re.MULTILINE)
        if match is None:
            raise DemoError(f"`quantshard train` printed no line {label!r}; see {self.out}")
        return list(match.groups())

    def rounding_bounds(self) -> dict[int, float]:
        """Bound on the loss difference between 1 and 2 processes, for every step after the resume.

        Two processes round their halves of a gradient g to BF16 before adding them, one process rounds the sum: they
        differ by 2 x 2**-9 of it. Adam at most doubles this in a step, and to first order the loss follows by that
        times lr |g|_1 <= lr sqrt(parameters) |g|_2.
        """
        bounds, drift = {}, 0.0
        for step, record in self.metrics(self.whole).items():
            if step > self.resumed:
                bounds[step] = _BF16_ROUNDING * record["loss"] + drift
                drift += 4 * _BF16_ROUNDING * record["lr"] * math.sqrt(self.parameters) * record["grad_norm"]
        return bounds

    def say(self, *lines: str) -> None:
        """Print lines on the screen of the demo."""
        for line in lines:
            self.console.print(line)

    def chapter(self, number: int, title: str) -> None:
        """Print the title of a chapter."""
        self.say("", f"[{number}/5] {title}")

    def expected(self, text: str) -> None:
        """Print the expected observation."""
        self.say(f"  expected: {text}")

    def seen(self, text: str) -> None:
        """Print the actual observation."""
        self.say(f"  seen:     {text}")

    def summary(self) -> None:
        """Print the table of results and the paths of the files."""
        table = plain_table("what", "found", "", texts=3)
        for what, result, holds in self.results:
            table.add_row(what, result, "" if holds is None else "ok" if holds else "FAILED")
        self.say("", "Summary")
        self.console.print(table)
        runs = " ".join(str(run.path) for run in (self.whole, self.killed, self.single))
        self.say(f"  logs are in {self.out}; to compare the losses: quantshard report {runs}")


# Running commands


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


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def records(file: Path) -> list[dict[str, Any]]:
    """Parse the complete lines of a JSON Lines file; empty if the file does not exist yet."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def last_step(run: RunDir) -> int:
    """Last step in the metrics of a run, or 0."""
    entries = records(run.metrics)
    return int(entries[-1]["step"]) if entries else 0


def load_and_save(run: RunDir, saved: Path | str, again: Path) -> int:
    """Load a checkpoint in this process alone and save it again; return the number of parameters.

    The model is initialized from another seed, so that equal bits can only come from the checkpoint.
    """
    settings = run.read_config()[0]
    torch.manual_seed(settings.seed + 1)
    model = LanguageModel(settings, recipe.resolve(settings.recipe), "cpu")
    optimizer = make_optimizer(model, settings)
    extra = checkpoints.load(saved, model, optimizer)
    checkpoints.save(again, model, optimizer, extra)
    return sum(param.numel() for param in model.parameters())


def facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Reproducible part of a metrics record: everything except measurements such as speed and memory."""
    return {name: value for name, value in record.items() if name not in MEASURED}
