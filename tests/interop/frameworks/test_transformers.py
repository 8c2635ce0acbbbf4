"""The integration with transformers: loading, saving, refusals."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.quantizers import auto

import quantshard as qs
from quantshard.errors import CheckpointError, ConfigurationError, UnsupportedOperationError
from quantshard.integrations import transformers as qt
from quantshard.interop.conversion import forward
from quantshard.interop.conversion.fusion import is_fused
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from tests.pages import section, snippets

transformers.utils.logging.disable_progress_bar()

LAYERS = 14
"""Linear layers of the model but its head: 2 x 7."""

MIXED = {"*.down_proj": "block", "*.o_proj": "bf16", "*": "mxfp8"}
RECIPES: list[Any] = ["mxfp8", "current", "nvfp4", "block", "delayed", MIXED]
NAMED = [recipe if isinstance(recipe, str) else "mixed" for recipe in RECIPES]
CELLS = ["mxfp8", "current", "nvfp4"]
"""The recipes of the table in docs/frameworks.md#transformers."""


def but(*others: str, of: list[Any] = RECIPES) -> list[Any]:
    """Recipes, these others for `make test-all` only."""
    return [pytest.param(each, marks=pytest.mark.exhaustive) if each in others else each for each in of]


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


def same_values(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(quantized(one).values(), quantized(other).values(), strict=True)
    return all(torch.equal(first.dequantize(), second.dequantize()) for first, second in pairs)


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


def test_a_function_of_names_is_the_mapping_that_it_stands_for(folder: Path, tmp_path: Path) -> None:
    """Written and read again, by the names of layers; shown, it is what it prints."""

    def recipe(module: nn.Module, name: str) -> str:
        return next((each for pattern, each in MIXED.items() if name.endswith(pattern[1:])), "mxfp8")

    found = load(folder, recipe)
    assert differing(load(folder, MIXED), found) == []
    found.save_pretrained(tmp_path)
    assert differing(found, load(tmp_path)) == []
    assert "function" in qt.QuantshardConfig(recipe).to_dict()["recipe"]["*"]


@pytest.mark.parametrize("recipe", ["auto", {"q_proj": "block", "*": "auto"}], ids=["name", "mapping"])
def test_the_configuration_holds_the_recipe_that_auto_stands_for(recipe: Any) -> None:
    assert qt.QuantshardConfig(recipe).to_dict()["recipe"]["*"] == "current"


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
    gc.freeze()  # what is there already need not be looked through for each weight
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


def test_fused_steps_are_loaded_saved_and_loaded_again(folder: Path, tmp_path: Path) -> None:
    model, later = load(folder, "block", modules="fused"), load(folder)
    qs.convert(later, "block", modules="fused")
    assert is_fused(model) and differing(model, later) == []
    assert train(model, adam_of(model)) == train(later, adam_of(later))
    assert not torch.equal(model(tokens()).logits, load(folder, "block")(tokens()).logits)
    model.save_pretrained(tmp_path)
    found = load(tmp_path)
    assert is_fused(found) and torch.equal(found(tokens()).logits, model(tokens()).logits)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, config=qt.training_config(tmp_path, "block"))
    assert not is_fused(plain) and differing(plain, model) == []


# Saving


@pytest.mark.parametrize("recipe", but("current", "block"), ids=NAMED)
def test_the_native_form_brings_every_bit_back(recipe: Any, folder: Path, tmp_path: Path) -> None:
    """From a model that was trained, in several files; the loaded one trains on as the saved one does."""
    model = load(folder, recipe)
    optimizer = adam_of(model)
    train(model, optimizer)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert not hasattr(model.config, "quantization_config") and getattr(model, "hf_quantizer", None) is None
    found = load(tmp_path)
    assert differing(model, found) == [] and own_recipes(found) == own_recipes(model)
    assert "not quantized in the files" in str(found.quantshard_report) and "filter" not in str(found.quantshard_report)
    assert torch.equal(model(tokens()).logits, found(tokens()).logits)
    found.save_pretrained(tmp_path / "again")
    assert differing(found, load(tmp_path / "again")) == []
    assert train(found, adam_of(found), 1) == train(model, adam_of(model), 1)
    assert differing(model, found) == []


