"""Results of checks and probes, as lines without private information."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

OK, WRONG, NOT_HERE = "ok", "WRONG", "not here"

_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:\\|~?/)[^\s'\"`,;:()]+")
_LONGEST = 200


class UnavailableError(Exception):
    """Raised by a check or probe if this machine lacks what it needs; the message gives the reason."""


@dataclass(frozen=True)
class Result:
    """One line of the report.

    `state`: `OK`, `WRONG` or `NOT_HERE`. `reason`: explanation of the last two. `value`, `unit`: the measurement of a
    probe.
    """

    name: str
    state: str
    reason: str = ""
    value: float | None = None
    unit: str = ""


class Watch:
    """Receives progress of checks and probes; this base class ignores it."""

    def begin(self, name: str, number: int, count: int) -> None:
        """Called before check or probe `number` (from 1) of `count`."""

    def end(self, result: Result, seconds: float) -> None:
        """Called after it, with its duration."""


def watched(
    tasks: Sequence[tuple[str, Callable[[], Result]]], watch: Watch, after: Callable[[], object] = lambda: None
) -> list[Result]:
    """Run named tasks one after another and return their results. `after`: called after each task."""
    results = []
    for number, (name, task) in enumerate(tasks, 1):
        watch.begin(name, number, len(tasks))
        start = time.perf_counter()
        results.append(task())
        watch.end(results[-1], time.perf_counter() - start)
        after()
    return results


def outcome_of(name: str, measure: Callable[[], float | str | None], unit: str = "") -> Result:
    """Convert what `measure` returns or raises to a result: a value, None, or an error text. Never raises."""
    try:
        outcome = measure()
    except UnavailableError as reason:
        return Result(name, NOT_HERE, str(reason), unit=unit)
    except torch.cuda.OutOfMemoryError:
        return Result(name, NOT_HERE, "the device has not enough free memory", unit=unit)
    # A kernel that fails to compile must not stop the report.
    except Exception as error:
        return Result(name, WRONG, first_line(error), unit=unit)
    if isinstance(outcome, str):
        return Result(name, WRONG, outcome, unit=unit)
    return Result(name, OK, "", outcome, unit)


def first_line(error: BaseException) -> str:
    """Class and first line of an error; for compiler errors, also the last line.

    Paths are removed, because they can contain user names.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[0] + (f" ... {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else "")
    return f"{type(error).__name__}: {without_paths(text)}"[:_LONGEST]


def without_paths(text: str) -> str:
    """Replace every absolute path in a text by `<path>`."""
    return _PATH.sub("<path>", text)
