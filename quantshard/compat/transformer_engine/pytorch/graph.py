"""TransformerEngine's `pytorch.graph`: `make_graphed_callables` with old and new argument names."""

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
    "_order": "callables run in the given order; capture each pipeline stage by itself",
    "_num_layers_per_chunk": "leave it out",
    "retain_graph_in_backward": "leave it out",
    "_reuse_graph_input_output_buffers": "leave it out",
    "_input_output_aliases": "leave it out",
    "capture_stream": "leave it out",
    "pre_warmup_hook": "run it before the call",
    "post_warmup_hook": "run it after the call",
    "capture_time_hooks": "register hooks after the capture",
}
_HINTS = ("_clone_param_grads_on_return",)
"""Arguments without effect, because gradients are always cloned. Likewise `cache_quantized_params`: weights stored
quantized are not quantized again, and others are quantized in each replay to the same codes."""


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
    others |= {
        "fp8_calibrating": fp8_calibrating,
        "calibrating": calibrating,
        "_order": _order,
        "_num_layers_per_chunk": _num_layers_per_chunk,
    }
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
    settings: dict[str, Any] = {name: old if new is None else new for name, (new, old) in pairs.items()}
    return layers.make_graphed_callables(
        modules,
        sample_args,
        num_warmup_iters,
        allow_unused_input,
        sample_kwargs,
        **settings | {"enabled": False if settings["enabled"] is None else settings["enabled"]},
        pool=pool,
    )