def own_recipes(model: Any) -> dict[str, str | None]:
    return {name: each.recipe for name, each in model.named_modules() if isinstance(each, ConvertedLinear)}


def test_layers_of_one_recipe_by_name_keep_it_as_their_own(folder: Path, tmp_path: Path) -> None:
    model = converted(folder, {"*": "mxfp8"})
    model.save_pretrained(tmp_path)
    found = own_recipes(load(tmp_path))
    assert set(found.values()) == {"mxfp8"} and found == own_recipes(model)


def test_the_native_form_is_read_by_the_base_of_a_model_and_by_models_over_it(folder: Path, tmp_path: Path) -> None:
    """Names have a prefix more or less then; with layers of their own recipes too."""
    model = converted(folder, {"*.down_proj": "block", "*": "mxfp8"})
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "base")
    for found in (
        AutoModel.from_pretrained(tmp_path / "whole"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "base").model,
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").model,
    ):
        assert not differing(found, model.model) and own_recipes(found) == own_recipes(model.model)
    model = converted(folder, {"lm_head": "mxfp8", "*": "bf16"})
    model.save_pretrained(tmp_path / "head")
    assert not differing(AutoModel.from_pretrained(tmp_path / "head"), model.model)


def test_a_model_made_by_convert_is_saved_alike(folder: Path, tmp_path: Path) -> None:
    """And loaded with load_state_dict, as the Trainer does; and the module within, by itself."""
    model = converted(folder, "mxfp8")
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "inner")
    assert differing(model, load(tmp_path / "whole")) == []
    inner = transformers.AutoModel.from_pretrained(tmp_path / "inner")
    assert differing(model.model, inner) == []
    with torch.no_grad():  # by the recipe, which it enters by itself
        outputs = [each(input_ids=tokens()).last_hidden_state for each in (model.model.eval(), inner.eval())]
    assert torch.equal(*outputs)
    other = converted(folder, "mxfp8")
    train(other, adam_of(other), 1)
    assert differing(model, other)
    read = transformers.modeling_utils.load_state_dict(tmp_path / "whole" / "model.safetensors")
    other.load_state_dict(read)
    assert differing(model, other) == []
    with pytest.raises(RuntimeError, match="is stored as 'mxfp8_32x32', but this model's weight is 'nvfp4_16x16'"):
        converted(folder, "nvfp4").load_state_dict(read, strict=False)
    converted(folder, "nvfp4").save_pretrained(tmp_path / "served", layout="compressed-tensors")
    read = transformers.modeling_utils.load_state_dict(tmp_path / "served" / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*q_proj\.weight"):
        converted(folder, "nvfp4").load_state_dict(read)


EXPORTS = [
    pytest.param("mxfp8", "compressed-tensors", marks=pytest.mark.exhaustive),
    pytest.param("current", "compressed-tensors", marks=pytest.mark.exhaustive),
    ("nvfp4", "compressed-tensors"), ("block", "hf-fp8-block"),
    pytest.param("current", "hf-fp8", marks=pytest.mark.exhaustive),
    pytest.param("current", "hf-fp8-block", marks=pytest.mark.exhaustive),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:compressed_tensors", "ignore::DeprecationWarning:compressed_tensors")
@pytest.mark.filterwarnings("ignore:save_pretrained.*not multiples of 128:UserWarning")
@pytest.mark.parametrize(("recipe", "layout"), EXPORTS)
def test_layouts_are_read_by_transformers_and_trained_on(
    recipe: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    """transformers' own quantizers read the values; training goes on from the same codes and scales."""
    model = load(folder, recipe, layout=layout)
    train(model, adam_of(model))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    read = load(tmp_path)  # by transformers alone
    assert not quantized(read) and not hasattr(read, "quantshard_report")
    far = (model(tokens()).logits - tiny()(tokens()).logits).abs().max()
    assert (
        (read(tokens()).logits - model(tokens()).logits).abs().max() < 0.1 < far
    )  # it quantizes activations otherwise
    found = AutoModelForCausalLM.from_pretrained(tmp_path, config=qt.training_config(tmp_path, recipe))
    assert all(name.endswith("_draws") for name in differing(model, found))
    assert train(found, adam_of(found), 2)[0] == train(model, adam_of(model), 2)[0]


@pytest.mark.filterwarnings("ignore:save_pretrained.*not multiples of 128:UserWarning")
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("block", "hf-fp8-block"),
        ("nvfp4", "compressed-tensors"),
        pytest.param("mxfp8", "compressed-tensors", marks=pytest.mark.exhaustive),
    ],
)
def test_layers_that_a_layout_left_are_quantized_from_their_values(
    recipe: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    """Of a file in which some layers are quantized and others in BF16, into a model in which all are."""
    some = load(folder, recipe, layout=layout, filter="*.mlp.*")
    some.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, config=qt.training_config(tmp_path, recipe))
    assert len(quantized(found)) == LAYERS > len(quantized(some)) > 0
    assert all(name.endswith("_draws") for name in differing(converted(folder, recipe), found))


def test_second_scales_that_are_no_inverse_come_back(folder: Path, tmp_path: Path) -> None:
    """NVFP4's amax, which the layout has as 2688 / amax: our export notes it in the header of the file."""
    model = load(folder, "nvfp4")
    candidates = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1
    amax = next(x for x in candidates if 2688 / (2688 / x) != x)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.quantize_(torch.full(weight.shape, amax.item()))
    model.save_pretrained(tmp_path, layout="compressed-tensors")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, config=qt.training_config(tmp_path, "nvfp4"))
    assert all(name.endswith("_draws") for name in differing(model, found))


