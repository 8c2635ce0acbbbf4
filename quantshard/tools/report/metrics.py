"""The figures of `metrics.jsonl` as columns, of a million steps as of ten.

Whatever is a number has a column, those that no version of quantshard has written too. A missing value is NaN. A value
that is not finite in float32 is infinity, so that sums and squares of the others cannot overflow. Steps that were
trained twice, since a run was killed and resumed, count once: as they were trained last.
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
"""The largest magnitude of a figure; a larger one counts as infinite."""


def number(value: object) -> float:
    """A figure of a record: NaN if it is no number, infinity if it is not finite in float32, also in words ("nan")."""
    if type(value) in _NUMBERS or (type(value) is str and len(value) < 10):
        try:
            found = float(value)  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            return math.inf if type(value) is int else math.nan
        return found if abs(found) <= LARGEST else math.inf
    return math.nan


def step_of(record: Mapping[str, Any]) -> int | None:
    """The step of a record; None if it says none."""
    step = record.get("step")
    return step if type(step) is int and 0 <= step < LARGEST_STEP else None


@dataclass(frozen=True)
class MetricTable:
    """Figures of a run by step: `steps` [N] int64, ascending; `columns`: name -> float64 [N].

    `others`: names beyond `MOST_COLUMNS`, which were left out.
    """

    steps: NDArray[np.int64]
    columns: dict[str, Column]
    others: int = 0

    def there(self, name: str) -> tuple[NDArray[np.int64], Column]:
        """Steps and values of a column where it has a finite one; empty for a name that it lacks."""
        values = self.columns.get(name, np.full(len(self.steps), np.nan))
        kept = np.isfinite(values)
        return self.steps[kept], values[kept]

    def not_finite(self, name: str) -> NDArray[np.int64]:
        """The steps at which a figure is infinite or NaN."""
        return self.steps[np.isinf(self.columns[name])]


@dataclass
class MetricReader:
    """Makes a `MetricTable` of the records of `path`, batch by batch."""

    path: str
    steps: list[NDArray[np.int64]] = field(default_factory=list)
    columns: dict[str, list[Column]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    rows: int = 0

    def add(self, batch: Iterable[Record]) -> None:
        """Take some records, in the order of the file.

        Raises:
            ConfigurationError: there are more figures than a report holds.
        """
        kept = [(step, record) for record in batch if (step := step_of(record)) is not None]
        if not kept:
            return
        records = [record for _, record in kept]
        if dict in set(map(type, chain.from_iterable(map(dict.values, records)))):
            records = list(map(_flat, records))
        for name in sorted(set().union(*records) - self.columns.keys() - {"step"}, key=_order(records)):
            self._begin(name, records)
        if (self.rows + len(kept)) * (len(self.columns) + 1) > _MOST_VALUES:
            raise ConfigurationError(
                f"{self.path} has more than {self.rows} steps of {len(self.columns)} figures, and at most "
                f"{_MOST_VALUES} values are held; keep a part of it in a folder of its own"
            )
        for name, parts in self.columns.items():
            parts.append(_column([record.get(name) for record in records]))
        self.steps.append(np.array([step for step, _ in kept], dtype=np.int64))
        self.rows += len(kept)

    def _begin(self, name: str, records: list[Record]) -> None:
        if all(math.isnan(number(record.get(name))) for record in records):
            return
        if len(self.columns) >= MOST_COLUMNS or len(name) > _LONGEST_NAME:
            if len(self.others) < _LONGEST_NAME:
                self.others.add(name[:_LONGEST_NAME])
            return
        self.columns[name] = [np.full(self.rows, np.nan)] if self.rows else []

    def table(self) -> MetricTable:
        """What was read, each step once."""
        if not self.rows:
            return MetricTable(np.zeros(0, dtype=np.int64), {}, len(self.others))
        steps = np.concatenate(self.steps)
        kept = np.ones(len(steps), dtype=bool)
        kept[:-1] = steps[:-1] < np.minimum.accumulate(steps[::-1])[::-1][1:]
        columns = {name: np.concatenate(parts)[kept] for name, parts in self.columns.items()}
        return MetricTable(steps[kept], columns, len(self.others))


def _order(records: list[Record]) -> Callable[[str], int]:
    """Names in the order in which records have them."""
    known = list(dict.fromkeys(chain(records[0], records[-1])))
    return lambda name: known.index(name) if name in known else len(known)


def _flat(record: Record) -> Record:
    """A record whose tables are entries of names with a dot: {"memory": {"weights": 1}} is {"memory.weights": 1}."""
    found: Record = {}
    for name, value in record.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if type(value) is dict else {name: value}
    return found


def _column(values: list[Any]) -> Column:
    kinds = set(map(type, values))
    if kinds <= _NUMBERS:
        try:
            found = np.array(values, dtype=np.float64)
            return np.where(np.abs(found) <= LARGEST, found, np.inf)
        except OverflowError:
            pass
    if kinds == {type(None)}:
        return np.full(len(values), np.nan)
    return np.array([number(value) for value in values], dtype=np.float64)
