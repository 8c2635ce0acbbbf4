"""Of a `statistics.jsonl` of any length some samples, evenly over the run, and all alarms.

A sample of a large model is a line of some ten kilobytes, and a map of a page has some hundred columns: so of a long
file only as many lines are parsed as `_PARSED` bytes have. The others are looked through for their ends alone, which
say, as `train` writes them, that there was no alarm. That goes at the speed of memory, up to `LOG_BYTES` bytes; of a
longer file parts are read, evenly over it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from quantshard.read_limits import LOG_BYTES
from quantshard.readable import human_bytes
from quantshard.tools.report import records
from quantshard.tools.report.records import Record, RecordFile

_PARSED = 8 << 20

_NO_ALARM, _ALARMS = b'"alarms": []}', b'], "alarms": ['
_BEGINNING = re.compile(rb'\{"step": \d+, (?="rows": \[\{)')


class RecordSample:
    """What a report reads of a file of statistics. `samples`: the lines with rows that were passed; `read`: how many of
    them were parsed."""

    def __init__(self, file: RecordFile) -> None:
        self.file, self.samples, self.read = file, 0, 0
        self._passed = self._parsed = 0
        self._last = b""
        """The last line with rows, if it was not parsed."""

    def batches(self) -> Iterator[list[Record]]:
        """The records that are parsed, in the order of the file: the first and the last one with rows, and those
        between evenly apart by their bytes; of every other one with an alarm the step and the alarms.

        Raises:
            OSError: it cannot be read.
        """
        share = _PARSED / max(_PARSED, min(self.file.size(), LOG_BYTES))
        for piece, start, end in self.file.pieces(_most_pieces()):
            yield self._records(list(self._chosen(piece, start, end, share)))
        if self._last:
            self.samples -= 1
            yield [record | {"alarms": []} for record in self._records([self._last])]  # those were taken before

    def notes(self) -> Iterator[str]:
        """What was left out, in sentences."""
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
        """The lines of a piece that are parsed, or what is parsed of them."""
        left = None
        while start < end:
            stop = piece.find(b"\n", start, end)
            if self._parsed <= share * self._passed:
                self._parsed += stop - start
                self._last, left = b"", None
                yield piece[start:stop]
            else:
                has_rows = True
                if not piece.endswith(_NO_ALARM, start, stop):
                    line, has_rows = _without_rows(piece[start:stop])
                    yield line
                if has_rows:
                    self.samples, left = self.samples + 1, (start, stop)
            self._passed += stop - start
            start = stop + 1
        if left is not None:
            self._last = piece[slice(*left)]

    def _records(self, lines: list[bytes]) -> list[Record]:
        found = [record for batch in self.file.parsed(lines) for record in batch]
        count = sum(bool(record.get("rows")) for record in found)
        self.samples, self.read = self.samples + count, self.read + count
        return found


def alarms_added(file: RecordFile) -> Iterator[list[Record]]:
    """Of the records that were added since the last call those with alarms, without rows.

    Raises:
        OSError: it cannot be read.
    """
    for piece, start, end in file.pieces(_most_pieces()):
        found = []
        while start < end:
            stop = piece.find(b"\n", start, end)
            if not piece.endswith(_NO_ALARM, start, stop):
                found.append(_without_rows(piece[start:stop])[0])
            start = stop + 1
        yield from file.parsed(found)


def _most_pieces() -> int:
    return max(2, LOG_BYTES // records.AT_ONCE)


def _without_rows(line: bytes) -> tuple[bytes, bool]:
    """A line without its rows, and whether it had some that are left out; as it is if anybody else than `train` wrote
    it."""
    begins, at = _BEGINNING.match(line), line.rfind(_ALARMS)
    return (line, False) if begins is None or at < 0 else (begins[0] + line[at + 3 :], True)
