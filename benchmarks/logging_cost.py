"""What logging costs the host in a step of `quantshard train`: microseconds of the trainer's own functions.

    python benchmarks/logging_cost.py [--layers 12] [--steps 300] [--of-step-ms 71]

A run with a small model of as many layers is made in a temporary folder, in one process without a terminal, and its
`Trainer.record` and `RunStatistics.stepped` are called for step after step, without training between them: medians,
means beside them, for what is flushed now and then, and shares of a step of `--of-step-ms` milliseconds (71: GPT-2
small, 32,768 tokens, BF16 on an H200). TensorBoard and Weights & Biases (offline) take what it adds in threads and
processes of their own too, which is not counted. Prints a table.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer import worker
from quantshard.tools.trainer.data import from_table
from quantshard.tools.trainer.loop import ProcessInfo, StopFlag, Trainer
from quantshard.tools.trainer.measurements import RunStatistics
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.trackers import open_trackers

WARM_UP = 20


def made_trainer(folder: Path, arguments: argparse.Namespace) -> Trainer:
    """The trainer of a new run, with alarms and without trackers."""
    (folder / "text").write_text("A line of text, as good as another.\n" * 600, encoding="utf-8")
    settings = TrainSettings(
        data=(str(folder / "text"),), layers=arguments.layers, hidden=64, heads=2, seq_length=16, global_batch=4,
        steps=1_000_000, recipe="mxfp8", device="cpu", statistics_every=1_000_000, alarm_loss_spike=6.0,
    )  # fmt: skip
    run = RunDir(folder / "run")
    worker.create_run(run, settings.resolved(), 1)
    settings, _, corpus = run.read_config()
    return Trainer(settings, from_table(corpus), run, ProcessInfo(0, 1, torch.device("cpu")), StopFlag())


def microseconds(call: Callable[[int], object], steps: int) -> list[float]:
    """Of each of some calls with the numbers of steps that follow."""
    found = []
    for step in range(1, WARM_UP + steps + 1):
        began = time.perf_counter()
        call(step)
        found.append((time.perf_counter() - began) * 1e6)
    return found[WARM_UP:]


def recorded(trainer: Trainer, steps: int) -> list[float]:
    """Of `Trainer.record`."""
    return microseconds(lambda step: trainer.record(step, 2 + 1 / step, 1.0, 0.07, None, None), steps)


def tracked(trainer: Trainer, steps: int, **asked: object) -> list[float]:
    """Of `Trainer.record` with the trackers that are asked for; of none, where their package is not installed."""
    try:
        trainer.trackers = open_trackers(replace(trainer.settings, **asked), trainer.run, 0)  # type: ignore[arg-type]
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return []
    try:
        return recorded(trainer, steps)
    finally:
        for tracker in trainer.trackers:
            tracker.close(failed=False)
        trainer.trackers = []


def alarmed(trainer: Trainer, steps: int) -> list[float]:
    """Of `RunStatistics.stepped` in steps that are not sampled."""
    with RunStatistics(
        trainer.settings, trainer.model, trainer.optimizer, trainer.record_statistics, trainer.progress.note, 0
    ) as statistics:
        return microseconds(lambda step: statistics.stepped(2 + step % 7 / 100, lambda: None), steps)


def rows(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds a step by what they are for."""
    os.environ["WANDB_MODE"] = "offline"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(redirect_stdout(stack.enter_context(open(folder / "lines", "w", encoding="utf-8"))))
            trainer, steps = made_trainer(folder, arguments), arguments.steps
            return {
                "`metrics.jsonl` and a line a step": recorded(trainer, steps),
                "the same and `--tensorboard`": tracked(trainer, steps, tensorboard=True),
                "the same and `--wandb`, offline": tracked(trainer, steps, wandb="cost"),
                "alarms, no sampled step": alarmed(trainer, steps),
            }
    finally:
        dist.destroy_process_group()


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--of-step-ms", type=float, default=71)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    print(f"{platform.processor() or platform.machine()}, {datetime.date.today()}, torch {torch.__version__}\n")
    print(f"| a step | us, median | us, mean | of {arguments.of_step_ms:g} ms, median |")
    print("|---|---|---|---|")
    for name, times in rows(arguments).items():
        if not times:
            continue
        share = median(times) / (arguments.of_step_ms * 1000)
        print(f"| {name} | {median(times):.0f} | {mean(times):.0f} | {share:.2%} |")


if __name__ == "__main__":
    main()