@pytest.mark.parametrize(
    ("recipe", "layout", "why"),
    [
        ("mxfp8", "hf-fp8-block", "blocks are 32x32, the layout's 128x128"),
        ("current", "compressed-tensors-mxfp8", "scales are not powers of two"),
        ("nvfp4", "hf-fp8", "codes are E2M1, the layout's E4M3"),
    ],
)
def test_layouts_that_a_weight_does_not_fit_are_refused(
    recipe: str, layout: str, why: str, folder: Path, tmp_path: Path
) -> None:
    """In the words of docs/frameworks.md#transformers; nothing is written."""
    model = load(folder, recipe)
    told = said(ConfigurationError, lambda: model.save_pretrained(tmp_path, layout=layout))
    assert "model.layers.0.self_attn.q_proj.weight [64, 64]" in told and why in told
    assert why in section("docs/frameworks.md#transformers")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("layout", "wide", "told"), [
    ("hf-fp8-block", 160, True), ("hf-fp8-block", 64, False), ("compressed-tensors", 64, True),
    ("plain-bf16", 160, False),
])  # fmt: skip
def test_blocks_that_transformers_reads_wrong_are_told(
    layout: str, wide: int, told: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """It derives the block from the grid of scales, which is right where there is one."""
    model = tiny(intermediate_size=wide)
    qs.convert(model, "block")
    model.save_pretrained(tmp_path, layout=layout)
    said = [str(warning.message) for warning in recwarn if "save_pretrained" in str(warning.message)]
    assert len(said) == told and all(f"[{wide}, 64]" in text or "[64, 64]" in text for text in said)


@pytest.mark.filterwarnings("ignore::UserWarning:compressed_tensors", "ignore::DeprecationWarning:compressed_tensors")
def test_stacked_experts_that_transformers_does_not_read_are_told(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=40, num_local_experts=2)
    model = MixtralForCausalLM(config).to(torch.bfloat16)
    qs.convert(model, "nvfp4")
    with pytest.warns(UserWarning, match=r"reads no stacked experts \(model.layers.0.mlp.experts"):
        model.save_pretrained(tmp_path, layout="compressed-tensors")


@pytest.mark.parametrize("recipe", but("nvfp4", of=CELLS))
def test_plain_values_on_request(recipe: str, folder: Path, tmp_path: Path) -> None:
    """Those that the codes stand for, which anybody reads; where scales are powers of two, the same when quantized
    again, if perhaps by other codes under another scale."""
    model = load(folder, recipe)
    train(model, adam_of(model))
    model.save_pretrained(tmp_path, layout="plain-bf16")
    again = load(tmp_path, recipe)
    assert same_values(model, again) == (recipe == "mxfp8")
    qs.revert(model)
    assert differing(model, load(tmp_path)) == []
    with pytest.raises(ConfigurationError, match=r"call model.to\(torch.float32\) first, not torch.bfloat16"):
        again.save_pretrained(tmp_path / "fp32", layout="plain-fp32")


SAVING = """
import sys
from pathlib import Path

import peft
import torch
import transformers as tf

import quantshard as qs
from quantshard.integrations.peft import register
from quantshard.optimizers import FusedAdam

folder = Path(sys.argv[1])
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
             head_dim=32, vocab_size=101, pad_token_id=0, eos_token_id=1, bos_token_id=2)
tokens = torch.arange(24).view(2, 12)


def build(kind, recipe):
    config = getattr(tf, f"{kind}{'Text' * (kind == 'Gemma3')}Config")(**sizes)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    qs.convert(model, recipe)
    return model


def check(model, name):
    again = tf.AutoModelForCausalLM.from_pretrained(folder / name)
    assert any(type(module).__name__ == "ConvertedLinear" for module in again.modules()), name
    logits = model.eval()(tokens).logits
    assert torch.equal(logits, again(tokens).logits), name
    torch.save(logits, folder / name / "logits.pt")


for kind in ("Llama", "Qwen3", "Gemma3"):
    for recipe in ("mxfp8", "block", "current"):
        model = build(kind, recipe)
        model.save_pretrained(folder / f"{kind}-{recipe}")
        check(model, f"{kind}-{recipe}")

adapted = peft.get_peft_model(build("Llama", "mxfp8"), register(peft.LoraConfig(target_modules=["q_proj"])))
merged = adapted.merge_and_unload()
merged.save_pretrained(folder / "merged")
check(merged, "merged")

model = build("Llama", "mxfp8")
options = tf.TrainingArguments(str(folder / "run"), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
adam = FusedAdam(model.named_parameters(), lr=1e-2)
trainer = tf.Trainer(model, options, train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
                     optimizers=(adam, None))
trainer.train()
trainer.save_model(str(folder / "trained"))
check(model, "trained")
assert "quantshard.integrations.transformers" in sys.modules
"""

LOADING = """
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import quantshard.integrations.transformers

found = sorted(Path(sys.argv[1]).glob("*/logits.pt"))
assert len(found) == 11
for file in found:
    model = AutoModelForCausalLM.from_pretrained(file.parent)
    assert torch.equal(model(torch.arange(24).view(2, 12)).logits, torch.load(file)), file
"""


@pytest.mark.exhaustive
def test_convert_enables_the_integration(tmp_path: Path) -> None:
    """A process that imports quantshard alone converts, saves and loads; a fresh one imports the integration."""
    for script in (SAVING, LOADING):
        subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True)


