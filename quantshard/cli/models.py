"""Models of which only shapes and formats are known, on the meta device: of a run, a checkpoint, or a config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantshard import recipe, sharding
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.conversion.convert import convert
from quantshard.conversion.selection import HIGH_PRECISION
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.foreign import FieldReader, shown
from quantshard.layouts.files import read_layout_json
from quantshard.layouts.source import CheckpointModel, CheckpointWeight
from quantshard.layouts.table import cell_of_tag
from quantshard.layouts.writing import CONFIGURATION
from quantshard.tensor import storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.terminal import inputs
from quantshard.trainer.config import TrainSettings
from quantshard.trainer.model import LanguageModel
from quantshard.trainer.run_dir import RunDir

_MOST_LAYERS = 1 << 12
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_experts", "num_local_experts")
"""Fields of configurations that say how many modules there are; a configuration comes from anybody."""

_RUN = "config.toml"


@dataclass(frozen=True)
class ModelSource:
    """A model on the meta device, and what is known of how it is trained.

    `told`: what it is, and what of it was left out, in lines. `mesh`: that of its run, "" if none is known.
    `optimizer`: the states that a checkpoint holds, None where there is none. `moments`: of Adam in its run.
    `settings`: its run's, None where it is of none.
    """

    model: nn.Module
    told: tuple[str, ...]
    mesh: str = ""
    optimizer: torch.optim.Optimizer | None = None
    moments: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    settings: TrainSettings | None = None

    @property
    def is_stored(self) -> bool:
        """True if its parameters alone are known, as a checkpoint has them."""
        return isinstance(self.model, StoredModule)


class StoredModule(nn.Module):
    """A module of which a checkpoint has the parameters, and nothing else is known."""

    gemm_reason = "a checkpoint does not say of which module it is"


class StoredEmbedding(StoredModule):
    """A module that is an embedding by its name."""


def find(path: str, recipe_name: str | None) -> ModelSource:
    """The model of a run, of a checkpoint (or its URL), or of a Hugging Face config.json.

    Args:
        recipe_name: instead of the run's recipe; by which a config.json's model is converted (default: mxfp8).

    Raises:
        ConfigurationError: there is none of these, or it cannot be built.
        CheckpointError: the checkpoint is damaged.
    """
    if recipe_name is not None:
        recipe.resolve(recipe_name)
    place = Path(inputs.existing(path, "a run, a checkpoint or a config.json"))
    if "://" in path or (place.is_dir() and is_complete(path)):
        if recipe_name is not None:
            raise ConfigurationError(
                f"{path} is a checkpoint, whose weights have their formats; --recipe is for runs and config.json"
            )
        return of_checkpoint(path)
    if (place / _RUN).is_file() or place.name == _RUN:
        return of_run(place.parent if place.name == _RUN else place, recipe_name)
    if (place / CONFIGURATION).is_file() or place.suffix == ".json":
        return of_configuration(place / CONFIGURATION if place.is_dir() else place, recipe_name or "mxfp8")
    raise ConfigurationError(
        f"{path} is no run (which has a {_RUN}), no complete checkpoint, and holds no Hugging Face {CONFIGURATION}"
    )


def of_run(path: Path, recipe_name: str | None) -> ModelSource:
    """The model of a run's settings, with its mesh."""
    settings, launched, _ = RunDir(path).read_config()
    settings = replace(settings, recipe=recipe_name or settings.recipe)
    settings.check(str(path))
    model = LanguageModel(settings, recipe.resolve(settings.recipe), "meta")
    mesh = launched.get("mesh") or str(settings.axes(launched["processes"]))
    told = f"{path}: {settings.architecture} of a run, by recipe {settings.recipe!r}"
    return ModelSource(model, (told,), mesh, moments=settings.torch_moment_dtypes, settings=settings)


