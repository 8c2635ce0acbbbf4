"""`quantshard export` and `quantshard import`, from a run to another program's folder and back."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import quantshard.cli as command_line
from quantshard.checkpoints.inspect.compare import compare
from quantshard.cli import exchange
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.trainer.config import to_toml
from tests.layouts import models


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A checkpoint where a run has its own."""
    folder = tmp_path_factory.mktemp("run")
    model, checkpoint = models.save(folder / "checkpoints", "mxfp8")
    (folder / "config.toml").write_text(to_toml(model.settings, {"launch": {}, "corpus": {}}))
    return checkpoint


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(command_line.app(), list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_export_and_import(run, tmp_path):
    out = tmp_path / "out"
    said = invoke("export", run, "--layout", "sglang-mxfp8", "--out", out, "--max-shard-size", "300KB")
    assert "14 weights exact, 0 requantized" in said
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in models.CONFIG} == models.CONFIG
    assert len(list(out.glob("*.safetensors"))) > 3
    said = invoke("import", out, "--out", tmp_path / "back", "--recipe", "mxfp8")
    assert "21 tensors copied bit for bit, 0 weights quantized" in said
    differing = {found.key for found in compare(run, tmp_path / "back").differences if found.key.startswith("model.")}
    assert differing and all(key.endswith(("_key", "_draws")) for key in differing)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_page_runs(run, tmp_path, monkeypatch):
    """The commands and the Python of docs/layouts.md."""
    page = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-000100").symlink_to(run)
    (tmp_path / "run/config.toml").write_bytes((run.parents[1] / "config.toml").read_bytes())
    monkeypatch.chdir(tmp_path)
    (commands,) = re.findall(r"```sh\n(.*?)```", page, flags=re.S)
    for line in commands.splitlines():
        invoke(*shlex.split(line)[1:])
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names = {"model": models.build("mxfp8", seed=1)}
    exec(code, names)
    assert len(names["done"].copied) == 21
    assert {"served", "plain", "blocks", "imported", "requantized", "modelopt"} <= {p.name for p in tmp_path.iterdir()}


def test_mistakes_name_themselves(run, tmp_path):
    with pytest.raises(ConfigurationError, match="--lossy"):
        invoke("export", run, "--layout", "hf-fp8", "--out", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="exists"):
        invoke("import", run, "--out", tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot read .*: No such file"):
        invoke("export", run, "--layout", "plain", "--out", tmp_path / "out", "--names", tmp_path / "none.toml")


def test_lossy_from_the_command_line_says_so(run, tmp_path):
    said = invoke("export", run, "--layout", "hf-fp8", "--out", tmp_path / "out", "--lossy")
    assert "LOSSY: requantized 14 weights" in said
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert load_file(file)["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(("text", "wanted"), [("5GB", 5 * 10**9), ("1.5mb", 1_500_000), ("12", 12), ("3k", 3000)])
def test_sizes(text, wanted):
    assert exchange.size(text) == wanted


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "5TB"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigurationError, match="is no size"):
        exchange.size(text)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "without biases"),
        ({"hidden_size": None}, "hidden_size is None, and must be given"),
        ({"vocab_size": "many"}, "vocab_size is 'many', and must be an integer from 1 to"),
        ({"head_dim": 32}, "heads of 32 features do not make up 256"),
        ({"num_key_value_heads": 3}, "kv_heads = 3 must divide"),
    ],
)
def test_configurations_that_are_refused(change, match):
    with pytest.raises(ConfigurationError, match=match):
        exchange.settings_of({**models.CONFIG, **change}, "here")
