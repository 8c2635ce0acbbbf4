"""TransformerEngine's `pytorch.graph`: `make_graphed_callables` with its arguments, old names and new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from quantshard import modules as layers
from quantshard.errors import ConfigurationError
from quantshard.recipe import Recipe

__all__ = ["make_graphed_callables"]

_REFUSED = {
    "calibrating": "train with delayed scaling instead",
    "fp8_calibrating": "train with delayed scaling instead",
    "_order": "callables run in the order in which they are given; capture those of each pipeline stage by themselves",
    "_num_layers_per_chunk": "leave it out",
    "retain_graph_in_backward": "a backward runs once for each forward; leave it out",
    "_reuse_graph_input_output_buffers": "leave it out",
    "pre_warmup_hook": "run it before the call",
    "post_warmup_hook": "run it after the call",
    "capture_time_hooks": "hooks run outside of the graphs; register them after the capture",
}
_HINTS = ("fp8_weight_caching", "cache_quantized_params")
"""Weights that are stored quantized are not quantized again; others are in each replay, to the same codes."""


def make_graphed_callables(
    modules: Any,
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    fp8_enabled: bool | None = None,
    fp8_recipe: str | Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
    enabled: bool | None = None,
    recipe: str | Recipe | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
    pool: Any = None,
    **others: Any,
) -> Any:
    """`quantshard.make_graphed_callables`; `fp8_enabled`, `fp8_recipe` and `fp8_group` are `enabled`, `recipe` and
    `amax_reduction_group`, and GEMMs run in high precision unless it is enabled, as in TransformerEngine.

    Raises:
        ConfigurationError: as there; for what is not supported of TransformerEngine's; for both names of one argument.
    """
    for name, value in others.items():
        if name not in _REFUSED and name not in _HINTS:
            raise TypeError(f"make_graphed_callables() got an unexpected keyword argument {name!r}")
        if name in _REFUSED and value not in (None, False):
            raise ConfigurationError(f"make_graphed_callables({name}={value!r}) is not supported: {_REFUSED[name]}")
    pairs = {
        "enabled": (enabled, fp8_enabled),
        "recipe": (recipe, fp8_recipe),
        "amax_reduction_group": (amax_reduction_group, fp8_group),
    }
    for name, (new, old) in pairs.items():
        if new is not None and old is not None:
            raise ConfigurationError(f"make_graphed_callables: give {name} or its old name, not both")
    return layers.make_graphed_callables(
        modules,
        sample_args,
        num_warmup_iters,
        allow_unused_input,
        sample_kwargs,
        enabled=bool(enabled or fp8_enabled),
        recipe=recipe if recipe is not None else fp8_recipe,
        amax_reduction_group=amax_reduction_group if amax_reduction_group is not None else fp8_group,
        pool=pool,
    )
