"""How many bytes a save, a load or a check has moved, told to whoever watches, as a command's bar does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class TransferWatch(Protocol):
    """What is told of bytes, from any thread."""

    def expect(self, count: int) -> None:
        """That so many more are to be moved, as far as it is known."""

    def moved(self, count: int) -> None:
        """That so many more were moved."""


_watching: list[TransferWatch] = []


@contextmanager
def watched(watch: TransferWatch) -> Iterator[None]:
    """While it lasts, tell what is moved by this process, by whichever of its threads."""
    _watching.append(watch)
    try:
        yield
    finally:
        _watching.remove(watch)


def expect(count: int) -> None:
    """Say how many bytes are about to be moved."""
    for watch in _watching:
        watch.expect(count)


def moved(count: int) -> None:
    """Say that bytes were moved."""
    for watch in _watching:
        watch.moved(count)
