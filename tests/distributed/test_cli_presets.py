"""`quantshard train --preset`: the run of its options spelled out; resumed, planned, explained, kept. Two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quantshard.checkpoints.comparison import compare
from quantshard.tools.trainer.run_dir import RunDir
from tests.distributed.commands import quantshard
from tests.distributed.test_cli import losses, one_line

pytestmark = pytest.mark.distributed

SIZES = "--hidden 64 --heads 2 --layers 1 --ffn 96 --seq-length 16 --global-batch 6 --eval-sequences 4 --warmup 1"
SPELLED = (
    "--master-dtype",
    "float16",
    "--master-remainders",
    "on",
    "--exp-avg-dtype",
    "fp8",
    "--exp-avg-sq-dtype",
    "bfloat16",
)
AS_LEAN6 = {"exp_avg": "FP8", "exp_avg_sq": "bf16", "master_param": "FP8+8"}


def command(run: Path, text: Path, *more: object) -> list[object]:
    options = ("--recipe", "block", "--nproc-per-node", 2, "--save-every", 2, "--eval-every", 2, *SIZES.split())
    return ["train", "--run", run, "--data", text, *options, "--decay-steps", 4, *more]


def train(run: Path, text: Path, *more: object) -> str:
    told = quantshard(*command(run, text, *more))
    assert told.returncode == 0 and not told.stderr, told.stderr
    return " ".join(told.stdout.split())


@pytest.mark.exhaustive
def test_a_run_by_a_preset(tmp_path: Path) -> None:
    text, runs = tmp_path / "text.txt", {name: tmp_path / name for name in ("named", "spelled", "resumed", "without")}
    text.write_text(Path(__file__).read_text())
    train(runs["named"], text, "--preset", "lean6", "--steps", 4)
    train(runs["spelled"], text, *SPELLED, "--steps", 4)
    train(runs["resumed"], text, "--preset", "lean6", "--steps", 2, "--auto-resume")
    train(runs["without"], text, "--no-master-weights", "--steps", 2)
    told = quantshard("resume", runs["resumed"], "--steps", 4)
    assert told.returncode == 0, told.stderr

    # The same run, whichever way it is asked for and stopped
    last = {name: run / "checkpoints" / "step-000004" for name, run in runs.items()}
    for other in ("spelled", "resumed"):
        assert compare(last["named"], last[other]).equal and losses(runs["named"]) == losses(runs[other])

    # Kept, and shown
    kept = RunDir(runs["resumed"]).read_config()[0]
    assert (kept.preset, kept.master_dtype, kept.master_remainders, kept.exp_avg_dtype, kept.exp_avg_sq_dtype) == (
        "lean6", "float16", "on", "fp8", "bfloat16",
    )  # fmt: skip
    commands = [("explain", runs["named"]), ("plan", runs["named"]), ("plan", runs["without"], "--preset", "lean6")]
    for arguments in commands:
        shown = json.loads(quantshard(*arguments, "--json").stdout)
        [row] = [each for each in shown["rows"] if each["name"] == "layers.0.self_attention.proj.weight"]
        assert row["optimizer"] == AS_LEAN6
    without = json.loads(quantshard("plan", runs["named"], "--preset", "none", "--json").stdout)["parameter"]
    assert without["master"] == 4 and without["moments"] == 8
    without = json.loads(quantshard("plan", runs["without"], "--json").stdout)["parameter"]
    assert without["master"] == 0 and without["moments"] == 8

    # Another one is refused where a run is there
    again = command(runs["resumed"], text, "--steps", 4, "--auto-resume")
    one_line(
        quantshard(*again, "--preset", "lean8"),
        "was started or resumed with preset = 'lean6', .* preset = 'lean8' is given",
    )
    one_line(
        quantshard(*again, "--preset", "none"), "with exp_avg_dtype = 'fp8', .* exp_avg_dtype = 'float32' is given"
    )
    one_line(quantshard(*again, "--exp-avg-sq-dtype", "fp8"), "exp_avg_sq_dtype = 'bfloat16', .* 'fp8' is given")
    assert quantshard(*again, "--preset", "lean6").returncode == 0

    # Of a run that is at its end nothing is saved anew
    told = quantshard("resume", runs["spelled"], "--preset", "none")
    assert told.returncode == 0 and "no step is left that would save it: ask for" in " ".join(told.stdout.split())

    # And gone over to by its name
    one_line(quantshard("resume", runs["without"], "--preset", "leen6"), "did you mean 'lean6'.*, none$")
    told = quantshard("resume", runs["without"], "--preset", "lean8", "--steps", 4)
    shown = " ".join(told.stdout.split())
    assert told.returncode == 0 and "masters were made: " in shown and "of their dequantized codes" in shown, (
        told.stderr
    )
    assert re.search(
        r"states were converted: \d exp_avg from float32 to fp8_1x128, \d exp_avg_sq from float32 to ue5", shown
    )
    assert RunDir(runs["without"]).read_config()[0].preset == "lean8"
    assert json.loads(quantshard("explain", runs["without"], "--json").stdout)["parameter"]["master"] == 1


def test_a_run_that_releases_gradients(tmp_path: Path) -> None:
    """Without clipping the weights and losses are those of whole steps; a resumed run clips as one never stopped."""
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    runs = {name: tmp_path / name for name in ("whole", "released", "clipped", "resumed")}
    train(runs["whole"], text, "--preset", "lean8", "--steps", 3, "--clip", 0)
    train(runs["released"], text, "--preset", "lean8", "--steps", 3, "--clip", 0, "--release-gradients")
    last = {name: run / "checkpoints" / "step-000003" for name, run in runs.items()}
    for expected, row in zip(losses(runs["whole"]), losses(runs["released"]), strict=True):
        # the norm is stored in float32
        assert row == expected | {"grad_norm": pytest.approx(expected["grad_norm"], rel=2**-23)}
    differences = compare(last["whole"], last["released"]).differences
    assert all(".grad_norm" in difference.key for difference in differences), differences
    train(runs["clipped"], text, "--preset", "lean8", "--steps", 3, "--clip", 0.1, "--release-gradients")
    train(runs["resumed"], text, "--preset", "lean8", "--steps", 2, "--clip", 0.1, "--release-gradients")
    told = quantshard("resume", runs["resumed"], "--steps", 3)
    assert told.returncode == 0, told.stderr
    assert compare(last["clipped"], last["resumed"]).equal and losses(runs["clipped"]) == losses(runs["resumed"])
    refused = quantshard(*command(tmp_path / "x", text, "--release-gradients", "--statistics-every", 1))
    one_line(refused, "release_gradients cannot be combined with statistics_every")
