"""Lookup of PyTorch's private names. A missing name disables its feature when it is used, but not the import."""

import functools
import importlib
import re
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from quantshard.errors import TorchVersionError

FIRST_TORCH, LAST_TORCH = (2, 11), (2, 15)
"""The first and the last minor version of PyTorch that the tests passed with, as in pyproject.toml."""

_TESTED = " to ".join(".".join(map(str, minor)) for minor in (FIRST_TORCH, LAST_TORCH))

NAMES: dict[str, str] = {}
"""All private names that are looked up, with the feature that each of them is needed for."""

_FREE = (Tensor, nn.Parameter, nn.Buffer, DTensor, Shard, Replicate, Partial)
"""Public types. An object of exactly such a type has no private class."""


def private_name(path: str, feature: str) -> Any:
    """Look up a dotted name of PyTorch, e.g. "torch._C._x". If this version has no such name, return a `MissingName`.

    `feature`: the feature that does not work without it, as the subject of a sentence.
    """
    NAMES[path] = feature
    try:
        return resolve_name(path)
    except (AttributeError, ImportError):
        return MissingName(path, feature)


def private_name_later(path: str, feature: str) -> Callable[[], Any]:
    """`private_name` as a function, for names in modules that take long to import."""
    NAMES[path] = feature
    return functools.partial(private_name, path, feature)


def resolve_name(path: str) -> Any:
    names = path.split(".")
    result: Any = torch
    for number, name in enumerate(names[1:], 2):
        try:
            result = getattr(result, name)
        except AttributeError:
            if not isinstance(result, types.ModuleType):
                raise
            result = importlib.import_module(".".join(names[:number]))
    return result


class MissingName:
    """Placeholder for a name that this version of PyTorch lacks. Calls, attributes and isinstance checks raise."""

    def __init__(self, path: str, feature: str) -> None:
        self._path, self._feature = path, feature

    def error(self) -> TorchVersionError:
        return TorchVersionError(
            f"torch {torch.__version__} has no {self._path}, without which {self._feature} cannot work; install torch "
            f"{_TESTED}"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.error()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # Python looks up optional special methods
        raise self.error()

    def __instancecheck__(self, instance: object) -> bool:
        """False for objects that certainly have another class."""
        if type(instance) in _FREE or type(instance).__module__.partition(".")[0] != "torch":
            return False
        raise self.error()


def missing(*names: Any) -> TorchVersionError | None:
    """The error for the first of these names that is missing, or None."""
    return next((name.error() for name in names if type(name) is MissingName), None)


def warn_of_untested_torch() -> None:
    """Warn if this version of PyTorch is older or newer than the tested ones."""
    minor = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if minor is None or not FIRST_TORCH <= (int(minor[1]), int(minor[2])) <= LAST_TORCH:
        warnings.warn(
            f"quantshard was tested with torch {_TESTED}, and this is torch {torch.__version__}: what it cannot do "
            "there raises TorchVersionError where it is used, and bits were not compared",
            stacklevel=3,
        )
