"""`quantshard train --cuda-graphs` without a GPU: with a graph that runs its work again, a run has the bits of an eager
one, and what cannot be captured is refused. What a graph holds, on GPUs: tests/distributed/test_graphs.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch

from quantshard.checkpoints.comparison import compare
from quantshard.modules.graphs import step_graph
from quantshard.modules.graphs.recorder import GraphRecorder
from quantshard.tools.trainer import worker
from quantshard.tools.trainer.measurements import RunStatistics
from tests.distributed import commands
from tests.distributed.commands import quantshard
from tests.distributed.test_cli import losses, one_line

pytestmark = pytest.mark.distributed

SIZES = (
    "--hidden 64 --heads 2 --layers 2 --ffn 96 --seq-length 16 --global-batch 6 --micro-batches 2 --eval-sequences 4 "
    "--warmup 1 --recipe layers.0=nvfp4,*=delayed --save-every 4 --eval-every 4 --statistics-every 2"
)
_work = commands._work


def unchecked(*_: object) -> None:
    """This machine has no GPU, and needs none."""


def rerun(run: str, order: str) -> tuple[str, str]:
    """What a process does where a replay runs the work that was captured. No graph outlives the run, since the end of
    a process group waits for it."""
    gc.disable()  # which would let go of some, now and then
    try:
        with (
            patch.object(worker, "check_requirements", unchecked),
            patch.object(GraphRecorder, "record", lambda _, owner, work: (Replay(work), None)),
            patch.object(step_graph, "_device", lambda model: torch.device("cpu")),
            patch.object(RunStatistics, "whole_step", seen_once),
        ):
            told = _work(run, order)
        assert not Replay.held
        return told
    finally:
        gc.enable()


class Replay:
    """Work that runs again."""

    held: ClassVar[WeakSet[Replay]] = WeakSet()

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self.work = work
        Replay.held.add(self)

    def __call__(self) -> torch.Tensor:
        return self.work()


_whole_step = RunStatistics.whole_step


@contextmanager
def seen_once(statistics: RunStatistics) -> Iterator[None]:
    """As of a graph: Python sees what was captured, and a replay's numbers come to where that one's are."""
    first = statistics._sample
    with _whole_step(statistics):
        yield
    if first is not None:
        unseen = statistics._sample
        assert first.numbers is not None and unseen is not None and unseen.numbers is not None
        first.numbers.copy_(unseen.numbers)
        unseen.numbers, statistics._sample = None, first
        unseen.order.clear()


def train(run: Path, text: Path, *more: object) -> None:
    told = quantshard("train", "--run", run, "--data", text, *SIZES.split(), *more)
    assert told.returncode == 0 and not told.stderr, told.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "adamw"), (3, "muon")])
def test_replays_are_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, optimizer: str) -> None:
    """Losses, held-out losses, statistics and checkpoints, also of a run that goes on eagerly."""
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    options = ("--nproc-per-node", ranks, "--optimizer", optimizer)
    train(tmp_path / "eager", text, "--steps", 8, *options)
    monkeypatch.setattr(commands, "_work", rerun)
    monkeypatch.setattr(worker, "check_requirements", unchecked)
    goes_on = ranks == 3
    steps = ("--steps", 4, "--decay-steps", 8) if goes_on else ("--steps", 8)
    train(tmp_path / "replayed", text, *steps, *options, "--cuda-graphs")
    if goes_on:
        told = quantshard("resume", tmp_path / "replayed", "--steps", 8, "--no-cuda-graphs")
        assert told.returncode == 0, told.stderr
    assert losses(tmp_path / "replayed") == losses(tmp_path / "eager")
    found = compare(*(tmp_path / run / "checkpoints" / "step-000008" for run in ("eager", "replayed")))
    rates = [f"optimizer.param_groups.{number}.lr" for number in (0, 1)]  # a graph's is float32
    assert [each.key for each in found.differences] == ([] if goes_on else rates)
    lines = [(tmp_path / name / "statistics.jsonl").read_text() for name in ("eager", "replayed")]
    assert lines[0] == lines[1] and '"step": 6' in lines[0]


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    start = ("train", "--run", tmp_path / "run", "--data", text, "--cuda-graphs", *SIZES.split())
    for more, says in (
        (("--dropout", 0.1), "cuda_graphs cannot be combined with dropout"),
        (("--no-master-weights",), "cuda_graphs cannot be combined with master_weights = false"),
        ((), "cuda_graphs = true needs a GPU; give --no-cuda-graphs"),
    ):
        one_line(quantshard(*start, *more), says)
        assert not (tmp_path / "run").exists()
