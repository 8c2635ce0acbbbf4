"""`quantshard train` with routers that balance by biases, losses and capacity: on 1 and 2 processes, and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from quantshard.checkpoints.comparison import compare
from tests.distributed.commands import quantshard
from tests.distributed.test_cli import losses, one_line

pytestmark = pytest.mark.distributed

SIZES = (
    "--hidden 32 --heads 2 --layers 2 --ffn 48 --experts 6 --seq-length 16 --global-batch 12 --eval-sequences 4 "
    "--warmup 1 --steps 4 --save-every 2 --router-bias-rate 0.003 --statistics-every 2"
)
ROWS = 12 * 16 * 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(Path(__file__).read_text() * 2)
    return tmp_path / "text.txt"


def train(run: Path, text: Path, *flags: str) -> Path:
    done = quantshard("train", "--run", run, "--data", text, *" ".join((SIZES, *flags)).split())
    assert done.returncode == 0, done.stderr
    return run


def biases(run: Path, step: int) -> list[list[float]]:
    """Biases of a checkpoint, read by PyTorch alone."""
    state = {f"model.layers.{layer}.mlp.router.expert_bias": torch.full((6,), torch.nan) for layer in (0, 1)}
    with pytest.warns(UserWarning, match="single process"):
        load(state, storage_reader=FileSystemReader(run / "checkpoints" / f"step-{step:06}"), no_dist=True)
    return [bias.tolist() for bias in state.values()]


def loads(run: Path) -> list[list[Any]]:
    lines = [json.loads(line) for line in (run / "statistics.jsonl").read_text().splitlines()]
    return [[row["load"], row["dropped"]] for line in lines for row in line["rows"] if row["role"] == "experts"]


def test_as_in_one_process(tmp_path: Path, text: Path) -> None:
    """1 process, 1 with gradient accumulation and recomputation, 2 with ep, 3 without: counts and biases have the same
    bits, because sums of integers are exact and capacity is per sequence. Losses are sums in other orders."""
    flags = (
        "--recipe bf16 --params-dtype float32 --router-balance bias+sequence --router-z-loss 1e-3 --capacity-factor 1"
    )
    meshes = ("dp_shard=1", "dp_shard=1 --micro-batches 3 --recompute layer", "ep=2", "dp_shard=3")
    one, *others = [train(tmp_path / f"{n}", text, flags, "--mesh", mesh) for n, mesh in enumerate(meshes)]
    assert len(loads(one)) == 4 and all(0 < dropped < 0.5 for _, dropped in loads(one))
    for layer in biases(one, 4):
        steps = [round(bias / 0.003) for bias in layer]
        assert layer == pytest.approx([0.003 * step for step in steps], abs=1e-7) and 0 < max(map(abs, steps)) <= 4
    for other in others:
        assert biases(other, 2) == biases(one, 2) and biases(other, 4) == biases(one, 4)
        assert loads(other) == loads(one)
        for step, expected in zip(losses(other), losses(one), strict=True):
            assert step == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mesh", ["ep=2"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, text: Path, mesh: str) -> None:
    whole = train(
        tmp_path / "whole", text, f"--mesh {mesh} --recipe delayed --router-balance bias --capacity-factor 1.2"
    )
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    done = quantshard("resume", run, "--nproc-per-node", 2)
    assert done.returncode == 0, done.stderr
    assert "rows dropped" in done.stdout
    assert losses(run) == losses(whole) and loads(run) == loads(whole)
    assert compare(*(each / "checkpoints" / "step-000004" for each in (whole, run))).equal
    assert biases(run, 2) != biases(run, 4)
    checkpoint = whole / "checkpoints" / "step-000004"
    begun = tmp_path / "begun"
    done = quantshard("train", "--run", begun, "--data", text, "--init-from", checkpoint, "--steps", 1, "--lr", 1e-3)
    assert done.returncode == 0, done.stderr
    moved = [
        abs(a - b) for pair in zip(biases(begun, 1), biases(whole, 4), strict=True) for a, b in zip(*pair, strict=True)
    ]
    assert max(moved) == pytest.approx(1e-3, abs=1e-6), "the biases of the checkpoint, and one step at the default rate"
    plain = quantshard(
        "train", "--run", tmp_path / "other", "--data", text, "--init-from", checkpoint, "--router-balance", "aux"
    )
    one_line(plain, "expert_bias")
