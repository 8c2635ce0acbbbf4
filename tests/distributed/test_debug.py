"""`quantshard debug`: a run beside float32; and what it refuses in one line, with nothing written.

The run is trained on 1 rank.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quantshard.trainer.settings.recipes import LayerRecipes
from tests.distributed.commands import quantshard

pytestmark = pytest.mark.distributed

SIZES = "--hidden 64 --heads 2 --ffn 96 --layers 2 --seq-length 32 --global-batch 2 --steps 2 --save-every 0".split()
LAYERS = [f"layers.{i}.{name}" for i in (0, 1) for name in ("self_attention.layernorm_qkv", "self_attention.proj")]
LAYERS += [f"layers.{i}.layernorm_mlp" for i in (0, 1)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debug")
    (folder / "text.txt").write_text("what loses most by being quantized\n" * 300)
    told = quantshard("train", "--run", folder / "run", "--nproc-per-node", 1, "--data", folder / "text.txt", *SIZES)
    assert told.returncode == 0, told.stderr
    return folder / "run"


def test_as_json_and_as_a_picture(run, tmp_path):
    told = quantshard("debug", run, "--json", "--end-to-end", "--picture", tmp_path / "errors.png")
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    errors = [each["error"] for each in found["gemms"]]
    assert len(errors) == 2 * 7 * 6 and errors == sorted(errors, reverse=True) and 1e-3 < errors[-1] <= errors[0] < 0.1
    assert {each["layer"] for each in found["gemms"]} == {each["layer"] for each in found["layers"]} == set(LAYERS)
    assert abs(found["loss"] - found["float32_loss"]) < 0.05 and 0 < found["gradient_error"] < 0.5
    assert 0.5 <= found["suggestion"]["removed"] < 1
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    suggested = found["suggestion"]
    assert suggested["keep"] in (["layers.0"], ["layers.1"]) and suggested["layers"] == 2
    recipes = LayerRecipes.parse(suggested["recipe"]).of_layers(["layers.0", "layers.1"])
    assert sorted(each.name for each in recipes) == ["bf16", "mxfp8"]


def test_as_a_table_of_a_checkpoint(run):
    told = quantshard("debug", run / "checkpoints" / "step-000002", "--batch", 2)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert "recipe 'mxfp8' beside float32, 2 sequences of 32" in lines[0]
    assert any(line.startswith("and 64 more: --wide or --json has them") for line in lines)
    assert lines[-1].startswith("--recipe 'layers.") and lines[-1].endswith("=bf16,*=mxfp8'")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["RUN", "--remove", "1"], "--remove 1.0: it is a share"),
        (["RUN", "--remove", "nan"], "--remove nan: it is a share"),
        (["RUN", "--batch", "0"], "--batch"),
        (["RUN", "--data", "nowhere"], "there is nothing at nowhere; name text"),
        (["RUN", "--picture", "errors.gif"], "--picture errors.gif: its name must end in one of .png, .svg, .pdf"),
        (["RUN", "--picture", "nowhere/errors.png"], "cannot write nowhere/errors.png"),
        (["RUN", "--picture", "there.png"], "--picture there.png exists; name another file"),
        (["RUN", "--picture", "link.png"], "--picture link.png exists; name another file"),
        (["nothing"], "there is nothing at nothing"),
        (["empty"], "empty is an empty folder"),
        (["there.png"], "there.png is no run"),
        (["alone"], "alone is not in a run's folder"),
        (["unsaved"], "has no complete checkpoint"),
        (["plain"], "trained by recipe = 'bf16', which quantizes nothing"),
    ],
)
def test_refused_in_one_line(run, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.png").write_bytes(b"mine")
    (tmp_path / "link.png").symlink_to(tmp_path / "elsewhere.png")
    (tmp_path / "empty").mkdir()
    shutil.copytree(run / "checkpoints" / "step-000002", tmp_path / "alone")
    (tmp_path / "unsaved").mkdir()
    settings = (run / "config.toml").read_text()
    (tmp_path / "unsaved" / "config.toml").write_text(settings)
    shutil.copytree(run, tmp_path / "plain")
    (tmp_path / "plain" / "config.toml").write_text(settings.replace('recipe = "mxfp8"', 'recipe = "bf16"'))
    before = sorted(tmp_path.iterdir())
    told = quantshard("debug", *(run if each == "RUN" else each for each in arguments))
    assert told.returncode in (1, 2) and says in told.stderr and len(told.stderr.splitlines()) == 1, told.stderr
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "there.png").read_bytes() == b"mine"
