"""`quantshard train --ema`: the average is evaluated, saved, resumed, looked at and exported. Two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantshard.checkpoints.comparison import compare
from quantshard.interop.layouts.source import CheckpointModel
from tests.distributed.commands import quantshard
from tests.distributed.test_cli import losses, one_line

pytestmark = pytest.mark.distributed

SIZES = "--hidden 64 --heads 2 --layers 1 --ffn 96 --seq-length 16 --global-batch 6 --eval-sequences 4 --warmup 1"
EMA = 0.75


def train(run: Path, text: Path, *more: object) -> None:
    options = ("--recipe", "block", "--nproc-per-node", 2, "--save-every", 2, "--eval-every", 2, *SIZES.split(), *more)
    told = quantshard("train", "--run", run, "--data", text, *options)
    assert told.returncode == 0 and not told.stderr, told.stderr


@pytest.mark.exhaustive
def test_a_run_with_an_average(tmp_path: Path) -> None:
    text, runs = tmp_path / "text.txt", {name: tmp_path / name for name in ("whole", "resumed", "without")}
    text.write_text(Path(__file__).read_text())
    train(runs["whole"], text, "--ema", EMA, "--steps", 4)
    train(runs["resumed"], text, "--ema", EMA, "--steps", 2, "--decay-steps", 4)
    train(runs["without"], text, "--steps", 4)
    told = quantshard("resume", runs["resumed"], "--steps", 4)
    assert told.returncode == 0 and "of the average" in told.stdout, told.stderr

    # An uninterrupted run, one that was resumed; and training does not see whether an average is kept and evaluated
    last = {name: run / "checkpoints" / "step-000004" for name, run in runs.items()}
    assert compare(last["whole"], last["resumed"]).equal and losses(runs["whole"]) == losses(runs["resumed"])
    evaluated = [record for record in losses(runs["whole"]) if "heldout_loss" in record]
    assert [record["step"] for record in evaluated] == [2, 4]
    assert all(record["heldout_loss_ema"] != record["heldout_loss"] for record in evaluated)
    plain = [{k: v for k, v in record.items() if k != "heldout_loss_ema"} for record in losses(runs["whole"])]
    assert plain == losses(runs["without"])
    told = quantshard("diff", last["whole"], last["without"])
    assert told.returncode == 1 and "weights: " not in told.stdout and "ema_param" in told.stdout

    # Others cope with the state
    for command in ("verify", "inspect"):
        assert quantshard(command, last["whole"]).returncode == 0
    whole, without = runs["whole"], runs["without"]
    commands = [("explain", whole), ("plan", whole), ("plan", without, "--ema")]
    commands += [("plan", whole, "--no-ema"), ("plan", without)]
    shown = [json.loads(quantshard(*command, "--json").stdout)["rows"][0]["optimizer"] for command in commands]
    assert [row.get("ema_param") for row in shown] == [*["fp32"] * 3, None, None]

    # Exported
    told = quantshard("export", last["whole"], "--layout", "plain-fp32", "--values", "ema", "--out", tmp_path / "out")
    assert told.returncode == 0 and "averages of the weights" in told.stdout, told.stderr
    [file] = (tmp_path / "out").glob("*.safetensors")
    source = CheckpointModel(last["whole"])
    embedding = source.average(source.weights["embedding.weight"])
    assert torch.equal(load_file(file)["model.embed_tokens.weight"], embedding)
    one_line(
        quantshard("export", last["without"], "--layout", "plain", "--values", "ema", "--out", tmp_path / "none"),
        "no averages",
    )
