"""The two contexts: `quantized_model_init` decides how weights are stored, `autocast` how GEMMs run."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import private_torch
from quantshard.argument_kinds import PROCESS_GROUP, check_arguments, suggests_names
from quantshard.collectives.delayed_scaling import MISMATCHES, PendingAmaxes
from quantshard.collectives.process_groups import world
from quantshard.errors import ConfigurationError, is_told
from quantshard.modules.contexts import context_warnings
from quantshard.modules.contexts.context_warnings import InitWatch
from quantshard.modules.contexts.layer_recipes import RecipeByName, Recipes, by_name, check_recipes
from quantshard.modules.contexts.unnamed_layers import UnnamedLayers
from quantshard.recipe import HighPrecision, Recipe, TensorRole, resolve


@dataclass(frozen=True)
class InitPlan:
    """How modules that are built now store their weights.

    `unnamed`: those whose recipes are found by their names, later; until then they are built in high precision.
    """

    recipe: Recipe
    quantize: bool
    preserve_high_precision: bool
    unnamed: UnnamedLayers | None = None


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_INIT = "quantized_model_init"
_HIGH_PRECISION_INIT = InitPlan(HighPrecision(), quantize=False, preserve_high_precision=False)
_queued_flush: weakref.ReferenceType[_BackwardFlush] | None = None
_rehearses = False

backward_amaxes = PendingAmaxes()
"""Amaxes of output gradients seen in the running backward pass, which autograd spreads over threads of its own."""


class _ThreadState(threading.local):
    """The contexts that this thread has entered, and the forward amaxes of its outermost autocast."""

    def __init__(self) -> None:
        self.init_plans: list[InitPlan] = []
        self.autocasts: list[autocast] = []
        self.forward_amaxes = PendingAmaxes()


_thread = _ThreadState()


def forward_amaxes() -> PendingAmaxes:
    """Amaxes of inputs and weights that this thread has seen since it entered the outermost autocast."""
    return _thread.forward_amaxes


@dataclass(frozen=True)
class AutocastSetting:
    """What one autocast asks for: a recipe, if strictly, and the group to reduce delayed amaxes over (None: all)."""

    recipe: Recipe
    amax_reduction_group: dist.ProcessGroup | None = None
    strict: bool = False


@dataclass(frozen=True)
class _RegisteredSetting:
    """A setting that outlives its autocast; its process group does not live on for it, and it goes with its group."""

    recipe: Recipe
    group: weakref.ReferenceType[dist.ProcessGroup] | None = None
    strict: bool = False


_SettingKey = tuple[str | int | None, int, bool]
"""The name of a recipe (None: the default one; "": none), or else its identity; that of a process group; and whether
strict. What is known by its identity lives as long as the key is in a dict."""

NO_AUTOCAST = "no autocast"
_HIGH_PRECISION = HighPrecision()
_settings: dict[str, _RegisteredSetting] = {NO_AUTOCAST: _RegisteredSetting(_HIGH_PRECISION)}
_names: dict[_SettingKey, str] = {}
_numbers = itertools.count(1)


# A compiled graph knows a setting by its name, so the functions marked below are constants to torch.compile.


@private_torch.constant_in_graphs
def _setting_name(enabled: bool, recipe: str | Recipe | None, group: dist.ProcessGroup | None, strict: bool) -> str:
    """A name for a setting, the same for equal ones; never used again for another, in any process.

    It has a digest of what graphs depend on, since a compile cache hands them to other processes. They do not depend on
    the process group, which is known by its number in this process.
    """
    if by_name(recipe):
        raise ConfigurationError(
            "autocast(recipe=...) takes one recipe; give any that quantizes, in which layers whose recipes go by their "
            "names (quantized_model_init, convert) run by these"
        )
    asked = resolve(recipe) if enabled else _HIGH_PRECISION
    called = recipe if enabled else ""
    key = (called if called is None or isinstance(called, str) else id(asked), id(group), strict)
    if (name := _names.get(key, "")) != "":
        return name
    name = _registered_name(asked, group, strict)
    if not isinstance(key[0], int) or _settings[name].recipe is asked:
        _names[key] = name
    return name


def _registered_name(asked: Recipe, group: dist.ProcessGroup | None, strict: bool) -> str:
    known = _RegisteredSetting(asked, None if group is None else weakref.ref(group), strict)
    for name, other in list(_settings.items()):  # other threads may add some
        if other == known and name != NO_AUTOCAST:
            return name
    content = repr((asked, list(asked.table.items()), sorted(gemm.value for gemm in asked.fast_gemms), strict))
    name = f"{asked.name} {hashlib.sha256(content.encode()).hexdigest()[:32]}"
    if group is not None or name in _settings:  # a recipe of one's own may have the content of another
        name += f" {next(_numbers)}"
    if group is not None:

        def forget(_: weakref.ReferenceType[dist.ProcessGroup]) -> None:
            for key in [key for key, other in _names.items() if other == name]:
                _names.pop(key, None)
            _settings.pop(name, None)

        known = _RegisteredSetting(asked, weakref.ref(group, forget), strict)
    _settings[name] = known
    return name


@private_torch.constant_in_graphs
def quantizes(name: str) -> bool:
    """True if the setting of that name quantizes anything."""
    return bool(_settings[name].recipe.table)


def has_quantized() -> bool:
    """True if any autocast of this process so far quantizes anything."""
    return any(known.recipe.table for known in list(_settings.values()))


@private_torch.constant_in_graphs
def is_delayed(name: str) -> bool:
    """True if the setting of that name scales by past amaxes."""
    return _settings[name].recipe.is_delayed


@private_torch.constant_in_graphs
def counts_calls(name: str) -> bool:
    """True if each forward under the setting of that name counts: it notes amaxes, or draws random words."""
    recipe = _settings[name].recipe
    return recipe.is_delayed or recipe.input_draws


def counts_backwards(name: str) -> bool:
    """True if each backward under the setting of that name counts: it notes amaxes, or draws random words."""
    recipe = _settings[name].recipe
    cells = recipe.activations[TensorRole.GRAD_OUTPUT]
    return recipe.is_delayed or any(cell and cell.scaling.stochastic_rounding for cell in cells)


def setting(name: str) -> AutocastSetting:
    """The setting of that name, its group resolved: None where nothing is delayed, and without process groups."""
    known, group = _settings[name], None
    if known.recipe.is_delayed:
        group = world() if known.group is None else known.group()
    return AutocastSetting(known.recipe, group, known.strict)


def current_setting() -> str:
    """Name of the setting of the innermost autocast."""
    return _thread.autocasts[-1].setting if _thread.autocasts else NO_AUTOCAST


def init_plan() -> InitPlan:
    """How a module built now stores its weights; each that asks is counted as built."""
    context_warnings.counts.built += 1
    return _thread.init_plans[-1] if _thread.init_plans else _HIGH_PRECISION_INIT


def quantizes_weights() -> bool:
    """True inside a `quantized_model_init` that quantizes, or may: recipes by name are told when it is left."""
    return bool(_thread.init_plans) and (_thread.init_plans[-1].quantize or _thread.init_plans[-1].unnamed is not None)


def in_autocast() -> bool:
    """True inside an autocast, an `enabled=False` one included."""
    return len(_thread.autocasts) > 0  # torch 2.11 cannot trace bool(list): every converted layer would run uncompiled


def runs_by(recipe: str | Recipe) -> bool:
    """True if the innermost autocast is known to be of that very recipe, which need not be entered again; while
    compiling it is not known."""
    return not torch.compiler.is_compiling() and _settings[current_setting()].recipe is resolve(recipe)


def is_strict() -> bool:
    """True if the innermost autocast turns fallbacks into errors."""
    return setting(current_setting()).strict


def flush_after_backward() -> None:
    """Record the amaxes of output gradients when the backward pass now running ends.

    Called first thing in a recomputed forward too: a reentrant checkpoint then runs a backward pass within this one, at
    whose end it would be too early.

    Raises:
        RankMismatchError: ranks used different modules in the forward, and the host is about to wait for the others.
    """
    global _queued_flush
    drop_failed_backward()
    if _queued_flush is None:
        flush = _BackwardFlush()
        _queued_flush = weakref.ref(flush)
        private_torch.at_end_of_backward(flush)
        if MISMATCHES.is_pending() and private_torch.has_offloaded_parameters():
            MISMATCHES.check()  # at the end it is too late: there FSDP2 comes first


class _BackwardFlush:
    """What is queued for the end of a backward pass, which alone holds it: it is gone if the pass fails."""

    def __call__(self) -> None:
        global _queued_flush
        _queued_flush = None
        backward_amaxes.flush()


@contextmanager
def amaxes_noted_in(forward: PendingAmaxes, backward: PendingAmaxes) -> Iterator[None]:
    """Meanwhile amaxes are noted there; those that are pending stay so. What runs inside is no step of training."""
    global backward_amaxes, _queued_flush, _rehearses
    before, before_forward = (backward_amaxes, _queued_flush, _rehearses), _thread.forward_amaxes
    backward_amaxes, _queued_flush, _rehearses = backward, None, True
    _thread.forward_amaxes = forward
    try:
        yield
    finally:
        backward_amaxes, _queued_flush, _rehearses = before
        _thread.forward_amaxes = before_forward


def is_rehearsed() -> bool:
    """True in a pass that is run for a capture, and counts for nothing."""
    return _rehearses


def drop_failed_backward() -> None:
    """Forget the amaxes of a backward pass that failed; one that runs, on any thread, keeps its own."""
    global _queued_flush
    if _queued_flush is not None and _queued_flush() is None:
        _queued_flush = None
        backward_amaxes.drop()


@torch.library.custom_op("quantshard::record_forward_amaxes", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _record_forward_amaxes() -> Tensor:
    """What leaving the outermost autocast does, as a step of a compiled graph. The result is empty.

    Without one, inductor frees the output of the layer before and then uses it (torch 2.13).
    """
    _thread.forward_amaxes.flush()
    return torch.empty(0, dtype=torch.float32, device="cpu")


@_record_forward_amaxes.register_fake
def _() -> Tensor:
    private_torch.check_order_is_kept()
    return torch.empty(0, dtype=torch.float32, device="cpu")


private_torch.keep_order(torch.ops.quantshard.record_forward_amaxes.default)


def check_flags(owner: str, **flags: object) -> None:
    """A recipe in the place of `enabled` would be true, and another one used."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"{owner}({name}={value!r}): it must be True or False; a recipe is given by its name: "
                f"{owner}(recipe={value!r})"
            )


