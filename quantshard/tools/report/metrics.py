"""Reads the figures of `metrics.jsonl` into columns, for runs of up to millions of steps.

Every numeric entry becomes a column, including names unknown to quantshard. A missing value is NaN. A value that is not
finite in float32 becomes infinity, so that sums and squares of the finite values cannot overflow. If a resumed run
repeated a step, only the last record of this step counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantshard.errors import ConfigurationError
from quantshard.tools.report.records import Record

Column = NDArray[np.float64]

MOST_COLUMNS, _MOST_VALUES = 64, 1 << 26
_LONGEST_NAME, LARGEST_STEP = 80, 1 << 53
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
        others: number of columns dropped beyond `MOST_COLUMNS`.
    """

    steps: NDArray[np.int64]
    columns: dict[str, Column]
    others: int = 0

    def there(self, name: str) -> tuple[NDArray[np.int64], Column]:
        """Steps and values of a column where the value is finite; empty arrays for an unknown name."""
        values = self.columns.get(name, np.full(len(self.steps), np.nan))
        finite = np.isfinite(values)
        return self.steps[finite], values[finite]

    def not_finite(self, name: str) -> NDArray[np.int64]:
        """Steps at which a figure was recorded but is not finite."""
        return self.steps[np.isinf(self.columns[name])]


@dataclass
class MetricReader:
    """Accumulates the records of `path` into a `MetricTable`, batch by batch."""

    path: str
    steps: list[NDArray[np.int64]] = field(default_factory=list)
    columns: dict[str, list[Column]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    rows: int = 0

    def add(self, batch: Iterable[Record]) -> None:
        """Add records, in the order of the file.

        Raises:
            ConfigurationError: the table would exceed the maximum number of values.
        """
        step_records = [(step, record) for record in batch if (step := step_of(record)) is not None]
        if not step_records:
            return
        records = [record for _, record in step_records]
        if dict in set(map(type, chain.from_iterable(map(dict.values, records)))):
            records = list(map(_flat, records))
        for name in sorted(set().union(*records) - self.columns.keys() - {"step"}, key=_order(records)):
            self._begin(name, records)
        if (self.rows + len(step_records)) * (len(self.columns) + 1) > _MOST_VALUES:
            raise ConfigurationError(
                f"{self.path} has more than {self.rows} steps of {len(self.columns)} figures, and at most "
                f"{_MOST_VALUES} values are held; keep a part of it in a folder of its own"
            )
        for name, parts in self.columns.items():
            parts.append(_column([record.get(name) for record in records]))
        self.steps.append(np.array([step for step, _ in step_records], dtype=np.int64))
        self.rows += len(step_records)

    def _begin(self, name: str, records: list[Record]) -> None:
        if all(math.isnan(number(record.get(name))) for record in records):
            return
        if len(self.columns) >= MOST_COLUMNS or len(name) > _LONGEST_NAME:
            if len(self.others) < _LONGEST_NAME:
                self.others.add(name[:_LONGEST_NAME])
            return
        self.columns[name] = [np.full(self.rows, np.nan)] if self.rows else []

    def table(self) -> MetricTable:
        """The accumulated table, with one row per step."""
        if not self.rows:
            return MetricTable(np.zeros(0, dtype=np.int64), {}, len(self.others))
        steps = np.concatenate(self.steps)
        is_last = np.ones(len(steps), dtype=bool)
        is_last[:-1] = steps[:-1] < np.minimum.accumulate(steps[::-1])[::-1][1:]
        columns = {name: np.concatenate(parts)[is_last] for name, parts in self.columns.items()}
        return MetricTable(steps[is_last], columns, len(self.others))


def _order(records: list[Record]) -> Callable[[str], int]:
    """Sort key that orders names as in the first and last record; unknown names come last."""
    names = list(dict.fromkeys(chain(records[0], records[-1])))
    return lambda name: names.index(name) if name in names else len(names)


def _flat(record: Record) -> Record:
    """Flatten nested tables: {"memory": {"weights": 1}} becomes {"memory.weights": 1}."""
    flat: Record = {}
    for name, value in record.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if type(value) is dict else {name: value}
    return flat


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
