"""What public functions may be given, where a value of another type would fail far inside, in other words."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from quantshard.errors import ConfigurationError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Kind = TypeVar("_Kind")


@runtime_checkable
class StateReader(Protocol):
    """What is read as a mapping, and may be none: a reader of values that are elsewhere."""

    def keys(self) -> Any:
        """The names."""

    def __getitem__(self, name: str) -> Any:
        """A value."""


class ArgumentKind(NamedTuple):
    """Types of values, and what a message calls them."""

    wanted: str
    types: tuple[Any, ...]

    @property
    def or_none(self) -> ArgumentKind:
        """The same, and None."""
        return ArgumentKind(f"{self.wanted}, or None", (*self.types, type(None)))


MODULE: Final = ArgumentKind("a torch.nn.Module", (nn.Module,))
OPTIMIZER: Final = ArgumentKind("a torch.optim.Optimizer", (Optimizer,))
TENSOR: Final = ArgumentKind("a tensor", (Tensor,))
PATH: Final = ArgumentKind("a path, as text or os.PathLike", (str, os.PathLike))
PROCESS_GROUP: Final = ArgumentKind("a torch.distributed.ProcessGroup", (dist.ProcessGroup,))
MESH: Final = ArgumentKind("a DeviceMesh", (DeviceMesh,))
CALLABLE: Final = ArgumentKind("a function", (Callable,))
MAPPING: Final = ArgumentKind("a mapping, as a dict", (Mapping,))
STATE_DICT: Final = ArgumentKind("a mapping, as a dict", (Mapping, StateReader))
ITERABLE: Final = ArgumentKind("several values, as a list", (Iterable,))
TEXT: Final = ArgumentKind("text", (str,))
NAMES: Final = ArgumentKind("a name or pattern of names, or a list of them", (str, Iterable))
NUMBER: Final = ArgumentKind("a number", (Real, Tensor))
SIZES: Final = ArgumentKind("a whole number, or one of each dim", (Integral, Iterable))
FLAG: Final = ArgumentKind("True or False", (object,))
"""What has a truth, but no text, of which "False" is true."""
WHOLE_NUMBER: Final = ArgumentKind("a whole number", (Integral,))


def check_arguments(where: str, kind: ArgumentKind, /, **given: Any) -> None:
    """Check that arguments of a public function are of a kind; True and False are no numbers, a text is not several.

    Raises:
        ConfigurationError: naming the first that is not, what was given, and what is wanted.
    """
    for name, value in given.items():
        is_flag = isinstance(value, bool) and kind.types[0] in (Integral, Real)
        is_text = isinstance(value, str) and str not in kind.types
        if is_flag or is_text or not isinstance(value, kind.types):
            raise ConfigurationError(f"{where}({name}={shown_argument(value)}): it must be {kind.wanted}")


def check_kinds(where: str, /, **given: tuple[ArgumentKind, Any]) -> None:
    """`check_arguments` of arguments of several kinds: (kind, value) by name."""
    for name, (kind, value) in given.items():
        check_arguments(where, kind, **{name: value})


def shown_argument(value: Any) -> str:
    """A value in a message: itself if it is short and plain, else the name of its type."""
    text = repr(value) if value is None or isinstance(value, bool | int | float | str) else ""
    return text if text and len(text) <= 80 else type(value).__name__


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The word that is most like one that is unknown, if one is."""
    by_case = {each.lower(): each for each in known}
    near = get_close_matches(name[:80].lower(), by_case, 1) if isinstance(name, str) else []
    return by_case[near[0]] if near else None


def meant(name: Any, known: Iterable[str]) -> str:
    """The word that was perhaps meant by one that is unknown, as a question before a list of those there are."""
    near = nearest(name, known)
    return f"did you mean {near!r}? " if near else ""


def unexpected_argument(owner: str, name: str, known: Collection[str]) -> TypeError:
    """What Python raises for an argument that a function does not have, with the name that was meant, as from 3.13."""
    hint = meant(name, known).rstrip()
    return TypeError(f"{owner}() got an unexpected keyword argument {name!r}{f'; {hint}' if hint else ''}")


def suggests_names(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function or a constructor, so that a misspelled argument is told by `unexpected_argument`."""
    known, owner = inspect.signature(function).parameters, function.__qualname__.partition(".")[0]

    @wraps(function)
    def checked(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        for name in options:
            if name not in known:
                raise unexpected_argument(owner, name, known.keys())
        return function(*args, **options)

    return checked


def suggests_fields(kind: type[_Kind]) -> type[_Kind]:
    """`suggests_names` for the constructor that a dataclass has of its fields."""
    kind.__init__ = suggests_names(kind.__init__)  # type: ignore[method-assign]
    return kind
