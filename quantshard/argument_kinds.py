"""Type checks for arguments of public functions, so that a wrong type raises at the call and not deep inside."""

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
    """An object that is read like a mapping without being one: a lazy reader of values stored elsewhere."""

    def keys(self) -> Any:
        """Return the names."""

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name."""


class ArgumentKind(NamedTuple):
    """Accepted types, and their description in error messages."""

    wanted: str
    types: tuple[Any, ...]

    @property
    def or_none(self) -> ArgumentKind:
        """This kind, also accepting None."""
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
"""Any object with a truth value except text: the string "False" would be true."""
WHOLE_NUMBER: Final = ArgumentKind("a whole number", (Integral,))


def check_arguments(where: str, kind: ArgumentKind, /, **given: Any) -> None:
    """Check that arguments of a public function are of a kind. Booleans are not numbers, and text is not a sequence.

    Raises:
        ConfigurationError: an argument is of another kind. The message names it, its value and the expected kind.
    """
    for name, value in given.items():
        is_flag = isinstance(value, bool) and kind.types[0] in (Integral, Real)
        is_text = isinstance(value, str) and str not in kind.types
        if is_flag or is_text or not isinstance(value, kind.types):
            raise ConfigurationError(f"{where}({name}={shown_argument(value)}): it must be {kind.wanted}")


def check_kinds(where: str, /, **given: tuple[ArgumentKind, Any]) -> None:
    """Call `check_arguments` for arguments of different kinds, given as name=(kind, value)."""
    for name, (kind, value) in given.items():
        check_arguments(where, kind, **{name: value})


def shown_argument(value: Any) -> str:
    """Format a value for a message: the value itself if it is short and plain, otherwise the name of its type."""
    text = repr(value) if value is None or isinstance(value, bool | int | float | str) else ""
    return text if text and len(text) <= 80 else type(value).__name__


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar to `name`, or None."""
    by_lowercase = {word.lower(): word for word in known}
    matches = get_close_matches(name[:80].lower(), by_lowercase, 1) if isinstance(name, str) else []
    return by_lowercase[matches[0]] if matches else None


def meant(name: Any, known: Iterable[str]) -> str:
    """Return a hint such as "did you mean 'x'? " for an unknown name, or "". It precedes the list of known words."""
    near = nearest(name, known)
    return f"did you mean {near!r}? " if near else ""


def unexpected_argument(owner: str, name: str, known: Collection[str]) -> TypeError:
    """Return the TypeError that Python raises for an unknown keyword argument, with a suggestion as in Python 3.13."""
    hint = meant(name, known).rstrip()
    return TypeError(f"{owner}() got an unexpected keyword argument {name!r}{f'; {hint}' if hint else ''}")


def suggests_names(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function or constructor so that a misspelled argument raises `unexpected_argument`."""
    parameters, owner = inspect.signature(function).parameters, function.__qualname__.partition(".")[0]

    @wraps(function)
    def checked(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        for name in options:
            if name not in parameters:
                raise unexpected_argument(owner, name, parameters.keys())
        return function(*args, **options)

    return checked


def suggests_fields(kind: type[_Kind]) -> type[_Kind]:
    """Apply `suggests_names` to the generated constructor of a dataclass."""
    kind.__init__ = suggests_names(kind.__init__)  # type: ignore[method-assign]
    return kind
