"""What a captured callable takes and returns: tensors, and constants that a graph knows by their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from quantshard.errors import ConfigurationError

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, Enum, tuple, list, dict)
"""What a graph takes for fixed; of tuples, lists and dicts those that are empty."""
_HINTS = ("is_first_microbatch",)
"""Arguments that change no result, so a call may give them another value than the sample."""


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The tensors and constants in tuples, lists and dicts, each with a name for messages."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | list) and value:
        for index, each in enumerate(value):
            yield from leaves(each, f"{name}[{index}]")
    elif isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(each, f"{name}[{key!r}]")
    else:
        yield name, value


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with each tensor changed, in the order of `leaves`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        changed = [mapped(each, change) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, dict):
        items = {key: mapped(each, change) for key, each in value.items()}
        return items if type(value) is dict else type(value)(**items)  # what a model of transformers returns
    return value


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for index, each in enumerate(args):
        yield from leaves(each, f"argument {index}")
    for name in sorted(kwargs):
        if name not in _HINTS:
            yield from leaves(kwargs[name], name)


class GraphArguments:
    """The arguments of a captured callable: tensors at fixed addresses, which each call fills, and constants."""

    def __init__(self, owner: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.owner = owner
        self.args = mapped(tuple(args), _static)
        self.kwargs = mapped(dict(kwargs), _static)
        self.sample = list(_arguments(self.args, self.kwargs))
        self.named = [(name, value) for name, value in self.sample if isinstance(value, Tensor)]
        for name, value in self.sample:
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise ConfigurationError(
                    f"make_graphed_callables: {name} of {owner} is a {type(value).__name__}; a graph takes tensors and "
                    "constants (numbers, strings, None), alone or in tuples, lists and dicts"
                )

    def tensors_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call.

        Raises:
            ConfigurationError: it has other arguments than were captured; saying which.
        """
        given = list(_arguments(args, kwargs))
        names = [name for name, _ in given]
        if len(given) != len(self.sample) or any(n != known for n, (known, _) in zip(names, self.sample, strict=True)):
            self._refuse(f"arguments {', '.join(names)}", f"arguments {', '.join(name for name, _ in self.sample)}")
        found = []
        for (name, value), (_, sample) in zip(given, self.sample, strict=True):
            if isinstance(sample, Tensor) and isinstance(value, Tensor):
                facts = (value.shape, value.dtype, value.device)
                if facts != (sample.shape, sample.dtype, sample.device) or value.requires_grad > sample.requires_grad:
                    self._refuse(f"{name} = {_described(value)}", _described(sample))
                found.append(value)
            elif isinstance(value, Tensor) or isinstance(sample, Tensor) or not _is_same(value, sample):
                self._refuse(f"{name} = {_described(value)}", _described(sample))
        return found

    def _refuse(self, given: str, captured: str) -> None:
        raise ConfigurationError(
            f"{self.owner} was called with {given}, but captured with {captured}; a graph runs what was captured: "
            "capture a callable for each kind of input, or call it in eval mode or under torch.no_grad(), where it is "
            "not replayed"
        )


def _static(sample: Tensor) -> Tensor:
    return sample.detach().clone().requires_grad_(sample.requires_grad)


def _is_same(value: Any, sample: Any) -> bool:
    return value is sample or (type(value) is type(sample) and value == sample)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    grad = ", requires_grad" if value.requires_grad else ""
    return f"a tensor {list(value.shape)} of {value.dtype} on {value.device}{grad}"
