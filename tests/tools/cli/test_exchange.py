"""`quantshard export` and `quantshard import`, from a run to another program's folder and back."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import quantshard as qs
import quantshard.tools.cli as command_line
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.inspection import inspect_checkpoint
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.tools.cli import exchange
from quantshard.tools.trainer.models import initialization
from quantshard.tools.trainer.run_dir import to_toml
from tests.interop.layouts import models
from tests.pages import snippets
from tests.tools.cli.hostile import told


@pytest.fixture(autouse=True)
def one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")


TABLES = {"launch": {"processes": 1}, "corpus": {"sha256": "0" * 64, "bytes": 1, "files": ["0" * 64 + " 1 /a"]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A checkpoint where a run has its own."""
    folder = tmp_path_factory.mktemp("run")
    model, checkpoint = models.save(folder / "checkpoints", "mxfp8")
    (folder / "config.toml").write_text(to_toml(model.settings, TABLES))
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
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-000100").symlink_to(run)
    (tmp_path / "run/config.toml").write_bytes((run.parents[1] / "config.toml").read_bytes())
    monkeypatch.chdir(tmp_path)
    (commands,) = snippets("docs/layouts.md", "sh")
    for line in commands.splitlines():
        invoke(*shlex.split(line)[1:])
    (code,) = snippets("docs/layouts.md")
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
    with pytest.raises(ConfigurationError, match=r"there is nothing at .*none.toml"):
        invoke("export", run, "--layout", "plain", "--out", tmp_path / "out", "--names", tmp_path / "none.toml")


def test_a_model_of_bytes_has_no_tokenizer_to_export(run, tmp_path):
    said = invoke("export", run, "--layout", "plain-bf16", "--out", tmp_path / "out")
    assert "no tokenizer was written: the run names none" in said