@pytest.mark.parametrize("autocast", [True, False])
def test_nothing_is_written_as_values_without_the_integration(
    autocast: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model, of the module within, and by the Trainer, whose checkpoints are made by the same method."""
    monkeypatch.setattr(forward, "SAVERS", [])
    model, in_part = converted(folder, "mxfp8", autocast=autocast), load(folder)
    qs.convert(in_part.model, "mxfp8", autocast=autocast)
    for module in (model, model.model, in_part):
        said = r"would write codes as if they were values; call quantshard.revert, or import quantshard.integrations"
        with pytest.raises(ConfigurationError, match=said):
            module.save_pretrained(tmp_path / "x")
    given = TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, log_level="error"
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    trainer = Trainer(model, given, train_dataset=rows, optimizer_cls_and_kwargs=qt.adam(given))
    with pytest.raises(ConfigurationError, match="as if they were values"):
        trainer.train()
    assert not list(tmp_path.rglob("*.safetensors"))
    qs.revert(model)
    model.save_pretrained(tmp_path)
    assert differing(model, load(tmp_path)) == []


@pytest.mark.parametrize(
    "recipe", [pytest.param("mxfp8", id="mxfp8", marks=pytest.mark.exhaustive), pytest.param(MIXED, id="mixed")]
)
def test_a_model_converted_in_part_is_written_as_one_converted_whole(recipe: Any, folder: Path, tmp_path: Path) -> None:
    """The parts are no models of transformers, and a copy is as the original."""
    model = load(folder)
    for part in model.model.layers:
        qs.convert(part, recipe)
    copy.deepcopy(model).save_pretrained(tmp_path)
    again = load(tmp_path)
    assert differing(model, again) == []
    assert torch.equal(model(tokens()).logits, again(tokens()).logits)
    model = load(folder)
    for part, enters in zip(model.model.layers, (True, False), strict=True):
        qs.convert(part, recipe, autocast=enters)
    with pytest.raises(ConfigurationError, match="autocast=True and autocast=False"):
        model.save_pretrained(tmp_path / "x")


@pytest.mark.parametrize("recipe", but("current", "nvfp4", of=CELLS))
def test_the_native_form_raises_where_we_are_not_imported(
    recipe: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers then skips the quantization_config, and finds shapes that are no weights'."""
    load(folder, recipe).save_pretrained(tmp_path)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "quantshard")
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "quantshard")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path)


