"""The model of a new run, from `--model` and `--init-from`: settings that follow from them, and the initial weights.

Names, shapes and formats are compared before anything is allocated. The optimizer is new. Its masters start from the
weights or, if the safetensors are in high precision, from the values of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from quantshard import checkpoints, recipe
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.errors import CheckpointError, ConfigurationError, meant
from quantshard.interop import layouts
from quantshard.interop.layouts import table
from quantshard.interop.layouts.files import SUFFIX, SafetensorsFiles, read_layout_json
from quantshard.interop.layouts.loading import check as check_safetensors
from quantshard.interop.layouts.source import CheckpointModel
from quantshard.interop.layouts.writing import CONFIGURATION
from quantshard.tensor import components
from quantshard.tools.terminal import inputs
from quantshard.tools.trainer.data.tokenizer import has_tokenizer
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.configuration import check_angles, run_of, settings_of
from quantshard.tools.trainer.settings.config import SIZES, TrainSettings
from quantshard.tools.trainer.settings.schema import shown_value

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
    """
    merged = {**file, **flags}
    model, source = str(merged.get("model", "")), str(merged.get("init_from", ""))
    if source and merged.get("random_weights"):
        raise ConfigurationError(f"random_weights, but init_from = {shown_value(source)} names weights; give one")
    if model and model not in SIZES:
        return _of_transformers(model, source, flags, merged) | merged
    named = dict(SIZES[model]) if model else {}
    weights = sizes(source) if source else {}
    for name, size in named.items():
        if name not in flags and weights.get(name, size) != size:  # e.g. rope_theta, which no shape shows
            raise ConfigurationError(
                f"model = {shown_value(model)} has {name} = {shown_value(size)}, but the model of init_from = "
                f"{shown_value(source)} has {shown_value(weights[name])}; leave out --model or --init-from"
            )
    if "model" in flags:
        return {**weights, **file, **named, **flags}
    return named | weights | merged


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


_SIZES = (
    "hidden", "layers", "heads", "kv_heads", "ffn", "tied", "params_dtype", "head_dim", "rope_theta", "norm_eps",
    "qk_norm", "experts", "experts_per_token", "vocabulary",
)  # fmt: skip
_OF_RUN = ("architecture", *_SIZES, "seq_length", "recipe")


def sizes(source: str) -> dict[str, Any]:
    """Return the settings that the files next to the weights define; may be empty."""
    source = inputs.existing(source, "a checkpoint, or a folder of safetensors")
    result: dict[str, Any] = {}
    run = run_of(source)
    if run is not None:
        result = {name: getattr(run, name) for name in _OF_RUN}
    elif "://" not in source and (Path(source) / CONFIGURATION).is_file():
        content = read_layout_json(Path(source) / CONFIGURATION)
        described = settings_of(content, source)
        check_angles(content, source)
        result = {name: getattr(described, name) for name in _SIZES}
    return result | _recipe_of(source)


def _recipe_of(source: str) -> dict[str, Any]:
    """Return the recipe that matches a checkpoint's formats or the layout of safetensors, if there is one."""
    if not _is_checkpoint(source):
        name = recipe_of_files(Path(source))
        return {} if name is None else {"recipe": name}
    tags = {weight.tag for weight in CheckpointModel(source).weights.values()} - {None}
    names = [name for name in recipe.NAMES if (cell := recipe.resolve(name).weight) and {cell.tag} == tags]
    return {"recipe": names[0]} if names else {}


def recipe_of_files(folder: Path) -> str | None:
    """Return the recipe that matches the layout of a folder of safetensors; None if none does or the weights are in
    high precision."""
    config = folder / CONFIGURATION
    quantized = read_layout_json(config).get("quantization_config") if config.is_file() else None
    layout = table.detect(quantized, SafetensorsFiles(folder).tensors, str(folder))
    return None if layout is None else table.recipe_of(layout)


def check(settings: TrainSettings, model: nn.Module) -> None:
    """Compare names, shapes and formats with the run's model on the meta device. Reads no weights; one process."""
    source = inputs.existing(settings.init_from, "a checkpoint, or a folder of safetensors")
    if _is_checkpoint(source):
        _check_checkpoint(source, model, settings)
    else:
        try:
            check_safetensors(source, model)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_ways_out(settings)}") from None


def _ways_out(settings: TrainSettings) -> str:
    """Return advice for weights with the names or sizes of another model."""
    if settings.is_by_sizes:
        return (
            "--init-from takes the sizes of the model here (--hidden, --layers, --vocabulary, ...); for another model, "
            "load into it by quantshard.layouts.load"
        )
    return (
        "--init-from takes the names and sizes of the --model here; what quantshard import has written, or train "
        "without --model, is of quantshard's own decoder: then leave --model out, or name the safetensors themselves"
    )


def _is_checkpoint(source: str) -> bool:
    if "://" in source or is_complete(source):
        return True
    if Path(source).is_dir() and any(path.name.endswith(SUFFIX) for path in Path(source).iterdir()):
        return False
    raise ConfigurationError(
        f"--init-from {source} is no complete checkpoint, and holds no safetensors; of a run, name a checkpoint in it, "
        "as RUN/checkpoints/step-000100"
    )


def _check_checkpoint(source: str, model: nn.Module, settings: TrainSettings) -> None:
    weights = CheckpointModel(source).weights
    for name, param in model.named_parameters():
        if name not in weights:
            extra = _first_other(weights, model)
            raise CheckpointError(f"{source} lacks {name}, which this model has; {extra}{_ways_out(settings)}")
        weight, quantized = weights[name], components.quantized_local(param)
        if weight.shape != tuple(param.shape):
            raise CheckpointError(
                f"{source}: {name} is {list(weight.shape)} there, and {list(param.shape)} here; {_ways_out(settings)}"
            )
        tag = None if quantized is None else quantized.quantized_storage.cell.tag
        if weight.tag != tag:
            raise CheckpointError(
                f"{source}: {name} is stored as {weight.tag or 'high precision'} there, and recipe = "
                f"{settings.recipe!r} has {tag or 'high precision'}; take the recipe of the checkpoint, or start with "
                "it and change it by quantshard resume --recipe"
            )
    if len(weights) > len(dict(model.named_parameters())):
        raise CheckpointError(f"{source}: {_first_other(weights, model)}{_ways_out(settings)}")


def _first_other(held: dict[str, Any], model: nn.Module) -> str:
    params = dict(model.named_parameters())
    extra = [name for name in held if name not in params]
    return f"it has {extra[0]}, which this model lacks; " if extra else ""


def load(source: str, model: nn.Module) -> str:
    """Load the weights of `source`, before the optimizer is built; return a line about them. Collective."""
    if _is_checkpoint(source):
        checkpoints.load(source, model)
        return f"began with the weights of {source}"
    return f"began with the weights of {'; '.join(layouts.load(source, model).lines())}"
