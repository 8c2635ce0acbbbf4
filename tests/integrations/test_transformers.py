"""The integration with transformers: loading, saving, refusals."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.quantizers import auto

import quantshard as qs
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.integrations import transformers as qt
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components

transformers.utils.logging.disable_progress_bar()

LAYERS = 14
"""Linear layers of the model but its head: 2 x 7."""

MIXED = {"*.down_proj": "block", "*.o_proj": "bf16", "*": "mxfp8"}
RECIPES: list[Any] = ["mxfp8", "current", "nvfp4", "block", "delayed", MIXED]
NAMED = [recipe if isinstance(recipe, str) else "mixed" for recipe in RECIPES]
CELLS = ["mxfp8", "current", "nvfp4"]
"""The recipes of the table in docs/hugging-face.md."""


def tiny(**options: Any) -> PreTrainedModel:
    """With biases, which transformers loads by themselves."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 64,
        "attention_bias": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).to(torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in BF16, in several files."""
    path = tmp_path_factory.mktemp("bf16")
    tiny().save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def load(path: Path, recipe: Any = None, **options: Any) -> PreTrainedModel:
    given = {} if recipe is None else {"quantization_config": qt.QuantshardConfig(recipe, **options)}
    return AutoModelForCausalLM.from_pretrained(path, **given)


def converted(path: Path, recipe: Any, **options: Any) -> PreTrainedModel:
    """Loaded in BF16, then converted."""
    model = load(path)
    qs.convert(model, recipe, **options)
    return model


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The entries of the state dicts that differ in a bit."""
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def quantized(model: nn.Module) -> dict[str, nn.Parameter]:
    named = model.named_parameters()
    return {name: param for name, param in named if components.quantized_local(param) is not None}


def tokens(seed: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.randint(3, 101, (rows, 12), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: FusedAdam, steps: int = 2, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam_of(model: nn.Module) -> FusedAdam:
    return FusedAdam(model.named_parameters(), lr=1e-2)


# Loading


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMED)
def test_quantizing_while_loading_is_converting_after_it(recipe: Any, folder: Path) -> None:
    """Bits, report and logits; and it is a converted model like any other, which can be reverted."""
    wanted, found = converted(folder, recipe), load(folder, recipe)
    assert differing(wanted, found) == []
    assert str(found.quantshard_report) == str(qs.convert(load(folder), recipe))
    assert len(quantized(found)) == (12 if recipe is MIXED else LAYERS)
    assert torch.equal(wanted(tokens()).logits, found(tokens()).logits)
    assert not found.is_quantized and not hasattr(found.config, "quantization_config")
    assert type(found).__name__ == "LlamaForCausalLM" and all(not p.is_meta for p in found.parameters())
    assert qs.revert(found) == qs.revert(wanted) and differing(wanted, found) == []


def test_one_weight_at_a_time_is_in_high_precision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []
    most = 0

    def take_values(self: Any, weight: torch.Tensor, *rest: Any) -> None:
        nonlocal most
        assert weight.dtype == torch.bfloat16
        gc.collect()
        alive.append(weakref.ref(weight))
        most = max(most, sum(ref() is not None for ref in alive))
        original(self, weight, *rest)

    kind = type(load(folder, "mxfp8").model.layers[0].mlp.up_proj)
    original = kind.take_values
    monkeypatch.setattr(kind, "take_values", take_values)
    load(folder, "mxfp8")
    assert len(alive) == LAYERS and most == 1


def test_heads_and_tied_weights_are_left_as_convert_leaves_them(tmp_path: Path) -> None:
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    for choice in (None, "*", ["*.mlp.*"]):
        wanted, found = converted(tmp_path, "mxfp8", filter=choice), load(tmp_path, "mxfp8", filter=choice)
        assert differing(wanted, found) == [] and quantized(found).keys() == quantized(wanted).keys()
        assert found.lm_head.weight is found.model.embed_tokens.weight
    left = load(tmp_path, "mxfp8", filter="*").quantshard_report.left
    assert [layer.reason for layer in left] == ["its weight is also that of model.embed_tokens"]


def test_options_of_convert_are_those_of_the_configuration(folder: Path) -> None:
    """An untied head, a function as filter, no autocast, kept initial values."""
    found = load(folder, "current", filter=lambda module, name: name == "lm_head", autocast=False)
    assert list(quantized(found)) == ["lm_head.weight"]
    assert not torch.equal(load(folder, "current", filter="lm_head")(tokens()).logits, found(tokens()).logits)
    kept = load(folder, "nvfp4", preserve_high_precision_init_val=True).model.layers[0].mlp.up_proj.weight
    assert torch.equal(kept.get_high_precision_init_val(), load(folder).model.layers[0].mlp.up_proj.weight)


# Saving


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMED)
def test_the_native_form_brings_every_bit_back(recipe: Any, folder: Path, tmp_path: Path) -> None:
    """From a model that was trained, in several files; the loaded one trains on as the saved one does."""
    model = load(folder, recipe)
    optimizer = adam_of(model)
    train(model, optimizer)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert not hasattr(model.config, "quantization_config") and getattr(model, "hf_quantizer", None) is None
    found = load(tmp_path)
    assert differing(model, found) == []
    assert torch.equal(model(tokens()).logits, found(tokens()).logits)
    assert train(found, adam_of(found), 1) == train(model, adam_of(model), 1)
    assert differing(model, found) == []


def test_a_model_made_by_convert_is_saved_alike(folder: Path, tmp_path: Path) -> None:
    """And loaded with load_state_dict, as the Trainer does; and the module within, by itself."""
    model = converted(folder, "mxfp8")
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "inner")
    assert differing(model, load(tmp_path / "whole")) == []
    assert differing(model.model, transformers.AutoModel.from_pretrained(tmp_path / "inner")) == []
    other = converted(folder, "mxfp8")
    train(other, adam_of(other), 1)
    assert differing(model, other)
    read = transformers.modeling_utils.load_state_dict(tmp_path / "whole" / "model.safetensors")
    other.load_state_dict(read)
    assert differing(model, other) == []
    with pytest.raises(RuntimeError, match="is stored as 'mxfp8_32x32', but this model's weight is 'nvfp4_16x16'"):
        converted(folder, "nvfp4").load_state_dict(read, strict=False)


LAYOUTS = {"mxfp8": "compressed-tensors", "current": "hf-fp8", "nvfp4": "compressed-tensors", "block": "hf-fp8-block"}


@pytest.mark.filterwarnings("ignore::UserWarning:compressed_tensors", "ignore::DeprecationWarning:compressed_tensors")
@pytest.mark.parametrize("recipe", LAYOUTS)
def test_layouts_are_read_by_transformers_and_trained_on(recipe: str, folder: Path, tmp_path: Path) -> None:
    """transformers' own quantizers read the values; training goes on from the same codes and scales."""
    model = load(folder, recipe, layout=LAYOUTS[recipe])
    train(model, adam_of(model))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    read = load(tmp_path)  # by transformers alone
    assert not quantized(read) and not hasattr(read, qt.REPORT)
    far = (model(tokens()).logits - tiny()(tokens()).logits).abs().max()
    assert (read(tokens()).logits - model(tokens()).logits).abs().max() < 0.1 < far  # it quantizes activations otherwise
    found = AutoModelForCausalLM.from_pretrained(tmp_path, config=qt.training_config(tmp_path, recipe))
    assert all(name.endswith("_draws") for name in differing(model, found))
    assert train(found, adam_of(found), 2)[0] == train(model, adam_of(model), 2)[0]