@pytest.mark.parametrize("recipe", but("mxfp8", "current", of=CELLS))
def test_generated_tokens_are_those_of_a_loop_of_forwards(recipe: str, folder: Path) -> None:
    model = load(folder, recipe)
    start = tokens()[:2, :5]
    wanted = start
    with torch.no_grad():
        for _ in range(6):
            wanted = torch.cat([wanted, model(wanted).logits[:, -1:].argmax(-1)], 1)
    options: Any = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(start, use_cache=False, **options), wanted)
    assert model.generate(start, **options).shape == wanted.shape


# What is refused


def said(error: type[Exception], call: Any) -> str:
    """One line."""
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_arguments_are_named(folder: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: qt.QuantshardConfig("fp7"), "unknown recipe 'fp7'; choose one of: auto, delayed, current"),
        (lambda: qt.QuantshardConfig({"*": "fp7"}), "unknown recipe 'fp7'"),
        (lambda: qt.QuantshardConfig("mxfp8", layout="gguf"), "unknown layout 'gguf'; choose one of: compressed"),
        (lambda: qt.QuantshardConfig("mxfp8", modules="mlp"), "QuantshardConfig(modules='mlp'): choose one of: linear"),
        (lambda: load(folder, "mxfp8", filter="*.qproj"), "(filter='*.qproj') matches none of the 15 linear layers"),
        (
            lambda: load(folder, "mxfp8", filter=lambda module, name: False),
            "can be converted: not chosen by the filter",
        ),
        (lambda: load(folder, {"q_porj": "block", "*": "mxfp8"}), "(recipe='q_porj') matches none of the 15"),
        (lambda: load(folder, {"layers.1": "block", "*": "mxfp8"}), "matches none of the 15 linear layers"),
        (
            lambda: load(folder, {"*": "mxfp8", "q_proj": "block"}),
            "convert(recipe): earlier patterns match all layers of 'q_proj'",
        ),
        (lambda: load(folder, "bf16"), "no layer of this model can be converted: recipe bf16; the head"),
        (lambda: qt.training_config(folder, "mxfp8"), "no quantization_config; pass QuantshardConfig()"),
        (lambda: qs.convert(load(folder, "mxfp8"), "nvfp4"), "q_proj.weight is already quantized"),
    ]
    for call, wanted in cases:
        assert wanted in said(ConfigurationError, call)


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "awq", "compressed-tensors"])
def test_models_of_other_quantizers_are_refused_by_name(method: str, folder: Path) -> None:
    """By transformers, when it reads the files; by convert, of a loaded model, by the mark that transformers sets."""
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": method, "bits": 4, "load_in_4bit": method == "bitsandbytes"}
    given = qt.QuantshardConfig("mxfp8")
    call = lambda: AutoModelForCausalLM.from_pretrained(folder, config=config, quantization_config=given)  # noqa: E731
    assert "but you are passing a QuantshardConfig config" in said(ValueError, call)
    model = load(folder)
    model.quantization_method = method
    wanted = f"convert: this model is already quantized ({method}); load it in bfloat16"
    assert said(ConfigurationError, lambda: qs.convert(model, "mxfp8")) == wanted


