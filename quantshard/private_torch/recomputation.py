"""Activation checkpointing: the regions that the calling code runs in, and the region that is recomputed."""

import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quantshard.errors import TorchVersionError
from quantshard.private_torch.autograd import current_backward, top_saved_tensor_hooks
from quantshard.private_torch.lookup import MissingName, missing, private_name

_FEATURE = "recomputation by torch.utils.checkpoint of layers that are quantized"


def _name(path: str) -> Any:
    return private_name(path, _FEATURE)


_top_hooks = top_saved_tensor_hooks
_pop_hooks = _name("torch._C._autograd._pop_saved_tensors_default_hooks")
_push_hooks = _name("torch._C._autograd._push_saved_tensors_default_hooks")
_region_class = _name("torch.utils.checkpoint._CheckpointFrame")
_first_hook = _name("torch.utils.checkpoint._checkpoint_hook")
_replay_hook = _name("torch.utils.checkpoint._recomputation_hook")
_reentrant_forward = _name("torch.utils.checkpoint.CheckpointFunction.forward.__code__")
_reentrant_backward = _name("torch.utils.checkpoint.CheckpointFunction.backward.__code__")
_NAMES = (
    _top_hooks, _pop_hooks, _push_hooks, _region_class, _first_hook, _replay_hook, _reentrant_forward,
    _reentrant_backward,
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointedRegions:
    """Regions of `torch.utils.checkpoint` around the running code, as objects that autograd keeps.

    `entered`: regions in their first forward. `replayed`: the region that is recomputed, if any. `replay`: identifies
    the recomputation. `unknown`: error to raise if recomputation would change results.
    """

    entered: tuple[Any, ...] = ()
    replayed: Any = None
    replay: Any = None
    unknown: TorchVersionError | None = None


NO_REGIONS = CheckpointedRegions()
"""No regions: the code runs outside of all, and outside of a backward pass."""


def checkpointed_regions() -> CheckpointedRegions:
    """The checkpointed regions that the calling code runs in. `may_be_checkpointed` is a faster check for any.

    A non-reentrant region is the `_CheckpointFrame` in the saved-tensor hooks of its first forward and recomputation. A
    reentrant one is the `ctx` of `CheckpointFunction`, the first argument of its methods on the Python stack.
    """
    backward = current_backward()
    if (error := missing(*_NAMES)) is not None:
        return NO_REGIONS if backward is None else CheckpointedRegions(unknown=error)
    by_hooks = _regions_of_hooks(backward)
    entered, replayed = _reentrant_regions(by_hooks.replayed)
    all_entered = (*by_hooks.entered, *entered)
    if replayed is not None:
        return CheckpointedRegions(all_entered, replayed, backward)
    return CheckpointedRegions(all_entered, by_hooks.replayed, by_hooks.replay, by_hooks.unknown)


def _regions_of_hooks(backward: int | None) -> CheckpointedRegions:
    """Regions from the innermost saved-tensor hooks outwards, popped and pushed back, up to a recomputation."""
    popped: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    entered: list[Any] = []
    try:
        while (hooks := _top_hooks(True)) is not None:
            pack = inspect.unwrap(hooks[0])
            cells = list(_held(pack))
            if (region := _only(cells)) is not None and _is_of(pack, _first_hook):
                entered.append(region)
            elif (region := _only([cell() for cell in cells if isinstance(cell, weakref.ref)])) is not None and (
                _is_of(pack, _replay_hook)
            ):
                return CheckpointedRegions(tuple(entered), region, hooks[0])
            elif _is_checkpointing(pack) and backward is not None:
                name = f"{pack.__module__}.{pack.__qualname__} as it was"
                return CheckpointedRegions(unknown=MissingName(name, _FEATURE).error())
            popped.append(hooks)
            _pop_hooks()
    finally:
        for pack, unpack in reversed(popped):
            _push_hooks(pack, unpack)
    return CheckpointedRegions(tuple(entered))


def _held(function: Any) -> Iterable[Any]:
    """Objects that a function of PyTorch closes over."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not filled yet


def _only(objects: Iterable[Any]) -> Any:
    """The region among some objects, if there is exactly one."""
    regions = [item for item in objects if isinstance(item, _region_class)]
    return regions[0] if len(regions) == 1 else None


def _is_of(function: Any, hook: Any) -> bool:
    """True if a function is defined in a method of a class of hooks."""
    return str(getattr(function, "__qualname__", "")).startswith(f"{hook.__qualname__}.")


def _is_checkpointing(function: Any) -> bool:
    """True for hooks of PyTorch's checkpointing, which must be recognized."""
    module = str(getattr(function, "__module__", ""))
    return module.startswith("torch.") and "checkpoint" in module


def _reentrant_regions(recomputed: Any) -> tuple[list[Any], Any]:
    """The reentrant regions that the Python stack enters, from the innermost up to a recomputation, and the one that it
    recomputes. `recomputed`: a non-reentrant region that is recomputed."""
    entered: list[Any] = []
    recompute_code = None if recomputed is None else inspect.unwrap(recomputed.recompute_fn).__code__
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _reentrant_forward:
            entered.append(_first_argument(frame))
        elif code is _reentrant_backward:
            return entered, _first_argument(frame)
        elif code is recompute_code:
            break
        frame = frame.f_back
    return entered, None


def _first_argument(frame: types.FrameType) -> Any:
    return frame.f_locals[frame.f_code.co_varnames[0]]
