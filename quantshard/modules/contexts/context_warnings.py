"""What is said, once in a process, where a context does not reach what it was meant for.

A context that no layer of quantshard was built or run in, a quantized weight that trains outside of one, and an input
that makes a layer compute in more bits than its own. The rightful use pays a comparison of two counts: nothing hooks
the forward, which would slow each module and keep torch.compile from taking it as one graph. Which modules were meant
is found afterwards, in the variables of the code that entered the context.
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
_FRAMES = 24  # callers that are looked at
_FRAMES_OWN_REFERENCES = 3  # to a copy of its variables: the frame's, and two of who counts them
_seen_codes: set[CodeType] = set()


class LayerCounts(threading.local):
    """How many modules of quantshard this thread built, and how many of their linear layers it ran."""

    built = 0
    run = 0


counts = LayerCounts()


# Built ---------------------------------------------------------------------------------------------------------------


class InitWatch:
    """What is built while `quantized_model_init` is entered: no module of quantshard, but which other one first."""

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
        """Of `nn.Linear` and what else may multiply by a matrix, or by those of experts."""
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
        """Leave the context."""
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
    """Called where an autocast is left that no linear layer of quantshard ran in: where the code that entered it, or
    its callers, hold a model that has linear layers, but none of quantshard, that was the one meant.

    Each place in the code is looked at once.
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
        found = next((each for name, model in models for each in _linear_layers(name, model)), None)
        if found is not None:
            name, layer = found
            warn_once(
                AUTOCAST,
                f"{what}: no layer of quantshard ran inside, so nothing was quantized; {name} is a "
                f"{_described(layer)}, which it does not change: call quantshard.convert(model, recipe) before, or "
                "build quantshard.Linear in its place",
            )
            return
        frame = frame.f_back


def _user_frame() -> FrameType | None:
    """The innermost one that is not of this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return frame


def _held_modules(frame: FrameType) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a function's variables, in the attributes of the objects there, and in the globals that it names;
    each with how the code calls it."""
    names = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    for name, value in {**names, **_variables(frame)}.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from _modules_in((f"{name}[{index}]", each) for index, each in enumerate(value[:_FRAMES]))
        elif not isinstance(value, type) and type(getattr(value, "__dict__", None)) is dict:
            yield from _modules_in((f"{name}.{key}", each) for key, each in list(vars(value).items()))


def _variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function, which are not kept: before Python 3.13 a frame whose variables were looked
    at holds a copy of them until it ends, and so the first step's logits until a training loop does."""
    if "locals" in frame.f_code.co_names:
        return {}  # that copy is the function's too, perhaps its hyperparameters: to look would add to it
    held = frame.f_locals
    found = dict(held)
    is_ours_alone = sys.getrefcount(held) <= _FRAMES_OWN_REFERENCES  # else the function has it too, by locals()
    if isinstance(held, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and is_ours_alone:
        held.clear()  # of a function it is that copy; of a module, which is not optimized, its globals
    return found


def _modules_in(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, value) for name, value in named if isinstance(value, nn.Module))


def _is_ours(module: nn.Module) -> bool:
    """FSDP2 makes classes of its own of those of modules."""
    return any(kind.__module__.partition(".")[0] == _PACKAGE for kind in type(module).__mro__)


def _linear_layers(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield f"{name}.{path}" if path else name, module


# Outside -------------------------------------------------------------------------------------------------------------


def warn_of_training_outside(module: Any, weight: str) -> None:
    """Called where a quantized weight is multiplied with outside of every autocast: a fallback that strict cannot
    refuse, since strict is an autocast's."""
    if not is_told(OUTSIDE):
        text = f"{name_of(module)}.{weight}: in training, {limits.FALLBACKS['dequantized']}"
        warn_once(OUTSIDE, f"{text}; autocast(enabled=False) says that it is meant so")


def warn_of_plain_weight(module: Any, weight: str) -> None:
    """Warn that an autocast quantizes a weight in every training forward, which `quantized_model_init` would avoid."""
    if not is_told(PLAIN_WEIGHT):
        text = f"{name_of(module)}.{weight}: {limits.FALLBACKS['quantized each forward']}"
        warn_once(PLAIN_WEIGHT, f"{text}; if intended: warnings.filterwarnings('ignore', '.*quantized anew')")


def warn_of_wide_input(module: nn.Module | str, given: torch.dtype, own: torch.dtype) -> None:
    """Called where an input has a wider dtype than the layer's weights, which may be nominal.

    It is not cast: what `torch.autocast` asks for is, but without one the dtype of a quantized weight is nominal, and
    a residual stream in float32 over layers that are called bfloat16 may be meant. PyTorch's layers raise here. So
    the numbers are those of the input's dtype, and it is said what they cost.
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
    """The same, of a layer of a class of that name that torch.compile traces."""
    warn_of_wide_input(name, given, own)


def name_of(module: Any) -> str:
    """How the outermost module that runs now calls this one; else its own name or class."""
    frame, path = inspect.currentframe(), ""
    while frame is not None:
        holder = _variables(frame).get("self")
        if isinstance(holder, nn.Module) and holder is not module:
            path = next((name for name, each in holder.named_modules() if each is module), path)
        frame = frame.f_back
    path = private_torch.without_wrappers(path).removeprefix("_orig_mod").removeprefix(".")
    return path or getattr(module, "name", None) or type(module).__name__
