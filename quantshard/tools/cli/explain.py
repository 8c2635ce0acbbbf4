"""`quantshard explain` and `quantshard plan`: show the memory and GEMMs of a model, and its memory on any mesh."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer import Argument, Option

from quantshard import kernels, limits, recipe
from quantshard.errors import ConfigurationError, meant
from quantshard.gemm import hardware
from quantshard.interop.layouts.files import read_layout_json
from quantshard.interop.layouts.writing import CONFIGURATION
from quantshard.state_storage import ADAMW, ALGORITHMS, MUON, PRESETS, StateOptions
from quantshard.tools import planning
from quantshard.tools.observe.table import Report
from quantshard.tools.planning import TrainingStep
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import Screen, say_whole
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.model import ModelSpec, losses, trained_loss
from quantshard.tools.trainer.optimizer import muon_head
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import FLOAT32_STATES, TP, LayerRecipes, MeshSpec, state_options

_RUN = "config.toml"

_ALONE = "none"
"""Value of --mesh for one process without FSDP2."""

_CUTS = {
    **{f"layernorm_qkv.{name}": 0 for name in ("weight", "query_weight", "key_weight", "value_weight")},
    **{f"fc1_{name}weight": 0 for name in ("", "gate_", "up_")},
    ".proj.weight": 1,
    "fc2_weight": 1,
    **{f"{name}_proj.weight": 0 for name in ("q", "k", "v", "qkv", "gate", "up", "gate_up")},
    "o_proj.weight": 1,
    "down_proj.weight": 1,
}
_CUTS |= {f"{end.removesuffix('weight')}bias": 0 for end, dim in _CUTS.items() if dim == 0}
"""Suffixes of parameter names (of `TransformerLayer` and of transformers) -> the dim that "tp" shards."""

SOURCE = Argument(..., metavar="X", help="a run, or a Hugging Face config.json")
RECIPE = Option(
    None,
    "--recipe",
    metavar="NAME",
    help=f"of a run or a config.json: {', '.join(recipe.CHOICES)} ({recipe.AUTO_HELP}); by GEMM or layer as of train",
)
WIDE = Option(False, "--wide", help="show every column and every tensor")
JSON = Option(False, "--json", help="print everything as JSON")


def explain(
    source: str = SOURCE,
    recipe_: str | None = RECIPE,
    wide: bool = WIDE,
    json_: bool = JSON,
) -> None:
    """Show how each parameter of a model is stored, its bytes, and how its GEMMs run.

    A model of a config.json is converted first, without weights (needs transformers).
    """
    model_source = find_model(source, recipe_)
    capability = hardware.capability_of(torch.device("cuda"))
    report = planning.plan(model_source.model, {}, **_states(model_source), ema=model_source.ema, capability=capability)
    _show((model_source.about,), report, model_source.high_precision, wide, json_)


def plan(
    source: str = SOURCE,
    mesh: str | None = Option(
        None,
        metavar="AXES",
        help=f"such as dp_shard=64,tp=8; {_ALONE}: one process without FSDP2. Default: the mesh of the run",
    ),
    rank: int = Option(0, min=0, help="rank to show"),
    recipe_: str | None = RECIPE,
    optimizer: str | None = Option(
        None, metavar="NAME", help=f"{', '.join(ALGORITHMS)}. Default: the optimizer of the run, or {ADAMW}"
    ),
    preset: str | None = Option(
        None, metavar="NAME", help=f"of masters and moments: {', '.join(PRESETS)}, {FLOAT32_STATES}"
    ),
    ema: bool | None = Option(None, help="count an average of the weights. Default: as in X", show_default=False),
    batch: int | None = Option(None, min=1, metavar="N", help="sequences per pass and rank. Default: the run's"),
    seq_length: int | None = Option(None, min=1, metavar="N", help="tokens per sequence. Default: the run's"),
    checkpoint_activations: bool = Option(False, "--recompute", help="recompute each layer in backward"),
    compute_capability: str = Option(
        "9.0", metavar="X.Y", help="compute capability of the GPU, which determines the emulated GEMMs"
    ),
    memory: float | None = Option(None, min=0, metavar="GIB", help="GPU memory: print the largest batch that fits"),
    wide: bool = WIDE,
    json_: bool = JSON,
) -> None:
    """Show what one rank of a mesh would hold, send and reduce, without starting anything.

    Repeated layers are sharded one by one, as fully_shard is called. With an axis tp the linear layers of attention
    and MLP are cut by columns and rows. With a batch, the peak of a training step: activations, gathered weights and
    gradients too.
    """
    model_source = find_model(source, recipe_)
    axes = _axes(model_source, mesh)
    cuts = _cuts(model_source.model, axes[TP]) if TP in axes else None
    numbers = re.fullmatch(r"(\d{1,2})\.(\d)", compute_capability, re.ASCII)
    if numbers is None:
        raise ConfigurationError(f"--compute-capability {compute_capability}: give two numbers, such as 9.0")
    capability = int(numbers[1]), int(numbers[2])
    step = _step(model_source, axes, batch, seq_length, checkpoint_activations, capability)
    if isinstance(step, str) and (batch or seq_length or checkpoint_activations or memory is not None):
        raise ConfigurationError(f"the memory of a step cannot be computed: {step}")
    lacks = f"activations, gradients and gathered weights are not in it: {step}"
    step_notes = (lacks,) if isinstance(step, str) else ()
    settings = model_source.settings
    report = planning.plan(
        model_source.model,
        axes,
        layers=huggingface.repeated_layers(model_source.model),
        rank=rank,
        tensor_parallel=cuts,
        reshard_after_forward=None if settings is None else True,
        **_states(model_source, preset, optimizer),
        step=None if isinstance(step, str) else step,
        memory=None if memory is None else int(memory * 2**30),
        ema=model_source.ema if ema is None else ema,
        capability=capability,
    )
    axes_text = ",".join(f"{axis}={size}" for axis, size in axes.items())
    where = f"rank {rank} of mesh {axes_text}" if axes else "one process without FSDP2"
    lines = (model_source.about, *step_notes, where)
    _show(lines, report, model_source.high_precision if wide or json_ else (), wide, json_)


def _axes(source: "ModelSource", mesh: str | None) -> dict[str, int]:
    """Axes of the mesh (empty without FSDP2), by default those of a run; experts as if FSDP2 sharded them."""
    if mesh == _ALONE:
        return {}
    spec = MeshSpec.parse(mesh or source.mesh or "dp_shard=8")
    if source.settings is not None:
        replace(source.settings, mesh=str(spec)).check()
    return replace(spec, dp_shard=spec.dp_shard * spec.ep * spec.cp, ep=1, cp=1).present


def _cuts(model: nn.Module, ranks: int) -> dict[str, int]:
    """Suffixes of parameter names -> the dim that the axis "tp" shards."""
    params = dict(model.named_parameters())
    names = list(params)
    cuts = {end: dim for end, dim in _CUTS.items() if any(name.endswith(end) for name in names)}
    for name, end in ((name, end) for name in names for end in cuts if name.endswith(end)):
        dim, shape = cuts[end], tuple(params[name].shape)
        if shape[dim] % ranks:
            cut = f"{name} {shape}, dim {dim} of {shape[dim]} over {ranks} ranks of {TP!r}"
            raise ConfigurationError(limits.refusal("uneven axis", cut))
    if not cuts:
        raise ConfigurationError(f"{TP!r} cuts no weight of this model (the first is {names[0]}); use quantshard.plan")
    return cuts


def _states(source: "ModelSource", preset: str | None = None, algorithm: str | None = None) -> dict[str, Any]:
    """Arguments of `planning.plan` for the optimizer and its states: of a preset, otherwise of the model's run."""
    name = algorithm or (ADAMW if source.settings is None else source.settings.optimizer)
    if name not in ALGORITHMS:
        raise ConfigurationError(f"--optimizer {name}: {meant(name, ALGORITHMS)}choose one of {', '.join(ALGORITHMS)}")
    head = muon_head(source.model, source.settings) if name == MUON and source.settings is not None else None
    states = StateOptions() if source.settings is None else source.settings.state_options
    if preset:
        states = state_options(preset, {})
    return {**states.arguments(name), "optimizer": name, "head": head}


