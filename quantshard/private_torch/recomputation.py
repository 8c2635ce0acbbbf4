"""Activation checkpointing: in which regions the calling code runs, and which of them is recomputed."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from quantshard.private_torch.autograd import in_backward


@dataclass(frozen=True)
class CheckpointedRegions:
    """The regions of `torch.utils.checkpoint` around the running code: objects that autograd keeps until they are done.

    `entered`: those that it runs the first forward of. `replayed`: the one that is recomputed, if any, and `replay`
    which recomputation of it this is.
    """

    entered: tuple[Any, ...] = ()
    replayed: Any = None
    replay: Any = None


_CHECKPOINT = inspect.unwrap(torch_checkpoint.checkpoint).__code__

_REENTRANT_FORWARD = torch_checkpoint.CheckpointFunction.forward.__code__

_REENTRANT_BACKWARD = torch_checkpoint.CheckpointFunction.backward.__code__

_HOOK_CODES = {
    code.co_name: code
    for code in torch_checkpoint._checkpoint_hook.__init__.__code__.co_consts
    if isinstance(code, types.CodeType)
}


def _require_names(found: dict[str, types.CodeType]) -> None:
    """Of frames only names tell what they hold: a renamed one would not fail, but give another recipe or draws."""
    wanted = {
        "checkpoint": ("gen",),
        "_checkpoint_without_reentrant_generator": ("new_frame",),
        "CheckpointFunction.forward": ("ctx",),
        "CheckpointFunction.backward": ("ctx",),
        "pack_hook": ("frame",),
        "unpack_hook": ("frame", "gid"),
    }
    for function, names in wanted.items():
        code = found.get(function)
        held = () if code is None else (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        lacking = [name for name in names if name not in held]
        assert not lacking, (
            f"torch {torch.__version__}: {function} of torch.utils.checkpoint has no variable {lacking[0]!r}, by which "
            "quantshard.private_torch.checkpointed_regions finds what is recomputed; teach it this version's names"
        )


_require_names(
    {
        "checkpoint": _CHECKPOINT,
        "_checkpoint_without_reentrant_generator": torch_checkpoint._checkpoint_without_reentrant_generator.__code__,
        "CheckpointFunction.forward": _REENTRANT_FORWARD,
        "CheckpointFunction.backward": _REENTRANT_BACKWARD,
        **_HOOK_CODES,
    }
)


def checkpointed_regions() -> CheckpointedRegions:
    """Which checkpointed regions the calling code runs in.

    PyTorch has no such question, so its own frames on the Python stack are read: a reentrant region is its autograd
    node, another one the `_CheckpointFrame` that its saved-tensor hooks close over. The stack is walked only where a
    region is possible: without gradients, under saved-tensor hooks, or in backward.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None and torch.is_grad_enabled() and not in_backward():
        return CheckpointedRegions()
    entered: list[Any] = []
    if hooks is not None and getattr(hooks[0], "__code__", None) is _HOOK_CODES["pack_hook"]:
        names = _HOOK_CODES["pack_hook"].co_freevars
        cells: Any = hooks[0].__closure__  # type: ignore[attr-defined]
        entered.append(cells[names.index("frame")].cell_contents)  # for the composable API, which is not on the stack
    at: types.FrameType | None = sys._getframe(1)
    while at is not None:
        code = at.f_code
        if code is _REENTRANT_FORWARD:
            entered.append(at.f_locals["ctx"])
        elif code is _CHECKPOINT and at.f_locals.get("gen") is not None:
            entered.append(at.f_locals["gen"].gi_frame.f_locals["new_frame"])
        elif code is _REENTRANT_BACKWARD:
            return CheckpointedRegions(_distinct(entered), at.f_locals["ctx"], torch._C._current_graph_task_id())
        elif code is _HOOK_CODES["unpack_hook"]:
            return CheckpointedRegions(_distinct(entered), at.f_locals["frame"], at.f_locals["gid"])
        at = at.f_back
    return CheckpointedRegions(_distinct(entered))


def _distinct(objects: list[Any]) -> tuple[Any, ...]:
    return tuple({id(each): each for each in objects}.values())
