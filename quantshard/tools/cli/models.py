"""Builds models on the meta device (shapes and formats only) from a run, a checkpoint or a config.json."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from quantshard import sharding
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop.layouts.files import read_layout_json
from quantshard.interop.layouts.source import CheckpointModel, CheckpointWeight
from quantshard.interop.layouts.table import cell_of_tag
from quantshard.interop.layouts.writing import CONFIGURATION
from quantshard.numerics.states import AVERAGE
from quantshard.recipe import auto_name
from quantshard.state_storage import StateOptions
from quantshard.tensor import storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tools.terminal import inputs
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.model import ModelSpec
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import LayerRecipes

_RUN = "config.toml"


@dataclass(frozen=True)
class ModelSource:
    """A model on the meta device, and known facts about its training.

    Attributes:
        told: lines that describe the source.
        left: lines about layers that stay in high precision.
        mesh: mesh of the run, or "" if unknown.
        optimizer: optimizer with the states in the checkpoint, or None without states.
        states: storage of masters and moments in the run.
        settings: settings of the run, or None if the source is not a run.
        ema: whether the run keeps an average of the weights.
    """

    model: nn.Module
    told: tuple[str, ...]
    left: tuple[str, ...] = ()
    mesh: str = ""
    optimizer: torch.optim.Optimizer | None = None
    states: StateOptions = field(default_factory=StateOptions)
    settings: TrainSettings | None = None
    ema: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether only the parameters are known, as for a checkpoint."""
        return isinstance(self.model, StoredModule)


class StoredModule(nn.Module):
    """A module known only by its parameters in a checkpoint."""

    gemm_reason = "a checkpoint does not say of which module it is"


class StoredEmbedding(StoredModule):
    """A stored module that is an embedding according to its name."""


def find(path: str, recipe_name: str | None) -> ModelSource:
    """Build the model of a run, of a checkpoint (or its URL), or of a Hugging Face config.json.

    Args:
        recipe_name: replaces the run's recipe, or converts the model of a config.json (default: auto).

    Raises:
        ConfigurationError: `path` is not such a source, or its model cannot be built.
        CheckpointError: the checkpoint is damaged.
    """
    if recipe_name is not None:
        recipe_name = LayerRecipes.parse(recipe_name).text
    local_path = Path(inputs.existing(path, "a run, a checkpoint or a config.json"))
    if "://" in path or (local_path.is_dir() and is_complete(path)):
        if recipe_name is not None:
            raise ConfigurationError(
                f"{path} is a checkpoint, whose weights have their formats; --recipe is for runs and config.json"
            )
        return of_checkpoint(path)
    if (local_path / _RUN).is_file() or local_path.name == _RUN:
        return of_run(local_path.parent if local_path.name == _RUN else local_path, recipe_name)
    if (local_path / CONFIGURATION).is_file() or local_path.suffix == ".json":
        return of_configuration(
            local_path / CONFIGURATION if local_path.is_dir() else local_path, recipe_name or auto_name()
        )
    raise ConfigurationError(
        f"{path} is no run (which has a {_RUN}), no complete checkpoint, and holds no Hugging Face {CONFIGURATION}"
    )


def of_run(path: Path, recipe_name: str | None) -> ModelSource:
    """Build the model of a run from its settings."""
    settings, launch_config, _ = RunDir(path).read_config()
    settings = replace(settings, recipe=recipe_name or settings.recipe)
    settings.check(str(path))
    model = ModelSpec(settings, RunDir(path).read_model(settings)).converted()[0]
    mesh = launch_config.get("mesh") or str(settings.axes(launch_config["processes"]))
    kind = settings.architecture if settings.is_by_sizes else type(model).__name__
    description = f"{path}: {kind} of a run, by recipe {settings.recipe!r}"
    return ModelSource(
        model, (description,), mesh=mesh, states=settings.state_options, settings=settings, ema=settings.ema > 0
    )


def of_checkpoint(path: str) -> ModelSource:
    """Build a module tree from the parameter names of a checkpoint, with the states of its optimizer."""
    source = CheckpointModel(path)
    model = StoredModule()
    for weight in source.weights.values():
        if weight.tag is not None or weight.dtype.is_floating_point:
            _add(model, weight, path)
    named, states = dict(model.named_parameters()), source.states()
    if not named:
        raise CheckpointError(f"{path} holds no weights")
    optimizer = None
    if names_with_states := [name for name in named if name in states]:
        optimizer = torch.optim.Optimizer([named[name] for name in names_with_states], {})
        for name in names_with_states:
            specs = states[name].items()
            optimizer.state[named[name]] = {
                state: torch.empty(shape, dtype=dtype, device="meta") for state, (dtype, shape) in specs
            }
    record = manifest.read_manifest(path)
    mesh = "" if record is None else ",".join(f"{axis}={size}" for axis, size in (record.mesh or {}).items())
    description = (f"{path}: a checkpoint, {len(named)} parameters",)
    return ModelSource(
        model,
        description,
        mesh=mesh,
        optimizer=optimizer,
        ema=any(AVERAGE in states[name] for name in names_with_states),
    )


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
    """Build the model of a Hugging Face config.json, and convert it."""
    model, report = huggingface.converted(read_layout_json(file), str(file), LayerRecipes.parse(recipe_name))
    description = f"{file}: {type(model).__name__}, by recipe {recipe_name!r}"
    return ModelSource(model, (description,), () if report is None else tuple(report.high_precision()))
