"""Arguments and results of a captured callable: tensors, and constants that a graph fixes by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from quantshard.errors import ConfigurationError

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, Enum, tuple, list, dict)
"""Types that a graph treats as constants. Tuples, lists and dicts are constants only if empty."""
_HINTS = ("is_first_microbatch",)
"""Arguments that change no result, so that a call can pass another value than the sample."""


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and constants in nested tuples, lists and dicts, each with a name for messages."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}[{index}]")
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]")
    else:
        yield name, value


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to each tensor in nested tuples, lists and dicts, in the order of `leaves`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        changed = [mapped(item, change) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, dict):
        items = {key: mapped(item, change) for key, item in value.items()}
        # other classes: outputs of transformers models
        return items if type(value) is dict else type(value)(**items)
    return value


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for index, arg in enumerate(args):
        yield from leaves(arg, f"argument {index}")
    for name in sorted(kwargs):
        if name not in _HINTS:
            yield from leaves(kwargs[name], name)


class GraphArguments:
    """Arguments of a captured callable: constants, and tensors at fixed addresses that each call copies into."""

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
        """Return the tensors of a call.

        Raises:
            ConfigurationError: the arguments differ from the captured ones in number, name, shape, dtype, device or
                constant value.
        """
        actual = list(_arguments(args, kwargs))
        names = [name for name, _ in actual]
        if len(actual) != len(self.sample) or any(
            n != expected for n, (expected, _) in zip(names, self.sample, strict=True)
        ):
            self._refuse(f"arguments {', '.join(names)}", f"arguments {', '.join(name for name, _ in self.sample)}")
        tensors = []
        for (name, value), (_, sample) in zip(actual, self.sample, strict=True):
            if isinstance(sample, Tensor) and isinstance(value, Tensor):
                facts = (value.shape, value.dtype, value.device)
                if facts != (sample.shape, sample.dtype, sample.device) or value.requires_grad > sample.requires_grad:
                    self._refuse(f"{name} = {_described(value)}", _described(sample))
                tensors.append(value)
            elif isinstance(value, Tensor) or isinstance(sample, Tensor) or not _is_same(value, sample):
                self._refuse(f"{name} = {_described(value)}", _described(sample))
        return tensors

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
