"""`quantshard explain` and `quantshard plan`: show the memory and GEMMs of a model, and its memory on any mesh."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from quantshard import kernels, limits, recipe
from quantshard.errors import ConfigurationError, meant
from quantshard.gemm import hardware
from quantshard.state_storage import ADAMW, ALGORITHMS, LION, MUON, PRESETS, UNUSED_OPTIONS
from quantshard.tools import observe, planning
from quantshard.tools.cli import models
from quantshard.tools.cli.models import ModelSource
from quantshard.tools.observe.table import Report
from quantshard.tools.planning import TrainingStep
from quantshard.tools.terminal.screen import Screen, say_whole
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.model import losses, trained_loss
from quantshard.tools.trainer.optimizer import muon_head
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import (
    FLOAT32_STATES,
    STATE_SETTINGS,
    TP,
    MeshSpec,
    as_settings,
    state_options,
)

_ALONE = "none"
"""Value of --mesh for one process without FSDP2."""

_TITLES = {ADAMW: "AdamW", LION: "Lion"}

_WORLD_SIZE = 8
"""Default number of ranks of a plan."""

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

SOURCE = typer.Argument(metavar="X", help="a run, a checkpoint (or its URL), or a Hugging Face config.json")
RECIPE = typer.Option(
    "--recipe",
    metavar="NAME",
    help=f"of a run or a config.json: {', '.join(recipe.CHOICES)} ({recipe.AUTO_HELP}); by GEMM or layer as of train",
)
WIDE = typer.Option("--wide", help="show every column and every tensor")
WIDER = "a wider terminal or --wide has them"
JSON = typer.Option("--json", help="print everything as JSON")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("explain", no_args_is_help=True)(explain)
    app.command("plan", no_args_is_help=True)(plan)


def explain(
    source: Annotated[str, SOURCE],
    recipe_: Annotated[str | None, RECIPE] = None,
    wide: Annotated[bool, WIDE] = False,
    json_: Annotated[bool, JSON] = False,
) -> None:
    """Show how each parameter of a model is stored, its bytes, and how its GEMMs run.

    A model of a config.json is converted first, without weights (needs transformers).
    """
    model_source = models.find(source, recipe_)
    if model_source.settings is None:
        report = observe.explain(model_source.model, model_source.optimizer)
    else:
        # The settings of a run define its optimizer states, so no optimizer is built here.
        capability = hardware.capability_of(torch.device("cuda"))
        report = planning.plan(
            model_source.model, {}, **_states(model_source), ema=model_source.ema, capability=capability
        )
    _show(model_source.told, report, model_source.left, wide, json_)


def plan(
    source: Annotated[str, SOURCE],
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help=f"such as dp_shard=64,tp=8; {_ALONE}: one process without FSDP2. Default: that of a run",
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="number of ranks, if there is no --mesh: all in dp_shard")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="rank to show")] = 0,
    recipe_: Annotated[str | None, RECIPE] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(ALGORITHMS)}. Default: that of a run, or {ADAMW}")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"of masters and moments: {', '.join(PRESETS)}, {FLOAT32_STATES}")
    ] = None,
    ema: Annotated[
        bool | None, typer.Option(help="count an average of the weights. Default: as in X", show_default=False)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="sequences per pass and rank. Default: the run's"),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="tokens per sequence. Default: the run's")
    ] = None,
    checkpoint_activations: Annotated[
        bool, typer.Option("--recompute", help="recompute each layer in backward")
    ] = False,
    compute_capability: Annotated[
        str, typer.Option(metavar="X.Y", help="compute capability of the GPU, which determines the emulated GEMMs")
    ] = "9.0",
    memory: Annotated[
        float | None, typer.Option(min=0, metavar="GIB", help="GPU memory: print the largest batch that fits")
    ] = None,
    wide: Annotated[bool, WIDE] = False,
    json_: Annotated[bool, JSON] = False,
) -> None:
    """Show what one rank of a mesh would hold, send and reduce, without starting anything.

    Repeated layers are sharded one by one, as fully_shard is called. With an axis tp the linear layers of attention
    and MLP are cut by columns and rows. With a batch, the peak of a training step: activations, gathered weights and
    gradients too.
    """
    model_source = models.find(source, recipe_)
    axes, mesh_origin = _axes(model_source, mesh, world_size)
    mesh_notes = _refused(model_source, axes)
    cuts = _cuts(model_source.model, axes[TP]) if TP in axes else None
    capability = _capability(compute_capability)
    step = _step(model_source, axes, batch, seq_length, checkpoint_activations, capability)
    if isinstance(step, str) and (batch or seq_length or checkpoint_activations or memory is not None):
        raise ConfigurationError(f"the memory of a step is not counted: {step}")
    step_notes = (f"{_LACKS}: {step}",) if isinstance(step, str) else _uncounted(model_source.settings)
    settings = model_source.settings
    optimizer_arguments = _states(model_source, preset, optimizer)
    report = planning.plan(
        model_source.model,
        axes,
        layers=huggingface.repeated_layers(model_source.model),
        rank=rank,
        tensor_parallel=cuts,
        reshard_after_forward=None if settings is None else settings.reshard_after_forward,
        **optimizer_arguments,
        step=None if isinstance(step, str) else step,
        memory=None if memory is None else int(memory * 2**30),
        ema=model_source.ema if ema is None else ema,
        capability=capability,
    )
    axes_text = ",".join(f"{axis}={size}" for axis, size in axes.items())
    where = f"rank {rank} of mesh {axes_text}{mesh_origin}" if axes else "one process without FSDP2"
    counted = _counted(model_source, optimizer_arguments["optimizer"])
    lines = (*model_source.told, *step_notes, where, *mesh_notes, *counted)
    _show(lines, report, model_source.left, wide, json_, lists_left=wide)


def _counted(found: ModelSource, optimizer: str) -> tuple[str, ...]:
    """A note on which optimizer's states are counted instead of those in a checkpoint; empty without states."""
    if found.optimizer is None:
        return ()
    return (f"states are counted as {_TITLES[optimizer]}'s; explain tells those that are there",)