def of_checkpoint(path: str) -> ModelSource:
    """The parameters of a checkpoint in a tree of modules of their names, and the states of its optimizer."""
    source = CheckpointModel(path)
    model = StoredModule()
    for weight in source.weights.values():
        if weight.tag is not None or weight.dtype.is_floating_point:
            _add(model, weight, path)
    named, states = dict(model.named_parameters()), source.states()
    if not named:
        raise CheckpointError(f"{path} holds no weights")
    optimizer = None
    if held := [name for name in named if name in states]:
        optimizer = torch.optim.Optimizer([named[name] for name in held], {})
        for name in held:
            described = states[name].items()
            optimizer.state[named[name]] = {
                state: torch.empty(shape, dtype=dtype, device="meta") for state, (dtype, shape) in described
            }
    facts = manifest.read_manifest(path)
    mesh = "" if facts is None else ",".join(f"{axis}={size}" for axis, size in (facts.mesh or {}).items())
    return ModelSource(model, (f"{path}: a checkpoint, {len(named)} parameters",), mesh, optimizer)


def _add(model: nn.Module, weight: CheckpointWeight, path: str) -> None:
    *parts, leaf = weight.name.split(".")
    value: torch.Tensor
    if weight.tag is None:
        value = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    else:
        shard = sharding.whole((weight.shape[0], weight.shape[1]))
        value = QuantizedTensor(storages.empty(cell_of_tag(weight.tag), shard, "meta"), torch.bfloat16)
    try:
        for part in parts:
            if part not in dict(model.named_children()):
                model.add_module(part, (StoredEmbedding if "embed" in part else StoredModule)())
            model = model.get_submodule(part)
        model.register_parameter(leaf, nn.Parameter(value))
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: no module can have a parameter named {weight.name}: {error}") from None


def of_configuration(file: Path, recipe_name: str) -> ModelSource:
    """The model of a Hugging Face configuration, converted."""
    content = read_layout_json(file)
    content.pop("quantization_config", None)  # of weights that are not looked at
    model = _build(content, file)
    told = f"{file}: {type(model).__name__}, by recipe {recipe_name!r}"
    if recipe_name == HIGH_PRECISION:
        return ModelSource(model, (told,))
    try:
        left = str(convert(model, recipe_name)).partition("\nleft ")[2]
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}; --recipe {HIGH_PRECISION} shows it as it is") from None
    return ModelSource(model, (told, f"left {left}") if left else (told,))


def _build(content: dict[str, Any], file: Path) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            f"{file} describes a model of transformers, which is not installed: pip install transformers"
        ) from None
    _check_counts(content, file)
    fields = FieldReader(content, str(file))
    kind, dtype = fields.text("model_type"), fields.text("dtype") or fields.text("torch_dtype") or "bfloat16"
    known = list(transformers.CONFIG_MAPPING)
    if kind not in known:
        near = get_close_matches(str(kind), known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "is this a model's configuration?"
        raise ConfigurationError(
            f"{file}: transformers {transformers.__version__} has no model_type {shown(kind)}; {hint}"
        )
    kept = {name: value for name, value in content.items() if name not in ("model_type", "dtype", "torch_dtype")}
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise fields.wrong("dtype", "a dtype of torch, such as bfloat16")
    names = [name for name in content.get("architectures") or () if isinstance(name, str)]
    try:
        config = transformers.AutoConfig.for_model(kind, **kept)
        named: Any = getattr(transformers, names[0], None) if names else None
        is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        with torch.device("meta"):
            model = named(config) if is_model else transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a field of a wrong type leads to in there
        line = " ".join(str(error).split())
        raise ConfigurationError(f"{file}: transformers cannot build it: {type(error).__name__}: {line:.300}") from None
    found: nn.Module = model.to(getattr(torch, dtype))
    return found


def _check_counts(content: Mapping[str, Any], file: Path) -> None:
    """Refuse more modules than any model has, which would take all memory, in what is nested, too."""
    for name, value in content.items():
        if name in _COUNTS and isinstance(value, int) and value > _MOST_LAYERS:
            raise ConfigurationError(f"{file}: {name} is {value}, more than the {_MOST_LAYERS} that are built")
        if isinstance(value, dict):
            _check_counts(value, file)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The modules whose names end in a number and have none before: what `fully_shard` is to wrap one by one."""
    return [module for name, module in model.named_modules() if re.fullmatch(r"(?:[^.]*[^.\d][^.]*\.)*\d+", name)]
