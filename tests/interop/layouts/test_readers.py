"""Exports as their own ecosystems' readers take them, on the CPU: transformers, compressed-tensors, PyTorch.

Not run, since they need a GPU: vLLM, SGLang, TensorRT-LLM, and transformers' computing in FP8.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from quantshard.interop.layouts import LLAMA, export
from quantshard.tools.trainer.models import initialization
from quantshard.tools.trainer.models.decoder import LanguageModel
from tests.interop.layouts import models

pytestmark = pytest.mark.filterwarnings("ignore")  # of the readers' own
transformers = pytest.importorskip("transformers")
compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")

TOKENS = torch.arange(48).view(2, 24) * 7 % 257


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exports by recipe and layout: the model, and the folder."""
    models_, folders = {}, {}

    def get(recipe: str, layout: str, **options: str) -> tuple[LanguageModel, Path]:
        if recipe not in models_:
            models_[recipe] = models.save(tmp_path_factory.mktemp("checkpoints"), recipe)
        key = (recipe, layout, *options)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("exports") / "-".join(key)
            export(models_[recipe][1], layout, folders[key], config=models.CONFIG, **options)
        return models_[recipe][0], folders[key]

    return get


def theirs(model: LanguageModel) -> dict[str, Tensor]:
    """Their name -> our weight's values, float32."""
    found = {}
    for ours, value in models.values(model).items():
        (name,) = LLAMA.theirs(ours, len(value), None)
        found[name] = value
    return found


def logits(folder: Path, **options: object) -> tuple[torch.nn.Module, Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return model, model(TOKENS).logits


def ours(model: LanguageModel) -> Tensor:
    """Our logits from the weights' values, with activations in float32."""
    plain = models.build("bf16")
    plain.load_state_dict(models.values(model), strict=False)
    with torch.no_grad():
        return plain.eval()(TOKENS)


def check_logits(found: Tensor, wanted: Tensor) -> None:
    # sums of at most 384 float32 products, in another order, through four blocks: far below 384 * 4 half-ulps
    assert (found - wanted).abs().max() <= 384 * 4 * 2**-24 * wanted.abs().max()


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_transformers_reads_plain_with_our_logits(exported, recipe):
    model, folder = exported(recipe, "plain-fp32", values="weights")
    loaded, found = logits(folder)
    for name, value in theirs(model).items():
        assert torch.equal(loaded.get_parameter(name), value)
    check_logits(found, ours(model))


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6, "head_dim": 96, "tied": True},
        {"rope_theta": 500.0, "norm_eps": 1e-2, "head_dim": 32, "kv_heads": 1},
    ],
    ids=["qwen3", "llama"],
)
def test_transformers_computes_what_a_run_does(changes, tmp_path):
    """Angles, epsilons, heads of other sizes and normalized queries are those of the configuration that is written."""
    model, checkpoint = models.save(tmp_path / "checkpoint", "bf16", **changes)
    config = initialization.hf_config(model.settings)
    export(checkpoint, "plain-fp32", tmp_path / "out", config=config, values="weights")
    loaded, found = logits(tmp_path / "out")
    assert type(loaded).__name__ == ("Qwen3ForCausalLM" if "qk_norm" in changes else "LlamaForCausalLM")
    with torch.no_grad():
        check_logits(found, model.eval()(TOKENS))
    again = initialization.settings_of(json.loads((tmp_path / "out" / "config.json").read_text()), "here")
    assert all(getattr(again, name) == value for name, value in changes.items())


@pytest.mark.parametrize(("recipe", "layout"), [("block", "hf-fp8-block"), ("current", "hf-fp8")])
def test_transformers_dequantizes_fp8(exported, recipe, layout):
    model, folder = exported(recipe, layout)
    loaded, found = logits(folder)
    for name, value in theirs(model).items():
        assert torch.equal(loaded.get_parameter(name), value), name
    check_logits(found, ours(model))


def test_pytorch_reads_blocks(exported):
    model, folder = exported("block-f32", "hf-fp8-block")
    wanted = theirs(model)
    state = {name: torch.empty_like(value) for name, value in wanted.items()}
    reader = dcp.QuantizedHuggingFaceStorageReader(str(folder), target_dtype=torch.float32)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


COMPRESSED = {"current": "fp8", "block": "fp8-block", "rowwise": "fp8-channel", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_compressed_tensors_decompresses(exported, recipe):
    model, folder = exported(recipe, "compressed-tensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= transformers.modeling_utils.load_state_dict(file)
    for name, value in theirs(model).items():
        stem = name.removesuffix("weight")
        if f"{stem}weight_scale" not in tensors:
            assert torch.equal(tensors[name], value)
            continue
        state = {key.removeprefix(stem): tensor for key, tensor in tensors.items() if key.startswith(stem)}
        found = compressor.decompress(state, scheme)["weight"]
        if recipe == "nvfp4":  # in BF16, from a quotient in which float32 rounds otherwise than in our product
            assert found.dtype == torch.bfloat16
            assert ((found.float() - value).abs() <= (2**-8 + 2**-20) * value.abs()).all()
        else:
            assert torch.equal(found.float(), value)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "nvfp4"])
def test_transformers_reads_compressed_tensors(exported, recipe):
    model, folder = exported(recipe, "compressed-tensors")
    options = transformers.CompressedTensorsConfig(dequantize=True)
    loaded, found = logits(folder, quantization_config=options)
    bound = 2**-8 + 2**-20 if recipe == "nvfp4" else 0.0
    for name, value in theirs(model).items():
        assert ((loaded.get_parameter(name).float() - value).abs() <= bound * value.abs()).all(), name
    if recipe != "nvfp4":
        check_logits(found, ours(model))
