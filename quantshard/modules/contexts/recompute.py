"""Activation recomputation: the recomputed forward of a checkpointed region repeats the first forward bit for bit.

`torch.utils.checkpoint` runs a region's forward a second time in backward, outside of autocast and after delayed
scaling has recorded new amaxes. Each linear layer therefore stores a `LinearContext` with the region in the first
forward. The second forward reads the recipe and the amaxes to scale by from there, and records nothing. Regions are
looked up in PyTorch's state (`private_torch.checkpointed_regions`).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils import checkpoint as torch_checkpoint

from quantshard import limits, private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.modules.contexts import context, settings
from quantshard.private_torch import CheckpointedRegions
from quantshard.recipe import Recipe, TensorRole

Layer = tuple[int, Sequence[str]]
"""A linear layer: id of its module, and the names of its weights in the module."""

_CALLS = "_quantshard_calls"


@dataclass
class LinearContext:
    """One forward of one linear layer.

    `group`: ranks that delayed scaling reduces amaxes over. `strict`: whether fallbacks raise. `amaxes`: amaxes that
    the first forward scaled by, for the input (index 0) and each weight. `record`: whether the amaxes of this forward
    and its backward are recorded. `repeated`: whether it is recomputed. `sequence_group`: ranks that share sequences.
    """

    recipe: Recipe
    group: dist.ProcessGroup | None
    strict: bool
    amaxes: dict[tuple[TensorRole, int], Tensor] = field(default_factory=dict)
    record: bool = True
    repeated: bool = False
    sequence_group: dist.ProcessGroup | None = None


class _RegionContexts:
    """Calls of each layer in a region's first forward, in order; the current recomputation and its calls so far."""

    def __init__(self) -> None:
        self.made: dict[Layer, list[LinearContext]] = defaultdict(list)
        self.replay: Any = None
        self.repeated: dict[Layer, int] = {}

    def next(self, layer: Layer, replay: Any) -> LinearContext | None:
        if replay != self.replay:
            self.replay, self.repeated = replay, {}
        index = self.repeated.get(layer, 0)
        self.repeated[layer] = index + 1
        contexts = self.made[layer]
        return contexts[index] if index < len(contexts) else None


def _regions() -> CheckpointedRegions:
    """The checkpointed regions around the calling code."""
    return private_torch.checkpointed_regions() if private_torch.may_be_checkpointed() else private_torch.NO_REGIONS


def in_region() -> bool:
    """True inside a checkpointed function, in the first forward or in a recomputation."""
    regions = _regions()
    return bool(regions.entered) or regions.replayed is not None


def is_repeated() -> bool:
    """True while a checkpointed function is recomputed."""
    return _regions().replayed is not None


def linear_context(layer: Layer, quantized: bool, training: bool, setting: str | None = None) -> LinearContext:
    """Return the context of a layer's forward, from autocast or, in a recomputation, from the first forward.
    `setting`: name of the autocast setting that the running code was compiled for; None in eager code."""
    regions = _regions()
    if regions.replayed is None:
        autocast_setting = settings.registered[setting or context.current_setting()]
        if regions.unknown is not None and (quantized or settings.has_quantized()):
            raise regions.unknown
        if regions is not private_torch.NO_REGIONS and private_torch.in_backward():
            # a recomputation, but not by torch.utils.checkpoint: its first forward is unknown
            is_delayed = autocast_setting.recipe.is_delayed
            if is_delayed or (quantized and setting is None and not context.in_autocast()):
                advice = "" if is_delayed else ", or enter autocast in the recomputed function"
                raise UnsupportedOperationError(limits.refusal("unknown first forward", "a linear layer") + advice)
        # As in TransformerEngine, only a differentiated forward records: in generation, ranks can run different numbers
        # of forwards. The first forward of a reentrant region, and compiled code, run under no_grad.
        differentiated = torch.is_grad_enabled() or bool(regions.entered) or setting is not None
        recipe, strict = autocast_setting.recipe, autocast_setting.strict
        group = autocast_setting.amax_reduction_group if recipe.is_delayed else None
        current = LinearContext(recipe, group, strict, record=training and differentiated)
        if not isinstance(functional.scaled_dot_product_attention, BuiltinFunctionType):
            current.sequence_group = private_torch.context_parallel_group()  # which replaces that function
    else:
        first, names = _calls_of(regions.replayed).next(layer, regions.replay), ",".join(layer[1])
        if first is None:
            raise UnsupportedOperationError(f"recomputation calls {names!r} more often than the first forward did")
        if setting is not None and settings.registered[setting].recipe != first.recipe:
            problem = f"recomputation of a compiled function calls {names!r} outside of its first forward's autocast"
            raise UnsupportedOperationError(f"{problem}; enter autocast inside the checkpointed function")
        current = replace(first, repeated=True)
    for region in regions.entered:
        _calls_of(region).made[layer].append(current)
    return current


def _calls_of(region: Any) -> _RegionContexts:
    if not hasattr(region, _CALLS):
        setattr(region, _CALLS, _RegionContexts())  # freed together with the region, which autograd keeps alive
    calls: _RegionContexts = getattr(region, _CALLS)
    return calls


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` without keeping its activations, and recompute them in backward.

    The gradients have the same bits as without checkpointing. This is `torch.utils.checkpoint` with TransformerEngine's
    arguments; PyTorch's own and `checkpoint_wrapper` are supported too.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
