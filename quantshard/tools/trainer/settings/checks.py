"""Refuses settings that cannot work together, or on a number of ranks."""

from __future__ import annotations

from typing import Any, Final

from quantshard.errors import ConfigurationError
from quantshard.formats import Role
from quantshard.gemm import hardware
from quantshard.tools.trainer.settings.mesh import MeshSpec
from quantshard.tools.trainer.settings.recipes import LayerRecipes
from quantshard.tools.trainer.settings.schema import shown_value

_OF_OUR_MODEL: Final = ("dropout", "recompute = 'activation'", "activation_storage = 'fp8'", "tp in the mesh")
"""Features of the built-in decoder that transformers models lack."""

_OF_DENSE_MODELS: Final = (
    "architecture = 'gpt'", "tp in the mesh", "recompute = 'activation'", "activation_storage = 'fp8'", "compile"
)  # fmt: skip
_NOT_CAPTURED: Final = ("dropout", "master_weights = false", "statistics_every = 1", "ep in the mesh")


def check(settings: Any) -> None:
    """Refuse incompatible settings of a `TrainSettings`."""
    if settings.head_size % 2 or (not settings.head_dim and settings.hidden % settings.heads):
        raise ConfigurationError(
            f"hidden = {settings.hidden} over heads = {settings.heads}: each head must get the same even number of "
            f"elements; or give head_dim (now {settings.head_dim}), an even number"
        )
    if settings.kv_heads and settings.heads % settings.kv_heads:
        raise ConfigurationError(f"kv_heads = {settings.kv_heads} must divide heads = {settings.heads}")
    if settings.micro_batch and settings.micro_batches != 1:
        raise ConfigurationError(
            f"micro_batch = {settings.micro_batch} and micro_batches = {settings.micro_batches} both say how a process "
            "takes its share of a step; give one of them"
        )
    if settings.weights and len(settings.weights) != len(settings.data):
        raise ConfigurationError(
            f"data_weights = {shown_value(settings.data_weights)}: {len(settings.weights)} given, and --data "
            f"{len(settings.data)} times; give one share for each, in order"
        )
    if settings.heldout_data and settings.heldout not in (0.0, type(settings).heldout):
        raise ConfigurationError(
            f"heldout = {settings.heldout} keeps a share of the data to evaluate on, and heldout_data names others; "
            "give one of them"
        )
    check_features(settings)
    if settings.mesh:
        _check_mesh(settings, MeshSpec.parse(settings.mesh))


def _enabled(settings: Any, names: tuple[str, ...]) -> list[str]:
    """Return which of these features the settings enable."""
    axes = MeshSpec.parse(settings.mesh) if settings.mesh else MeshSpec()
    features = {
        "dropout": settings.dropout > 0,
        "architecture = 'gpt'": settings.architecture == "gpt",
        "master_weights = false": not settings.master_weights,
        "statistics_every = 1": settings.statistics_every == 1,
        "recompute = 'activation'": settings.recompute == "activation",
        "activation_storage = 'fp8'": settings.activation_storage == "fp8",
        "tp in the mesh": axes.tp > 1,
        "ep in the mesh": axes.ep > 1,
        "compile": settings.compile,
    }
    return [name for name in names if features[name]]


def check_features(settings: Any) -> None:
    """Refuse features that the model, the compiler or a CUDA graph lacks."""
    if not settings.is_by_sizes:
        for name in _enabled(settings, _OF_OUR_MODEL):
            raise ConfigurationError(
                f"model = {shown_value(settings.model)} is one of transformers, for which there is no {name} here; "
                "leave it out, or build the model by sizes, such as gpt2-small, or --hidden, --layers, ..."
            )
    elif settings.experts:
        _check_experts(settings)
    if settings.compile and settings.recipe != "bf16" and _enabled(settings, ("tp in the mesh",)):
        raise ConfigurationError(
            "compile = true, and quantized layers are not compiled with tp in the mesh; leave one out, or take recipe "
            "= 'bf16'"
        )
    for name in _enabled(settings, _NOT_CAPTURED) if settings.cuda_graphs else ():
        raise ConfigurationError(f"cuda_graphs = true, and a step with {name} is not captured; leave one out")


