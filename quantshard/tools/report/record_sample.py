"""Reads evenly spaced samples and all alarms from a `statistics.jsonl` of any length.

A line of a large model takes some ten kilobytes, and a map has only some hundred columns. At most about `_PARSED` bytes
of lines are therefore parsed. In other lines only the end is checked, where `train` writes an empty list of alarms;
this check runs at memory speed. In a file longer than `LOG_BYTES`, only evenly spaced parts are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from quantshard.readable import human_bytes
from quantshard.tools.report import records
from quantshard.tools.report.records import LOG_BYTES, Record, RecordFile

_PARSED = 8 << 20

_NO_ALARM, _ALARMS = b'"alarms": []}', b'], "alarms": ['
_BEGINNING = re.compile(rb'\{"step": \d+, (?="rows": \[\{)')


class RecordSample:
    """Reader of samples from a statistics file.

    Attributes:
        samples: number of lines with rows so far.
        read: number of these lines that were parsed.
    """

    def __init__(self, file: RecordFile) -> None:
        self.file, self.samples, self.read = file, 0, 0
        self._passed = self._parsed = 0
        self._last = b""
        """The last line with rows if it was not parsed, otherwise empty."""

    def batches(self) -> Iterator[list[Record]]:
        """Yield parsed records, in the order of the file.

        Complete records are the first and the last one with rows, and records between them, evenly spaced by bytes.
        Other records come only if they have alarms, without rows.

        Raises:
            OSError: the file cannot be read.
        """
        share = _PARSED / max(_PARSED, min(self.file.size(), LOG_BYTES))
        for piece, start, end in self.file.pieces(_most_pieces()):
            yield self._records(list(self._chosen(piece, start, end, share)))
        if self._last:
            self.samples -= 1
            # The alarms of this line were yielded before.
            yield [record | {"alarms": []} for record in self._records([self._last])]

    def notes(self) -> Iterator[str]:
        """Yield sentences about the data that was left out."""
        if self.read < self.samples:
            yield (
                f"{self.file.path} has {self.samples:,} samples of statistics: the maps show {self.read:,} of them, "
                "evenly over the run, and not what was worse in others; alarms are those of all"
            )
        if self.file.skipped:
            yield (
                f"{self.file.path}: {human_bytes(self.file.skipped)} of it, evenly over the run, are not read; samples "
                "and alarms there are neither shown nor counted"
            )

    def _chosen(self, piece: bytes, start: int, end: int, share: float) -> Iterator[bytes]:
        """Lines of a piece to parse; lines outside the sample come without rows, and only if they have alarms."""
        unparsed = None
        while start < end:
            stop = piece.find(b"\n", start, end)
            if self._parsed <= share * self._passed:
                self._parsed += stop - start
                self._last, unparsed = b"", None
                yield piece[start:stop]
            else:
                has_rows = True
                if not piece.endswith(_NO_ALARM, start, stop):
                    line, has_rows = _without_rows(piece[start:stop])
                    yield line
                if has_rows:
                    self.samples, unparsed = self.samples + 1, (start, stop)
            self._passed += stop - start
            start = stop + 1
        if unparsed is not None:
            self._last = piece[slice(*unparsed)]

    def _records(self, lines: list[bytes]) -> list[Record]:
        parsed = [record for batch in self.file.parsed(lines) for record in batch]
        count = sum(bool(record.get("rows")) for record in parsed)
        self.samples, self.read = self.samples + count, self.read + count
        return parsed


def alarms_added(file: RecordFile) -> Iterator[list[Record]]:
    """Yield the records with alarms that were added since the last call, without rows.

    Raises:
        OSError: the file cannot be read.
    """
    for piece, start, end in file.pieces(_most_pieces()):
        lines = []
        while start < end:
            stop = piece.find(b"\n", start, end)
            if not piece.endswith(_NO_ALARM, start, stop):
                lines.append(_without_rows(piece[start:stop])[0])
            start = stop + 1
        yield from file.parsed(lines)


def _most_pieces() -> int:
    return max(2, LOG_BYTES // records.AT_ONCE)


def _without_rows(line: bytes) -> tuple[bytes, bool]:
    """Strip the rows from a line, and return whether rows were stripped.

    A line in a format that `train` does not write is returned unchanged.
    """
    prefix, alarms_start = _BEGINNING.match(line), line.rfind(_ALARMS)
    return (line, False) if prefix is None or alarms_start < 0 else (prefix[0] + line[alarms_start + 3 :], True)
