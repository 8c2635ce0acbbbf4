"""Progress of saves, loads and checks in bytes, reported to watchers such as a command's progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class TransferWatch(Protocol):
    """A receiver of progress, called from any thread."""

    def expect(self, count: int) -> None:
        """Add bytes that are about to be moved, as far as known."""

    def moved(self, count: int) -> None:
        """Add bytes that were moved."""


_watching: list[TransferWatch] = []


@contextmanager
def watched(watch: TransferWatch) -> Iterator[None]:
    """Report the bytes moved by any thread of this process to `watch`, for the duration of the context."""
    _watching.append(watch)
    try:
        yield
    finally:
        _watching.remove(watch)


def expect(count: int) -> None:
    """Report bytes that are about to be moved."""
    for watch in _watching:
        watch.expect(count)


def moved(count: int) -> None:
    """Report bytes that were moved."""
    for watch in _watching:
        watch.moved(count)
