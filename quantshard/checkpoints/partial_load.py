"""Makes a model and an optimizer refuse to be used after a load that failed while writing.

Such objects mix values of the checkpoint with earlier values, which nothing else would detect. The refusals are hooks:
a failed load registers them, and a successful load removes them, so that complete objects pay nothing in a forward or a
step.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from quantshard.checkpoints.disk.store import why
from quantshard.errors import CheckpointError
from quantshard.tensor import components

_MARK = "_quantshard_partial_load"
"""Attribute of a module or an optimizer: which load failed, and why. Copies have it too."""

_hooks: WeakKeyDictionary[nn.Module | Optimizer, list[Any]] = WeakKeyDictionary()


@dataclass
class LoadGuard:
    """The progress of a load.

    `is_mixed`: an earlier load failed halfway. `writes`: this load has begun to write, so that a failure leaves mixed
    values. `mends`: this load overwrites everything that an earlier one could have left mixed.
    """

    is_mixed: bool
    writes: bool = False
    mends: bool = True


@contextmanager
def loading(call: str, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[LoadGuard]:
    """Guard a load into a model and an optimizer. Set `writes` before the first byte is written.

    If the load fails after that, all modules and the optimizer refuse to be used until another load has written all of
    them. If it fails earlier, they are unchanged. `call`: the name of the load in messages.
    """
    marked: list[nn.Module | Optimizer] = [*model.modules(), *(() if optimizer is None else (optimizer,))]
    earlier_marks = {owner: mark for owner in marked if (mark := _unmark(owner)) is not None}
    load = LoadGuard(bool(earlier_marks))
    try:
        yield load
    except BaseException as error:
        message = f"{call} failed after it had begun to write ({type(error).__name__}: {why(error)})"
        marks = dict.fromkeys(marked, message) if load.writes else earlier_marks
        for owner, mark in marks.items():
            _mark(owner, mark)
        if load.writes:
            _count_as_written(model)
            _forget_compiled_code()
        raise
    for owner, mark in ({} if load.mends else earlier_marks).items():
        _mark(owner, mark)
    if earlier_marks:
        _forget_compiled_code()


def covers_buffers(model: nn.Module, given: Collection[str] = ()) -> bool:
    """Whether `given` contains the names of all buffers of the model's state dict."""
    return {name for name, _ in model.named_buffers()} & model.state_dict().keys() <= set(given)


def refuse_partial(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise if a load into the model or the optimizer failed halfway, and none has succeeded since.

    Raises:
        CheckpointError: names the load, and a remedy.
    """
    for owner in (*model.modules(), *(() if optimizer is None else (optimizer,))):
        _refuse(owner)


def _refuse(marked: nn.Module | Optimizer, *_: Any) -> None:
    """Hook before a forward, a step and `state_dict()` that raises for marked objects."""
    mark = vars(marked).get(_MARK)
    if mark is None:
        return
    if isinstance(marked, Optimizer):
        raise CheckpointError(
            f"this {type(marked).__name__} cannot step or be saved: {mark}, so part of its states are of the "
            "checkpoint and part are not; load a checkpoint into the model and it again, or build it anew"
        )
    raise CheckpointError(
        f"this {type(marked).__name__} cannot run or be saved: {mark}, so part of its values are of the checkpoint and "
        "part are not; load again, with quantshard.checkpoints.load or another call of quantshard's, or build it anew"
    )


def _mark(marked: nn.Module | Optimizer, mark: str) -> None:
    setattr(marked, _MARK, mark)
    if marked in _hooks:
        return
    if isinstance(marked, Optimizer):
        _hooks[marked] = [
            marked.register_step_pre_hook(_refuse),
            marked.register_state_dict_pre_hook(_refuse),
            marked.register_load_state_dict_post_hook(_loaded),
        ]
    else:
        _hooks[marked] = [
            marked.register_forward_pre_hook(_refuse, prepend=True),
            marked.register_state_dict_pre_hook(_refuse),
        ]


def _loaded(optimizer: Optimizer) -> None:
    """Remove the mark after a `load_state_dict`, which writes everything or raises before it writes."""
    _unmark(optimizer)


def _unmark(marked: nn.Module | Optimizer) -> str | None:
    """Remove the mark and its hooks. Returns the mark, or None."""
    mark: str | None = vars(marked).pop(_MARK, None)
    for hook in _hooks.pop(marked, ()):
        hook.remove()
    return mark


def _count_as_written(model: nn.Module) -> None:
    """Mark the weights as changed, so that optimizers outside the load notice that their masters are stale."""
    for param in model.parameters():
        quantized = components.quantized_local(param)
        if quantized is not None:
            quantized.quantized_storage.mark_written()


def _forget_compiled_code() -> None:
    """Reset torch.compile, which ignores hook changes in a compiled module that contains the loaded one."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
