"""The exceptions that quantshard raises on purpose.

    QuantshardError
     |-- ConfigurationError (also a ValueError)     an argument, option or file of the user's does not fit
     |-- RecipeMismatchError (also a ValueError)    a weight's format is not the one the recipe in force asks for
     |-- UnsupportedOperationError (also a RuntimeError)  an operation would change or dequantize a weight unasked
     |-- FallbackError (also a RuntimeError)        strict was asked for, and something would take a slower path
     |-- CheckpointError (also a RuntimeError)      a checkpoint is missing, damaged, or of another model or recipe
     |    `-- LostRankError                       another rank ended or did not come, and said why, if it could
     |-- RankMismatchError (also a RuntimeError)    ranks disagree on something that must be equal
     |-- TorchVersionError (also a RuntimeError)    this version of PyTorch lacks what a feature needs
     `-- NonFiniteGradientError (also a RuntimeError)  infinite or NaN gradients, too often or unskippable

Each message says what happened, to which tensor, with which numbers, and what to do next. It may have names from files
of other people in it, and is shown by terminals: what a terminal would obey is escaped here, for all errors at once.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

_OURS = ("quantshard", "torch", "contextlib")
_told: set[str] = set()


def printable(text: str, but: str = "") -> str:
    """A text as it may be shown on one line of a terminal: all but printable characters are escaped, as `repr` does it.

    That is control characters and so escape sequences, ends of lines, surrogates, and what reorders or hides text. A
    backslash stays one, so that nothing is escaped twice. Brackets stay too: a library that reads markup in them, as
    rich does, is to be given a `rich.text.Text`. `but`: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode("ascii") for c in text)


class QuantshardError(Exception):
    """Base of all errors that quantshard raises on purpose."""

    _kept = "\n"
    _longest = 1 << 20

    def __str__(self) -> str:
        """The message, escaped. What is cut from one that is too long, by a name that is, is in the middle."""
        found = printable(super().__str__(), but=self._kept)
        half = self._longest // 2
        return found if len(found) <= self._longest else f"{found[:half]}...{found[-half:]}"


class ConfigurationError(QuantshardError, ValueError):
    """An argument, option or file of the user's does not fit."""


class RecipeMismatchError(QuantshardError, ValueError):
    """A weight's format is not the one that the recipe in force asks for."""


class UnsupportedOperationError(QuantshardError, RuntimeError):
    """An operation would change or dequantize a quantized tensor without being asked to.

    Not a TypeError: Python's operators take one for "try the other operand", and `==` would end in False.
    """


class FallbackError(QuantshardError, RuntimeError):
    """Strict was asked for, and something would take a slower or larger path than its native one."""


class CheckpointError(QuantshardError, RuntimeError):
    """A checkpoint is missing, damaged, or of another model or recipe. Its message is one line of some length."""

    _kept, _longest = "", 4000


class LostRankError(CheckpointError):
    """Another rank ended, was interrupted, or did not come to a collective call: what it said is the reason."""


class RankMismatchError(QuantshardError, RuntimeError):
    """Ranks disagree on something that must be equal everywhere."""


class TorchVersionError(QuantshardError, RuntimeError):
    """This version of PyTorch lacks a private function, class or attribute that a feature needs."""


class NonFiniteGradientError(QuantshardError, RuntimeError):
    """Too many steps in a row had infinite or NaN gradients, or one had that its optimizer cannot skip."""


def is_told(topic: str) -> bool:
    """True if `warn_once` has said something on this topic in this process."""
    return topic in _told


def silence(topic: str) -> None:
    """Leave out the warnings of `warn_once` on this topic in this process."""
    _told.add(topic)


def warn_once(topic: str, text: str) -> None:
    """Warn, at the user's line, of what is no error; once for each topic in a process, however often it happens."""
    if topic in _told:
        return
    _told.add(topic)
    warn_user(text, is_counted=True)


def warn_user(text: str, category: type[Warning] = UserWarning, *, is_counted: bool = False) -> None:
    """Warn at the user's line, the first that is neither ours nor PyTorch's.

    `is_counted`: who calls this knows that it is said once, as of each optimizer, so that the same words at the same
    line are news of another. Else Python leaves out those it has shown, unless a filter says otherwise.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    names: dict[str, Any] = vars(sys) if frame is None else frame.f_globals
    registry = {} if is_counted else names.setdefault("__warningregistry__", {})  # of what was shown, by text and line
    place = ("sys", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(printable(text), category, *place, names.get("__name__", "sys"), registry)
