"""`quantshard resume --recipe`: a run goes on with weights of another recipe. Each test names its rank count."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quantshard import checkpoints
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.inspection import inspect_checkpoint
from quantshard.tools.trainer.data import from_table
from quantshard.tools.trainer.loop import ProcessInfo, StopFlag, Trainer, make_optimizer
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.run_dir import RunDir
from tests.distributed.commands import quantshard
from tests.distributed.pool import run_ranks
from tests.distributed.test_cli import content, one_line

pytestmark = pytest.mark.distributed

SMALL = (
    "--recipe mxfp8 --hidden 64 --heads 2 --layers 1 --ffn 96 --seq-length 16 --global-batch 4 --steps 2 --save-every 2"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 steps with mxfp8, on 2 processes."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "text.py").write_text(Path(__file__).read_text())
    told = quantshard("train", "--run", folder / "run", "--data", folder / "text.py", "--nproc-per-node", 2, *SMALL)
    assert told.returncode == 0, told.stderr
    return folder / "run"


def saved_anew(folder: str, out: str) -> None:
    """What one process makes of the checkpoint."""
    settings, _, _ = RunDir(Path(folder)).read_config()
    model = models.build(models.ModelSpec(replace(settings, recipe="block")), settings.axes(1).device_mesh("cpu"))
    optimizer = make_optimizer(model, settings)
    with pytest.warns(UserWarning, match="requantized"):
        extra = checkpoints.load(f"{folder}/checkpoints/step-000002", model, optimizer, requantize=True)
    checkpoints.save(out, model, optimizer, extra | {"recipe": "block"})


def starts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


def formats(run: Path, step: int) -> set[str]:
    found = inspect_checkpoint(run / "checkpoints" / f"step-{step:06d}", data=False)
    return {row.format for row in found.rows if row.quantized}


def test_resumed_with_another_recipe(run: Path, tmp_path: Path) -> None:
    """2 ranks: from the masters, the bits of one process; said on stdout and in the run's folder; stopped before a
    save, it is done again. Then 1 rank."""
    folder, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(run, folder)
    told = quantshard("resume", folder, "--recipe", "block", "--copy-to", copy)
    assert told.returncode == 0 and not told.stderr, told.stderr
    said = "weights were requantized: 7 from mxfp8_32x32 to fp8_128x128 by their masters; losses go on from"
    assert said in told.stdout
    run_ranks(1, saved_anew, str(folder), str(tmp_path / "alone"))
    assert compare(copy, tmp_path / "alone").equal
    assert RunDir(folder).read_config()[0].recipe == "block" and formats(folder, 2) == {"mxfp8_32x32"}
    told = quantshard("resume", folder, "--steps", 4, "--nproc-per-node", 1)
    assert told.returncode == 0 and said in told.stdout, told.stderr
    assert formats(folder, 4) == {"fp8_128x128"}
    told = quantshard("resume", folder, "--steps", 5)
    assert told.returncode == 0 and "requantized" not in told.stdout, told.stderr
    records = [(start["step"], start["recipe"], start.get("lossy"), "requantized" in start) for start in starts(folder)]
    assert records == [(0, "mxfp8", None, False), *[(2, "block", False, True)] * 2, (4, "block", None, False)]


def without_masters(folder: str) -> None:
    settings, _, corpus = RunDir(Path(folder)).read_config()
    run, place = RunDir(Path(folder)), ProcessInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    trainer = Trainer(replace(settings, master_weights=False), from_table(corpus), run, place, StopFlag())
    with trainer.manager:
        trainer.step(1)
        trainer.save(3)


def test_without_masters(run: Path, tmp_path: Path) -> None:
    """2 ranks: refused, and nothing is changed; or not, if that is asked for."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    run_ranks(2, without_masters, str(folder))
    before = content(folder)
    one_line(
        quantshard("resume", folder, "--recipe", "block", "--steps", 4),
        r"7 weights are of another recipe, .* --lossy\)",
    )
    one_line(quantshard("resume", folder, "--lossy"), "--lossy needs --recipe")
    one_line(quantshard("resume", folder, "--recipe", "fp7"), "fp7")
    assert content(folder) == before
    told = quantshard("resume", folder, "--recipe", "block", "--lossy", "--steps", 4)
    assert told.returncode == 0 and "by their dequantized codes, WITHOUT masters; losses" in told.stdout, told.stderr
    assert starts(folder)[-1]["lossy"] and formats(folder, 4) == {"fp8_128x128"}
