"""`quantshard explain` and `quantshard plan`: show the memory and GEMMs of a model, and its memory on any mesh."""

from __future__ import annotations

import glob
import json
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from torch import nn

from quantshard import limits, recipe
from quantshard.errors import ConfigurationError, meant
from quantshard.gemm import hardware
from quantshard.numerics.muon import MOMENTUM_BUFFER
from quantshard.state_storage import ADAMW, ALGORITHMS, LION, MUON, PRESETS, UNUSED_OPTIONS
from quantshard.tools import observe, planning
from quantshard.tools.cli import models
from quantshard.tools.cli.models import ModelSource
from quantshard.tools.cli.planned_step import StepOptions, planned_step
from quantshard.tools.observe.table import Report
from quantshard.tools.terminal.screen import Screen, say_whole
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.optimizer import muon_head
from quantshard.tools.trainer.settings.mesh import TP, MeshSpec
from quantshard.tools.trainer.settings.optimizer_states import (
    FLOAT32_STATES,
    MASTER_DTYPES,
    MOMENT_DTYPES,
    STATE_SETTINGS,
    SWITCH,
    as_settings,
    state_options,
)

_ALONE = "none"
"""Value of --mesh for one process without FSDP2."""

_CHOICES = {"master_dtype": tuple(MASTER_DTYPES), "master_remainders": tuple(SWITCH)}
"""Choices of the options for masters; the other state options take the dtypes of moments."""

_TITLES = {ADAMW: "AdamW", LION: "Lion", MUON: "Muon"}

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
WIDE = typer.Option("--wide", help="every column, and a row for every tensor")
WIDER = "a wider terminal or --wide has them"
JSON = typer.Option("--json", help="all of it, as JSON")


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
    """Show how each parameter of a model is stored, in how many bytes, and how its GEMMs run, whole in one process.

    A model of a config.json is converted first, without weights (needs transformers).
    """
    model_source = models.find(source, recipe_)
    if model_source.settings is None:
        report = observe.explain(model_source.model, model_source.optimizer)
    else:
        # The settings of a run define its optimizer states, so no optimizer is built here.
        capability = hardware.capability_of(torch.device("cuda"))
        report = planning.plan(
            model_source.model, {}, **_states(model_source, None, {}), ema=model_source.ema, capability=capability
        )
    _show(model_source, model_source.told, report, wide, json_)


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
        int | None, typer.Option(min=1, metavar="N", help="ranks, all in dp_shard; or those of the mesh")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="whose share is shown")] = 0,
    recipe_: Annotated[str | None, RECIPE] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(ALGORITHMS)}. Default: that of a run, or {ADAMW}")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"of masters and moments: {', '.join(PRESETS)}, {FLOAT32_STATES}")
    ] = None,
    no_master_weights: Annotated[bool, typer.Option("--no-master-weights", help="no masters")] = False,
    master_dtype: Annotated[str | None, typer.Option(help=f"of masters: {', '.join(MASTER_DTYPES)}")] = None,
    master_remainders: Annotated[str | None, typer.Option(help="of masters what weights lack: on, off")] = None,
    exp_avg_dtype: Annotated[str | None, typer.Option(help=f"Adam's first moment: {', '.join(MOMENT_DTYPES)}")] = None,
    exp_avg_sq_dtype: Annotated[str | None, typer.Option(help="Adam's second moment: as the first")] = None,
    momentum_dtype: Annotated[str | None, typer.Option(help="Muon's momentum: as the first")] = None,
    ema: Annotated[
        bool | None, typer.Option(help="an average of the weights. Default: as X", show_default=False)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="sequences of a micro-batch on a rank. Default: that of a run"),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="tokens of a sequence. Default: that of a run")
    ] = None,
    checkpoint_activations: Annotated[
        bool, typer.Option("--recompute", help="each layer is recomputed in backward")
    ] = False,
    compute_capability: Annotated[
        str, typer.Option(metavar="X.Y", help="of the GPU, which says what products are emulated")
    ] = "9.0",
    memory: Annotated[
        float | None, typer.Option(min=0, metavar="GIB", help="of a GPU: tells the largest batch that fits in it")
    ] = None,
    wide: Annotated[bool, WIDE] = False,
    json_: Annotated[bool, JSON] = False,
) -> None:
    """Show what one rank of a mesh would hold, send and reduce, the optimizer's states included; nothing is started.

    Repeated layers are sharded one by one, as fully_shard is called. With an axis tp the linear layers of attention
    and MLP are cut by columns and rows. With a batch, the peak of a training step: activations, gathered weights and
    gradients too.
    """
    model_source = models.find(source, recipe_)
    axes, mesh_origin = _axes(model_source, mesh, world_size)
    mesh_notes = _refused(model_source, axes)
    cuts = _cuts(model_source.model, axes[TP]) if TP in axes else None
    step_options = StepOptions(batch, seq_length, checkpoint_activations, compute_capability, memory is not None)
    step, step_notes = planned_step(model_source, axes, step_options)
    settings = model_source.settings
    moments = {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype, "momentum_dtype": momentum_dtype}
    masters = {"master_dtype": master_dtype, "master_remainders": master_remainders}
    has_masters = False if no_master_weights else True if any(masters.values()) else None
    states = {"master_weights": has_masters, **masters, **moments}
    optimizer_arguments = _states(model_source, preset, states, optimizer)
    report = planning.plan(
        model_source.model,
        axes,
        layers=huggingface.repeated_layers(model_source.model),
        rank=rank,
        tensor_parallel=cuts,
        reshard_after_forward=None if settings is None else settings.reshard_after_forward,
        **optimizer_arguments,
        step=step,
        memory=None if memory is None else int(memory * 2**30),
        ema=model_source.ema if ema is None else ema,
        capability=step_options.capability,
    )
    axes_text = ",".join(f"{axis}={size}" for axis, size in axes.items())
    where = f"rank {rank} of mesh {axes_text}{mesh_origin}" if axes else "one process without FSDP2"
    _show(
        model_source,
        (
            *model_source.told,
            *step_notes,
            where,
            *mesh_notes,
            *_counted(model_source, optimizer_arguments["optimizer"]),
        ),
        report,
        wide,
        json_,
    )


