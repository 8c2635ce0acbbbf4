"""Refuses combinations of settings that cannot work together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from quantshard.errors import ConfigurationError
from quantshard.gemm import hardware
from quantshard.tools.trainer.settings.mesh import MeshSpec
from quantshard.tools.trainer.settings.recipes import LayerRecipes
from quantshard.tools.trainer.settings.schema import shown_value
from quantshard.tools.trainer.settings.sizes import SIZES

_Asked = Callable[[Any], bool]

_ASKED: Final[dict[str, _Asked]] = {
    "dropout": lambda settings: settings.dropout > 0,
    "experts": lambda settings: settings.experts > 0,
    "architecture = 'gpt'": lambda settings: settings.architecture == "gpt",
    "master_weights = false": lambda settings: not settings.master_weights,
    "statistics_every = 1": lambda settings: settings.statistics_every == 1,
    "recompute = 'activation'": lambda settings: settings.recompute == "activation",
    "activation_storage = 'fp8'": lambda settings: settings.stores_codes,
    "tp in the mesh": lambda settings: bool(settings.mesh) and MeshSpec.parse(settings.mesh).tp > 1,
    "ep in the mesh": lambda settings: bool(settings.mesh) and MeshSpec.parse(settings.mesh).ep > 1,
    "compile": lambda settings: settings.compile,
}
"""Features by their name in messages, and a test of whether the settings enable them."""

_OF_OUR_MODEL: Final = ("dropout", "recompute = 'activation'", "activation_storage = 'fp8'", "tp in the mesh")
"""Features of the built-in decoder that transformers models lack."""

_OF_DENSE_MODELS: Final = (
    "architecture = 'gpt'", "tp in the mesh", "recompute = 'activation'", "activation_storage = 'fp8'", "compile"
)  # fmt: skip
_NOT_COMPILED: Final = ("tp in the mesh",)
_NOT_CAPTURED: Final = (
    "dropout", "master_weights = false", "statistics_every = 1", "ep in the mesh"
)  # fmt: skip


def check_combinations(settings: Any) -> None:
    """Refuse incompatible settings of a `TrainSettings`.

    Raises:
        ConfigurationError: names both settings.
    """
    if not settings.is_by_sizes:
        for name in _asked(settings, _OF_OUR_MODEL):
            raise ConfigurationError(
                f"model = {shown_value(settings.model)} is one of transformers, for which there is no {name} here; "
                f"leave it out, or build the model by sizes ({', '.join(SIZES)}, or --hidden, --layers, ...)"
            )
    elif settings.experts:
        _check_experts(settings)
    for name in _asked(settings, _NOT_COMPILED) if settings.compile and settings.recipe != "bf16" else ():
        raise ConfigurationError(
            f"compile = true, and quantized layers are not compiled with {name}; leave one out, or take recipe = 'bf16'"
        )
    for name in _asked(settings, _NOT_CAPTURED) if settings.cuda_graphs else ():
        raise ConfigurationError(f"cuda_graphs = true, and a step with {name} is not captured; leave one out")
    if settings.stores_codes and settings.recompute == "layer" and settings.recompute_every == 1:
        raise ConfigurationError(
            f"activation_storage = {settings.activation_storage!r}, but with recompute = 'layer' no layer keeps "
            "activations until its backward, so gradients would be rounded for no memory; leave one of them out, "
            "or give recompute_every"
        )


def _check_experts(settings: Any) -> None:
    if settings.experts_per_token > settings.experts:
        raise ConfigurationError(
            f"experts_per_token = {settings.experts_per_token}, but there are experts = {settings.experts}, and a "
            "token goes to different ones"
        )
    for recipe in LayerRecipes.parse(settings.recipe).recipes.values() if settings.cuda_graphs else ():
        if recipe.table and hardware.block_together(recipe) is None:
            raise ConfigurationError(
                f"cuda_graphs = true, and experts by {recipe.name!r} go one by one, for which the host reads how many "
                "tokens each has; take delayed, current, block, mxfp8 or bf16, or leave cuda_graphs out"
            )
    for name in _asked(settings, _OF_DENSE_MODELS):
        raise ConfigurationError(
            f"experts = {settings.experts}, and there is no {name} of a mixture of experts here; leave one out"
        )


def _asked(settings: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if _ASKED[name](settings)]
