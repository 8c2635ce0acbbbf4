"""The statistics of `statistics.jsonl` as maps of tensor x step, and the alarms of a run.

Where there are more steps than a map has columns, each column stands for equally many of them, and the worst of its
values stays: the largest share that saturates, the smallest signal-to-noise ratio, or that one was not finite. So
memory does not grow with the run, and nothing bad of what is read vanishes (`record_sample.py`).
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
    """What a run warned of: at which step, of which kind, and in words."""

    step: int
    kind: str
    text: str


@dataclass
class MapColumn:
    """What the sampled steps from `first` to `last` had: the worst of their values."""

    first: int
    last: int
    values: MapValues

    def take(self, later: MapColumn) -> None:
        """Stand for the steps of a later one too."""
        self.last = later.last
        for key, values in later.values.items():
            kept = self.values.setdefault(key, {})
            for name, value in values.items():
                kept[name] = _worse(key[1], kept[name], value) if name in kept else value


@dataclass
class StatisticsReader:
    """Takes the records of `statistics.jsonl`, batch by batch.

    `each`: the sampled steps of a column; only the last of `columns` may have fewer. `counts`: alarms by kind.
    `left_out`: whether there were too many names or statistics.
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
    """The sampled steps of the last column."""

    def add(self, batch: Iterable[Record]) -> None:
        """Take some records, in the order of the file.

        A step that comes again replaces the columns that reach it; of the last of these, that goes for its earlier
        steps too, which nothing tells apart any more.
        """
        for record in batch:
            step = step_of(record)
            if step is None:
                continue
            self._forget(step)
            self._alarm(step, record.get("alarms"))
            if found := self._values(record.get("rows")):
                self._sampled(MapColumn(step, step, found))

    def merged(self, most: int) -> list[MapColumn]:
        """The columns, merged by pairs until there are `most` of them at most."""
        found = self.columns
        while len(found) > most:
            found = _pairs(found)
        return found

    def alarms(self) -> list[AlarmEntry]:
        """The first and the last of them, in the order of the file."""
        return [*self.first_alarms, *self.last_alarms]

    def _forget(self, step: int) -> None:
        while self.columns and self.columns[-1].last >= step:
            self.columns.pop()
            self._count = self.each  # of the one before
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
        found: MapValues = {}
        for row in rows if type(rows) is list else ():
            if type(row) is not dict or type(row.get("name")) is not str:
                continue
            name, role = row["name"][:_LONGEST], row.get("role")
            role = role[:_LONGEST] if type(role) is str else ""
            if not _room(self.names, name, _MOST_NAMES):
                self.left_out = True
                continue
            for statistic, value in row.items():
                if statistic in _NO_STATISTICS or math.isnan(read := number(value)):
                    continue
                if _room(self.maps, (role, statistic[:_LONGEST]), _MOST_MAPS):
                    found.setdefault((role, statistic[:_LONGEST]), {})[name] = read
                else:
                    self.left_out = True
        return found

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
            found = AlarmEntry(step, kind, str(text)[:_LONGEST])
            if len(self.first_alarms) < _MOST_ALARMS:
                self.first_alarms.append(found)
            else:
                self.last_alarms.append(found)


def _room(known: dict[Any, None], key: Any, most: int) -> bool:
    if key in known:
        return True
    if len(known) >= most:
        return False
    known[key] = None
    return True


def _pairs(columns: list[MapColumn]) -> list[MapColumn]:
    """Half as many columns; those that were given stay as they are."""
    found = []
    for at in range(0, len(columns), 2):
        first = columns[at]
        found.append(MapColumn(first.first, first.last, {key: dict(kept) for key, kept in first.values.items()}))
        for later in columns[at + 1 : at + 2]:
            found[-1].take(later)
    return found


def _worse(statistic: str, first: float, second: float) -> float:
    """What was not finite is infinite here, and the worst of any statistic."""
    smaller = statistic in _SMALLER_IS_WORSE and math.inf not in (first, second)
    return min(first, second) if smaller else max(first, second)