def _show(lines: tuple[str, ...], report: Report, high_precision: tuple[str, ...], wide: bool, as_json: bool) -> None:
    """Print a report. `high_precision`: lines about layers in high precision."""
    if as_json:
        say_whole(json.dumps({"source": list(lines), "left": list(high_precision), **report.to_dict()}, indent=2))
        return
    screen = Screen(wide=wide)
    screen.lines(*lines, "")
    screen.print(report if wide else report.summary())
    screen.lines(*high_precision)


def _step(
    source: "ModelSource",
    axes: Mapping[str, int],
    batch: int | None,
    seq_length: int | None,
    recompute: bool,
    capability: tuple[int, int],
) -> TrainingStep | str:
    """The step of a run's settings or of the options, or why its memory cannot be estimated."""
    if axes.get(TP, 1) > 1:
        return f"the mesh has an axis of tensor parallelism, {TP}={axes[TP]}"
    if not kernels.USABLE:
        return "the estimate runs the kernels' code, which needs Triton (but no GPU)"
    settings = source.settings
    if settings is None:
        if batch is None or seq_length is None:
            return "give --batch and --seq-length"
        return TrainingStep(batch, seq_length, checkpoint_activations=recompute, capability=capability)
    if settings.experts:
        return "which expert a token goes to depends on values"
    parts = settings.micro_batches * math.prod(axes.values())
    if not (batch or settings.micro_batch) and settings.global_batch % parts:
        return f"global_batch = {settings.global_batch} cannot be divided on this mesh; give --batch"
    batch = batch or settings.micro_batch or settings.global_batch // parts
    return TrainingStep(
        batch,
        seq_length or settings.seq_length,
        micro_batches=settings.parts(MeshSpec(**axes)),
        loss=lambda model, x, y: trained_loss(model, losses(model, x, y, settings.z_loss), settings),
        checkpoint_activations=recompute,
        forward_prefetch=True,
        reduce_dtype=settings.torch_reduce_dtype,
        norm_dtype=torch.float64,
        release_gradients=settings.release_gradients,
        capability=capability,
    )


