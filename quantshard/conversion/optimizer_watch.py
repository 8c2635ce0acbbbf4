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

from quantshard.modules.base import weight_watch
from quantshard.observe import optimizer_members
from quantshard.tensor import components

_LOOKS = (2, 8, 64)
"""Before which training forwards: an optimizer may be made after the first."""


@dataclass
class OptimizerWatch:
    """`replaced`: the weights whose places others have taken, by name, alive or not. `forwards`: those in training."""

    replaced: dict[str, ReferenceType[Tensor]] = field(default_factory=dict)
    forwards: int = 0


_watches: WeakKeyDictionary[nn.Module, OptimizerWatch] = WeakKeyDictionary()


def begin(model: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Look at a model's next training forwards."""
    _watches[model] = OptimizerWatch({name: ref(weight) for name, weight in replaced.items()})


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
        optimizers = components.living_optimizers()
        if _told_of_replaced(watch, optimizers) or optimizer_members.warn_of_unheld(model, optimizers):
            held = {id(param) for param in optimizer_members.held(optimizers)}
            weight_watch.note_told(model.modules(), held)
            end(model)
        elif watch.forwards == _LOOKS[-1]:
            end(model)


def _told_of_replaced(watch: OptimizerWatch, optimizers: list[Optimizer]) -> bool:
    alive = {weight: name for name, each in watch.replaced.items() if (weight := each()) is not None}
    told = False
    for optimizer in optimizers:
        names = [f"{alive[param]}.weight" for param in optimizer_members.held([optimizer]) if param in alive]
        if names:
            optimizer_members.warn_of_replaced(optimizer, names)
            told = True
    return told