def _counted(found: ModelSource, optimizer: str) -> tuple[str, ...]:
    """A note on which optimizer's states are counted instead of those in a checkpoint; empty without states."""
    if found.optimizer is None:
        return ()
    split = " of the matrices whose momentum it holds, and AdamW's of the others" if optimizer == MUON else ""
    return (f"states are counted as {_TITLES[optimizer]}'s{split}; explain tells those that are there",)


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


def _states(
    found: ModelSource, preset: str | None, given: dict[str, Any], algorithm: str | None = None
) -> dict[str, Any]:
    """Arguments of `planning.plan` for the optimizer and its states.

    Options in `given` override the preset; without a preset, they override the settings of the model's run.

    Raises:
        ConfigurationError: an optimizer, preset or option value is unknown, or options contradict each other.
    """
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        choices = _CHOICES.get(name, tuple(MOMENT_DTYPES))
        if isinstance(value, str) and value not in choices:
            hint = f"{meant(value, choices)}choose one of {', '.join(choices)}"
            raise ConfigurationError(f"--{name.replace('_', '-')} {value}: {hint}")
    for name in ("master_dtype", "master_remainders") if options.get("master_weights") is False else ():
        if name in options:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} would do nothing beside --no-master-weights; leave one of the two out"
            )
    state_settings = state_options(preset or "", options if preset else as_settings(found.states) | options)
    optimizer_arguments = _algorithm(found, algorithm)
    unused = UNUSED_OPTIONS[optimizer_arguments["optimizer"]]
    for name in options:
        if STATE_SETTINGS[name] in unused:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} would do nothing beside {optimizer_arguments['optimizer']}; leave it out"
            )
    supported = {*STATE_SETTINGS.values()}.difference(unused)
    return {
        name: value for name, value in state_settings.muon_arguments.items() if name in supported
    } | optimizer_arguments


def _algorithm(found: ModelSource, given: str | None) -> dict[str, Any]:
    """Name of the optimizer and, for Muon, the output head."""
    name = given or (ADAMW if found.settings is None else found.settings.optimizer)
    if name not in ALGORITHMS:
        raise ConfigurationError(f"--optimizer {name}: {meant(name, ALGORITHMS)}choose one of {', '.join(ALGORITHMS)}")
    if name == MUON and found.is_stored:
        return {"optimizer": name, "head": _stored_head(found)}
    head = muon_head(found.model, found.settings) if name == MUON and found.settings is not None else None
    return {"optimizer": name, "head": head}


def _stored_head(found: ModelSource) -> list[str]:
    """Patterns for matrices of a checkpoint that Muon does not update: those without a momentum state.

    Raises:
        ConfigurationError: there is no momentum state, or a parameter that is not a matrix has one (as under SGD).
    """
    states = {} if found.optimizer is None else found.optimizer.state
    params = dict(found.model.named_parameters())
    with_momentum = [name for name, param in params.items() if MOMENTUM_BUFFER in states.get(param, {})]
    non_matrices = [name for name in with_momentum if params[name].ndim != 2]
    if not with_momentum or non_matrices:
        why = (
            f"{non_matrices[0]}, which is no matrix, has momentum" if non_matrices else "it holds no momentum of Muon's"
        )
        raise ConfigurationError(
            "--optimizer muon: a checkpoint does not say which layer gives the logits, nor do the states of this one: "
            f"{why}; name its run, or a config.json"
        )
    return [glob.escape(name) for name, param in params.items() if param.ndim == 2 and name not in with_momentum]


def _show(found: ModelSource, told: tuple[str, ...], report: Report, wide: bool, as_json: bool) -> None:
    if as_json:
        say_whole(json.dumps({"source": list(told), "left": list(found.left), **report.to_dict()}, indent=2))
        return
    screen = Screen(wide=wide)
    screen.lines(*told, "")
    screen.print(report if wide else report.summary(WIDER))
    screen.lines(*found.left)