@dataclass(frozen=True)
class ModelSource:
    """A model on the meta device, and known facts about its training.

    Attributes:
        about: a line that describes the source.
        high_precision: lines about layers that stay in high precision.
        mesh: mesh of the run, or "" if unknown.
        settings: settings of the run, or None if the source is not a run.
    """

    model: nn.Module
    about: str
    high_precision: tuple[str, ...] = ()
    mesh: str = ""
    settings: TrainSettings | None = None

    @property
    def ema(self) -> bool:
        return self.settings is not None and self.settings.ema > 0


def find_model(path: str, recipe_name: str | None) -> ModelSource:
    """Build the model of a run, or of a config.json, on the meta device. `recipe_name`: replaces the run's, or auto."""
    if recipe_name is not None:
        recipe_name = LayerRecipes.parse(recipe_name).text
    location = outputs.existing(Path(path), "a run or a config.json")
    if (location / _RUN).is_file() or location.name == _RUN:
        run = RunDir(location.parent if location.name == _RUN else location)
        settings, launched, _ = run.read_config()
        settings = replace(settings, recipe=recipe_name or settings.recipe)
        settings.check(str(run.path))
        model = ModelSpec(settings, run.read_model(settings)).converted()[0]
        kind = settings.architecture if settings.is_by_sizes else type(model).__name__
        about = f"{run.path}: {kind} of a run, by recipe {settings.recipe!r}"
        mesh = launched.get("mesh") or str(settings.axes(launched["processes"]))
        return ModelSource(model, about, mesh=mesh, settings=settings)
    if (location / CONFIGURATION).is_file() or location.suffix == ".json":
        file = location / CONFIGURATION if location.is_dir() else location
        recipe_name = recipe_name or recipe.auto_name()
        model, report = huggingface.converted(read_layout_json(file), str(file), LayerRecipes.parse(recipe_name))
        about = f"{file}: {type(model).__name__}, by recipe {recipe_name!r}"
        return ModelSource(model, about, () if report is None else tuple(report.high_precision()))
    raise ConfigurationError(f"{path} has no {_RUN} of a run and no {CONFIGURATION}; inspect shows a checkpoint")