def _axes(found: ModelSource, mesh: str | None, world_size: int | None) -> tuple[dict[str, int], str]:
    """Axes of the mesh (empty without FSDP2), and a note on their origin if the user did not set them."""
    if mesh == _ALONE:
        if world_size not in (None, 1):
            raise ConfigurationError(f"--mesh {_ALONE} is one process, but --world-size says {world_size}")
        return {}, ""
    if mesh is None and world_size is not None:
        return {"dp_shard": world_size}, ""
    origin = "" if mesh else ", as it was started" if found.mesh else " (--world-size N or --mesh says another)"
    spec = MeshSpec.parse(mesh or found.mesh or f"dp_shard={_WORLD_SIZE}")
    if world_size not in (None, spec.processes):
        raise ConfigurationError(
            f"--mesh {mesh} is of {spec.processes} ranks, but --world-size says {world_size}; leave one of them out"
        )
    if spec.ep > 1:
        origin += ", experts as if FSDP2 sharded them"
    return replace(spec, dp_shard=spec.dp_shard * spec.ep, ep=1).present, origin


def _refused(found: ModelSource, axes: dict[str, int]) -> tuple[str, ...]:
    """A note if the train command would reject a run's batches on this mesh; the memory plan is still valid.

    Raises:
        ConfigurationError: the train command cannot shard the model on this mesh.
    """
    if found.settings is None:
        return ()
    if not axes:
        return ("quantshard train calls fully_shard on one process too, which copies what is not quantized",)
    spec = MeshSpec(**axes)
    settings = replace(found.settings, mesh=str(spec), dp_replicate=1)
    settings.check()
    try:
        settings.check_ranks(spec.processes)
    except ConfigurationError as error:
        return (f"quantshard train would refuse this mesh: {error}",)
    return ()


def _cuts(model: nn.Module, ranks: int) -> dict[str, int]:
    """Suffixes of parameter names -> the dim that the axis "tp" shards.

    Raises:
        ConfigurationError: no parameter has a known suffix, or a dim is not divisible by `ranks`.
    """
    params = dict(model.named_parameters())
    names = list(params)
    cuts = {end: dim for end, dim in _CUTS.items() if any(name.endswith(end) for name in names)}
    for name, end in ((name, end) for name in names for end in cuts if name.endswith(end)):
        dim, shape = cuts[end], tuple(params[name].shape)
        if shape[dim] % ranks:
            raise ConfigurationError(
                limits.refusal("uneven axis", f"{name} {shape}, dim {dim} of {shape[dim]} over {ranks} ranks of {TP!r}")
            )
    if not cuts:
        raise ConfigurationError(
            f"no weight of this model has a name that says how {TP!r} cuts it (as q_proj.weight has; "
            f"the first is {names[0]}); plan it from Python: quantshard.plan(..., tensor_parallel=...)"
        )
    return cuts


