"""Public names of the torchtitan integration; torchtitan finds an override by the module that defines it, so here."""

from __future__ import annotations

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive, override
from torchtitan.models.common.linear import Linear as PlainLinear

from quantshard.errors import ConfigurationError
from quantshard.interop.frameworks.torchtitan import (
    LAYERS,
    TitanConverter,
    TitanLinear,
    TitanLinearConfig,
    TitanOptimizers,
    TitanOptimizersConfig,
)
from quantshard.recipe import AUTO, resolve

__all__ = ["TitanConverter", "TitanLinear", "TitanOptimizers", "linear", "optimizer"]


@override(target=PlainLinear.Config, fqns=LAYERS, description="quantized weights, by quantshard")
def linear(config: PlainLinear.Config, recipe: str = AUTO) -> TitanLinearConfig:
    """The override of linear layers: `--override.imports 'quantshard.integrations.torchtitan.linear={"recipe": ...}'`.

    It takes the layers that `LAYERS` says; `TitanConverter` takes patterns.

    Raises:
        ConfigurationError: the recipe is not known, or the layer is of a class that computes in its own way.
    """
    resolve(recipe)
    if type(config) is not PlainLinear.Config:
        raise ConfigurationError(
            f"the override quantshard.integrations.torchtitan.linear met a {type(config).__qualname__} "
            f"[{config.out_features}, {config.in_features}], which computes in its own way; take that converter or "
            "backend out of the model's config, or use TitanConverter, which leaves such layers as they are"
        )
    return derive(config, TitanLinearConfig, recipe=recipe)


@override(target=OptimizersContainer.Config, description="FusedAdam, by quantshard")
def optimizer(config: OptimizersContainer.Config) -> TitanOptimizersConfig:
    """The override of the optimizers: `--override.imports quantshard.integrations.torchtitan.optimizer`."""
    return derive(config, TitanOptimizersConfig)
