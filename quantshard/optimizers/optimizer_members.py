"""Warnings about parameters of a model that its optimizers lack, and parameters of an optimizer that the model lacks.

An optimizer knows no model, and a model no optimizer, so only callers that have both can check: `explain(model,
optimizer)` and accelerate's `prepare`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from quantshard import private_torch
from quantshard.errors import warn_once

_FEW = 4

_count = itertools.count()
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Numbers of the optimizers with a warning. Ids are not used, because addresses are reused."""


def registered(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters of a model with their names; sharded parameters if FSDP2 has gathered them."""
    gathers = private_torch.fsdp_gathers(model)
    names: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            gathered = gathers.get((id(module), leaf))
            name = private_torch.without_wrappers(f"{prefix}.{leaf}" if prefix else leaf)
            names.setdefault(param if gathered is None else gathered.param, name)
    return names


def held(optimizers: Iterable[Any]) -> dict[Tensor, str]:
    """Return the parameters in the groups of optimizers, with the names that the optimizers have for them."""
    result: dict[Tensor, str] = {}
    for optimizer in optimizers:
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):  # absent if the constructor failed
            names = group.get("param_names") or [
                f"parameter {position} of group {number}" for position in range(len(group["params"]))
            ]
            result.update(zip(group["params"], names, strict=False))
    return result


def warn_of_unheld(model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Warn about trainable parameters that are in none of the optimizers.

    Does nothing if the optimizers have no parameter of this model, because they can belong to another one.
    """
    params, optimized = registered(model), held(optimizers)
    if not any(param in optimized for param in params):
        return
    missing = [name for param, name in params.items() if param.requires_grad and param not in optimized]
    if missing:
        relevant = [candidate for candidate in optimizers if any(param in params for param in held([candidate]))]
        kinds = " and ".join(sorted({type(optimizer).__name__ for optimizer in relevant}))
        warn_once(
            f"unheld {shown(missing)} {class_name(model)} {[*map(_number, relevant)]}",
            f"{shown(missing)} of a {class_name(model)}: trained, but not in this {kinds}, whose step leaves it as it "
            "is; give the optimizer model.named_parameters(), or freeze it: requires_grad_(False)",
        )


def warn_of_strangers(model: nn.Module, optimizer: Any) -> None:
    """Warn about parameters of an optimizer that are not in the model."""
    params = registered(model)
    strange = [name for param, name in held([optimizer]).items() if param not in params]
    if strange:
        _warn_of_optimizer(
            optimizer,
            f"{type(optimizer).__name__} holds {shown(strange, 1)}, not in this {class_name(model)}, so it does not "
            "train them; make it after convert and fully_shard",
        )


def _warn_of_optimizer(optimizer: Any, text: str) -> None:
    """Warn once per optimizer."""
    warn_once(f"parameters of optimizer {_number(optimizer)}", text)


def _number(optimizer: Any) -> int:
    """Return a number that identifies the optimizer in this process."""
    return _numbers.setdefault(optimizer, next(_count))


def class_name(model: nn.Module) -> str:
    """Return the name of the class before `fully_shard`, which turns Llama into FSDPLlama."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def shown(names: Sequence[str], few: int = _FEW) -> str:
    """Format the first few names, and how many more there are."""
    more = f" and {len(names) - few} more" if len(names) > few else ""
    return ", ".join(names[:few]) + more
