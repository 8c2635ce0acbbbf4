"""Samples of tensor statistics, and alarms, from `statistics.jsonl`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quantshard.tools.report.metrics import number, step_of
from quantshard.tools.report.records import Record

MOST_SAMPLES, _MOST_NAMES, _MOST_MAPS, _MOST_ALARMS, _LONGEST = 80, 1024, 48, 200, 300
_NO_STATISTICS = ("name", "role")

MapValues = dict[tuple[str, str], dict[str, float]]
"""Values by (role, statistic) and name."""


class AlarmEntry(NamedTuple):
    """One alarm of a run: its step, kind and text."""

    step: int
    kind: str
    text: str


class Sample(NamedTuple):
    """The statistics of one step."""

    step: int
    values: MapValues


@dataclass
class StatisticsReader:
    """Accumulates the records of `statistics.jsonl`, batch by batch, in bounded memory.

    Attributes:
        samples: less than 2 * `MOST_SAMPLES` samples, evenly spread over the run.
        every: one in `every` samples of the file is kept.
        counts: number of alarms by kind.
        left_out: whether names or statistics were dropped because there were too many.
    """

    samples: list[Sample] = field(default_factory=list)
    every: int = 1
    names: dict[str, None] = field(default_factory=dict)
    maps: dict[tuple[str, str], None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    first_alarms: list[AlarmEntry] = field(default_factory=list)
    last_alarms: deque[AlarmEntry] = field(default_factory=lambda: deque(maxlen=_MOST_ALARMS))
    left_out: bool = False
    _dropped: int = 0
    """Number of samples since the last one that was kept."""

    def add(self, batch: Iterable[Record]) -> None:
        """Add records, in the order of the file; a repeated step (of a resumed run) drops this step and later ones."""
        for record in batch:
            step = step_of(record)
            if step is None:
                continue
            while self.samples and self.samples[-1].step >= step:
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
            self.samples.append(Sample(step, values))
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
