"""Settings of a new run that follow from `--model` and `--init-from`: sizes without a flag, and the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quantshard.errors import ConfigurationError, meant
from quantshard.interop.layouts.writing import CONFIGURATION
from quantshard.tools.trainer.data.tokenizer import has_tokenizer
from quantshard.tools.trainer.models import huggingface, initialization
from quantshard.tools.trainer.settings.schema import shown_value
from quantshard.tools.trainer.settings.sizes import SIZES

_BY_SIZES: Final = (
    "architecture", "hidden", "layers", "heads", "kv_heads", "ffn", "experts", "head_dim", "rope_theta", "norm_eps",
    "qk_norm", "tied", "params_dtype",
)  # fmt: skip
"""Settings of the built-in decoder that the configuration of a transformers model determines."""


_FINE_TUNING: Final = {"lr": 1e-5, "weight_decay": 0.01}
_FINE_TUNING_CONTEXT = 2048


def fine_tuning_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for fine-tuning, where they differ from training from scratch, without the settings in
    `given`."""
    if not given.get("init_from"):
        return {}
    defaults: dict[str, Any] = dict(_FINE_TUNING)
    model = str(given.get("model", ""))
    location = Path(str(given["init_from"]) if model in ("", *SIZES) else model)
    if location.is_file() or (location / CONFIGURATION).is_file():
        longest = huggingface.longest_sequence(huggingface.read_configuration(str(location)))
        defaults["seq_length"] = min(longest or _FINE_TUNING_CONTEXT, _FINE_TUNING_CONTEXT)
    return {name: value for name, value in defaults.items() if name not in given}


def chosen(flags: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of flags and file with the settings that follow from the model they name.

    Precedence with `--model NAME`: flags, then sizes of the model, then the file. Sizes that follow from the file's
    model or from weights only fill gaps.

    Raises:
        ConfigurationError: there is no such model, or another setting contradicts it.
        CheckpointError: the initial weights are damaged.
    """
    merged = {**file, **flags}
    model, source = str(merged.get("model", "")), str(merged.get("init_from", ""))
    if model and model not in SIZES:
        return _of_transformers(model, source, flags, merged) | merged
    if merged.get("random_weights"):
        raise ConfigurationError(
            "random_weights is of a --model DIR that has weights; a model that is built by sizes has random ones "
            "unless --init-from names others"
        )
    named = dict(SIZES[model]) if model else {}
    weights = initialization.sizes(source) if source else {}
    for name, size in named.items():
        if name in weights and weights[name] != size and name not in flags:
            raise ConfigurationError(
                f"model = {shown_value(model)} has {name} = {shown_value(size)}, but the model of init_from = "
                f"{shown_value(source)} has {shown_value(weights[name])}; leave --model out, or name its own weights"
            )
    explicit = flags if "model" in flags else weights | merged
    if "kv_heads" not in explicit and "kv_heads" in named:
        _check_heads(model, named["kv_heads"], explicit.get("heads"))
    if "model" in flags:
        return {**weights, **file, **named, **flags}
    return named | weights | merged


def _check_heads(model: str, kv_heads: int, heads: object) -> None:
    """Refuse explicit `heads` that the model's default `kv_heads` does not divide."""
    if isinstance(heads, int) and heads % kv_heads:
        raise ConfigurationError(
            f"heads = {heads}, but model = {shown_value(model)} has kv_heads = {kv_heads}, which must divide them; "
            f"give kv_heads too, such as {math.gcd(heads, kv_heads)}, or 0 for as many as heads"
        )


def _of_transformers(model: str, source: str, flags: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if not Path(model).exists() and Path(model).name == model:
        raise ConfigurationError(
            f"model = {shown_value(model)} is neither a folder or config.json, nor one of the known sizes; "
            f"{meant(model, SIZES)}there are {', '.join(SIZES)}"
        )
    huggingface.read_configuration(model)
    for name in _BY_SIZES:
        if name in flags:  # flags only, because the file of a run contains all settings
            raise ConfigurationError(
                f"{name} = {shown_value(flags[name])}, but the configuration of model = {shown_value(model)} decides "
                f"it; leave {name} out, or change a copy of its config.json"
            )
    if source and given.get("random_weights"):
        raise ConfigurationError(f"random_weights, but init_from = {shown_value(source)} names weights; give one")
    result: dict[str, Any] = {}
    if not (source or given.get("random_weights")):
        result["init_from"] = huggingface.weights_beside(model)
        if not result["init_from"]:
            raise ConfigurationError(
                f"model = {shown_value(model)} has no safetensors beside it; give --random-weights to begin with "
                "random ones, or --init-from DIR"
            )
    if not given.get("tokenizer") and has_tokenizer(model):
        result["tokenizer"] = model
    return result
