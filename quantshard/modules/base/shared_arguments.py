"""Constructor arguments that all modules share, for tensor parallelism and from TransformerEngine.

Constructors take them in `**others`. `help` and `inspect.signature` list the tensor-parallel arguments one by one.
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
"""Class name -> names of the arguments in its displayed signature."""

_Init = TypeVar("_Init", bound=Callable[..., None])


def parallelism(owner: str, others: Mapping[str, Any], base: str = "") -> TensorParallelConfig:
    """Build the tensor-parallel configuration from a constructor's `**others`.

    `base`: the class that defines the constructor, if `owner` inherits it.

    Raises:
        ConfigurationError: an argument of TransformerEngine has a value that is not supported.
        TypeError: TransformerEngine has no such argument either.
    """
    accepted = _taken(owner)
    remaining = {name: value for name, value in others.items() if name not in accepted}
    unsupported.refuse(owner, remaining, _SHOWN.get(base or owner, ()))
    return TensorParallelConfig(**{name: value for name, value in others.items() if name in accepted})


def shows_parallelism(before: str) -> Callable[[_Init], _Init]:
    """Decorate a constructor that passes `**others` to `parallelism`; its signature then lists those arguments.

    The new arguments are inserted before `before`, except those that the constructor already names. `**others` stays
    in the signature if the class also accepts arguments of TransformerEngine.
    """

    def shown(init: _Init) -> _Init:
        signature, owner = inspect.signature(init), init.__qualname__.partition(".")[0]
        params = [
            param
            for param in signature.parameters.values()
            if param.kind is not Parameter.VAR_KEYWORD or owner in unsupported.ARGUMENTS
        ]
        position = next(index for index, param in enumerate(params) if param.name == before)
        params[position:position] = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in _taken(owner).values()
            if field.name not in signature.parameters
        ]
        _SHOWN[owner] = [param.name for param in params]
        init.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
        return init

    return shown


@cache
def _taken(owner: str) -> dict[str, Any]:
    """Name -> field of `TensorParallelConfig`, for the fields that a class accepts."""
    refused = unsupported.ARGUMENTS.get(owner, {})
    return {field.name: field for field in fields(TensorParallelConfig) if field.name not in refused}
