"""Public names of the torchtitan integration. Overrides are defined here because torchtitan finds them by module."""

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
    """Override linear layers: `--override.imports 'quantshard.integrations.torchtitan.linear={"recipe": ...}'`.

    Applies to the layers in `LAYERS`; `TitanConverter` accepts other patterns.

    Raises:
        ConfigurationError: the recipe is unknown, or the layer's class has its own computation.
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
    """Override the optimizers: `--override.imports quantshard.integrations.torchtitan.optimizer`."""
    return derive(config, TitanOptimizersConfig)
