"""One-time warnings for contexts that had no effect, and for inputs that are wider than their layer.

There is a warning if no layer of quantshard was built or run in a context, if a quantized weight trains outside of
autocast, and if a layer computes in more bits than its weights have. Correct code pays only for comparing two counters;
forward hooks would slow every module and break graphs of torch.compile. The modules to name in a warning are found
afterwards, in the variables of the code that entered the context.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from quantshard import limits, private_torch
from quantshard.errors import is_told, warn_once

INIT, AUTOCAST, OUTSIDE, WIDE_INPUT = "quantized_model_init", "autocast", "outside autocast", "wide input"
PLAIN_WEIGHT = "weight in high precision"
"""What is said once each."""

_PACKAGE = __name__.split(".", 1)[0]
_FRAMES = 24  # callers to search
_FRAMES_OWN_REFERENCES = 3  # references to the copy of the variables: one in the frame, two in `_variables`
_seen_codes: set[CodeType] = set()


class LayerCounts(threading.local):
    """Number of quantshard modules that this thread has built, and of linear layers that it has run."""

    built = 0
    run = 0


counts = LayerCounts()


# Built ---------------------------------------------------------------------------------------------------------------


class InitWatch:
    """Watch inside `quantized_model_init` that records the first module with a matrix, other than quantshard's."""

    def __init__(self, what: str) -> None:
        self._what, self._before, self._thread = what, counts.built, threading.get_ident()
        self._first: nn.Module | None = None
        self._top: nn.Module | None = None
        self._path: list[str] = []
        self._hooks: list[RemovableHandle] = [
            torch_modules.register_module_parameter_registration_hook(self._note_parameter),
            torch_modules.register_module_module_registration_hook(self._note_child),
        ]

    def _note_parameter(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        """Record the module if its parameter is 2-D, as in linear layers, or 3-D, as in experts."""
        if self._thread != threading.get_ident():
            return
        if self._first is not None or parameter is None or parameter.ndim not in (2, 3):
            return
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self._first = self._top = module

    def _note_child(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and child is self._top:
            self._top = module
            self._path.insert(0, name)

    def end(self, failed: bool) -> None:
        """Remove the hooks; warn if no module of quantshard was built."""
        for hook in self._hooks:
            hook.remove()
        first = self._first
        if failed or first is None or counts.built != self._before:
            return
        name = f"{'.'.join(self._path)}, a " if self._path else ""
        warn_once(
            INIT,
            f"{self._what}: no module of quantshard was built inside, so no weight is quantized; the first other one "
            f"was {name}{_described(first)}: build quantshard.Linear in its place, or call quantshard.convert(model, "
            "recipe), which exchanges the linear layers of any model",
        )


def _described(module: nn.Module) -> str:
    kind = type(module)
    where = "torch.nn" if kind.__module__.startswith("torch.nn.") else kind.__module__.split(".", 1)[0]
    shape = next((list(parameter.shape) for parameter in module.parameters(recurse=False)), [])
    return f"{where}.{kind.__name__} with a parameter {shape}"


# Run -----------------------------------------------------------------------------------------------------------------


def warn_of_idle_autocast(what: str) -> None:
    """Warn at the exit of an autocast in which no linear layer of quantshard ran.

    The warning names a model that has linear layers, but none of quantshard. Such a model is looked up in the variables
    of the code that entered the autocast and of its callers; each code object is searched once.
    """
    frame = _user_frame()
    if is_told(AUTOCAST) or frame is None or frame.f_code in _seen_codes:
        return
    _seen_codes.add(frame.f_code)
    for _ in range(_FRAMES):
        if frame is None:
            return
        models = list(_held_modules(frame))
        if any(_is_ours(module) for _, model in models for module in model.modules()):
            return
        named_layer = next((linear for name, model in models for linear in _linear_layers(name, model)), None)
        if named_layer is not None:
            name, layer = named_layer
            warn_once(
                AUTOCAST,
                f"{what}: no layer of quantshard ran inside, so nothing was quantized; {name} is a "
                f"{_described(layer)}, which it does not change: call quantshard.convert(model, recipe) before, or "
                "build quantshard.Linear in its place",
            )
            return
        frame = frame.f_back


def _user_frame() -> FrameType | None:
    """The innermost frame outside of this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return frame


def _held_modules(frame: FrameType) -> Iterator[tuple[str, nn.Module]]:
    """Yield (expression, module) for modules in a frame's variables, their attributes, and the globals in use."""
    names = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    for name, value in {**names, **_variables(frame)}.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from _modules_in((f"{name}[{index}]", item) for index, item in enumerate(value[:_FRAMES]))
        elif not isinstance(value, type) and type(getattr(value, "__dict__", None)) is dict:
            yield from _modules_in((f"{name}.{key}", item) for key, item in list(vars(value).items()))


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a running function without keeping them alive.

    Before Python 3.13, reading a frame's variables stores a copy in the frame until the function returns. A training
    loop would keep the first step's logits alive.
    """
    if "locals" in frame.f_code.co_names:
        return {}  # reading f_locals here would change the dict that the function got from locals()
    frame_locals = frame.f_locals
    variables = dict(frame_locals)
    # more references: the function itself has the copy, from locals()
    is_unshared = sys.getrefcount(frame_locals) <= _FRAMES_OWN_REFERENCES
    if isinstance(frame_locals, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and is_unshared:
        frame_locals.clear()  # only for functions: f_locals of a module, which is not CO_OPTIMIZED, are its globals
    return variables


def _modules_in(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, value) for name, value in named if isinstance(value, nn.Module))


def _is_ours(module: nn.Module) -> bool:
    """Check all base classes, because FSDP2 subclasses the classes of modules."""
    return any(kind.__module__.partition(".")[0] == _PACKAGE for kind in type(module).__mro__)


def _linear_layers(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield f"{name}.{path}" if path else name, module


# Outside -------------------------------------------------------------------------------------------------------------


def warn_of_training_outside(module: Any, weight: str) -> None:
    """Warn that a quantized weight trains outside of autocast, a fallback that autocast's `strict` cannot reject."""
    if not is_told(OUTSIDE):
        text = f"{name_of(module)}.{weight}: in training, {limits.FALLBACKS['dequantized']}"
        warn_once(OUTSIDE, f"{text}; autocast(enabled=False) says that it is meant so")


def warn_of_plain_weight(module: Any, weight: str) -> None:
    """Warn that an autocast quantizes a weight in every training forward, which `quantized_model_init` would avoid."""
    if not is_told(PLAIN_WEIGHT):
        text = f"{name_of(module)}.{weight}: {limits.FALLBACKS['quantized each forward']}"
        warn_once(PLAIN_WEIGHT, f"{text}; if intended: warnings.filterwarnings('ignore', '.*quantized anew')")


def warn_of_wide_input(module: nn.Module | str, given: torch.dtype, own: torch.dtype) -> None:
    """Warn that an input has a wider dtype than the layer's weights.

    PyTorch's layers raise here. The dtype of a quantized weight is only nominal, and a float32 residual stream over
    bfloat16 layers can be intended, so the layer computes in the input's dtype without a cast.
    """
    if is_told(WIDE_INPUT):
        return
    wide, narrow = (str(dtype).removeprefix("torch.") for dtype in (given, own))
    warn_once(
        WIDE_INPUT,
        f"{module if isinstance(module, str) else name_of(module)}: an input of {wide} in a layer of {narrow}: it "
        f"computes in {wide}, and what follows takes the memory for it; give x.to(torch.{narrow}), enter "
        "torch.autocast, or cast the model (quantized weights keep their codes)",
    )


@private_torch.constant_in_graphs
def warn_of_wide_input_in_graph(name: str, given: torch.dtype, own: torch.dtype) -> None:
    """`warn_of_wide_input` for a layer that torch.compile traces; `name`: name of its class."""
    warn_of_wide_input(name, given, own)


def name_of(module: Any) -> str:
    """Name of a module in the outermost running module; otherwise its own name or class."""
    frame, path = inspect.currentframe(), ""
    while frame is not None:
        holder = _variables(frame).get("self")
        if isinstance(holder, nn.Module) and holder is not module:
            path = next((name for name, child in holder.named_modules() if child is module), path)
        frame = frame.f_back
    path = private_torch.without_wrappers(path).removeprefix("_orig_mod").removeprefix(".")
    return path or getattr(module, "name", None) or type(module).__name__
