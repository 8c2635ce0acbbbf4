"""`quantshard debug`: runs beside float32, the recipes that it suggests, and what it refuses, with nothing written.

The runs are trained on 1 rank.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantshard.tensor.parameter_state import RNG_KEY
from quantshard.tools.cli import debug
from quantshard.tools.cli.debug import ModelPair
from quantshard.tools.trainer.models import model as models
from tests.distributed.commands import quantshard

pytestmark = pytest.mark.distributed

SIZES = (
    "--hidden 64 --heads 2 --ffn 96 --layers 2 --seq-length 32 --global-batch 2 --steps 2 --save-every 0 --recipe mxfp8"
).split()
LAYERS = [f"layers.{i}.{name}" for i in (0, 1) for name in ("self_attention.layernorm_qkv", "self_attention.proj")]
LAYERS += [f"layers.{i}.layernorm_mlp" for i in (0, 1)]


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 264,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 32,
    "attention_dropout": 0.5, "dtype": "bfloat16",
}  # fmt: skip
BY_NAME = "layers.0.*=bf16,*.down_proj=current,*=mxfp8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("debug")
    (found / "text.txt").write_text("what loses most by being quantized\n" * 300)
    (found / "llama").mkdir()
    (found / "llama" / "config.json").write_text(json.dumps(LLAMA))
    return found


def trained(folder: Path, name: str, *flags: object) -> Path:
    told = quantshard("train", "--run", folder / name, "--nproc-per-node", 1, "--data", folder / "text.txt", *flags)
    assert told.returncode == 0, told.stderr
    return folder / name


def found_in(run: Path) -> dict[str, Any]:
    told = quantshard("debug", run, "--json")
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return trained(folder, "run", *SIZES, "--recipe", "mxfp8")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return trained(
        folder,
        "of-transformers",
        "--model",
        folder / "llama",
        "--random-weights",
        "--vocabulary",
        257,
        *SIZES[8:],
        "--recipe",
        BY_NAME,
    )


def test_as_json(run):
    found = found_in(run)
    errors = [each["error"] for each in found["gemms"]]
    assert len(errors) == 2 * 7 * 6 and errors == sorted(errors, reverse=True) and 1e-3 < errors[-1] <= errors[0] < 0.1
    assert {each["layer"] for each in found["gemms"]} == set(LAYERS)
    assert abs(found["loss"] - found["exact_loss"]) < 0.05 and 0 < found["gradient"] < 0.5
    assert found["suggestion"]["kept"] == [] and found["suggestion"]["layers"] == 2
    assert found["suggestion"]["recipes"] == "*=mxfp8"


def test_as_a_table_of_a_checkpoint(run):
    command = ("debug", run / "checkpoints" / "step-000002", "--batch", 2)
    told = quantshard(*command)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert "recipe 'mxfp8' beside float32, 2 sequences of 32" in lines[0]
    assert any(line.startswith("and 64 more: --wide or --json has them") for line in lines)
    assert re.fullmatch(
        r"No layer stands out: the largest error is 1(\.\d)? times the median of 2 layers\. Keep the recipe\.",
        lines[-1],
    )
    rows = [re.findall(r"([\d.]+)%", line) for line in lines if "layers." in line and "%" in line]
    assert rows and all(2 < float(gaussian) < 4 for _, gaussian in rows), "MXFP8 has 2.7 %"


def largest(found: dict[str, Any], layers: str, operand: str) -> float:
    """Of the errors of a kind."""
    return max(each["error"] for each in found["gemms"] if layers in each["layer"] and each["operand"] == operand)


@pytest.mark.exhaustive
def test_recipes_by_layer(folder):
    """Each layer by its own recipe: gradients of `current` have two bits of mantissa, and one scale."""
    flags = [*SIZES, "--layers", 3]
    run = trained(folder, "by-layer", *flags, "--recipe", "layers.0=bf16,layers.2=current,*=mxfp8")
    first = found_in(run)
    assert {each["layer"].split(".")[1] for each in first["gemms"]} == {"1", "2"}
    assert largest(first, "layers.1", "grad_output") < 0.04 < largest(first, "layers.2", "grad_output")


@pytest.mark.exhaustive
def test_experts(folder):
    """Each expert's GEMMs by name; those without tokens have no errors."""
    flags = [*SIZES, "--experts", 4]
    first = found_in(trained(folder, "experts", *flags))
    weights = {each["weight"] for each in first["gemms"]}
    assert {f"layers.{layer}.mlp.down.weight{expert}" for layer in (0, 1) for expert in range(4)} & weights
    assert not any("router" in name for name in weights) and first["suggestion"]["layers"] == 2


