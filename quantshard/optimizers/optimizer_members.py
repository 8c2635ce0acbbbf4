"""Which parameters of a model its optimizers hold, and which they hold that are not the model's: told once.

An optimizer knows its parameters, by name if it was given names, and no model; a model knows no optimizer. So this can
be known only where both are at hand: in `explain(model, optimizer)`, and in the forward of a model that `convert` has
made, which looks for the optimizers of the process. It cannot be known of a model of plain layers that nobody explains,
nor of an optimizer that holds no parameter of the model at all: that may be another model's.
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
"""The optimizers that something was told of: another may come to lie at the same address."""


def registered(model: nn.Module) -> dict[Tensor, str]:
    """The parameters of a model with their names; of one that FSDP2 has gathered, the sharded one."""
    gathers = private_torch.fsdp_gathers(model)
    found: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            known = gathers.get((id(module), leaf))
            name = private_torch.without_wrappers(f"{prefix}.{leaf}" if prefix else leaf)
            found.setdefault(param if known is None else known.param, name)
    return found


def held(optimizers: Iterable[Any]) -> dict[Tensor, str]:
    """The parameters in optimizers' groups, with the names that those know."""
    found: dict[Tensor, str] = {}
    for optimizer in optimizers:
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):  # or its constructor failed
            names = group.get("param_names") or [
                f"parameter {position} of group {number}" for position in range(len(group["params"]))
            ]
            found.update(zip(group["params"], names, strict=False))
    return found


def warn_of_unheld(model: nn.Module, optimizers: Sequence[Any]) -> bool:
    """Tell of parameters that train and are in none of some optimizers; False if these hold none of the model."""
    params, known = registered(model), held(optimizers)
    if not any(param in known for param in params):
        return False
    missing = [name for param, name in params.items() if param.requires_grad and param not in known]
    if missing:
        holding = [each for each in optimizers if any(param in params for param in held([each]))]
        kinds = " and ".join(sorted({type(optimizer).__name__ for optimizer in holding}))
        warn_once(
            f"unheld {shown(missing)} {class_name(model)} {[*map(_number, holding)]}",
            f"{shown(missing)} of a {class_name(model)}: trained, but in no optimizer ({kinds}), so a step leaves "
            "it as it is; give the optimizer model.named_parameters(), or freeze it: requires_grad_(False)",
        )
    return True


def warn_of_strangers(model: nn.Module, optimizer: Any) -> None:
    """Tell of parameters that an optimizer holds and a model does not have."""
    params = registered(model)
    strange = [name for param, name in held([optimizer]).items() if param not in params]
    if strange:
        _warn_of_optimizer(
            optimizer,
            f"{type(optimizer).__name__} holds {shown(strange, 1)}, not in this {class_name(model)}, so it does not "
            "train them; make it after convert and fully_shard",
        )


def warn_of_replaced(optimizer: Any, names: Sequence[str], by: str = "convert") -> None:
    """Tell of weights that an optimizer holds, and in whose place `convert`, or `by`, has put others."""
    _warn_of_optimizer(
        optimizer,
        f"{type(optimizer).__name__} was made before {by} and holds {shown(names, 1)} as they were, so it does not "
        f"train them; make it after {by} and fully_shard",
    )


def _warn_of_optimizer(optimizer: Any, text: str) -> None:
    """Once for each optimizer."""
    warn_once(f"parameters of optimizer {_number(optimizer)}", text)


def _number(optimizer: Any) -> int:
    """By which one is told from others that are alike; of this process."""
    return _numbers.setdefault(optimizer, next(_count))


def class_name(model: nn.Module) -> str:
    """Of the class as it was: fully_shard makes FSDPLlama of Llama."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def shown(names: Sequence[str], few: int = _FEW) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - few} more" if len(names) > few else ""
    return ", ".join(names[:few]) + more
