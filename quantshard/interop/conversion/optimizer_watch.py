"""A converted model looks, in its first training forwards, whether optimizers of this process hold its parameters.

Nothing links a model with its optimizer, so Python is asked for all objects, once or a few times: see
`observe.optimizer_members` for what cannot be known. A model in a graph of torch.compile does not look; nor does one
that was given a forward of its own before, as by accelerate's `prepare` with mixed precision; and one that was reverted
has no forward of ours. There the steps of optimizers look whether these hold weights of before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from quantshard.errors import warn_user
from quantshard.modules.base import weight_watch
from quantshard.optimizers import optimizer_members
from quantshard.tensor import components

_FEW = 4
_LOOKS = (2, 8, 64)
"""Before which training forwards, or else behind which steps: an optimizer may be made after the first."""


@dataclass
class OptimizerWatch:
    """`replaced`: the weights whose places others have taken, by name, alive or not; `with_gradients`: those that had
    one then. `forwards`: those in training. `steps`: those of any optimizers while there was no such forward."""

    replaced: dict[str, ReferenceType[Tensor]] = field(default_factory=dict)
    with_gradients: frozenset[str] = frozenset()
    forwards: int = 0
    steps: int = 0


_watches: WeakKeyDictionary[nn.Module, OptimizerWatch] = WeakKeyDictionary()
_reverted: dict[int, tuple[ReferenceType[Tensor], str]] = {}
"""Quantized weights that plain ones have taken the places of, by identity, with their names."""
_hooks: list[Any] = []


def begin(model: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Look at a model's next training forwards."""
    with_gradients = frozenset(name for name, weight in replaced.items() if weight.grad is not None)
    _watches[model] = OptimizerWatch({name: ref(weight) for name, weight in replaced.items()}, with_gradients)
    _look_at_steps()


def end(model: nn.Module) -> None:
    """Look no more."""
    _watches.pop(model, None)


def note_reverted(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Look at steps of optimizers from now on: whether one holds weights that `revert` has put others in place of."""
    _reverted.update({id(weight): (ref(weight), f"{name}.weight" if name else "weight") for name, weight in weights})
    _look_at_steps()


def _look_at_steps() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """Behind each step of an optimizer of this process."""
    if torch.compiler.is_compiling():
        return
    for model, watch in list(_watches.items()):
        if not watch.forwards:
            _note_step(model, watch)
    if _reverted:
        _tell_of_reverted(optimizer)


def _note_step(model: nn.Module, watch: OptimizerWatch) -> None:
    """Called at each step, where a model's forward is not ours."""
    watch.steps += 1
    if watch.steps in _LOOKS:
        optimizers = components.living_optimizers()
        if _told_of_replaced(watch, optimizers, unused=True):
            _leave_to_names(model, optimizers)


def _tell_of_reverted(optimizer: Optimizer) -> None:
    for key in [key for key, (weight, _) in _reverted.items() if weight() is None]:
        del _reverted[key]
    params = optimizer_members.held([optimizer])
    names = [
        known[1]
        for param in params
        if (known := _reverted.get(id(param))) is not None
        and known[0]() is param
        and param.grad is None  # else a layer computes with it, perhaps of another model
    ]
    if names:
        optimizer_members.warn_of_replaced(optimizer, names, "revert")


def note_forward(model: nn.Module) -> None:
    """Called at each training forward."""
    watch = _watches.get(model)
    if watch is None:
        return
    watch.forwards += 1
    if watch.forwards in _LOOKS:
        _tell_of_computing(watch)
        optimizers = components.living_optimizers()
        if _told_of_replaced(watch, optimizers) or optimizer_members.warn_of_unheld(model, optimizers):
            _leave_to_names(model, optimizers)
        elif watch.forwards == _LOOKS[-1]:
            end(model)


def _leave_to_names(model: nn.Module, optimizers: list[Optimizer]) -> None:
    """What was told of a model here, by name, is told nowhere else."""
    weight_watch.note_told(model.modules(), {id(param) for param in optimizer_members.held(optimizers)})
    end(model)


def _tell_of_computing(watch: OptimizerWatch) -> None:
    """That layers compute still whose places others have: their weights have got gradients."""
    alive = {name: weight() for name, weight in watch.replaced.items() if name not in watch.with_gradients}
    names = [name for name, weight in alive.items() if weight is not None and weight.grad is not None]
    if names:
        watch.with_gradients |= {*names}
        more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
        warn_user(
            f"{', '.join(names[:_FEW])}{more}: convert has put other layers in their places, and the old ones still "
            "compute and get gradients, in high precision and in no optimizer; the forward has them from elsewhere "
            "than children, lists, tuples, dicts and sets of modules: let it read them from there, or build what "
            "holds them after convert",
            is_counted=True,
        )


def _told_of_replaced(watch: OptimizerWatch, optimizers: list[Optimizer], unused: bool = False) -> bool:
    """`unused`: of weights without gradients alone; with one, a layer computes with it, perhaps of another model."""
    alive = {weight: name for name, each in watch.replaced.items() if (weight := each()) is not None}
    told = False
    for optimizer in _without_wrappers(optimizers):
        held = [param for param in optimizer_members.held([optimizer]) if param in alive]
        names = [f"{alive[param]}.weight" for param in held if not (unused and param.grad is not None)]
        if names:
            optimizer_members.warn_of_replaced(optimizer, names)
            told = True
    return told


def _without_wrappers(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Those that step: Lightning and accelerate have another optimizer around each, with its groups."""
    wrappers = {
        id(wrapper)
        for wrapper in optimizers
        for each in vars(wrapper).values()
        if issubclass(type(each), Optimizer)
        and getattr(each, "param_groups", None) is getattr(wrapper, "param_groups", ())
    }
    return [each for each in optimizers if id(each) not in wrappers]
