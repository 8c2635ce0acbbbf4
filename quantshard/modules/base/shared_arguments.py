"""What the constructors of all modules take besides their own arguments: tensor parallelism's and TransformerEngine's.

They arrive in `**others`. The signature that `help` and `inspect.signature` show has tensor parallelism's one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from inspect import Parameter
from typing import Any, TypeVar

from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.modules.contexts import unsupported

_SHOWN: dict[str, list[str]] = {}
"""Class -> the arguments that its signature shows."""

_Init = TypeVar("_Init", bound=Callable[..., None])


def parallelism(owner: str, others: Mapping[str, Any], base: str = "") -> TensorParallelConfig:
    """Tensor parallelism's arguments of those that a constructor was given besides its own.

    `base`: the class whose constructor it is, where `owner` inherits it.

    Raises:
        ConfigurationError: another one, which TransformerEngine has, asks for something that is not here.
        TypeError: TransformerEngine does not have it either.
    """
    taken = _taken(owner)
    other = {name: value for name, value in others.items() if name not in taken}
    unsupported.refuse(owner, other, _SHOWN.get(base or owner, ()))
    return TensorParallelConfig(**{name: value for name, value in others.items() if name in taken})


def shows_parallelism(before: str) -> Callable[[_Init], _Init]:
    """Decorate a constructor that hands its `**others` to `parallelism`, so that its signature shows what they may be.

    `before`: the argument in front of which tensor parallelism's are shown. Those that the constructor names itself
    stay where they are; `**others` stays if it takes arguments of TransformerEngine's too.
    """

    def shown(init: _Init) -> _Init:
        signature, owner = inspect.signature(init), init.__qualname__.partition(".")[0]
        own = [
            each
            for each in signature.parameters.values()
            if each.kind is not Parameter.VAR_KEYWORD or owner in unsupported.ARGUMENTS
        ]
        place = next(index for index, each in enumerate(own) if each.name == before)
        own[place:place] = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in _taken(owner).values()
            if field.name not in signature.parameters
        ]
        _SHOWN[owner] = [each.name for each in own]
        init.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return init

    return shown


@cache
def _taken(owner: str) -> dict[str, Any]:
    """The fields of `TensorParallelConfig` that a class does not refuse, by name."""
    refused = unsupported.ARGUMENTS.get(owner, {})
    return {field.name: field for field in fields(TensorParallelConfig) if field.name not in refused}
