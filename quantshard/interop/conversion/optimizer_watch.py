"""Checks, in a converted model's first training forwards, whether the process's optimizers hold its parameters.

Models and optimizers are not linked, so the check searches all Python objects, at most a few times; see
`optimizers.optimizer_members` for the limits. Some models do not check in forward: compiled ones, those that already
had a replaced forward (accelerate's `prepare` with mixed precision), and reverted ones. For these, steps of optimizers
check whether the optimizer holds replaced weights.
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
"""Training forwards, or optimizer steps, at which to check. An optimizer can be built after the first forward."""


@dataclass
class OptimizerWatch:
    """State of the checks for one model.

    `replaced`: replaced weights by name, alive or not. `with_gradients`: names of those that had a gradient when
    replaced. `forwards`: number of training forwards. `steps`: number of optimizer steps while there was no training
    forward.
    """

    replaced: dict[str, ReferenceType[Tensor]] = field(default_factory=dict)
    with_gradients: frozenset[str] = frozenset()
    forwards: int = 0
    steps: int = 0


_watches: WeakKeyDictionary[nn.Module, OptimizerWatch] = WeakKeyDictionary()
_reverted: dict[int, tuple[ReferenceType[Tensor], str]] = {}
"""Quantized weights that `revert` replaced, with their names, by identity."""
_hooks: list[Any] = []


def begin(model: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Start checking a model's training forwards."""
    with_gradients = frozenset(name for name, weight in replaced.items() if weight.grad is not None)
    _watches[model] = OptimizerWatch({name: ref(weight) for name, weight in replaced.items()}, with_gradients)
    _look_at_steps()


def end(model: nn.Module) -> None:
    """Stop checking a model."""
    _watches.pop(model, None)


def note_reverted(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Start checking whether stepping optimizers hold weights that `revert` has replaced."""
    _reverted.update({id(weight): (ref(weight), f"{name}.weight" if name else "weight") for name, weight in weights})
    _look_at_steps()


def _look_at_steps() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """Hook that runs after each step of any optimizer in this process."""
    if torch.compiler.is_compiling():
        return
    for model, watch in list(_watches.items()):
        if not watch.forwards:
            _note_step(model, watch)
    if _reverted:
        _tell_of_reverted(optimizer)


def _note_step(model: nn.Module, watch: OptimizerWatch) -> None:
    """Count a step for a model that has had no training forward of ours, and check at the steps in `_LOOKS`."""
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
        entry[1]
        for param in params
        if (entry := _reverted.get(id(param))) is not None
        and entry[0]() is param
        # with a gradient, the weight is still in use, perhaps by another model
        and param.grad is None
    ]
    if names:
        optimizer_members.warn_of_replaced(optimizer, names, "revert")


def note_forward(model: nn.Module) -> None:
    """Count a training forward of a model, and check at the forwards in `_LOOKS`."""
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
    """Stop checking a model and suppress other warnings about the parameters already reported by name."""
    weight_watch.note_told(model.modules(), {id(param) for param in optimizer_members.held(optimizers)})
    end(model)


def _tell_of_computing(watch: OptimizerWatch) -> None:
    """Warn about replaced layers that still compute, as shown by new gradients of their weights."""
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
    """Warn about optimizers that hold replaced weights, and return whether any does.

    `unused`: consider only weights without gradients; with one, the weight is in use, perhaps by another model.
    """
    alive = {weight: name for name, reference in watch.replaced.items() if (weight := reference()) is not None}
    has_warned = False
    for optimizer in _without_wrappers(optimizers):
        params = [param for param in optimizer_members.held([optimizer]) if param in alive]
        names = [f"{alive[param]}.weight" for param in params if not (unused and param.grad is not None)]
        if names:
            optimizer_members.warn_of_replaced(optimizer, names)
            has_warned = True
    return has_warned


def _without_wrappers(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Drop optimizer wrappers, which Lightning and accelerate put around each optimizer, sharing its groups."""
    wrappers = {
        id(wrapper)
        for wrapper in optimizers
        for candidate in vars(wrapper).values()
        if issubclass(type(candidate), Optimizer)
        and getattr(candidate, "param_groups", None) is getattr(wrapper, "param_groups", ())
    }
    return [candidate for candidate in optimizers if id(candidate) not in wrappers]