def test_a_model_of_transformers(llama):
    """Its linear layers by name, without those in BF16 and the head."""
    first = found_in(llama)
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert {each["layer"] for each in first["gemms"]} == {f"model.layers.1.{name}" for name in names}
    assert first["suggestion"]["layers"] == 7 and first["suggestion"]["recipes"].startswith("layers.0.*=bf16,")
    assert abs(first["loss"] - first["exact_loss"]) < 0.05 and 0 < first["gradient"] < 0.5
    assert largest(first, "down_proj", "grad_output") > 0.04 > largest(first, "_attn", "grad_output")


def test_a_model_of_transformers_in_float32_is_that_of_transformers(llama):
    """Of the masters, with nothing dropped out; layers have the random keys of those that were trained."""
    found = debug.find(str(llama))
    batch = debug.batch_of(found, (), 2)
    pair = ModelPair(found, batch)
    report = pair.compare()
    plain = LlamaForCausalLM(LlamaConfig(**LLAMA | {"dtype": "float32"})).eval()
    values = {name: param.detach() for name, param in pair.exact.named_parameters()}
    assert plain.load_state_dict(values) and {each.dtype for each in values.values()} == {torch.float32}
    tokens, targets, positions, _ = batch.unbind(1)
    loss = models.loss(plain(input_ids=tokens, position_ids=positions).logits, targets)
    assert report.exact_loss == pytest.approx(float(loss.detach()), abs=1e-6)
    assert len(pair.recipes) == 7
    for name in pair.recipes:
        ours, exact = (each.get_submodule(name) for each in (pair.model, pair.exact))
        assert torch.equal(ours.weight_state("weight")[RNG_KEY], exact.weight_state("weight")[RNG_KEY])
        assert (ours.weight.dequantize().float() - exact.weight).abs().max() > 0


def test_buffers_are_those_of_the_checkpoint(llama, monkeypatch):
    """As of a family whose routers have some."""
    load = debug.checkpoints.load

    def other(checkpoint, model, optimizer):
        load(checkpoint, model, optimizer)
        model.model.rotary_emb.inv_freq.fill_(0.25)

    monkeypatch.setattr(debug.checkpoints, "load", other)
    found = debug.find(str(llama))
    assert (ModelPair(found, debug.batch_of(found, (), 1)).exact.model.rotary_emb.inv_freq == 0.25).all()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["RUN", "--batch", "0"], "--batch"),
        (["RUN", "--data", "nowhere"], "there is nothing at nowhere; name text"),
        (["nothing"], "there is nothing at nothing"),
        (["empty"], "empty is no run"),
        (["there.png"], "there.png is no run"),
        (["alone"], "alone is no run"),
        (["unsaved"], "has no complete checkpoint"),
        (["plain"], "trained by recipe = 'bf16', which quantizes nothing"),
        (["named"], "trained by recipe = 'layers.0=bf16,*=bf16', which quantizes nothing"),
    ],
)
def test_refused_in_one_line(run, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.png").write_bytes(b"mine")
    (tmp_path / "empty").mkdir()
    shutil.copytree(run / "checkpoints" / "step-000002", tmp_path / "alone")
    (tmp_path / "unsaved").mkdir()
    settings = (run / "config.toml").read_text()
    (tmp_path / "unsaved" / "config.toml").write_text(settings)
    shutil.copytree(run, tmp_path / "plain")
    (tmp_path / "plain" / "config.toml").write_text(settings.replace('recipe = "mxfp8"', 'recipe = "bf16"'))
    shutil.copytree(run, tmp_path / "named")
    (tmp_path / "named" / "config.toml").write_text(settings.replace('"mxfp8"', '"layers.0=bf16,*=bf16"'))
    before = sorted(tmp_path.iterdir())
    told = quantshard("debug", *(run if each == "RUN" else each for each in arguments))
    assert told.returncode in (1, 2) and says in told.stderr and len(told.stderr.splitlines()) == 1, told.stderr
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "there.png").read_bytes() == b"mine"
