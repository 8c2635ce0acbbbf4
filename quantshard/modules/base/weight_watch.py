"""Weights that train and are in no optimizer are told: the commonest case is an optimizer built before fully_shard.

Nothing links a model with its optimizer. But when an optimizer steps, a parameter with a gradient that no optimizer of
the process holds is one that trains in vain. So after some steps of each optimizer the modules that are there are
looked at. Python is asked for all optimizers only if there is such a parameter.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from quantshard import kernel_dispatch
from quantshard.errors import warn_once
from quantshard.tensor import components

_LOOKS = (2, 8, 64)
"""After which steps of an optimizer: others may be made later than it, and gradients may come later."""
_FEW = 4

_modules: WeakSet[nn.Module] = WeakSet()
_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_hooks: list[Any] = []


def watch(module: nn.Module) -> None:
    """Look at the parameters of a module from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
    _modules.add(module)


def leave_out(modules: Iterable[nn.Module]) -> None:
    """Look at some no more: who knows their names has told what there was to tell."""
    for module in modules:
        _modules.discard(module)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """Behind each step of an optimizer of this process."""
    if torch.compiler.is_compiling() or kernel_dispatch.is_capturing():  # no collection of garbage within a capture
        return
    count = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if count in _LOOKS:
        _look(optimizer)


def _look(optimizer: Optimizer) -> None:
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if all(id(param) in own for param, _ in _trained()):
        return
    gc.collect()  # of models that were given up
    living = [each for each in components.living_optimizers() if hasattr(each, "param_groups")]  # was built
    if any(each is not optimizer and each.param_groups is optimizer.param_groups for each in living):
        return  # it steps masters within another, whose own step is looked at
    held = {id(param) for each in living for group in each.param_groups for param in group["params"]}
    names = [name for param, name in _trained() if id(param) not in held]
    if names:
        _warn(optimizer, names)


def _trained() -> Iterator[tuple[Tensor, str]]:
    """The parameters that have a gradient, each with what it is called where no names are known."""
    for module in list(_modules):
        kind = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule)).__name__
        for leaf, param in module.named_parameters(recurse=False):
            if param.requires_grad and param.grad is not None:
                yield param, f"{leaf} {list(param.shape)} of a {kind}"


def _warn(optimizer: Optimizer, names: list[str]) -> None:
    held = [param for group in optimizer.param_groups for param in group["params"]]
    idle = all(param.grad is None for param in held)
    kind = type(optimizer).__name__
    shown = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
    why = (
        f"{kind}, which stepped, has {len(held)} parameters, none of them with a gradient; build it after convert and "
        "fully_shard, which put others in their place"
        if idle
        else "give the optimizer model.named_parameters(), or freeze what is not to train: requires_grad_(False)"
    )
    warn_once(
        f"unheld weights {shown}",
        f"{shown}: trained, but in no optimizer, so no step changes {'it' if len(names) == 1 else 'them'}; {why}",
    )