def test_lossy_from_the_command_line_says_so(run, tmp_path):
    said = invoke("export", run, "--layout", "hf-fp8", "--out", tmp_path / "out", "--lossy")
    assert "LOSSY: requantized 14 weights" in said
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert load_file(file)["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


BESIDE = ("generation_config.json", "merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
          "tokenizer_config.json", "vocab.json", "chat_template.jinja")  # fmt: skip


def described(folder: Path, config: dict[str, Any]) -> Path:
    """A folder such as a model's of transformers, without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in BESIDE:
        (folder / name).write_bytes(name.encode())
    (folder / "README.md").write_text("not copied")
    return folder


def converted(recipe: str) -> torch.nn.Module:
    """A model that has the names of its files, from one seed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(**QWEN3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' imports
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    qs.convert(model, recipe)
    return model


QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "vocab_size": 100, "tie_word_embeddings": False}  # fmt: skip
LAYOUTS_OF_RECIPES = [("mxfp8", "compressed-tensors"), ("nvfp4", "modelopt"), ("mxfp8", "plain")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("recipe", "layout"), LAYOUTS_OF_RECIPES)
def test_a_converted_model_has_the_names_of_its_files(tmp_path, recipe, layout):
    """No map is asked for, on either side; the other files of the model's folder come along."""
    model, folder = converted(recipe), described(tmp_path / "hub", QWEN3)
    qs.checkpoints.save(tmp_path / "saved", model, None)
    said = invoke("export", tmp_path / "saved", "--layout", layout, "--config", folder, "--out", tmp_path / "out")
    assert "names are the model's own" in said
    assert "copied: chat_template.jinja, generation_config.json, merges.txt" in said
    assert {name: (tmp_path / "out" / name).read_bytes() for name in BESIDE} == {name: name.encode() for name in BESIDE}
    assert not (tmp_path / "out" / "README.md").exists()
    written = {key for file in (tmp_path / "out").glob("*.safetensors") for key in load_file(file)}
    assert {name for name, _ in model.named_parameters()} <= written
    before, names = models.values(model), dict(model.named_parameters())
    again = converted(recipe)
    with torch.no_grad():
        for param in again.parameters():
            param.mul_(0)
    done = qs.layouts.load(tmp_path / "out", again)
    assert len(done.copied) + len(done.quantized) + len(done.rounded) == len(names) and not done.requantized
    for name, value in models.values(again).items():
        assert torch.equal(before[name], value) and bool(value.any()), name


def test_a_model_of_our_own_layers_still_needs_a_map(tmp_path):
    """Weights of several matrices have names that no reader knows: they are not written under them."""
    _, saved = models.save(tmp_path, "mxfp8", architecture="gpt", kv_heads=0)
    with pytest.raises(ConfigurationError, match=r"has no external name; .*--names"):
        invoke("export", saved, "--layout", "plain", "--out", tmp_path / "out")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_import_with_recipes_by_layer(run, tmp_path):
    invoke("export", run, "--layout", "plain", "--out", tmp_path / "out")
    text = "layers.0=bf16,self_attention=current,*=nvfp4/wgrad:current"
    invoke("import", tmp_path / "out", "--out", tmp_path / "back", "--recipe", text)
    formats = {row.name: row.format for row in inspect_checkpoint(tmp_path / "back", data=False).rows}
    assert {name: formats[f"model.layers.{name}"] for name in PARTS} == PARTS


PARTS = {
    "0.self_attention.proj.weight": "float32",
    "0.layernorm_mlp.fc2_weight": "float32",
    "1.self_attention.proj.weight": "fp8_e4m3",
    "1.layernorm_mlp.fc2_weight": "nvfp4_16x16",
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_import_copies_what_lies_beside_the_weights(run, tmp_path):
    """And names it in the manifest; an export of the import has it again, and the configuration."""
    folder = described(tmp_path / "hub", models.CONFIG)
    invoke("export", run, "--layout", "sglang-mxfp8", "--config", folder, "--out", tmp_path / "out")
    said = invoke("import", tmp_path / "out", "--out", tmp_path / "back")  # by the recipe of the files
    assert "0 weights quantized" in said and "by recipe 'mxfp8'" in said
    assert "copied: chat_template.jinja, config.json, generation_config.json" in said
    assert invoke("verify", tmp_path / "back").startswith("whole")
    (tmp_path / "back" / "merges.txt").write_text("changed")
    found = CliRunner().invoke(command_line.app(), ["verify", str(tmp_path / "back")])
    assert found.exit_code == 1 and "merges.txt" in found.output
    (tmp_path / "back" / "merges.txt").write_text("merges.txt")
    said = invoke("export", tmp_path / "back", "--layout", "sglang-mxfp8", "--out", tmp_path / "again")
    assert "copied: chat_template.jinja, generation_config.json" in said
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {key: config[key] for key in models.CONFIG} == models.CONFIG and "quantization_config" in config
    for name in BESIDE:
        assert (tmp_path / "again" / name).read_bytes() == name.encode()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", "svaed", "--layout", "plain", "--out", "o"], r"nothing at svaed"),
        (["export", "saved", "--layout", "plian", "--out", "o"], "unknown layout 'plian'; did you mean 'plain'"),
        (["export", "saved", "--layout", "plain", "--out", "o", "--config", "c"], "nothing at c; name a config.json"),
        (
            ["export", "saved", "--layout", "plain", "--out", "o", "--values", "master"],
            "use 'masters', 'weights' or 'ema'",
        ),
        (["export", "empty", "--layout", "plain", "--out", "o"], "empty is not a complete checkpoint"),
        (["import", "empty", "--out", "o"], "empty"),
        (["import", "none", "--out", "o"], "nothing at none; name a folder of safetensors"),
        (["diff", "saved", "empty"], "empty is not a complete checkpoint"),
        (["diff", "savd", "saved"], r"nothing at savd"),
        (["convert-te", "savd", "--like", "saved", "--out", "o"], "nothing at savd"),
        (["resume", "savd"], r"no run in savd: it has no config.toml"),
    ],
)
def test_missing_paths_and_typos_are_one_line(run, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "saved").symlink_to(run)
    code, out, err = told(*arguments)
    assert code in (1, 2) and not out and len(err) == 1 and re.search(says, err[0]), (code, out, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "saved"]


@pytest.mark.parametrize(("text", "wanted"), [("5GB", 5 * 10**9), ("1.5mb", 1_500_000), ("12", 12), ("3k", 3000)])
def test_sizes(text, wanted):
    assert exchange.size(text) == wanted


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "5TB"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigurationError, match="is not a size"):
        exchange.size(text)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "without biases"),
        ({"hidden_size": None}, "hidden_size is None, and must be given"),
        ({"vocab_size": "many"}, "vocab_size is 'many', and must be an integer from 1 to"),
        ({"head_dim": 33}, "an even head_dim"),
    ],
)
def test_configurations_that_are_refused(change, match):
    with pytest.raises(ConfigurationError, match=match):
        initialization.settings_of({**models.CONFIG, **change}, "here")
