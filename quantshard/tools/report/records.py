"""Files of one JSON object a line, read from where the last reading ended, also while they are written.

They may come from anybody and lie behind a URL: memory is bounded, a line that is no object is counted and left out,
and so is the last one while it has no end. What stood before is looked at again: a resume writes such a file anew,
without the steps that are forgotten.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from quantshard.checkpoints.disk.store import Store
from quantshard.read_limits import BROKEN_LINES, LOG_BYTES

Record = dict[str, Any]

AT_ONCE = 1 << 22
"""Bytes that are read at a time, and the most that a line may have."""

_BLANK_LINES = re.compile(rb"\n\n+")
_BATCH = 512

_OVERLAP = 64
"""Bytes before the place where reading goes on, by which a file that was written anew is recognized."""


class RecordFile:
    """A file of records in a store. `broken`: how many lines were no records so far; `torn`: the last has no end;
    `skipped`: bytes that were not read."""

    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path = store, path
        self.clear()

    def clear(self) -> None:
        """Read from the beginning again."""
        self.offset, self.broken, self.torn, self.skipped = 0, 0, False, 0
        self._before = b""
        self._in_long_line = False

    def was_rewritten(self) -> bool:
        """Whether what was read is no longer what the file begins with: then it is read from its beginning again.

        Raises:
            OSError: it cannot be looked at.
        """
        if not self.offset:
            return False
        size = self.size()
        start = self.offset - len(self._before)
        if size >= self.offset and self.store.read_range(self.path, start, self.offset) == self._before:
            return False
        self.clear()
        return True

    def batches(self) -> Iterator[list[Record]]:
        """The records that were added since the last call, some hundred at a time, which stay in a processor's cache.

        Raises:
            OSError: it cannot be read.
        """
        for piece, first, end in self.pieces(max(2, LOG_BYTES // AT_ONCE)):
            yield from self.parsed(piece[first:end].split(b"\n")[:-1])

    def parsed(self, lines: list[bytes]) -> Iterator[list[Record]]:
        """The records of some lines; lines that are no records are counted in `broken`."""
        for start in range(0, len(lines), _BATCH):
            some = lines[start : start + _BATCH]
            batch = records_of(some, all_or_none=self.broken > BROKEN_LINES)
            self.broken += len(some) - len(batch)
            yield batch

    def pieces(self, most: int = sys.maxsize) -> Iterator[tuple[bytes, int, int]]:
        """Parts of what was added since the last call, each with the first and the last place of its whole lines.

        Where there are more than `most` parts (2 at least), so many are read, evenly apart, the first and the last
        among them; bytes between them are counted in `skipped`, and a line that is partly there is lost.

        Raises:
            OSError: it cannot be read.
        """
        size, self.torn = self.size(), False
        began, apart = self.offset, 0.0
        if size - began > most * AT_ONCE:
            apart = (size - began - AT_ONCE) / (most - 1)
        done = 0
        while self.offset < size:
            piece = self.store.read_range(self.path, self.offset, min(size, self.offset + AT_ONCE))
            used = piece.rfind(b"\n") + 1
            if not used and len(piece) < AT_ONCE:
                self.torn = True
                return
            done += 1
            first = piece.find(b"\n") + 1 if self._in_long_line and used else 0
            if not used:
                self.broken += not self._in_long_line
            self._in_long_line = not used
            self._advance(piece, used or len(piece))
            if apart and done < most:
                self._go_to(began + int(done * apart))
            if used and b"\n\n" in piece:
                lines = _BLANK_LINES.sub(b"\n", piece[first:used]).lstrip(b"\n")
                self.broken += piece.count(b"\n", first, used) - lines.count(b"\n")
                piece, first, used = lines, 0, len(lines)
            if used:
                yield piece, first, used

    def _go_to(self, offset: int) -> None:
        """Go on from there, with the line that begins next."""
        if offset > self.offset:
            self.skipped += offset - self.offset
            self.offset, self._in_long_line = offset, True

    def _advance(self, piece: bytes, used: int) -> None:
        self.offset += used
        self._before = piece[max(0, used - _OVERLAP) : used]

    def size(self) -> int:
        """Its length; 0 where there is none."""
        try:
            return self.store.size(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return 0


def records_of(lines: list[bytes], all_or_none: bool = False) -> list[Record]:
    """The lines that are JSON objects. Nearly always all of them are, which one call of the parser finds out.
    `all_or_none`: return none of them if one is no object."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines) and all(type(each) is dict for each in found):
            return list(found)
    except (ValueError, RecursionError):
        pass
    return [] if all_or_none else [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> Record | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if type(found) is dict else None
