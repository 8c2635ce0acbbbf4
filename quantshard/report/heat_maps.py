"""The statistics of `statistics.jsonl` as maps of tensor x step, and the alarms of a run.

Steps are merged by pairs where there are more than a map has columns, and the worse of two values stays: the larger
share that saturates, the smaller signal-to-noise ratio. So memory does not grow with the run, and nothing bad vanishes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quantshard.report.metrics import number, step_of
from quantshard.report.records import Record

MOST_COLUMNS, _MOST_NAMES, _MOST_MAPS, _MOST_ALARMS, _LONGEST = 160, 2048, 48, 200, 300
_SMALLER_IS_WORSE = ("sqnr_db",)
_NO_STATISTICS = ("name", "role")


@dataclass(frozen=True)
class AlarmEntry:
    """What a run warned of: at which step, of which kind, and in words."""

    step: int
    kind: str
    text: str


@dataclass
class StatisticsReader:
    """Takes the records of `statistics.jsonl`, batch by batch.

    `columns`: the first step that each stands for, and its values by (role, statistic) and name. `counts`: alarms by
    kind. `left_out`: how many names were too many.
    """

    columns: list[tuple[int, dict[tuple[str, str], dict[str, float]]]] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    maps: dict[tuple[str, str], None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    first_alarms: list[AlarmEntry] = field(default_factory=list)
    last_alarms: deque[AlarmEntry] = field(default_factory=lambda: deque(maxlen=_MOST_ALARMS))
    left_out: bool = False

    def add(self, batch: Iterable[Record]) -> None:
        """Take some records, in the order of the file; a step that comes again replaces what came after it."""
        for record in batch:
            step = step_of(record)
            if step is None:
                continue
            while self.columns and self.columns[-1][0] >= step:
                self.columns.pop()
            self._alarm(step, record.get("alarms"))
            if found := self._values(record.get("rows")):
                self.columns.append((step, found))
            if len(self.columns) >= 2 * MOST_COLUMNS:
                self.columns = [_merged(*pair) for pair in zip(self.columns[::2], self.columns[1::2], strict=True)]

    def merged(self, most: int) -> list[tuple[int, dict[tuple[str, str], dict[str, float]]]]:
        """The columns, merged by pairs until there are `most` of them at most."""
        found = self.columns
        while len(found) > most:
            found = [
                _merged(*found[at : at + 2]) if at + 1 < len(found) else found[at] for at in range(0, len(found), 2)
            ]
        return found

    def alarms(self) -> list[AlarmEntry]:
        """The first and the last of them, in the order of the file."""
        return [*self.first_alarms, *self.last_alarms]

    def _values(self, rows: Any) -> dict[tuple[str, str], dict[str, float]]:
        found: dict[tuple[str, str], dict[str, float]] = {}
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


def _merged(
    first: tuple[int, dict[tuple[str, str], dict[str, float]]],
    second: tuple[int, dict[tuple[str, str], dict[str, float]]],
) -> tuple[int, dict[tuple[str, str], dict[str, float]]]:
    found = {key: dict(values) for key, values in first[1].items()}
    for key, values in second[1].items():
        worse = min if key[1] in _SMALLER_IS_WORSE else max
        kept = found.setdefault(key, {})
        for name, value in values.items():
            kept[name] = worse(kept[name], value) if name in kept else value
    return first[0], found
