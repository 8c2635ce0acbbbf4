"""torchtitan: linear layers with quantized weights and FusedAdam, enabled by its overrides or a converter."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import derive, override
from torchtitan.models.common.linear import Linear as PlainLinear
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from quantshard.errors import ConfigurationError
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.interop.conversion.selection import HEADS, ROUTERS
from quantshard.modules import quantized_model_init
from quantshard.modules.contexts.layer_recipes import check_patterns, matches
from quantshard.optimizers import FusedAdam
from quantshard.recipe import AUTO, concrete_name, resolve
from quantshard.tensor.components import FORMAT_SUFFIX

__all__ = ["TitanConverter", "TitanLinear", "TitanOptimizers", "linear", "optimizer"]

LAYERS = ["*.attention.*", "*.feed_forward.*", "*.shared_experts.w?"]
"""Layers replaced by the override `linear`; excludes the head and routers."""

ADAMS = {"AdamW": True, "Adam": False}
"""Optimizer name in torchtitan's configs -> FusedAdam's `adam_w_mode`."""


@dataclass(kw_only=True, slots=True)
class TitanLinearConfig(PlainLinear.Config):
    """torchtitan's Linear config with a quantization recipe. `recipe`: name of the recipe."""

    recipe: str = AUTO


class TitanLinear(ConvertedLinear, Module):
    """torchtitan's linear layer with a quantized weight. Enters its recipe unless the caller is in an autocast."""

    Config = TitanLinearConfig
    _param_init: dict[str, Callable[..., Any]] | None = None  # set by torchtitan, after the constructor

    def __init__(self, config: TitanLinearConfig) -> None:
        recipe = resolve(config.recipe)
        with quantized_model_init(recipe=recipe):
            super().__init__(config.in_features, config.out_features, bias=config.bias)
        self.recipe = self.model_recipe = concrete_name(config.recipe)

    def forward(self, input: Tensor) -> Any:  # type: ignore[override]  # torchtitan looks for an argument of this name
        return super().forward(input)

    def parallelize(self, parallel_dims: Any) -> None:
        """Apply torchtitan's parallelization, which must leave weights to FSDP2."""
        if parallel_dims.tp > 1:
            raise ConfigurationError(f"{type(self).__name__} has no TP; use --parallelism.tensor_parallel_degree 1")
        if parallel_dims.spmd_backend != "partial_dtensor":
            raise ConfigurationError(f"{type(self).__name__} needs --parallelism.spmd_backend partial_dtensor")
        super().parallelize(parallel_dims)

    def _init_self_parameters(self) -> None:
        """Run the config's initializers with per-weight RNG keys, so that results do not depend on the mesh."""
        initializers = self._param_init or {}
        if initializers:
            for name, spec in self._weights.items():
                self._weights[name] = replace(spec, init_method=initializers[name])
        self.reset_parameters()
        for name in self._vectors if initializers else ():
            initializers[name](self.get_parameter(name))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load like `Linear`, but shard replicated codes: torchtitan joins a fused projection's codes on every rank."""
        live = self.state_dict(prefix=prefix, keep_vars=True)
        resharded = {key: _as_live(value, live.get(key)) for key, value in state_dict.items() if key.startswith(prefix)}
        super()._load_from_state_dict(resharded, prefix, *args)


def _as_live(value: Any, live: Any) -> Any:
    if isinstance(value, DTensor) and isinstance(live, DTensor) and all(p.is_replicate() for p in value.placements):
        return value.redistribute(live.device_mesh, live.placements)
    return value


@dataclass(kw_only=True, slots=True)
class TitanConverterConfig(QuantizationConverter.Config):
    """Config of TitanConverter. `filter`: patterns as in `quantshard.convert`; default: all but head and routers."""

    recipe: str = AUTO
    filter: list[str] = field(default_factory=list)


class TitanConverter(QuantizationConverter):
    """Converts a model's linear layers, for `model_registry(flavor, converters=[TitanConverter.Config()])`."""

    Config = TitanConverterConfig

    def __init__(self, config: TitanConverterConfig) -> None:
        resolve(config.recipe)
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace the configs of the selected linear layers in place, and return the model config."""
        plain = [entry for entry in model_config.traverse(PlainLinear.Config) if type(entry[1]) is PlainLinear.Config]
        check_patterns("TitanConverter(filter=", self.config.filter, [name for name, *_ in plain])
        selected = [entry for entry in plain if self._chooses(entry[0])]
        if not selected:
            raise ConfigurationError(f"TitanConverter selects none of {len(plain)} plain linear layers")
        for _, config, parent, attribute in selected:
            new = derive(config, TitanLinearConfig, recipe=self.config.recipe)
            if isinstance(parent, list):
                parent[attribute] = new
            else:
                setattr(parent, attribute, new)
        logger.info(f"quantshard: {len(selected)} of {len(plain)} linear layers have weights of {self.config.recipe}")
        return model_config

    def _chooses(self, name: str) -> bool:
        if self.config.filter:
            return any(matches(pattern, name) for pattern in self.config.filter)
        return name.rsplit(".", 1)[-1] not in HEADS | ROUTERS


@dataclass(kw_only=True, slots=True)
class TitanOptimizersConfig(OptimizersContainer.Config):
    """torchtitan's OptimizersContainer config. `implementation` is ignored."""


class TitanOptimizers(OptimizersContainer):  # type: ignore[type-arg]
    """torchtitan's optimizers, with FusedAdam for AdamW and Adam."""

    Config = TitanOptimizersConfig

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., FusedAdam]:
        if name not in ADAMS:
            raise ConfigurationError(f"TitanOptimizers: {name!r} has no masters; use {' or '.join(ADAMS)}")
        return partial(FusedAdam, adam_w_mode=ADAMS[name])

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        return {}


def _guarded(method: Callable[..., Any], flag: str, instead: str) -> Callable[..., Any]:
    """Wrap a torchtitan method so that it rejects quantized weights if its argument `flag` is true."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        tagged = [key.removesuffix(FORMAT_SUFFIX) for key in arguments["state_dict"] if key.endswith(FORMAT_SUFFIX)]
        if arguments.get(flag) and tagged:
            problem = f"{flag} would read codes as values ({tagged[0]})"
            raise ConfigurationError(f"{problem}; use quantshard.checkpoints.{instead}")
        return method(*args, **kwargs)

    return checked


# The adapter maps names and silently drops unknown ones, so the check must run before it.
CheckpointManager.dcp_save = _guarded(CheckpointManager.dcp_save, "to_hf", "high_precision_state_dict")
CheckpointManager.dcp_load = _guarded(CheckpointManager.dcp_load, "from_hf", "load_high_precision")


@override(target=PlainLinear.Config, fqns=LAYERS, description="quantized weights, by quantshard")
def linear(config: PlainLinear.Config, recipe: str = AUTO) -> TitanLinearConfig:
    """Override linear layers: `--override.imports 'quantshard.integrations.torchtitan.linear={"recipe": ...}'`.

    Applies to the layers in `LAYERS`; `TitanConverter` accepts other patterns.
    """
    resolve(recipe)
    if type(config) is not PlainLinear.Config:
        name = type(config).__qualname__
        raise ConfigurationError(f"torchtitan.linear: {name} computes in its own way; TitanConverter skips it")
    return derive(config, TitanLinearConfig, recipe=recipe)


@override(target=OptimizersContainer.Config, description="FusedAdam, by quantshard")
def optimizer(config: OptimizersContainer.Config) -> TitanOptimizersConfig:
    """Override the optimizers: `--override.imports quantshard.integrations.torchtitan.optimizer`."""
    return derive(config, TitanOptimizersConfig)
