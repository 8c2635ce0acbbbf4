"""Incremental reader of JSON Lines files (one object per line), also while they are being written.

Files are untrusted and can be remote. Memory is therefore bounded, and invalid lines are counted and skipped, as is an
incomplete last line. Each poll verifies the bytes before the current offset, because a resume rewrites the file without
the steps after its checkpoint.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from quantshard.checkpoints.disk.store import Store

Record = dict[str, Any]

AT_ONCE = 1 << 22
"""Bytes per read, which is also the maximum length of a line."""

LOG_BYTES = 1 << 30
"""Bytes of `metrics.jsonl` that a report reads: five million steps. Of a longer file parts are read, evenly over it."""

BROKEN_LINES = 10_000
"""Lines of such a file that are no records, after which some hundred lines are read only if all are: each costs an
exception."""

_BLANK_LINES = re.compile(rb"\n\n+")
_BATCH = 512

_OVERLAP = 64
"""Number of bytes before the offset that are compared to detect a rewritten file."""


class RecordFile:
    """A file of records in a store.

    Attributes:
        broken: number of invalid lines so far.
        torn: whether the last line is incomplete.
        skipped: number of bytes that were not read.
    """

    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path = store, path
        self.clear()

    def clear(self) -> None:
        """Restart from the beginning of the file."""
        self.offset, self.broken, self.torn, self.skipped = 0, 0, False, 0
        self._before = b""
        self._in_long_line = False

    def was_rewritten(self) -> bool:
        """Whether the file was rewritten since the last call; if so, the reader restarts from its beginning.

        Raises:
            OSError: the file cannot be read.
        """
        if not self.offset:
            return False
        size = self.size()
        start = self.offset - len(self._before)
        if size >= self.offset and self.store.read_range(self.path, start, self.offset) == self._before:
            return False
        self.clear()
        return True

    def batches(self, limit: int = LOG_BYTES) -> Iterator[list[Record]]:
        """Yield the records added since the last call, in batches small enough for the CPU cache.

        Of more than `limit` bytes, only evenly spaced parts are read.

        Raises:
            OSError: the file cannot be read.
        """
        for piece, first, end in self.pieces(max(2, limit // AT_ONCE)):
            lines = piece[first:end].split(b"\n")[:-1]
            for start in range(0, len(lines), _BATCH):
                chunk = lines[start : start + _BATCH]
                batch = records_of(chunk, all_or_none=self.broken > BROKEN_LINES)
                self.broken += len(chunk) - len(batch)
                yield batch

    def pieces(self, most: int = sys.maxsize) -> Iterator[tuple[bytes, int, int]]:
        """Yield the bytes added since the last call, as (piece, start, end of its complete lines).

        If the new bytes need more than `most` pieces (>= 2), only `most` evenly spaced pieces are read, including the
        first and the last. Bytes between them are counted in `skipped`, and lines cut by a gap are lost.

        Raises:
            OSError: the file cannot be read.
        """
        size, self.torn = self.size(), False
        start, spacing = self.offset, 0.0
        if size - start > most * AT_ONCE:
            spacing = (size - start - AT_ONCE) / (most - 1)
        num_pieces = 0
        while self.offset < size:
            piece = self.store.read_range(self.path, self.offset, min(size, self.offset + AT_ONCE))
            end = piece.rfind(b"\n") + 1
            if not end and len(piece) < AT_ONCE:
                self.torn = True
                return
            num_pieces += 1
            first = piece.find(b"\n") + 1 if self._in_long_line and end else 0
            if not end:
                self.broken += not self._in_long_line
            self._in_long_line = not end
            self._advance(piece, end or len(piece))
            if spacing and num_pieces < most:
                self._go_to(start + int(num_pieces * spacing))
            if end and b"\n\n" in piece:
                lines = _BLANK_LINES.sub(b"\n", piece[first:end]).lstrip(b"\n")
                self.broken += piece.count(b"\n", first, end) - lines.count(b"\n")
                piece, first, end = lines, 0, len(lines)
            if end:
                yield piece, first, end

    def _go_to(self, offset: int) -> None:
        """Skip forward to `offset` and continue with the next complete line."""
        if offset > self.offset:
            self.skipped += offset - self.offset
            self.offset, self._in_long_line = offset, True

    def _advance(self, piece: bytes, used: int) -> None:
        self.offset += used
        self._before = piece[max(0, used - _OVERLAP) : used]

    def size(self) -> int:
        """Size in bytes; 0 if the file does not exist."""
        try:
            return self.store.size(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return 0


def records_of(lines: list[bytes], all_or_none: bool = False) -> list[Record]:
    """Parse the lines that are JSON objects, in one call of the parser if all are valid.

    `all_or_none`: return an empty list if any line is invalid.
    """
    try:
        entries = json.loads(b"[" + b",".join(lines) + b"]")
        if len(entries) == len(lines) and all(type(entry) is dict for entry in entries):
            return list(entries)
    except (ValueError, RecursionError):
        pass
    return [] if all_or_none else [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> Record | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if type(value) is dict else None
