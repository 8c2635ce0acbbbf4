"""Converted mixtures of transformers: saved, loaded, and written with the names that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import quantshard as qs
from quantshard import layouts
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.integrations import transformers as qt
from quantshard.integrations.transformers.trainer import load_weights
from quantshard.optimizers import FusedAdam
from tests.interop.conversion.mixtures import mixture, stacks, tokens
from tests.interop.frameworks.test_transformers import differing, load, said

transformers.utils.logging.disable_progress_bar()

FORMS = [("Qwen3-MoE", "current"), ("gpt-oss", "mxfp8"), ("Mixtral", "nvfp4")]
MATRICES = {
    "Qwen3-MoE": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "Mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
EXPERTS_PER_TENSOR = "files have its experts in one tensor; choose plain-bf16"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each mixture in BF16, under the names of transformers."""
    found = {name: tmp_path_factory.mktemp(name) for name, _ in FORMS}
    for name, path in found.items():
        mixture(name).save_pretrained(path)
    return found


def converted(path: Path, recipe: Any) -> Any:
    """Loaded in BF16, converted, and trained for a step."""
    model = load(path)
    qs.convert(model, recipe)
    step(model)
    return model


def step(model: nn.Module) -> float:
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
    loss: torch.Tensor = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def reverted(model: Any, tmp_path: Path) -> Any:
    """A copy with the values that the codes stand for."""
    model.save_pretrained(tmp_path / "native")
    copy = load(tmp_path / "native")
    qs.revert(copy)
    return copy


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def same_tensors(one: Path, other: Path) -> bool:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    return all(first[name].dtype == second[name].dtype and bool((first[name].view(torch.uint8) == second[name].view(
        torch.uint8)).all()) for name in first if first[name].ndim)  # fmt: skip


@pytest.mark.parametrize(("name", "recipe"), FORMS)
def test_the_native_form_brings_every_bit_back(name: str, recipe: str, folders: Any, tmp_path: Path) -> None:
    """Also of several files, of a loaded model saved again, and with the Trainer's loading in place."""
    model = converted(folders[name], recipe)
    model.save_pretrained(tmp_path / "one", max_shard_size="40KB")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 2
    found = load(tmp_path / "one")
    assert len(stacks(found)) == 4 and differing(model, found) == []
    assert torch.equal(model(tokens()).logits, found(tokens()).logits)
    inner = AutoModel.from_pretrained(tmp_path / "one")
    inner.save_pretrained(tmp_path / "inner")
    assert differing(inner, found.model) == [] == differing(load(tmp_path / "inner").model, inner)
    found.save_pretrained(tmp_path / "two")
    other = converted(folders[name], recipe)
    step(other)
    assert differing(other, model)
    load_weights(other, str(tmp_path / "two"))
    assert differing(other, model) == []
    assert step(found) == step(model) and differing(found, model) == []
    with pytest.raises(RuntimeError, match="is stored as"):
        wrong = load(folders[name])
        qs.convert(wrong, "current" if recipe != "current" else "mxfp8")
        wrong.load_state_dict(tensors(tmp_path / "two"), strict=False)


@pytest.mark.parametrize(("name", "recipe"), FORMS)
def test_quantizing_while_loading_is_converting_after_it(name: str, recipe: str, folders: Any) -> None:
    """transformers stacks the experts that files have one by one; only then are they quantized."""
    model = load(folders[name])
    report = qs.convert(model, recipe)
    found = load(folders[name], recipe)
    assert differing(model, found) == [] and str(found.quantshard_report) == str(report)
    assert torch.equal(model(tokens()).logits, found(tokens()).logits)
    kept = load(folders[name], recipe, preserve_high_precision_init_val=True)
    for key, param in stacks(kept).items():
        assert torch.equal(param.get_high_precision_init_val(), stacks(load(folders[name]))[key])
    assert qs.revert(found) == qs.revert(model) and differing(found, model) == []


@pytest.mark.parametrize(("name", "recipe"), FORMS)
def test_plain_transformers_reads_the_values_and_generates(
    name: str, recipe: str, folders: Any, tmp_path: Path
) -> None:
    """Written by `save_pretrained`, and by `export` from a checkpoint: equal files, and the reverted model's bits."""
    model = converted(folders[name], recipe)
    plain = reverted(model, tmp_path)
    model.save_pretrained(tmp_path / "saved", layout="plain-bf16")
    qs.checkpoints.save(tmp_path / "checkpoint", model, None)
    layouts.export(tmp_path / "checkpoint", "plain-bf16", tmp_path / "exported", config=tmp_path / "saved")
    assert same_tensors(tmp_path / "saved", tmp_path / "exported")
    found = load(tmp_path / "exported")
    assert differing(found, plain) == [] and torch.equal(found(tokens()).logits, plain(tokens()).logits)
    options: Any = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(found.generate(tokens()[:, :8], **options), plain.generate(tokens()[:, :8], **options))