def _states(found: ModelSource, preset: str | None = None, algorithm: str | None = None) -> dict[str, Any]:
    """Arguments of `planning.plan` for the optimizer and its states: of a preset, otherwise of the model's run.

    Raises:
        ConfigurationError: the optimizer or the preset is unknown.
    """
    state_settings = state_options(preset or "", {} if preset else as_settings(found.states))
    optimizer_arguments = _algorithm(found, algorithm)
    supported = {*STATE_SETTINGS.values()}.difference(UNUSED_OPTIONS[optimizer_arguments["optimizer"]])
    states = {name: value for name, value in state_settings.arguments(MUON).items() if name in supported}
    return states | optimizer_arguments


def _algorithm(found: ModelSource, given: str | None) -> dict[str, Any]:
    """Name of the optimizer and, for Muon, the output head."""
    name = given or (ADAMW if found.settings is None else found.settings.optimizer)
    if name not in ALGORITHMS:
        raise ConfigurationError(f"--optimizer {name}: {meant(name, ALGORITHMS)}choose one of {', '.join(ALGORITHMS)}")
    if name == MUON and found.is_stored:
        raise ConfigurationError(
            "--optimizer muon: a checkpoint does not say which layer gives the logits; name its run, or a config.json"
        )
    head = muon_head(found.model, found.settings) if name == MUON and found.settings is not None else None
    return {"optimizer": name, "head": head}


def _show(
    lines: tuple[str, ...], report: Report, left: tuple[str, ...], wide: bool, as_json: bool, lists_left: bool = True
) -> None:
    """Print a report. `left`: lines about layers in high precision."""
    if as_json:
        say_whole(json.dumps({"source": list(lines), "left": list(left), **report.to_dict()}, indent=2))
        return
    screen = Screen(wide=wide)
    screen.lines(*lines, "")
    screen.print(report if wide else report.summary(WIDER))
    screen.lines(*(left if lists_left else ()))


# The training step of a plan

_LACKS = "activations, gradients and gathered weights are not in it"


def _capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text, re.ASCII)
    if match is None:
        raise ConfigurationError(
            f"--compute-capability {text}: give two numbers, such as 9.0 (an H100 or H200) or 10.0 (a B200)"
        )
    return int(match[1]), int(match[2])


def _uncounted(settings: TrainSettings | None) -> tuple[str, ...]:
    """Notes about enabled settings of a run that the memory estimate ignores."""
    if settings is None:
        return ()
    every = settings.statistics_every
    ignored = {"compile": settings.compile, f"statistics_every = {every}": every}
    return tuple(f"{name}: the peak is that of a step without it" for name, is_asked in ignored.items() if is_asked)


def _step(
    found: ModelSource,
    axes: Mapping[str, int],
    batch: int | None,
    seq_length: int | None,
    recompute: bool,
    capability: tuple[int, int],
) -> TrainingStep | str:
    """The step of a run's settings or of the options, or why its memory cannot be estimated."""
    if axes.get(TP, 1) > 1:
        return f"the mesh has an axis of tensor parallelism, {TP}={axes[TP]}"
    if found.is_stored:
        return "a checkpoint does not say how its model computes; plan the run or config.json that it is of"
    if not kernels.USABLE:
        return "it is counted with the kernels, for which Triton must be installed (no GPU is needed)"
    settings = found.settings
    if settings is None:
        if batch is None or seq_length is None:
            return "give --batch and --seq-length"
        return TrainingStep(batch, seq_length, checkpoint_activations=recompute, capability=capability)
    if settings.experts:
        return "which expert a token goes to, and so what is kept, follows from values"
    batch = batch or _own_batch(settings, axes)
    if batch is None:
        return f"global_batch = {settings.global_batch} cannot be divided on this mesh; give --batch"
    return TrainingStep(
        batch,
        seq_length or settings.seq_length,
        micro_batches=settings.parts(MeshSpec(**axes)),
        loss=partial(_loss, settings),
        checkpoint_activations=recompute,
        forward_prefetch=True,
        reduce_dtype=settings.torch_reduce_dtype,
        norm_dtype=torch.float64,
        capability=capability,
    )


def _own_batch(settings: TrainSettings, axes: Mapping[str, int]) -> int | None:
    """Sequences of a micro-batch on one rank, or None if the global batch is not divisible."""
    if settings.micro_batch:
        return settings.micro_batch
    parts = settings.micro_batches * math.prod(axes.values())
    return None if settings.global_batch % parts else settings.global_batch // parts


def _loss(settings: TrainSettings, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return trained_loss(model, losses(model, tokens, targets), settings)
