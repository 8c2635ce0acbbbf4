"""What a load leaves behind that fails after it began to write: a model and an optimizer that refuse to be used.

Part of their values are those of the checkpoint then and part are not, and nothing else would tell. The refusals are
hooks, which are put on when a load has failed and taken off by one that succeeds: a forward or a step of what is whole
looks at nothing.
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
"""Attribute of a module or an optimizer: which load failed, and why. A copy has it too."""

_hooks: WeakKeyDictionary[nn.Module | Optimizer, list[Any]] = WeakKeyDictionary()


@dataclass
class LoadGuard:
    """A load that is under way.

    `writes`: whether it has begun to write, so that a failure leaves a mixture. `mends`: whether it writes all that an
    earlier one may have left, `is_mixed` whether there was such a one.
    """

    is_mixed: bool
    writes: bool = False
    mends: bool = True


@contextmanager
def loading(call: str, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[LoadGuard]:
    """A load into a model and an optimizer, while the context lasts; set `writes` before the first byte is written.

    If it fails after that, all modules and the optimizer refuse to be used until another load has written all of them;
    if it fails before, they are as they were. `call`: what the load is called in messages.
    """
    marked: list[nn.Module | Optimizer] = [*model.modules(), *(() if optimizer is None else (optimizer,))]
    earlier = {each: mark for each in marked if (mark := _unmark(each)) is not None}
    load = LoadGuard(bool(earlier))
    try:
        yield load
    except BaseException as error:
        said = f"{call} failed after it had begun to write ({type(error).__name__}: {why(error)})"
        marks = dict.fromkeys(marked, said) if load.writes else earlier
        for each, mark in marks.items():
            _mark(each, mark)
        if load.writes:
            _count_as_written(model)
            _forget_compiled_code()
        raise
    for each, mark in ({} if load.mends else earlier).items():
        _mark(each, mark)
    if earlier:
        _forget_compiled_code()


def covers_buffers(model: nn.Module, given: Collection[str] = ()) -> bool:
    """Whether the buffers that a state dict has are all among some names."""
    return {name for name, _ in model.named_buffers()} & model.state_dict().keys() <= set(given)


def refuse_partial(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise if a load into one of them failed half way, and none has succeeded since.

    Raises:
        CheckpointError: saying which load, and what to do.
    """
    for each in (*model.modules(), *(() if optimizer is None else (optimizer,))):
        _refuse(each)


def _refuse(marked: nn.Module | Optimizer, *_: Any) -> None:
    """The hook: before a forward, a step, and `state_dict()`."""
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
    """Its `load_state_dict` raises before it writes, or writes all."""
    _unmark(optimizer)


def _unmark(marked: nn.Module | Optimizer) -> str | None:
    """Take the refusal away; its mark, if there was one."""
    mark: str | None = vars(marked).pop(_MARK, None)
    for hook in _hooks.pop(marked, ()):
        hook.remove()
    return mark


def _count_as_written(model: nn.Module) -> None:
    """Let optimizers that the load was not given notice it: their masters are of other weights."""
    for param in model.parameters():
        quantized = components.quantized_local(param)
        if quantized is not None:
            quantized.quantized_storage.mark_written()


def _forget_compiled_code() -> None:
    """Compiled code is not looked at again when hooks come and go, if it is of a module around the loaded one."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
