"""The two contexts: `quantized_model_init` decides how weights are stored, `autocast` how GEMMs run."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from quantshard import private_torch
from quantshard.amax import PendingAmaxes
from quantshard.errors import ConfigurationError
from quantshard.recipe import HighPrecision, Recipe, resolve


@dataclass(frozen=True)
class InitPlan:
    """How modules that are built now store their weights."""

    recipe: Recipe
    quantize: bool
    preserve_high_precision: bool


_HIGH_PRECISION_INIT = InitPlan(HighPrecision(), quantize=False, preserve_high_precision=False)
_init_plans: list[InitPlan] = []
_autocasts: list[autocast] = []

_flush_is_queued = False

forward_amaxes = PendingAmaxes()
"""Amaxes of inputs and weights seen since the outermost autocast was entered."""

backward_amaxes = PendingAmaxes()
"""Amaxes of output gradients seen in the running backward pass."""


def init_plan() -> InitPlan:
    """How a module built now stores its weights."""
    return _init_plans[-1] if _init_plans else _HIGH_PRECISION_INIT


def current_recipe() -> Recipe:
    """The recipe of the innermost autocast, or high precision outside of one."""
    return _autocasts[-1].effective_recipe if _autocasts else HighPrecision()


def current_amax_group() -> dist.ProcessGroup | None:
    """The group over which the innermost autocast reduces delayed-scaling amaxes; None without process groups."""
    group = _autocasts[-1].amax_reduction_group if _autocasts else None
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def in_autocast() -> bool:
    """True inside an autocast, an `enabled=False` one included."""
    return bool(_autocasts)


def is_strict() -> bool:
    """True if the innermost autocast turns fallbacks into errors."""
    return bool(_autocasts) and _autocasts[-1].strict


def flush_after_backward() -> None:
    """Record the amaxes of output gradients when the backward pass now running ends.

    Called first thing in a recomputed forward too: a reentrant checkpoint then runs a backward pass within this one, at
    whose end it would be too early.
    """
    global _flush_is_queued
    if not _flush_is_queued:
        _flush_is_queued = True
        private_torch.at_end_of_backward(_flush_backward)


def _flush_backward() -> None:
    global _flush_is_queued
    _flush_is_queued = False
    backward_amaxes.flush()


class quantized_model_init:
    """Modules built inside store their weights quantized.

    Args:
        enabled: False builds high-precision weights, e.g. for one module inside another context.
        recipe: a `Recipe` or its name; its weight format is used. With `enabled=False` the recipe only tells which
            autocast to prepare for: under delayed scaling the amax histories exist from the start, and are in the state
            dict before the first step.
        preserve_high_precision_init_val: keep each weight's initial high-precision values on the CPU, to seed the
            optimizer's masters from: `get_high_precision_init_val` of the weight, or of its `to_local()` if it is a
            DTensor.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: str | Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        resolved = resolve(recipe)
        self.plan = InitPlan(resolved, enabled and resolved.weight is not None, preserve_high_precision_init_val)

    def __enter__(self) -> None:
        _init_plans.append(self.plan)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _init_plans.pop()


def _drop_backward() -> None:
    global _flush_is_queued
    _flush_is_queued = False
    backward_amaxes.drop()


class autocast:
    """GEMMs of modules called inside are quantized by the recipe.

    Contexts nest; the innermost decides. At the exit of the outermost one, the amaxes that delayed scaling saw are
    reduced over the ranks and recorded, in one collective.

    Args:
        enabled: False runs in high precision inside another autocast; quantized weights are then dequantized.
        recipe: a `Recipe` or its name (default: current scaling).
        amax_reduction_group: the processes over which delayed scaling reduces amaxes (default: all). Histories are
            equal within a group only, and a checkpoint holds those of the group of rank 0.
        strict: raise where a layer would take a slower path than its native one (`limits.FALLBACKS`), backward passes
            included.

    Raises:
        FallbackError: under `strict`, from a module's forward.
        ConfigurationError: one instance is entered twice; make a new one each time.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: str | Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
        strict: bool = False,
    ) -> None:
        if calibrating:
            raise ConfigurationError("autocast(calibrating=True) is not supported: train with delayed scaling instead")
        self.effective_recipe = resolve(recipe) if enabled else HighPrecision()
        self.amax_reduction_group, self.strict = amax_reduction_group, strict

    def __enter__(self) -> None:
        if self in _autocasts:
            raise ConfigurationError("this autocast is already entered; make a new one each time")
        if not _autocasts and not private_torch.in_backward():
            _drop_backward()  # of a backward pass that failed; else no later one would flush
        _autocasts.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _autocasts.pop()
        if _autocasts:
            return
        if kind is None:
            forward_amaxes.flush()
        else:
            forward_amaxes.drop()  # other ranks may not have failed here: no collective
