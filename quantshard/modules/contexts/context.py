"""The two contexts: `quantized_model_init` selects how weights are stored, `autocast` how GEMMs run."""

import threading
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard.errors import ConfigurationError
from quantshard.modules.contexts import pending_amaxes, settings
from quantshard.recipe import HighPrecision, Recipe, resolve


@dataclass(frozen=True)
class InitPlan:
    """How a module stores its weights. `is_open`: no context chose this, so `quantize_` may choose again."""

    recipe: Recipe
    quantize: bool
    preserve_high_precision: bool
    is_open: bool = False


_HIGH_PRECISION_INIT = InitPlan(HighPrecision(), quantize=False, preserve_high_precision=False, is_open=True)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.init_plans: list[InitPlan] = []
        self.autocasts: list[autocast] = []


_thread = _ThreadState()


def current_setting() -> str:
    """Name of the innermost autocast's setting."""
    return _thread.autocasts[-1].setting if _thread.autocasts else settings.NO_AUTOCAST


def init_plan() -> InitPlan:
    """The plan for a module that is being built."""
    return _thread.init_plans[-1] if _thread.init_plans else _HIGH_PRECISION_INIT


def in_autocast() -> bool:
    """True inside an autocast, also one with `enabled=False`."""
    return len(_thread.autocasts) > 0  # torch 2.11 cannot trace bool(list), so converted layers would not be compiled


def runs_by(recipe: str | Recipe) -> bool:
    """Return whether the innermost autocast uses this recipe object; false while compiling."""
    return not torch.compiler.is_compiling() and settings.registered[current_setting()].recipe is resolve(recipe)


def is_strict() -> bool:
    """Return whether the innermost autocast turns fallbacks into errors."""
    return settings.registered[current_setting()].strict


def _leave(entered: list[Any], one: object) -> None:
    """Remove a context from the stack. Generators can leave contexts out of order, so it need not be the last."""
    if entered[-1] is one:
        entered.pop()
    else:
        del entered[max(index for index, context in enumerate(entered) if context is one)]


class quantized_model_init(ContextDecorator):
    """Context that stores the weights of modules built inside quantized.

    The context affects only the thread that entered it. As a decorator, it is entered again on each call; do not
    decorate generators and coroutines, whose bodies run after the call.

    Args:
        enabled: False builds high-precision weights, e.g. for one module inside another context.
        recipe: a `Recipe` or its name, for its weight format. Default: "auto", as for `autocast`. With
            `enabled=False` the recipe only prepares for an autocast: under delayed scaling the amax histories exist
            from the start, and are in the state dict before the first step. For recipes that differ by layer, see
            `quantize_`.
        preserve_high_precision_init_val: keep each weight's initial high-precision values on the CPU to initialize the
            optimizer's masters (`get_high_precision_init_val` of the weight, or of its `to_local()` for a DTensor).
    """

    def __init__(
        self, enabled: bool = True, recipe: str | Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        settings.check_flags("quantized_model_init", enabled=enabled)
        resolved = resolve(recipe)
        self.plan = InitPlan(resolved, enabled and resolved.weight is not None, preserve_high_precision_init_val)

    def __enter__(self) -> None:
        _thread.init_plans.append(self.plan)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _leave(_thread.init_plans, self.plan)


class autocast(ContextDecorator):
    """Context that quantizes the GEMMs of modules called inside.

    Contexts nest and are per thread, as with `torch.autocast`; the innermost applies. Backward and recomputation use
    the recipe of their forward on any thread. At the exit of the outermost context, delayed scaling reduces the amaxes
    of this thread over the ranks in one collective and records them. As a decorator, it is entered again on each call.

    Args:
        enabled: False runs in high precision inside another autocast; quantized weights are then dequantized.
        recipe: a `Recipe` or its name. Default: "auto", which is "mxfp8" on Blackwell GPUs and "current" elsewhere.
        amax_reduction_group: the processes over which delayed scaling reduces amaxes (default: all). The group of a
            tensor-parallel layer always takes part. Histories are equal only within a group, and a checkpoint holds the
            histories of the group of rank 0.
        strict: raise if a layer of quantshard would take a slower path than its native one (`limits.FALLBACKS`), also
            in backward. `explain(strict=True)` also checks other modules, sharding and the optimizer.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: str | Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
        strict: bool = False,
    ) -> None:
        settings.check_flags("autocast", enabled=enabled, strict=strict)
        if amax_reduction_group is not None and torch.compiler.is_compiling():
            raise ConfigurationError("autocast(amax_reduction_group=): enter it around the compiled function")
        self.setting = settings.setting_name(enabled, recipe, amax_reduction_group, strict)
        self.group = amax_reduction_group  # keeps the group alive, which the setting does not
        self.records = settings.is_delayed(self.setting)
        self.strict = strict

    def __enter__(self) -> None:
        if not _thread.autocasts and not torch.compiler.is_compiling():
            pending_amaxes.drop_failed_backward()
        _thread.autocasts.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _leave(_thread.autocasts, self)
        if _thread.autocasts:
            if self.records:
                _thread.autocasts[-1].records = True
        elif torch.compiler.is_compiling():
            if self.records:
                torch.ops.quantshard.record_forward_amaxes(kind is not None)
        elif kind is None:
            pending_amaxes.forward_amaxes().flush()
        else:
            pending_amaxes.forward_amaxes().drop()  # no collective, because other ranks need not have failed


def autocast_by(recipe: str | Recipe) -> autocast:
    """Create an autocast with another recipe and the other arguments of the innermost one."""
    innermost = _thread.autocasts[-1]
    return autocast(recipe=recipe, amax_reduction_group=innermost.group, strict=innermost.strict)


# PyTorch's autocast ---------------------------------------------------------------------------------------------------


def autocast_input(x: Tensor) -> Tensor:
    """Cast x to the dtype of the active `torch.autocast` of its device, if there is one. float64 is not cast."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x