def _check_experts(settings: Any) -> None:
    if settings.experts_per_token > settings.experts:
        raise ConfigurationError(
            f"experts_per_token = {settings.experts_per_token}, but there are experts = {settings.experts}, and a "
            "token goes to different ones"
        )
    for recipe in LayerRecipes.parse(settings.recipe).recipes.values() if settings.cuda_graphs else ():
        if recipe.table and hardware.block_together(recipe) is None:
            raise ConfigurationError(
                f"cuda_graphs = true needs experts that run in one kernel; {recipe.name!r} runs them one at a time"
            )
    for name in _enabled(settings, _OF_DENSE_MODELS):
        raise ConfigurationError(
            f"experts = {settings.experts}, and there is no {name} of a mixture of experts here; leave one out"
        )


def _check_mesh(settings: Any, axes: MeshSpec) -> None:
    if settings.dp_replicate not in (1, axes.dp_replicate):
        raise ConfigurationError(
            f"dp_replicate = {settings.dp_replicate}, but mesh = {axes} has dp_replicate = {axes.dp_replicate}; give "
            "it in the mesh alone"
        )
    if axes.ep > 1 and (not settings.experts or settings.experts % axes.ep):
        raise ConfigurationError(
            f"experts = {settings.experts}, but mesh = {axes} spreads them over ep = {axes.ep} processes; take a "
            f"multiple of {axes.ep}, or leave ep out"
        )
    if axes.tp == 1:
        return
    full = settings.resolved()
    for name in ("hidden", "heads", "kv_heads", "ffn"):
        if getattr(full, name) % axes.tp:
            raise ConfigurationError(
                f"{name} = {getattr(full, name)} cannot be divided evenly over tp = {axes.tp} processes (mesh = {axes})"
                f"; make it a multiple of {axes.tp}, or take another tp"
            )
    weights = [layer_recipe.weight for layer_recipe in LayerRecipes.parse(settings.recipe).recipes.values()]
    parts = [part for weight in weights if weight for part in weight.format.components]
    packed = max((max(part.block_shape) for part in parts if part.role is Role.CODES), default=1)
    if full.ffn // axes.tp % packed:
        raise ConfigurationError(
            f"ffn = {full.ffn} over tp = {axes.tp} processes (mesh = {axes}) is {full.ffn // axes.tp} each, but recipe "
            f"= {settings.recipe!r} stores {packed} elements in a byte; make ffn a multiple of {axes.tp * packed}"
        )


def check_ranks(settings: Any, ranks: int) -> None:
    """Refuse a number of ranks that the settings cannot be divided over."""
    if not settings.mesh and ranks % settings.dp_replicate:
        raise ConfigurationError(f"dp_replicate = {settings.dp_replicate} must divide the {ranks} processes")
    axes = settings.axes(ranks)
    if axes.processes != ranks:
        raise ConfigurationError(
            f"mesh = {axes} is of {axes.processes} processes, but --nproc-per-node, or the launcher, says {ranks}; "
            "make them equal, or leave --nproc-per-node out"
        )
    name = "micro_batch" if settings.micro_batch else "micro_batches"
    times = getattr(settings, name)
    parts = axes.data_parallel * times
    if settings.global_batch % parts:
        over = f"{ranks} processes" if axes.tp == 1 else f"{axes.data_parallel} data-parallel parts (mesh = {axes})"
        raise ConfigurationError(
            f"global_batch = {settings.global_batch} sequences cannot be split evenly over {over} x {name} = {times}; "
            f"make it a multiple of {parts}, or take another --nproc-per-node or --mesh"
        )
    if settings.sequence_parallel == "on" and axes.tp > 1 and not settings.divides_sequences(axes):
        raise ConfigurationError(
            f"sequence_parallel = 'on' divides the {settings.sequences_at_once(axes)} sequences of a micro-batch over "
            f"tp = {axes.tp} processes, which does not come out even; make global_batch a multiple of "
            f"{parts * axes.tp}, or take sequence_parallel = 'auto'"
        )
