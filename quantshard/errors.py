"""The exceptions that quantshard raises on purpose.

Messages can contain names from untrusted files and are printed to terminals, so errors escape control characters.
"""

import inspect
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_INTERNAL = ("quantshard", "torch", "contextlib")
_warned_topics: set[str] = set()


def printable(text: str, but: str = "") -> str:
    """Escape all non-printable characters of a text, as `repr` does, so that it fits on one line of a terminal.

    Backslashes are not escaped, so applying the function twice is safe. Brackets are not escaped either: pass the
    result to libraries that parse markup, such as rich, as a `rich.text.Text`.

    Args:
        but: characters to leave unescaped.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: object, most: int = 80) -> str:
    """Format a value from a file for a message, shortened if it is long."""
    text = repr(value)
    return printable(text if len(text) <= most else text[: most - 3] + "...")


class QuantshardError(Exception):
    """Base of all errors that quantshard raises on purpose."""

    _unescaped = "\n"
    _max_length = 1 << 20

    def __str__(self) -> str:
        """Return the escaped message. A message that is too long is cut in the middle."""
        message = printable(super().__str__(), but=self._unescaped)
        half = self._max_length // 2
        return message if len(message) <= self._max_length else f"{message[:half]}...{message[-half:]}"


class ConfigurationError(QuantshardError, ValueError):
    """An argument, option or file of the user does not fit."""


class RecipeMismatchError(QuantshardError, ValueError):
    """A weight's format differs from the format that the active recipe requires."""


class UnsupportedOperationError(QuantshardError, RuntimeError):
    """An operation would silently change or dequantize a quantized tensor.

    This is not a TypeError, because Python's operators treat a TypeError as "try the other operand", and `==` would
    return False.
    """


class FallbackError(QuantshardError, RuntimeError):
    """Strict mode is on, and an operation would use a slower path or more memory than its native one."""


class CheckpointError(QuantshardError, RuntimeError):
    """A checkpoint is missing, damaged, or of another model or recipe. Its message is one line of limited length."""

    _unescaped, _max_length = "", 4000


class LostRankError(CheckpointError):
    """Another rank exited, was interrupted, or did not join a collective. The message gives its reason, if known."""


class RankMismatchError(QuantshardError, RuntimeError):
    """Ranks disagree on a value that must be equal everywhere."""


class TorchVersionError(QuantshardError, RuntimeError):
    """This version of PyTorch lacks a private function, class or attribute that a feature needs."""


class NonFiniteGradientError(QuantshardError, RuntimeError):
    """Too many consecutive steps had infinite or NaN gradients, or the optimizer cannot skip such a step."""


def silence(topic: str) -> None:
    """Leave out the warnings of `warn_once` on this topic in this process."""
    _warned_topics.add(topic)


def warn_once(topic: str, text: str) -> None:
    """Warn at the user's line, once per topic and process, about something that is not an error."""
    if topic in _warned_topics:
        return
    _warned_topics.add(topic)
    warn_user(text, is_counted=True)


def warn_user(text: str, category: type[Warning] = UserWarning, *, is_counted: bool = False) -> None:
    """Warn at the user's line: the first stack frame outside quantshard and PyTorch.

    Args:
        is_counted: the caller already limits how often it warns, for example once per optimizer. The warning is then
            shown even if Python has shown the same text at the same line, because it concerns another object.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        frame = frame.f_back
    names: dict[str, Any] = vars(sys) if frame is None else frame.f_globals
    registry = {} if is_counted else names.setdefault("__warningregistry__", {})  # Python's record of shown warnings
    location = ("sys", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(printable(text), category, *location, names.get("__name__", "sys"), registry)


def meant(name: Any, known: Iterable[str]) -> str:
    """Return a hint such as "did you mean 'x'? " for an unknown name, or "". It precedes the list of known words."""
    by_lowercase = {word.lower(): word for word in known}
    matches = get_close_matches(name[:80].lower(), by_lowercase, 1) if isinstance(name, str) else []
    return f"did you mean {by_lowercase[matches[0]]!r}? " if matches else ""
