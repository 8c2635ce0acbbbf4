"""Weights that train and are in no optimizer are told: the commonest case is an optimizer built before fully_shard.

Nothing links a model with its optimizer. But when an optimizer steps, a parameter that has a gradient, and that no
optimizer holds, may be one that trains in vain. So behind some steps of each optimizer the modules that are there are
looked at, and behind the next step again: what then has another gradient is told, if the values of all such are the
same. By hand, from masters that PyTorch steps, some would have changed; of 16 bits others may not.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from quantshard import kernel_dispatch, private_torch
from quantshard.errors import warn_user
from quantshard.tensor import components

_LOOKS = (2, 8, 64)
"""After which steps of an optimizer: others may be made later than it, and gradients may come later."""
_EVERY = 128
"""And after each so many, since weights may be unfrozen at any time."""
_FEW = 4
_MOST = 64
"""Parameters that are looked at a second time."""

_modules: WeakSet[nn.Module] = WeakSet()
_told: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_held: WeakKeyDictionary[Optimizer, frozenset[int]] = WeakKeyDictionary()
"""The ids of the parameters of optimizers that have stepped, which are theirs while the optimizer is there. No weak
references: a tensor that has one is not moved by `Module.to`."""
_samples: WeakKeyDictionary[Optimizer, list[WeightSample]] = WeakKeyDictionary()
_hooks: list[Any] = []


@dataclass(frozen=True)
class WeightSample:
    """A parameter with a gradient that no optimizer holds; what it and its gradient were. It lives for a step."""

    module: nn.Module
    leaf: str
    param: Tensor
    grad: Tensor
    changes: int
    values: tuple[float, ...]

    @staticmethod
    def of(module: nn.Module, leaf: str, param: Tensor) -> WeightSample:
        assert param.grad is not None
        changes = private_torch.in_place_changes(param.grad)
        return WeightSample(module, leaf, param, param.grad, changes, _values(param))

    def has_new_gradient(self) -> bool:
        """Whether it has another one, or more was added to it."""
        grad = self.param.grad
        if grad is None or not self.param.requires_grad:
            return False
        return grad is not self.grad or private_torch.in_place_changes(grad) != self.changes

    def has_changed(self) -> bool:
        """Whether its values have."""
        return _values(self.param) != self.values

    @property
    def shown(self) -> str:
        """What it is called where no names are known."""
        kind = next(each for each in type(self.module).__mro__ if not issubclass(each, FSDPModule)).__name__
        return f"{self.leaf} {list(self.param.shape)} of a {kind}"


def watch(module: nn.Module) -> None:
    """Look at the parameters of a module from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
    _modules.add(module)


def note_told(modules: Iterable[nn.Module], held: Collection[int]) -> None:
    """Tell no more of weights that train and are in no optimizer (`held`: what is, by identity): who knows the names
    of these has told of them. Of others, as what is unfrozen later, there may be something to tell."""
    for module in modules:
        for leaf, param in module.named_parameters(recurse=False):
            if param.requires_grad and id(param) not in held:
                _told.setdefault(module, set()).add(leaf)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """Behind each step of an optimizer of this process."""
    if torch.compiler.is_compiling() or kernel_dispatch.is_capturing():
        return
    count = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    looks = count in _LOOKS or count % _EVERY == 0
    if count == 1 or looks:
        _note(optimizer)
    if (samples := _samples.pop(optimizer, None)) is not None:
        _confirm(optimizer, samples)
    if looks and (unheld := list(_unheld())):
        chosen = unheld[:: -(-len(unheld) // _MOST)]  # of all models that are there
        _samples[optimizer] = [WeightSample.of(*each) for each in chosen]


def _note(optimizer: Optimizer) -> None:
    _held[optimizer] = frozenset(id(param) for group in optimizer.param_groups for param in group["params"])


def _unheld() -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The parameters with a gradient that no optimizer that is known holds."""
    held = frozenset[int]().union(*_held.values())
    for module in list(_modules):
        for leaf, param in module.named_parameters(recurse=False):
            trains = param.requires_grad and param.grad is not None and id(param) not in held
            if trains and leaf not in _told.get(module, ()) and _has_values(param):
                yield module, leaf, param


def _has_values(param: Tensor) -> bool:
    """Not so where a step is rehearsed, as by `plan`, or traced."""
    return not private_torch.local_tensor(param).is_meta and not private_torch.is_traced(param)


def _confirm(optimizer: Optimizer, samples: list[WeightSample]) -> None:
    trained = [each for each in samples if each.has_new_gradient()]
    if not trained or any(each.has_changed() for each in trained):  # if one does, somebody steps them by hand
        return
    gc.collect()  # of optimizers that were given up
    for living in components.living_optimizers():
        if hasattr(living, "param_groups"):  # else its constructor failed
            _note(living)
    unheld = {id(param) for _, _, param in _unheld()}
    found = [each for each in trained if id(each.param) in unheld]
    if found:
        _warn(optimizer, sorted(each.shown for each in found))
    for each in found:
        _told.setdefault(each.module, set()).add(each.leaf)


def _values(param: Tensor) -> tuple[float, ...]:
    """Sums over what is stored of a weight here, by which a change is seen; read from the device."""
    quantized = components.quantized_local(param)
    if quantized is None:
        return (float(private_torch.local_tensor(param).detach().sum(dtype=torch.float64)),)
    stored = quantized.quantized_storage.components.values()
    return tuple(float(part.contiguous().view(torch.uint8).sum(dtype=torch.int64)) for part in stored)


def _warn(optimizer: Optimizer, names: list[str]) -> None:
    held = [param for group in optimizer.param_groups for param in group["params"]]
    kind, is_one = type(optimizer).__name__, len(names) == 1
    shown = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
    why = (
        f"{kind}, which stepped, has {len(held)} parameters, none of them with a gradient; build it after convert and "
        "fully_shard, which put others in their place"
        if all(param.grad is None for param in held)
        else "give the optimizer model.named_parameters(), or freeze what is not to train: requires_grad_(False)"
    )
    warn_user(
        f"{shown}: {'it gets a gradient and is' if is_one else 'they get gradients and are'} in no optimizer, so no "
        f"step changes {'it' if is_one else 'them'}; {why}",
        is_counted=True,
    )
