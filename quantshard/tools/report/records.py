"""Readers of the untrusted `metrics.jsonl` and `statistics.jsonl`, while they are written, in bounded memory."""

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantshard.checkpoints.disk.store import LocalStore, Store, why
from quantshard.errors import ConfigurationError

Record = dict[str, Any]

AT_ONCE = 1 << 24
"""Bytes per read, which is also the maximum length of a line."""

MOST_BYTES = 256 << 20
"""Bytes of a file that are read: the last ones, which are more than a million steps of `metrics.jsonl`."""


class RecordFile:
    """Records in a file. `broken`: invalid lines. `torn`: whether the last is incomplete. `skipped`: bytes not read."""

    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path = store, path
        self.restart()

    def restart(self) -> None:
        self.broken, self.torn, self.skipped, self._offset = 0, False, 0, 0
        self._in_line, self._before = False, b""

    def was_rewritten(self) -> bool:
        """Whether a resume has rewritten the file since the last call; if so, it is read from its beginning again."""
        start = self._offset - len(self._before)
        if not self._offset or (
            self._size() >= self._offset and self.store.read_range(self.path, start, self._offset) == self._before
        ):
            return False
        self.restart()
        return True

    def _size(self) -> int:
        try:
            return self.store.size(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def records(self) -> Iterator[Record]:
        """Yield the records added since the last call, of more than `MOST_BYTES` the last ones."""
        size, self.torn = self._size(), False
        if (excess := size - self._offset - MOST_BYTES) > 0:
            self.skipped += excess
            self._offset, self._in_line = self._offset + excess, True
        while self._offset < size:
            piece = self.store.read_range(self.path, self._offset, min(size, self._offset + AT_ONCE))
            end = piece.rfind(b"\n") + 1
            if not end and len(piece) < AT_ONCE:
                self.torn = True
                return
            first = piece.find(b"\n") + 1 if self._in_line else 0
            self.broken += not end and not self._in_line
            self._in_line = not end
            self._offset += end or len(piece)
            self._before = piece[: end or len(piece)][-64:]
            for line in piece[first:end].split(b"\n")[:-1]:
                record = parse_record(line)
                if record is None:
                    self.broken += 1
                else:
                    yield record


def parse_record(line: bytes) -> Record | None:
    # An exception for each of millions of broken lines would take minutes.
    if not line.startswith(b"{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if type(value) is dict else None


def read_records(path: Path) -> list[Record]:
    """Read the complete lines of a local file; empty if there is none."""
    try:
        return list(RecordFile(LocalStore(), str(path)).records())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {why(error)}") from None


Column = NDArray[np.float64]

MOST_COLUMNS, LARGEST_STEP = 64, 1 << 53
LARGEST = float(np.finfo(np.float32).max)
"""Largest finite magnitude of a figure (the float32 maximum)."""


def number(value: object) -> float:
    """Convert an entry to float: NaN if it is no number, infinity if it is not finite in float32 (also "nan")."""
    if type(value) in (int, float) or (type(value) is str and len(value) < 10):
        try:
            result = float(value)  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            return math.inf if type(value) is int else math.nan
        return result if abs(result) <= LARGEST else math.inf
    return math.nan


def step_of(record: Mapping[str, Any]) -> int | None:
    step = record.get("step")
    return step if type(step) is int and 0 <= step < LARGEST_STEP else None


@dataclass(frozen=True)
class MetricTable:
    """Figures of a run by step.

    Every numeric entry of a record has a column, up to `MOST_COLUMNS`. A missing value is NaN, and a value that is not
    finite in float32 is infinity.

    Attributes:
        steps: int64 [N], ascending.
        columns: name -> float64 [N].
    """

    steps: NDArray[np.int64]
    columns: dict[str, Column]

    @classmethod
    def of(cls, records: Iterable[Record]) -> "MetricTable":
        """Build a table from records in the order of the file; of a repeated step (of a resume) the last one counts."""
        steps = array("q")
        columns: dict[str, array[float]] = {}
        for record in records:
            step = step_of(record)
            if step is None:
                continue
            while steps and steps[-1] >= step:
                steps.pop()
                for values in columns.values():
                    values.pop()
            for name, value in record.items():
                figure = value if type(value) is float and -LARGEST <= value <= LARGEST else number(value)
                if name not in columns:
                    is_full = len(columns) >= MOST_COLUMNS or len(name) > 80
                    if name == "step" or math.isnan(figure) or is_full:
                        continue
                    columns[name] = array("d", [math.nan]) * len(steps)
                columns[name].append(figure)
            steps.append(step)
            for values in columns.values():
                if len(values) < len(steps):
                    values.append(math.nan)
        return cls(np.array(steps, dtype=np.int64), {name: np.array(values) for name, values in columns.items()})

    def there(self, name: str) -> tuple[NDArray[np.int64], Column]:
        """Steps and values of a column where the value is finite; empty arrays for an unknown name."""
        values = self.columns.get(name, np.full(len(self.steps), np.nan))
        finite = np.isfinite(values)
        return self.steps[finite], values[finite]


MOST_SAMPLES, MOST_ALARMS, _MOST_EXPERTS, _LONGEST = 80, 400, 1024, 300

MapValues = dict[tuple[str, str], dict[str, float]]
ExpertTable = tuple[int, dict[str, list[float]]]


class AlarmEntry(NamedTuple):
    step: int
    kind: str
    text: str


@dataclass
class StatisticsReader:
    """Accumulates the records of `statistics.jsonl` in bounded memory.

    Attributes:
        samples: steps and values, less than 2 * `MOST_SAMPLES`, evenly spread over the run.
        every: one in `every` samples of the file is kept.
        tables: by role and statistic with a value for each expert: the last kept step, and the values by name.
        counts: number of alarms by kind.
        alarms: the first alarms, at most `MOST_ALARMS`.
    """

    samples: list[tuple[int, MapValues]] = field(default_factory=list)
    every: int = 1
    names: dict[str, None] = field(default_factory=dict)
    maps: dict[tuple[str, str], None] = field(default_factory=dict)
    tables: dict[tuple[str, str], ExpertTable] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    alarms: list[AlarmEntry] = field(default_factory=list)
    _dropped: int = 0
    """Number of samples since the last one that was kept."""

    def add(self, records: Iterable[Record]) -> None:
        """Add records, in the order of the file; a repeated step (of a resumed run) drops this step and later ones."""
        for record in records:
            step = step_of(record)
            if step is None:
                continue
            while self.samples and self.samples[-1][0] >= step:
                self.samples.pop()
            self._alarm(step, record.get("alarms"))
            if record.get("rows"):
                self._sample(step, record["rows"])

    def _sample(self, step: int, rows: Any) -> None:
        self._dropped += 1
        if self.samples and self._dropped < self.every:
            return
        if values := self._values(step, rows):
            self.samples.append((step, values))
            self._dropped = 0
        if len(self.samples) >= 2 * MOST_SAMPLES:
            self.samples, self.every = self.samples[::2], 2 * self.every
            self._dropped = self.every // 2

    def _values(self, step: int, rows: Any) -> MapValues:
        result: MapValues = {}
        tables: dict[tuple[str, str], ExpertTable] = {}
        for row in rows if type(rows) is list else ():
            if type(row) is not dict or type(row.get("name")) is not str:
                continue
            name, role = row["name"][:_LONGEST], row.get("role")
            role = role[:_LONGEST] if type(role) is str else ""
            self.names[name] = None
            for statistic, value in row.items():
                key = role, statistic[:_LONGEST]
                if type(value) is list:
                    tables.setdefault(key, (step, {}))[1][name] = [number(entry) for entry in value[:_MOST_EXPERTS]]
                elif statistic not in ("name", "role") and not math.isnan(figure := number(value)):
                    self.maps[key] = None
                    result.setdefault(key, {})[name] = figure
        self.tables |= tables
        return result

    def _alarm(self, step: int, alarms: Any) -> None:
        for alarm in alarms if type(alarms) is list else ():
            if type(alarm) is not dict:
                continue
            kind = str(alarm.get("kind", "alarm"))[:_LONGEST]
            text = alarm.get("text") or " ".join(str(alarm[key]) for key in ("name", "value") if key in alarm)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if len(self.alarms) < MOST_ALARMS:
                self.alarms.append(AlarmEntry(step, kind, str(text)[:_LONGEST]))