@pytest.mark.parametrize(("name", "recipe", "layout", "is_read"), [
    ("Qwen3-MoE", "current", "hf-fp8", True), ("Qwen3-MoE", "current", "compressed-tensors", False),
    ("Mixtral", "current", "hf-fp8-block", True), ("Mixtral", "nvfp4", "compressed-tensors", False),
    ("Qwen3-MoE", "mxfp8", "compressed-tensors", False),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:save_pretrained.*stacked experts:UserWarning")
def test_layouts_have_every_expert_by_its_name(
    name: str, recipe: str, layout: str, is_read: bool, folders: Any, tmp_path: Path
) -> None:
    """gate and up are halves of one stack, under the scale of their expert; codes are copied, so nothing is rounded."""
    model = converted(folders[name], recipe)
    model.save_pretrained(tmp_path / "saved", layout=layout)
    qs.checkpoints.save(tmp_path / "checkpoint", model, None)
    report = layouts.export(tmp_path / "checkpoint", layout, tmp_path / "exported", config=folders[name])
    assert not report.requantized and same_tensors(tmp_path / "saved", tmp_path / "exported")
    found, row = tensors(tmp_path / "exported"), report.layout
    block, gate, up, down = MATRICES[name]
    start, stack = f"model.layers.1.{block}.experts.3", model.model.layers[1].mlp.experts
    assert not [key for key in found if "experts.gate_up" in key or "experts.down" in key]
    codes = stack.state_dict()["gate_up_proj"][3]
    half = len(codes) // 2
    for matrix, rows in ((gate, codes[:half]), (up, codes[half:]), (down, stack.state_dict()["down_proj"][3])):
        assert torch.equal(found[f"{start}.{matrix}.{row.codes_key}"].view(torch.uint8), rows)
    scales = [found[f"{start}.{matrix}.{row.scale_key}"].flatten() for matrix in (gate, up)]
    if recipe == "current":
        assert torch.equal(scales[0], stack.state_dict()["gate_up_proj_scale_inv"][3].flatten())
        assert torch.equal(*scales)
    if row.second is not None:
        amax = stack.state_dict()["gate_up_proj_amax"].flatten()
        assert len(amax.unique()) == len(amax)
        for matrix in (gate, up):
            assert torch.equal(found[f"{start}.{matrix}.{row.second.key}"].reshape(()), 2688 / amax[3])
    if is_read:
        read = load(tmp_path / "exported")
        assert differing(read, reverted(model, tmp_path)) == []
    found_again = load_trainable(tmp_path / "exported", recipe)
    assert all(key.endswith("_draws") for key in differing(model, found_again))
    other = converted(folders[name], recipe)
    step(other)
    assert len(layouts.load(tmp_path / "exported", other).copied) == len(dict(model.named_parameters()))
    assert all(key.endswith("_draws") for key in differing(model, other))


def load_trainable(path: Path, recipe: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, config=qt.training_config(path, recipe))


def test_what_no_file_can_hold_is_refused(folders: Any, tmp_path: Path) -> None:
    """gpt-oss's files have its experts in one tensor, and nothing is written."""
    model = converted(folders["gpt-oss"], "current")
    qs.checkpoints.save(tmp_path / "checkpoint", model, None)
    cases = [
        (lambda: model.save_pretrained(tmp_path / "x", layout="hf-fp8"), EXPERTS_PER_TENSOR),
        (lambda: layouts.export(tmp_path / "checkpoint", "hf-fp8", tmp_path / "x", config=folders["gpt-oss"]),
         EXPERTS_PER_TENSOR),
        (lambda: layouts.export(
            tmp_path / "checkpoint", "hf-fp8", tmp_path / "x", lossy=True, config=folders["gpt-oss"]),
         EXPERTS_PER_TENSOR),
        (lambda: layouts.export(tmp_path / "checkpoint", "plain-bf16", tmp_path / "x"), "config.json"),
        (lambda: layouts.export(tmp_path / "checkpoint", "plain-bf16", tmp_path / "x", config={"architectures": ["X"]}),
         "the model of config.json with split experts cannot be built"),
        (lambda: layouts.export(tmp_path / "checkpoint", "plain-bf16", tmp_path / "x",
                                config={"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 10**9}),
         "num_hidden_layers is 1000000000, and must be"),
    ]  # fmt: skip
    for call, wanted in cases:
        assert wanted in said(ConfigurationError, call)
        assert not (tmp_path / "x").exists()


def test_experts_that_were_left_are_listed_as_such(folders: Any, tmp_path: Path) -> None:
    """Or transformers would replace them too; one by one where the files have them so."""
    model = load(folders["Qwen3-MoE"])
    qs.convert(model, {"*.layers.0.mlp.experts": "bf16", "*": "current"})
    model.save_pretrained(tmp_path / "saved", layout="hf-fp8")
    qs.checkpoints.save(tmp_path / "checkpoint", model, None)
    layouts.export(tmp_path / "checkpoint", "hf-fp8", tmp_path / "exported", config=folders["Qwen3-MoE"])
    assert same_tensors(tmp_path / "saved", tmp_path / "exported")
    wanted = {"saved": "model.layers.0.mlp.experts", "exported": "model.layers.0.mlp.experts.1.up_proj"}
    for folder, name in wanted.items():
        config = transformers.AutoConfig.from_pretrained(tmp_path / folder).quantization_config
        left = config["modules_to_not_convert"]
        assert name in left and not [each for each in left if "layers.1.mlp.experts" in each]
        assert differing(load(tmp_path / folder), reverted(model, tmp_path)) == []


def test_values_of_files_are_quantized_into_stacks(folders: Any) -> None:
    """As `convert` quantizes them, where files have one tensor per expert; others are refused."""
    wanted, model = load(folders["Mixtral"]), converted(folders["Mixtral"], "nvfp4")
    qs.convert(wanted, "nvfp4")
    layouts.load(folders["Mixtral"], model)
    assert all(key.endswith("_draws") for key in differing(model, wanted))
    with pytest.raises(CheckpointError, match="these experts cannot be loaded"):
        layouts.load(folders["gpt-oss"], converted(folders["gpt-oss"], "mxfp8"))
