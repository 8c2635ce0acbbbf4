"""Heat maps (tensor x step) and alarms from `statistics.jsonl`.

If a run has more sampled steps than a map has columns, each column covers equally many steps and keeps the worst value:
the largest saturated share, the smallest signal-to-noise ratio, or infinity if a value was not finite. Memory therefore
does not grow with the run, and no bad value among the parsed records (see `record_sample.py`) is lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quantshard.tools.report.metrics import number, step_of
from quantshard.tools.report.records import Record

MOST_COLUMNS, _MOST_NAMES, _MOST_MAPS, _MOST_ALARMS, _LONGEST = 160, 2048, 48, 200, 300
_SMALLER_IS_WORSE = ("sqnr_db", "scale_min")
_NO_STATISTICS = ("name", "role")

MapValues = dict[tuple[str, str], dict[str, float]]
"""Values by (role, statistic) and name."""


@dataclass(frozen=True)
class AlarmEntry:
    """One alarm of a run: its step, kind and text."""

    step: int
    kind: str
    text: str


@dataclass
class MapColumn:
    """The worst values of the sampled steps from `first` to `last`."""

    first: int
    last: int
    values: MapValues

    def take(self, later: MapColumn) -> None:
        """Merge the values of a later column into this one."""
        self.last = later.last
        for key, values in later.values.items():
            merged = self.values.setdefault(key, {})
            for name, value in values.items():
                merged[name] = _worse(key[1], merged[name], value) if name in merged else value


@dataclass
class StatisticsReader:
    """Accumulates the records of `statistics.jsonl`, batch by batch.

    Attributes:
        each: number of sampled steps per column; only the last of `columns` can have fewer.
        counts: number of alarms by kind.
        left_out: whether names or statistics were dropped because there were too many.
    """

    columns: list[MapColumn] = field(default_factory=list)
    each: int = 1
    names: dict[str, None] = field(default_factory=dict)
    maps: dict[tuple[str, str], None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    first_alarms: list[AlarmEntry] = field(default_factory=list)
    last_alarms: deque[AlarmEntry] = field(default_factory=lambda: deque(maxlen=_MOST_ALARMS))
    left_out: bool = False
    _count: int = 0
    """Number of sampled steps in the last column."""

    def add(self, batch: Iterable[Record]) -> None:
        """Add records, in the order of the file.

        A repeated step (of a resumed run) drops every column that contains this step or later ones. Earlier steps in a
        dropped column are lost, because merged steps cannot be separated.
        """
        for record in batch:
            step = step_of(record)
            if step is None:
                continue
            self._forget(step)
            self._alarm(step, record.get("alarms"))
            if values := self._values(record.get("rows")):
                self._sampled(MapColumn(step, step, values))

    def merged(self, most: int) -> list[MapColumn]:
        """The columns, merged in pairs until at most `most` remain."""
        columns = self.columns
        while len(columns) > most:
            columns = _pairs(columns)
        return columns

    def alarms(self) -> list[AlarmEntry]:
        """The first and the last alarms, in the order of the file."""
        return [*self.first_alarms, *self.last_alarms]

    def _forget(self, step: int) -> None:
        while self.columns and self.columns[-1].last >= step:
            self.columns.pop()
            self._count = self.each  # the previous column is full
        if not self.columns:
            self.each = 1

    def _sampled(self, column: MapColumn) -> None:
        if self.columns and self._count < self.each:
            self.columns[-1].take(column)
            self._count += 1
            return
        self.columns.append(column)
        self._count = 1
        if len(self.columns) >= 2 * MOST_COLUMNS:
            self.columns = _pairs(self.columns)
            self._count, self.each = self.each + 1, 2 * self.each

    def _values(self, rows: Any) -> MapValues:
        result: MapValues = {}
        for row in rows if type(rows) is list else ():
            if type(row) is not dict or type(row.get("name")) is not str:
                continue
            name, role = row["name"][:_LONGEST], row.get("role")
            role = role[:_LONGEST] if type(role) is str else ""
            if not _room(self.names, name, _MOST_NAMES):
                self.left_out = True
                continue
            for statistic, value in row.items():
                if statistic in _NO_STATISTICS or math.isnan(figure := number(value)):
                    continue
                if _room(self.maps, (role, statistic[:_LONGEST]), _MOST_MAPS):
                    result.setdefault((role, statistic[:_LONGEST]), {})[name] = figure
                else:
                    self.left_out = True
        return result

    def _alarm(self, step: int, alarms: Any) -> None:
        for alarm in alarms if type(alarms) is list else ():
            if type(alarm) is not dict:
                continue
            kind = str(alarm.get("kind", "alarm"))[:_LONGEST]
            text = alarm.get("text") or " ".join(
                str(alarm[key])[:_LONGEST] for key in ("name", "value") if key in alarm
            )
            if kind in self.counts or len(self.counts) < _MOST_MAPS:
                self.counts[kind] = self.counts.get(kind, 0) + 1
            entry = AlarmEntry(step, kind, str(text)[:_LONGEST])
            if len(self.first_alarms) < _MOST_ALARMS:
                self.first_alarms.append(entry)
            else:
                self.last_alarms.append(entry)


def _room(known: dict[Any, None], key: Any, most: int) -> bool:
    if key in known:
        return True
    if len(known) >= most:
        return False
    known[key] = None
    return True


def _pairs(columns: list[MapColumn]) -> list[MapColumn]:
    """Merge adjacent columns in pairs, out of place."""
    pairs = []
    for index in range(0, len(columns), 2):
        first = columns[index]
        pairs.append(MapColumn(first.first, first.last, {key: dict(values) for key, values in first.values.items()}))
        for later in columns[index + 1 : index + 2]:
            pairs[-1].take(later)
    return pairs


def _worse(statistic: str, first: float, second: float) -> float:
    """The worse of two values of a statistic. Infinity (a value that was not finite) is the worst."""
    smaller = statistic in _SMALLER_IS_WORSE and math.inf not in (first, second)
    return min(first, second) if smaller else max(first, second)
