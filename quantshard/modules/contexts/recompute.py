"""Activation recomputation: what the first forward of a checkpointed region did, its second forward does again.

`torch.utils.checkpoint`, reentrant or not, runs a region's forward a second time in backward. By then autocast was
left, and delayed scaling has recorded new amaxes. So each linear layer leaves a `LinearContext` with the region, and
the second forward takes the recipe and the amaxes to scale by from there: it quantizes to the same bits and records
nothing twice.

Which region that is `quantshard.checkpoint` knows by itself: it tells the first run of its function from later ones. Of
`torch.utils.checkpoint` it must be found out (`private_torch.checkpointed_regions`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from quantshard import limits, private_torch
from quantshard.argument_kinds import CALLABLE, check_arguments
from quantshard.errors import UnsupportedOperationError
from quantshard.modules.contexts import context, context_warnings, unsupported
from quantshard.private_torch import CheckpointedRegions
from quantshard.recipe import Recipe, TensorRole

Layer = tuple[int, str]
"""A linear layer: id of its module, and the names of its weights there."""

_CALLS = "_quantshard_calls"


@dataclass
class LinearContext:
    """One forward of one linear layer.

    `group`: over which delayed scaling reduces amaxes. `amaxes`: those to scale by under delayed scaling, kept by the
    first forward, of the input (0) and of each weight. `strict`: no fallback is taken. `record`: whether its amaxes,
    and those of its backward, are recorded. `repeated`: this is a second forward, whose amaxes were recorded by the
    first.
    """

    recipe: Recipe
    group: dist.ProcessGroup | None
    strict: bool
    amaxes: dict[tuple[TensorRole, int], Tensor] = field(default_factory=dict)
    record: bool = True
    repeated: bool = False


class _RegionContexts:
    """The calls in the first forward of a region, in order for each layer, and how far a second one has come."""

    def __init__(self) -> None:
        self.made: dict[Layer, list[LinearContext]] = defaultdict(list)
        self.replay: Any = None
        self.repeated: dict[Layer, int] = {}

    def next(self, layer: Layer, replay: Any) -> LinearContext | None:
        if replay != self.replay:
            self.replay, self.repeated = replay, {}
        index = self.repeated.get(layer, 0)
        self.repeated[layer] = index + 1
        made = self.made[layer]
        return made[index] if index < len(made) else None


class _CheckpointRegion:
    """The function of one `quantshard.checkpoint`: its first run is the first forward, each later one recomputes it."""

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
    """The regions of `quantshard.checkpoint` that run on this thread, the innermost last: with which run of it that is,
    and the backward pass in which it began."""

    def __init__(self) -> None:
        self.regions: list[tuple[_CheckpointRegion, int, int | None]] = []


_running = _RunningRegions()


def _regions() -> CheckpointedRegions:
    """Which regions the calling code runs in, those of `quantshard.checkpoint` and others."""
    found = private_torch.checkpointed_regions()
    if not _running.regions:
        return found
    backward, entered = private_torch.current_backward(), list(found.entered)
    for region, run, began in reversed(_running.regions):
        if began != backward:
            break  # a backward pass within this run: what runs now belongs to what that pass recomputes
        if run > 1:
            return CheckpointedRegions(tuple(entered), region, run)
        entered.append(region)
    return replace(found, entered=tuple(entered))


def in_region() -> bool:
    """True in a checkpointed function: in its first forward or where it is recomputed."""
    found = _regions()
    return bool(found.entered) or found.replayed is not None


def linear_context(layer: Layer, quantized: bool, training: bool, setting: str | None = None) -> LinearContext:
    """How a layer is to be computed now: as autocast says, or in a second forward as in the first.

    `training`: the mode of its module. `setting`: that of autocast when the running code was compiled; None if it was
    not.

    Raises:
        UnsupportedOperationError: a forward runs again, but nothing was kept of the first.
        TorchVersionError: a forward runs again, and this version of PyTorch does not tell of which region.
    """
    context_warnings.counts.run += 1
    regions = _regions()
    if regions.replayed is None:
        asked = context.setting(setting or context.current_setting())
        if regions.unknown is not None and (quantized or context.has_quantized()):
            raise regions.unknown
        if regions is not private_torch.NO_REGIONS and private_torch.in_backward():
            _check_known_without_first(quantized, setting)
        # Ranks may generate texts of different lengths: as in TransformerEngine, only a forward that is differentiated
        # records. The first one of a reentrant region runs under no_grad, and compiled code always does.
        differentiated = torch.is_grad_enabled() or bool(regions.entered) or setting is not None
        current = LinearContext(
            asked.recipe, asked.amax_reduction_group, asked.strict, record=training and differentiated
        )
    else:
        first = _calls_of(regions.replayed).next(layer, regions.replay)
        if first is None:
            raise UnsupportedOperationError(
                f"activation recomputation called the layer of {layer[1]!r} more often than the first forward did; "
                "a checkpointed function must do the same each time"
            )
        if setting is not None and context.setting(setting).recipe != first.recipe:
            raise UnsupportedOperationError(
                f"activation recomputation of a compiled function calls the layer of {layer[1]!r} outside of the "
                "autocast that its first forward ran in, and a graph is compiled for one recipe; enter autocast inside "
                "the checkpointed function, or compile the function that checkpoints"
            )
        current = replace(first, repeated=True)
    for region in regions.entered:
        _calls_of(region).made[layer].append(current)
    return current


def _calls_of(region: Any) -> _RegionContexts:
    if not hasattr(region, _CALLS):
        setattr(region, _CALLS, _RegionContexts())  # lives as long as the region, which is what autograd keeps of it
    found: _RegionContexts = getattr(region, _CALLS)
    return found


def _check_known_without_first(quantized: bool, setting: str | None) -> None:
    """A forward in backward that is no recomputation of torch.utils.checkpoint: its first one is not known.

    One that torch.compile put into a graph runs by the setting that it was compiled for.
    """
    delayed = context.is_delayed(setting or context.current_setting())
    if delayed or (quantized and setting is None and not context.in_autocast()):
        way_out = "" if delayed else ", or enter autocast in the recomputed function"
        raise UnsupportedOperationError(limits.refusal("unknown first forward", "a linear layer") + way_out)


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`, keep none of its activations, and compute them again in backward.

    The recomputation uses the recipe and scales of this call, whatever autocast says by then, and records no amax a
    second time: the gradients have the same bits as without. This is `torch.utils.checkpoint` with TransformerEngine's
    arguments; that itself, and PyTorch's `checkpoint_wrapper`, do as well, with FSDP2 inside or outside.

    Args:
        function: a module or function.
        use_reentrant: which implementation of `torch.utils.checkpoint`.
        **kwargs: the other arguments of `torch.utils.checkpoint.checkpoint` (`preserve_rng_state`, `context_fn`,
            `determinism_check`, `debug`) and of the function, with `use_reentrant` too, which PyTorch's does not take;
            TransformerEngine's are in `unsupported`.
    """
    check_arguments("checkpoint", CALLABLE, function=function)
    refused = unsupported.ARGUMENTS["checkpoint"]
    unsupported.refuse("checkpoint", {name: kwargs.pop(name) for name in refused if name in kwargs})
    if use_reentrant:
        function, args, kwargs = _by_position(function, args, kwargs)
    if not torch.compiler.is_compiling():  # a graph is told by names what its layers do, and recomputes that
        function = _CheckpointRegion(function)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Arguments of `torch.utils.checkpoint.checkpoint` besides those that its function gets."""


def _by_position(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Function and arguments such that the function gets all by position: the reentrant implementation takes no others,
    and finds tensors that need gradients among those alone."""
    options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    names = [name for name in kwargs if name not in options]
    if not names:
        return function, args, options
    count = len(args)

    def call_by_name(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return call_by_name, (*args, *(kwargs[name] for name in names)), options
