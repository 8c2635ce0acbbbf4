"""What a check or a probe found, in a line that can be shown to anybody."""

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
    """Raised by a check or probe of what this machine does not have; the message says why."""


@dataclass(frozen=True)
class Result:
    """One line of the report. `state`: `OK`, `WRONG` or `NOT_HERE`, with a reason for the last two. `value`, `unit`:
    what a probe measured."""

    name: str
    state: str
    reason: str = ""
    value: float | None = None
    unit: str = ""


class Watch:
    """Is told what runs, as it runs. This one says nothing."""

    def begin(self, name: str, number: int, count: int) -> None:
        """The check or probe `number`, from 1, of `count` begins."""

    def end(self, result: Result, seconds: float) -> None:
        """It ended, after so many seconds."""


def watched(
    tasks: Sequence[tuple[str, Callable[[], Result]]], watch: Watch, after: Callable[[], object] = lambda: None
) -> list[Result]:
    """The results of tasks, each by its name, one after another; `after`: called after each."""
    results = []
    for number, (name, task) in enumerate(tasks, 1):
        watch.begin(name, number, len(tasks))
        start = time.perf_counter()
        results.append(task())
        watch.end(results[-1], time.perf_counter() - start)
        after()
    return results


def outcome_of(name: str, measure: Callable[[], float | str | None], unit: str = "") -> Result:
    """What `measure` returns or raises: a value, nothing, or in words what is wrong. No error gets past it."""
    try:
        told = measure()
    except UnavailableError as why:
        return Result(name, NOT_HERE, str(why), unit=unit)
    except torch.cuda.OutOfMemoryError:
        return Result(name, NOT_HERE, "the device has not enough free memory", unit=unit)
    except Exception as error:  # a kernel that fails to compile must not stop the report
        return Result(name, WRONG, first_line(error), unit=unit)
    if isinstance(told, str):
        return Result(name, WRONG, told, unit=unit)
    return Result(name, OK, "", told, unit)


def first_line(error: BaseException) -> str:
    """The class and the first line of an error, without paths, which name users; of a compiler's, also the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[0] + (f" ... {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else "")
    return f"{type(error).__name__}: {without_paths(text)}"[:_LONGEST]


def without_paths(text: str) -> str:
    """A text with `<path>` for every absolute path."""
    return _PATH.sub("<path>", text)