def test_files_that_do_not_fit_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    deeper = AutoConfig.from_pretrained(folder)
    deeper.num_hidden_layers = 3
    model = load(folder, "mxfp8")
    model.save_pretrained(tmp_path / "native")
    model.save_pretrained(tmp_path / "mx", layout="compressed-tensors")
    own = qs.recipe.MXFP8BlockScaling(enable_2d_quantization=False)
    load(folder, own).save_pretrained(tmp_path / "own")
    broken = load(folder)
    broken.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    broken.save_pretrained(tmp_path / "nan")

    def read(path: Path, *args: Any, **options: Any) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(path, config=qt.training_config(path, *args, **options))

    given = qt.QuantshardConfig("mxfp8")
    cases: list[tuple[type[Exception], Any, str]] = [
        (
            CheckpointError,
            lambda: AutoModelForCausalLM.from_pretrained(folder, config=deeper, quantization_config=given),
            "the files lack 7 of 21 quantized layers (first: model.layers.2.self_attn.q_proj)",
        ),
        (ConfigurationError, lambda: load(tmp_path / "nan", "mxfp8"), "layers.1.mlp.up_proj.weight: 1 of 10240 values"),
        (CheckpointError, lambda: read(tmp_path / "mx", "nvfp4"), "down_proj.weight: it cannot be copied into nvfp4"),
        (
            ConfigurationError,
            lambda: read(tmp_path / "mx", "mxfp8", filter="q_proj"),
            "but not in this model; let filter=",
        ),
        (CheckpointError, lambda: read(tmp_path / "native", "nvfp4"), "is stored as 'mxfp8_32x32', but this model's"),
        (
            ConfigurationError,
            lambda: load(tmp_path / "own"),
            "lacks the recipe of the model",
        ),
        (
            ConfigurationError,
            lambda: model.save_pretrained(tmp_path / "x", layout="modelopt-fp8"),
            "scale of the activ",
        ),
    ]
    for error, call, wanted in cases:
        assert wanted in said(error, call)
    assert differing(read(tmp_path / "own", own), load(folder, own)) == []
    with pytest.warns(UserWarning, match="already has a `quantization_config` attribute"):
        assert differing(load(tmp_path / "native", "nvfp4"), model) == []


def test_places_without_values_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """A model on the meta device is neither stepped nor saved; weights are not put on the disk."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    qs.convert(model, "mxfp8")
    assert "model.embed_tokens.weight is on the meta device" in said(ConfigurationError, lambda: adam_of(model))
    assert "is on the meta device; load the model first" in said(
        ConfigurationError, lambda: model.save_pretrained(tmp_path)
    )
    given = qt.QuantshardConfig("mxfp8")
    for options, wanted in (
        ({"device_map": {"": "disk"}}, "weights on the disk cannot be trained"),
        (
            {"distributed_config": transformers.DistributedConfig(fsdp_size=1)},
            "distributed_config is not supported",
        ),
    ):
        call = lambda options=options: AutoModelForCausalLM.from_pretrained(  # noqa: E731
            folder, quantization_config=given, **options
        )
        assert wanted in said(ConfigurationError, call)


# The page


@pytest.mark.filterwarnings("ignore::UserWarning:compressed_tensors")
def test_the_trainer_as_it_is_names_ours(folder: Path, tmp_path: Path) -> None:
    """Whose default optimizer is fused."""
    given = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    trainer = Trainer(converted(folder, "mxfp8"), given, train_dataset=rows)
    with pytest.raises(UnsupportedOperationError, match=r"quantshard.integrations.transformers.QuantizedTraining"):
        trainer.train()


def test_the_snippets_of_the_page(folder: Path, tmp_path: Path) -> None:
    """They run one after the other, and models that they load have the bits that the page says."""
    names: dict[str, Any] = {"path": folder, "out": str(tmp_path / "out")}
    names |= {name: tmp_path / name for name in ("native", "served", "plain")}
    names["dataset"] = [{"input_ids": row, "labels": row} for row in tokens(rows=8)]
    load_it, fuse_it, save_it, train_it = snippets("docs/frameworks.md#transformers")
    exec(load_it, names)
    exec(fuse_it, names)
    assert differing(names["model"], names["fused"]) == []
    exec(save_it, names)
    for other in ("again", "served_again"):
        assert differing(names["model"], names[other]) == []
    pairs = zip(quantized(names["model"]).values(), quantized(names["plain_again"]).values(), strict=True)
    for one, other in pairs:  # the codes are the same, and the scale is rounded to BF16
        torch.testing.assert_close(one.dequantize(), other.dequantize(), rtol=2**-7, atol=0)
    exec(train_it.replace("report_to=[]", "report_to=[], use_cpu=True, disable_tqdm=True, log_level='error'"), names)
    assert differing(names["model"], load(tmp_path / "out" / "trained")) == []
