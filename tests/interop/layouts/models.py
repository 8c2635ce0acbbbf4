"""A small Llama that was trained a step, saved; and what its exported form must be."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quantshard as qs
from quantshard import checkpoints, recipe
from quantshard.tensor import components
from quantshard.tools.trainer.models.decoder import LanguageModel
from quantshard.tools.trainer.settings.config import TrainSettings

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
}
RECIPES: dict[str, recipe.Recipe] = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "block-f32": recipe.Float8BlockScaling(use_f32_scales=True),
    "rowwise": recipe.Float8RowwiseScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8-1d": recipe.MXFP8BlockScaling(enable_2d_quantization=False),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "nvfp4-1d": recipe.NVFP4BlockScaling(disable_2d_quantization=True),
    "fp8-weights": recipe.resolve("fp8-weights"),
    "mxfp8-weights": recipe.resolve("mxfp8-weights"),
    "nvfp4-weights": recipe.resolve("nvfp4-weights"),
    "bf16": recipe.HighPrecision(),
}


def build(name: str, seed: int = 0, **changes: Any) -> LanguageModel:
    """A model of `CONFIG` with weights of a recipe of `RECIPES`."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 384, "seq_length": 64}
    settings = TrainSettings(**{**sizes, "params_dtype": "float32", **changes}).resolved()
    return LanguageModel(settings, RECIPES[name], "cpu")


def trained(model: LanguageModel, **options: Any) -> torch.optim.Optimizer:
    """Take one step: masters are no longer the weights."""
    optimizer = qs.optimizers.FusedAdam(model.named_parameters(), lr=1e-3, **options)
    tokens = torch.arange(32).view(2, 16) * 5 % 257
    model(tokens).square().mean().backward()
    optimizer.step()
    return optimizer


def save(path: Path, name: str, optimizer: dict[str, Any] | None = None, **changes: Any) -> tuple[LanguageModel, Path]:
    """The trained model of a recipe and its checkpoint."""
    model = build(name, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single process, which is meant
        checkpoints.save(path / name, model, trained(model, **optimizer or {}))
    return model, path / name


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    """Our name -> the weight's own values, float32."""
    found = {}
    for name, param in model.named_parameters():
        quantized = components.quantized_local(param)
        found[name] = param.detach().float() if quantized is None else quantized.quantized_storage.dequantize()
    return found
