"""Readers of `metrics.jsonl` and `statistics.jsonl`, one JSON object per line, also while they are being written.

Files are untrusted and can be remote. Memory is therefore bounded, and invalid lines are counted and skipped, as is an
incomplete last line. Each poll verifies the bytes before the current offset, because a resume rewrites the file without
the steps after its checkpoint.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantshard.checkpoints.disk.store import Store

Record = dict[str, Any]

AT_ONCE = 1 << 22
"""Bytes per read, which is also the maximum length of a line."""

LOG_BYTES = 1 << 30
"""Bytes of `metrics.jsonl` that a report reads: five million steps. Of a longer file parts are read, evenly over it."""

BROKEN_LINES = 10_000
"""After this many lines that are no records, batches with such lines are skipped: each line costs an exception."""

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
        """Whether the file was rewritten since the last call; if so, the reader restarts from its beginning."""
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

        Of more than `limit` bytes, only evenly spaced pieces are read, including the first and the last. Bytes between
        them are counted in `skipped`, and lines cut by a gap are lost.
        """
        size, self.torn = self.size(), False
        start, spacing, num_pieces, most = self.offset, 0.0, 0, max(2, limit // AT_ONCE)
        if size - start > most * AT_ONCE:
            spacing = (size - start - AT_ONCE) / (most - 1)
        while self.offset < size:
            piece = self.store.read_range(self.path, self.offset, min(size, self.offset + AT_ONCE))
            end = piece.rfind(b"\n") + 1
            if not end and len(piece) < AT_ONCE:
                self.torn = True
                return
            num_pieces += 1
            first = piece.find(b"\n") + 1 if self._in_long_line else 0
            self.broken += not end and not self._in_long_line
            self._in_long_line = not end
            used = end or len(piece)
            self.offset += used
            self._before = piece[max(0, used - _OVERLAP) : used]
            next_offset = start + int(num_pieces * spacing) if num_pieces < most else 0
            if next_offset > self.offset:
                self.skipped += next_offset - self.offset
                self.offset, self._in_long_line = next_offset, True
            lines = piece[first:end].split(b"\n")[:-1]
            for index in range(0, len(lines), _BATCH):
                chunk = lines[index : index + _BATCH]
                batch = _records_of(chunk, all_or_none=self.broken > BROKEN_LINES)
                self.broken += len(chunk) - len(batch)
                yield batch

    def size(self) -> int:
        """Size in bytes; 0 if the file does not exist."""
        try:
            return self.store.size(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return 0


def _records_of(lines: list[bytes], all_or_none: bool = False) -> list[Record]:
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


# Figures of steps

Column = NDArray[np.float64]

MOST_COLUMNS, LARGEST_STEP = 64, 1 << 53
_LONGEST_NAME = 80
_NUMBERS = frozenset((int, float))
LARGEST = float(np.finfo(np.float32).max)
"""Largest finite magnitude of a figure (the float32 maximum)."""


def number(value: object) -> float:
    """Convert an entry of a record to float.

    Returns NaN if `value` is not a number, and infinity if it is not finite in float32, including the text "nan".
    """
    if type(value) in _NUMBERS or (type(value) is str and len(value) < 10):
        try:
            result = float(value)  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            return math.inf if type(value) is int else math.nan
        return result if abs(result) <= LARGEST else math.inf
    return math.nan


def step_of(record: Mapping[str, Any]) -> int | None:
    """The step of a record, or None if missing or invalid."""
    step = record.get("step")
    return step if type(step) is int and 0 <= step < LARGEST_STEP else None


@dataclass(frozen=True)
class MetricTable:
    """Figures of a run by step.

    Attributes:
        steps: int64 [N], ascending.
        columns: name -> float64 [N].
        has_more: whether columns beyond `MOST_COLUMNS` were dropped.
    """

    steps: NDArray[np.int64]
    columns: dict[str, Column]
    has_more: bool = False

    def there(self, name: str) -> tuple[NDArray[np.int64], Column]:
        """Steps and values of a column where the value is finite; empty arrays for an unknown name."""
        values = self.columns.get(name, np.full(len(self.steps), np.nan))
        finite = np.isfinite(values)
        return self.steps[finite], values[finite]


@dataclass
class MetricReader:
    """Accumulates records into a `MetricTable`, batch by batch.

    Every numeric entry becomes a column, including names unknown to quantshard. A missing value is NaN, and a value
    that is not finite in float32 is infinity. If a resumed run repeated a step, only the last record of it counts.
    """

    steps: list[NDArray[np.int64]] = field(default_factory=list)
    columns: dict[str, list[Column]] = field(default_factory=dict)
    has_more: bool = False
    rows: int = 0

    def add(self, batch: Iterable[Record]) -> None:
        """Add records, in the order of the file."""
        step_records = [(step, record) for record in batch if (step := step_of(record)) is not None]
        if not step_records:
            return
        records = [record for _, record in step_records]
        for name in dict.fromkeys(chain.from_iterable(records)):
            if name not in self.columns and name != "step":
                self._begin(name, records)
        for name, parts in self.columns.items():
            parts.append(_column([record.get(name) for record in records]))
        self.steps.append(np.array([step for step, _ in step_records], dtype=np.int64))
        self.rows += len(step_records)

    def _begin(self, name: str, records: list[Record]) -> None:
        if all(math.isnan(number(record.get(name))) for record in records):
            return
        if len(self.columns) >= MOST_COLUMNS or len(name) > _LONGEST_NAME:
            self.has_more = True
            return
        self.columns[name] = [np.full(self.rows, np.nan)] if self.rows else []

    def table(self) -> MetricTable:
        """The accumulated table, with one row per step."""
        if not self.rows:
            return MetricTable(np.zeros(0, dtype=np.int64), {}, self.has_more)
        steps = np.concatenate(self.steps)
        is_last = np.ones(len(steps), dtype=bool)
        is_last[:-1] = steps[:-1] < np.minimum.accumulate(steps[::-1])[::-1][1:]
        columns = {name: np.concatenate(parts)[is_last] for name, parts in self.columns.items()}
        return MetricTable(steps[is_last], columns, self.has_more)


def _column(values: list[Any]) -> Column:
    kinds = set(map(type, values))
    if kinds <= _NUMBERS:
        try:
            array = np.array(values, dtype=np.float64)
            return np.where(np.abs(array) <= LARGEST, array, np.inf)
        except OverflowError:
            pass
    if kinds == {type(None)}:
        return np.full(len(values), np.nan)
    return np.array([number(value) for value in values], dtype=np.float64)


# Statistics of tensors, and alarms

MOST_SAMPLES, _MOST_ALARMS, _LONGEST = 80, 200, 300
_NO_STATISTICS = ("name", "role")

MapValues = dict[tuple[str, str], dict[str, float]]
"""Values by (role, statistic) and name."""


class AlarmEntry(NamedTuple):
    """One alarm of a run."""

    step: int
    kind: str
    text: str


@dataclass
class StatisticsReader:
    """Accumulates the records of `statistics.jsonl`, batch by batch, in bounded memory.

    Attributes:
        samples: steps and values, less than 2 * `MOST_SAMPLES`, evenly spread over the run.
        every: one in `every` samples of the file is kept.
        counts: number of alarms by kind.
    """

    samples: list[tuple[int, MapValues]] = field(default_factory=list)
    every: int = 1
    names: dict[str, None] = field(default_factory=dict)
    maps: dict[tuple[str, str], None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    first_alarms: list[AlarmEntry] = field(default_factory=list)
    last_alarms: deque[AlarmEntry] = field(default_factory=lambda: deque(maxlen=_MOST_ALARMS))
    _dropped: int = 0
    """Number of samples since the last one that was kept."""

    def add(self, batch: Iterable[Record]) -> None:
        """Add records, in the order of the file; a repeated step (of a resumed run) drops this step and later ones."""
        for record in batch:
            step = step_of(record)
            if step is None:
                continue
            while self.samples and self.samples[-1][0] >= step:
                self.samples.pop()
            self._alarm(step, record.get("alarms"))
            if record.get("rows"):
                self._sample(step, record["rows"])

    def alarms(self) -> list[AlarmEntry]:
        """The first and the last alarms, in the order of the file."""
        return [*self.first_alarms, *self.last_alarms]

    def _sample(self, step: int, rows: Any) -> None:
        self._dropped += 1
        if self.samples and self._dropped < self.every:
            return
        if values := self._values(rows):
            self.samples.append((step, values))
            self._dropped = 0
        if len(self.samples) >= 2 * MOST_SAMPLES:
            self.samples, self.every = self.samples[::2], 2 * self.every
            self._dropped = self.every // 2

    def _values(self, rows: Any) -> MapValues:
        result: MapValues = {}
        for row in rows if type(rows) is list else ():
            if type(row) is not dict or type(row.get("name")) is not str:
                continue
            name, role = row["name"][:_LONGEST], row.get("role")
            role = role[:_LONGEST] if type(role) is str else ""
            self.names[name] = None
            for statistic, value in row.items():
                if statistic not in _NO_STATISTICS and not math.isnan(figure := number(value)):
                    self.maps[role, statistic[:_LONGEST]] = None
                    result.setdefault((role, statistic[:_LONGEST]), {})[name] = figure
        return result

    def _alarm(self, step: int, alarms: Any) -> None:
        for alarm in alarms if type(alarms) is list else ():
            if type(alarm) is not dict:
                continue
            kind = str(alarm.get("kind", "alarm"))[:_LONGEST]
            text = alarm.get("text") or " ".join(str(alarm[key]) for key in ("name", "value") if key in alarm)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            entry = AlarmEntry(step, kind, str(text)[:_LONGEST])
            if len(self.first_alarms) < _MOST_ALARMS:
                self.first_alarms.append(entry)
            else:
                self.last_alarms.append(entry)
