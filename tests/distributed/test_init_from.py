"""`quantshard train --init-from`: a run begins with the weights of an import, an export, or a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quantshard.errors import QuantshardError
from quantshard.tools.trainer.data import from_table
from quantshard.tools.trainer.loop import ProcessInfo, StopFlag, Trainer
from quantshard.tools.trainer.run_dir import RunDir
from tests.distributed.commands import quantshard
from tests.distributed.pool import run_ranks
from tests.distributed.test_cli import losses, one_line

pytestmark = pytest.mark.distributed

SIZES = {"hidden": 64, "heads": 2, "layers": 1, "ffn": 96, "kv_heads": 1}
MODEL = [text for name, size in SIZES.items() for text in (f"--{name.replace('_', '-')}", size)]
MORE = "--recipe mxfp8 --seq-length 16 --global-batch 4 --steps 2 --warmup 0 --lr 0.01 --nproc-per-node 2".split()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On 2 processes: a run of 2 steps; its checkpoint exported twice, and imported."""
    folder = tmp_path_factory.mktemp("sources")
    # a fixed text: a few masters in a million have another code if they are rounded to BF16 before
    (folder / "text.py").write_text((Path(__file__).parents[2] / "LICENSE").read_text())
    saved, out = folder / "run" / "checkpoints" / "step-000002", folder / "exact"
    for line in (
        ["train", "--run", folder / "run", "--data", folder / "text.py", *MODEL, *MORE],
        ["export", saved, "--layout", "compressed-tensors", "--out", out],
        ["export", saved, "--layout", "plain", "--out", folder / "plain"],
        ["import", out, "--recipe", "mxfp8", "--out", folder / "imported"],
    ):
        told = quantshard(*line)
        assert told.returncode == 0, told.stderr
    return folder


def begun(folder: Path, source: str, *more: Any) -> Path:
    """A run of 2 steps from a source, of which no size is given."""
    run = folder / f"from-{Path(source).name}"
    told = quantshard("train", "--run", run, "--init-from", source, "--data", folder / "text.py", *MORE, *more)
    assert told.returncode == 0, told.stderr
    assert f"began with the weights of {source}" in told.stdout
    return run


def first_loss(settings_of: str) -> float:
    """The loss of step 1, by the weights after step 2, restored with their optimizer."""
    run = RunDir(Path(settings_of))
    settings, _, corpus = run.read_config()
    place = ProcessInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    trainer = Trainer(replace(settings, init_from=""), from_table(corpus), run, place, StopFlag())
    with trainer.manager:
        trainer.restore(2)
    return trainer.step(1)[0]


def test_all_three_begin_with_the_same_bits(sources: Path) -> None:
    """2 ranks: an import, an export and the checkpoint have the same losses to the last bit, and sizes are theirs;
    the first is that of the run's weights."""
    paths = {name: str(sources / name) for name in ("imported", "exact", "run/checkpoints/step-000002")}
    runs = {name: begun(sources, path) for name, path in paths.items()}
    settings = {name: RunDir(run).read_config()[0] for name, run in runs.items()}
    for name, found in settings.items():
        assert {key: getattr(found, key) for key in SIZES} == SIZES and found.init_from == paths[name], name
    first, *others = (losses(run) for run in runs.values())
    assert len(first) == 2 and all(other == first for other in others)
    expected = run_ranks(2, first_loss, str(sources / "run"))
    assert expected == [first[0]["loss"]] * 2
    plain = losses(begun(sources, str(sources / "plain"), "--recipe", "mxfp8"))
    assert plain[0]["loss"] == first[0]["loss"] and plain[1]["loss"] != first[1]["loss"]  # its masters have more bits
    assert losses(sources / "run")[0]["loss"] > first[0]["loss"]  # of random weights


def test_resumed_it_does_not_begin_again(sources: Path, tmp_path: Path) -> None:
    """2 ranks; what it began with may be gone."""
    (tmp_path / "text.py").write_text((sources / "text.py").read_text())
    source = tmp_path / "imported"
    shutil.copytree(sources / "imported", source)
    run = begun(tmp_path, str(source))
    shutil.rmtree(source)
    told = quantshard("resume", run, "--steps", 3)
    assert told.returncode == 0 and "began with" not in told.stdout, told.stderr
    assert [record["step"] for record in losses(run)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("source", "more", "says"),
    [
        ("imported", ["--hidden", 96], r"embedding\.weight"),
        ("imported", ["--layers", 2], r"layers\.1\."),
        ("run/checkpoints/step-000002", ["--tied"], r"head\.weight"),
        ("imported", ["--recipe", "block"], r"as mxfp8_32x32 there"),
        ("exact", ["--hidden", 96], r"model\.embed_tokens\.weight is .*\[257, 64\], but embedding\.weight must be"),
        ("exact", ["--ffn", 128], r"mlp\.\S+ is .*\[96, 64\], but .*\[128, 64\]"),
        ("exact", ["--recipe", "nvfp4"], r"codes are E4M3 there, E2M1 here; use recipe"),
        ("run", [], r"is no complete checkpoint, and holds no safetensors"),
    ],
)
def test_another_model_is_refused(sources: Path, tmp_path: Path, source: str, more: list[Any], says: str) -> None:
    run = tmp_path / "run"
    line = ["train", "--run", run, "--init-from", sources / source, "--data", sources / "text.py", *MORE, *more]
    one_line(quantshard(*line), says)
    # a checkpoint is compared by the processes, which leave the folder free
    assert not (run / "config.toml").exists()


def refusal(settings_of: str, source: str) -> str:
    run = RunDir(Path(settings_of))
    settings, _, corpus = run.read_config()
    place = ProcessInfo(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    with pytest.raises(QuantshardError) as caught:
        Trainer(replace(settings, ffn=128), from_table(corpus), run, place, StopFlag(), source)
    return str(caught.value)


@pytest.mark.parametrize("source", ["imported", "exact"])
def test_every_rank_says_by_name_what_does_not_fit(sources: Path, source: str) -> None:
    """2 ranks, where the files change after they were looked at."""
    messages = run_ranks(2, refusal, str(sources / "run"), str(sources / source))
    assert messages[0] == messages[1] and "\n" not in messages[0]
    assert re.search(r"(fc1_\w+weight|mlp\.\w+_proj)\S*.*(\[96, 64\]|shape)", messages[0]), messages[0]


def test_vocabulary_of_another_tokenizer_is_named(sources: Path, tmp_path: Path) -> None:
    shutil.copytree(sources / "imported", tmp_path / "imported")
    config = json.loads((tmp_path / "imported" / "config.json").read_text())
    (tmp_path / "imported" / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    line = ["train", "--run", tmp_path / "r", "--init-from", tmp_path / "imported", "--data", sources / "text.py"]
    one_line(quantshard(*line, *MORE), "model_type 'gemma2'")
