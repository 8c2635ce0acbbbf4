"""What became of a reading: it was refused in one line, or gave values; anything else is a fault.

Faults are an exception that is not one of `quantshard.errors`, a line that a terminal would obey or that is too long,
other values without an error where a manifest says what they are, more time or more memory than the bounds.
"""

from __future__ import annotations

import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantshard.errors import CheckpointError, QuantshardError

SECONDS, ALARM_SECONDS = 10.0, 300
"""Of a processor, and of a clock, that reading one of the small files may take; whole, they take less than one."""

HEADROOM = 1 << 30
"""Bytes that a reading may take beside what the process has; whole files need some megabytes."""

REFUSED, READ = "refused", "read"
FAULTS = ("wrong", "traceback", "line", "slow", "memory")


_UNFORESEEN = re.compile(r"\b[A-Z]\w*(Error|Exception|Interrupt): ")


@dataclass(frozen=True)
class Verdict:
    """How a reading ended: one of the above; and what there is to say of a fault."""

    kind: str
    what: str = ""


class _Late(BaseException):
    """Not an Exception, so that nobody takes it for an error of the file."""


@contextmanager
def bounded() -> Iterator[None]:
    """Allocations beyond what is there and some headroom fail, and so does what takes too long."""
    statm, before = Path("/proc/self/statm"), resource.getrlimit(resource.RLIMIT_AS)

    def late(*_: object) -> None:
        raise _Late

    if statm.exists():
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + HEADROOM, before[1]))
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(ALARM_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(read: Callable[[], Any], expected: object = None) -> Verdict:
    """Read, and say what became of it. `expected`: what the reading must give where it gives anything."""
    start = time.process_time()
    try:
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read()
    except QuantshardError as error:
        verdict = _refused(error)
    except MemoryError:
        return Verdict("memory", traceback.format_exc())
    except _Late:
        return Verdict("slow", traceback.format_exc())
    except Exception:
        return Verdict("traceback", traceback.format_exc())
    else:
        verdict = Verdict(READ)
        if expected is not None and found != expected:
            return Verdict("wrong", f"it gives {found!r:.200}, and {expected!r:.200} was saved")
    took = time.process_time() - start
    return verdict if took < SECONDS else Verdict("slow", f"{took:.1f} s")


def _refused(error: BaseException) -> Verdict:
    text, cause = str(error), error
    if _UNFORESEEN.search(text):  # said as an error to the ranks that wait
        return Verdict("traceback", "".join(traceback.format_exception(error)))
    while cause is not None:
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            return Verdict("memory", "".join(traceback.format_exception(error)))
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    if not text.replace("\n", "").isprintable() or (isinstance(error, CheckpointError) and "\n" in text):
        return Verdict("line", f"a terminal obeys {text!r:.300}")
    return Verdict("line", f"{len(text)} characters") if len(text) > 5000 else Verdict(REFUSED, text)
