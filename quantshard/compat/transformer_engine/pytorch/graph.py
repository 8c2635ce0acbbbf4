"""TransformerEngine's `pytorch.graph`: `make_graphed_callables` with old and new argument names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from quantshard import modules as layers
from quantshard.compat.transformer_engine.arguments import supported
from quantshard.errors import ConfigurationError
from quantshard.recipe import Recipe

__all__ = ["make_graphed_callables"]


def make_graphed_callables(
    modules: Any,
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    fp8_enabled: bool | Sequence[bool] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: str | Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | Sequence[bool] | None = None,
    calibrating: bool | None = None,
    recipe: str | Recipe | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
    cache_quantized_params: bool | None = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    pool: Any = None,
    **others: Any,
) -> Any:
    """`quantshard.make_graphed_callables` with TransformerEngine's argument names.

    `fp8_enabled`, `fp8_recipe` and `fp8_group` are old names of `enabled`, `recipe` and `amax_reduction_group`. As in
    TransformerEngine, GEMMs run in high precision unless `enabled`, which is a flag for all callables or a tuple of
    flags.
    """
    named = {
        "fp8_calibrating": fp8_calibrating, "fp8_weight_caching": fp8_weight_caching, "calibrating": calibrating,
        "cache_quantized_params": cache_quantized_params, "_order": _order,
        "_num_layers_per_chunk": _num_layers_per_chunk, "pool": pool,
    }  # fmt: skip
    others |= {name: value for name, value in named.items() if value is not None}
    new, old = (enabled, recipe, amax_reduction_group), (fp8_enabled, fp8_recipe, fp8_group)
    if any(value is not None and old_value is not None for value, old_value in zip(new, old, strict=True)):
        raise ConfigurationError("make_graphed_callables: give each argument by its old or its new name, not both")
    enabled = fp8_enabled if enabled is None else enabled
    return layers.make_graphed_callables(
        modules,
        sample_args,
        num_warmup_iters,
        allow_unused_input,
        sample_kwargs,
        enabled=False if enabled is None else enabled,
        recipe=fp8_recipe if recipe is None else recipe,
        amax_reduction_group=fp8_group if amax_reduction_group is None else amax_reduction_group,
        **supported("make_graphed_callables", others),
    )
