"""A converted model looks, in its first training forwards, whether optimizers of this process hold its parameters.

Nothing links a model with its optimizer, so Python is asked for all objects, once or a few times: see
`observe.optimizer_members` for what cannot be known. A model in a graph of torch.compile does not look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from quantshard.errors import warn_user
from quantshard.modules.base import weight_watch
from quantshard.observe import optimizer_members
from quantshard.tensor import components

_FEW = 4
_LOOKS = (2, 8, 64)
"""Before which training forwards: an optimizer may be made after the first."""


@dataclass
class OptimizerWatch:
    """`replaced`: the weights whose places others have taken, by name, alive or not; `with_gradients`: those that had
    one then. `forwards`: those in training."""

    replaced: dict[str, ReferenceType[Tensor]] = field(default_factory=dict)
    with_gradients: frozenset[str] = frozenset()
    forwards: int = 0


_watches: WeakKeyDictionary[nn.Module, OptimizerWatch] = WeakKeyDictionary()


def begin(model: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Look at a model's next training forwards."""
    with_gradients = frozenset(name for name, weight in replaced.items() if weight.grad is not None)
    _watches[model] = OptimizerWatch({name: ref(weight) for name, weight in replaced.items()}, with_gradients)


def end(model: nn.Module) -> None:
    """Look no more."""
    _watches.pop(model, None)


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
            held = {id(param) for param in optimizer_members.held(optimizers)}
            weight_watch.note_told(model.modules(), held)
            end(model)
        elif watch.forwards == _LOOKS[-1]:
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
            "holds them after convert"
        )


def _told_of_replaced(watch: OptimizerWatch, optimizers: list[Optimizer]) -> bool:
    alive = {weight: name for name, each in watch.replaced.items() if (weight := each()) is not None}
    told = False
    for optimizer in optimizers:
        names = [f"{alive[param]}.weight" for param in optimizer_members.held([optimizer]) if param in alive]
        if names:
            optimizer_members.warn_of_replaced(optimizer, names)
            told = True
    return told