def _check_function(owner: str, function: Callable[..., Any]) -> None:
    """What only runs after a call has returned would run outside of the context."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_of(function) for is_of in kinds):
        raise ConfigurationError(
            f"{owner} as a decorator of {function.__name__}, whose body runs after that call; enter it inside"
        )


def _leave(entered: list[Any], one: object) -> None:
    """Take a context off those that are entered: the last, unless a generator entered it that ends out of order."""
    if entered[-1] is one:
        entered.pop()
    else:
        del entered[max(place for place, other in enumerate(entered) if other is one)]


class quantized_model_init:
    """Modules built inside store their weights quantized.

    Only the thread that entered it is affected. As a decorator, each call enters it again.

    Args:
        enabled: False builds high-precision weights, e.g. for one module inside another context.
        recipe: a `Recipe` or its name; its weight format is used. Default: "auto", as for `autocast`. With
            `enabled=False` the recipe only tells which autocast to prepare for: under delayed scaling the amax
            histories exist from the start, and are in the state dict before the first step. Or, as `convert` takes it,
            a mapping from patterns of layers' names to recipes, of which the first that matches holds, or a function
            of module and name: `{"layers.0.*": "bf16", "*": "mxfp8"}`.
            Layers have their names when the context is left, from the outermost module that was built, or
            given a part, inside; until then weights are in high precision (on the meta device none takes memory), and
            what is built under another context inside goes by that one; hooks of weights are for afterwards, since
            other parameters take the place of these (those of PyTorch's accumulators of gradients are not seen). In an
            autocast that quantizes, whichever its recipe, each of these layers runs by its own; in none, quantized
            weights are dequantized, as ever.
        preserve_high_precision_init_val: keep each weight's initial high-precision values on the CPU, to seed the
            optimizer's masters from: `get_high_precision_init_val` of the weight, or of its `to_local()` if it is a
            DTensor.

    Raises:
        ConfigurationError: `enabled` is not a bool, or the recipe is not known. When it is left, of recipes by name: a
            pattern matches no layer; a layer has no name; a weight is sharded already, has hooks, is another module's
            too, or in an optimizer.
    """

    @suggests_names
    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipes | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        check_flags("quantized_model_init", enabled=enabled)
        self._by_name: RecipeByName | None = None
        if by_name(recipe):
            self._by_name = recipe  # type: ignore[assignment]
            check_recipes(_INIT, recipe)  # type: ignore[arg-type]
        self._enabled, self._preserve = enabled, preserve_high_precision_init_val
        self.plan = self._plan_of(HighPrecision() if self._by_name else resolve(recipe))  # type: ignore[arg-type]
        self._entered: list[tuple[InitPlan, InitWatch | None]] = []
        self._arguments = (enabled, recipe, preserve_high_precision_init_val)

    def _plan_of(self, recipe: Recipe) -> InitPlan:
        return InitPlan(recipe, self._enabled and recipe.weight is not None, self._preserve)

    def __call__(self, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        _check_function("quantized_model_init", function)

        @functools.wraps(function)
        def inside(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            with quantized_model_init(*self._arguments):
                return function(*args, **kwargs)

        return inside

    def __enter__(self) -> None:
        plan, silent = self.plan, not self.plan.quantize or is_told(context_warnings.INIT)
        if self._by_name is not None:
            plan = replace(plan, unnamed=UnnamedLayers(_INIT, self._by_name))
        self._entered.append((plan, None if silent else InitWatch(f"{_INIT}(recipe={plan.recipe.name!r})")))
        _thread.init_plans.append(plan)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        plan, watch = self._entered.pop()
        _leave(_thread.init_plans, plan)
        if watch is not None:
            watch.end(failed=kind is not None)
        if plan.unnamed is not None:
            plan.unnamed.leave()
            if kind is None:
                plan.unnamed.give(self._plan_of)


class autocast:
    """GEMMs of modules called inside are quantized by the recipe.

    Contexts nest; the innermost decides, for the thread that entered it, as with `torch.autocast`. Backward and
    recomputation use the recipe of their forward on any thread. At the exit of the outermost context, the amaxes that
    delayed scaling saw on this thread are reduced over the ranks and recorded, in one collective. As a decorator, each
    call enters a new context.

    Args:
        enabled: False runs in high precision inside another autocast; quantized weights are then dequantized.
        recipe: a `Recipe` or its name. Default: "auto", which is "mxfp8" on Blackwell GPUs and "current" elsewhere.
        amax_reduction_group: the processes over which delayed scaling reduces amaxes (default: all); for a layer that
            tensor parallelism cuts, also those of its group. Histories are equal within a group only, and a checkpoint
            holds those of the group of rank 0.
        strict: raise where a layer of quantshard would take a slower path than its native one (`limits.FALLBACKS`),
            backward passes included; `explain(strict=True)` sees other modules, sharding and the optimizer too.

    Raises:
        FallbackError: under `strict`, from a module's forward.
        ConfigurationError: one instance is entered twice; make a new one each time. Or a flag is not a bool.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: str | Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
        strict: bool = False,
    ) -> None:
        check_flags("autocast", enabled=enabled, calibrating=calibrating, strict=strict)
        if calibrating:
            raise ConfigurationError("autocast(calibrating=True) is not supported: train with delayed scaling instead")
        if amax_reduction_group is not None and torch.compiler.is_compiling():
            raise ConfigurationError(
                "autocast(amax_reduction_group=) inside a compiled function is not supported: a graph holds no process "
                "group; enter this autocast around the compiled function"
            )
        if amax_reduction_group is not None:  # nothing of it in a compiled function
            check_arguments("autocast", PROCESS_GROUP, amax_reduction_group=amax_reduction_group)
        self.setting = _setting_name(enabled, recipe, amax_reduction_group, strict)
        self.group = amax_reduction_group  # kept alive: the setting itself does not
        self.records = is_delayed(self.setting)
        self._runs_before = 0
        self._arguments = (enabled, calibrating, recipe, amax_reduction_group, strict)

    def __call__(self, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        _check_function("autocast", function)

        @functools.wraps(function)
        def inside(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            with autocast(*self._arguments):
                return function(*args, **kwargs)

        return inside

    def __enter__(self) -> None:
        if self in _thread.autocasts:
            raise ConfigurationError("this autocast is already entered; make a new one each time")
        if not _thread.autocasts and not torch.compiler.is_compiling():
            drop_failed_backward()
            self._runs_before = context_warnings.counts.run
        _thread.autocasts.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _leave(_thread.autocasts, self)
        if _thread.autocasts:
            if self.records:
                _thread.autocasts[-1].records = True
        elif torch.compiler.is_compiling():
            if self.records:
                torch.ops.quantshard.record_forward_amaxes()
        elif kind is None:
            _thread.forward_amaxes.flush()
            if context_warnings.counts.run == self._runs_before and quantizes(self.setting):
                context_warnings.warn_of_idle_autocast(f"autocast(recipe={setting(self.setting).recipe.name!r})")
        else:
            _thread.forward_amaxes.drop()  # other ranks may not have failed here: no collective


def autocast_by(recipe: str | Recipe) -> autocast:
    """The innermost autocast once more, of another recipe: as strict, and over the same ranks."""
    *_, group, strict = _thread.autocasts[-1]._arguments
    return autocast(recipe=recipe, amax_reduction_group=group, strict=strict)
