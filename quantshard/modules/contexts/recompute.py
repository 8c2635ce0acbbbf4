"""Activation recomputation: the recomputed forward of a checkpointed region repeats the first forward bit for bit.

`torch.utils.checkpoint` runs a region's forward a second time in backward, outside of autocast and after delayed
scaling has recorded new amaxes. Each linear layer therefore stores a `LinearContext` with the region in the first
forward. The second forward reads the recipe and the amaxes to scale by from there, and records nothing.

`quantshard.checkpoint` counts the runs of its function and thus knows its region. A region of `torch.utils.checkpoint`
is looked up in PyTorch's state (`private_torch.checkpointed_regions`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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
    and its backward are recorded. `repeated`: whether this is a recomputed forward.
    """

    recipe: Recipe
    group: dist.ProcessGroup | None
    strict: bool
    amaxes: dict[tuple[TensorRole, int], Tensor] = field(default_factory=dict)
    record: bool = True
    repeated: bool = False


class _RegionContexts:
    """Calls of each layer in a region's first forward, in order, and the position of the current recomputation."""

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


class _CheckpointRegion:
    """The function of one `quantshard.checkpoint`. The first run is the first forward; later runs recompute it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.runs = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        _running.regions.append((self, self.runs, private_torch.current_backward()))
        try:
            return self.function(*args, **kwargs)
        finally:
            _running.regions.pop()


class _RunningRegions(threading.local):
    """Running regions of `quantshard.checkpoint` on this thread, innermost last: the region, the number of the run, and
    the id of the backward pass in which the run began, if any."""

    def __init__(self) -> None:
        self.regions: list[tuple[_CheckpointRegion, int, int | None]] = []


_running = _RunningRegions()


def _regions() -> CheckpointedRegions:
    """Checkpointed regions around the calling code, from `quantshard.checkpoint` and from PyTorch."""
    regions = private_torch.NO_REGIONS
    if private_torch.may_be_checkpointed():
        regions = private_torch.checkpointed_regions()
    if not _running.regions:
        return regions
    backward, entered = private_torch.current_backward(), list(regions.entered)
    for region, run, began in reversed(_running.regions):
        if began != backward:
            break  # a nested backward pass is running: the caller belongs to a region that this pass recomputes
        if run > 1:
            return CheckpointedRegions(tuple(entered), region, run)
        entered.append(region)
    return replace(regions, entered=tuple(entered))


def in_region() -> bool:
    """True inside a checkpointed function, in the first forward or in a recomputation."""
    regions = _regions()
    return bool(regions.entered) or regions.replayed is not None


def linear_context(layer: Layer, quantized: bool, training: bool, setting: str | None = None) -> LinearContext:
    """Return the context of a layer's forward, from autocast or, in a recomputation, from the first forward.

    `training`: training mode of the module. `setting`: name of the autocast setting that the running code was compiled
    for; None in eager code.
    """
    regions = _regions()
    if regions.replayed is None:
        autocast_setting = settings.registered[setting or context.current_setting()]
        if regions.unknown is not None and (quantized or settings.has_quantized()):
            raise regions.unknown
        if regions is not private_torch.NO_REGIONS and private_torch.in_backward():
            _check_known_without_first(quantized, setting)
        # As in TransformerEngine, only a differentiated forward records: in generation, ranks can run different numbers
        # of forwards. The first forward of a reentrant region, and compiled code, run under no_grad.
        differentiated = torch.is_grad_enabled() or bool(regions.entered) or setting is not None
        recipe, strict = autocast_setting.recipe, autocast_setting.strict
        group = autocast_setting.amax_reduction_group if recipe.is_delayed else None
        current = LinearContext(recipe, group, strict, record=training and differentiated)
    else:
        first, names = _calls_of(regions.replayed).next(layer, regions.replay), ",".join(layer[1])
        if first is None:
            raise UnsupportedOperationError(
                f"activation recomputation called the layer of {names!r} more often than the first forward did; "
                "a checkpointed function must do the same each time"
            )
        if setting is not None and settings.registered[setting].recipe != first.recipe:
            raise UnsupportedOperationError(
                f"activation recomputation of a compiled function calls the layer of {names!r} outside of the "
                "autocast that its first forward ran in, and a graph is compiled for one recipe; enter autocast inside "
                "the checkpointed function, or compile the function that checkpoints"
            )
        current = replace(first, repeated=True)
    for region in regions.entered:
        _calls_of(region).made[layer].append(current)
    return current


def _calls_of(region: Any) -> _RegionContexts:
    if not hasattr(region, _CALLS):
        setattr(region, _CALLS, _RegionContexts())  # freed together with the region, which autograd keeps alive
    calls: _RegionContexts = getattr(region, _CALLS)
    return calls


def _check_known_without_first(quantized: bool, setting: str | None) -> None:
    """Reject a forward in backward, outside of torch.utils.checkpoint, if it needs its unknown first forward."""
    delayed = settings.is_delayed(setting or context.current_setting())
    if delayed or (quantized and setting is None and not context.in_autocast()):
        way_out = "" if delayed else ", or enter autocast in the recomputed function"
        raise UnsupportedOperationError(limits.refusal("unknown first forward", "a linear layer") + way_out)


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` without keeping its activations, and recompute them in backward.

    The gradients have the same bits as without checkpointing. This is `torch.utils.checkpoint` with TransformerEngine's
    arguments. PyTorch's own `torch.utils.checkpoint` and `checkpoint_wrapper` are supported too.

    Args:
        function: a module or function.
        use_reentrant: which implementation of `torch.utils.checkpoint`.
        **kwargs: other arguments of `torch.utils.checkpoint.checkpoint` (`preserve_rng_state`, `context_fn`,
            `determinism_check`, `debug`), and keyword arguments of the function, which PyTorch does not accept with
            `use_reentrant`.
    """
    if use_reentrant:
        function, args, kwargs = _by_position(function, args, kwargs)
    if not torch.compiler.is_compiling():  # a compiled graph handles recomputation itself
        function = _CheckpointRegion(function)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")  # not the function's


def _by_position(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Convert keyword arguments to positional ones, the only ones that the reentrant implementation accepts."""
    options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    names = [name for name in kwargs if name not in options]
    if not names:
        return function, args, options
    count = len(args)

    def call_by_name(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return call_by_name, (*args, *(kwargs[name] for name in names)), options
