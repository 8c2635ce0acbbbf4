"""Follows a run that another process trains, step by step, for `watch`; and the lines of steps, also for `train`."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from quantshard.tools.report import history
from quantshard.tools.report.records import Record, StatisticsReader, number, step_of

START_SECONDS = 30.0
"""Seconds to wait for a run to start, because its processes lock it only after importing PyTorch."""


def step_line(entry: Mapping[str, Any], planned: int | None) -> str:
    """Format a step as one line of a log."""
    line = f"loss {_said(entry.get(history.LOSS), '.4f')}  lr {_said(entry.get('lr'), '.2e')}"
    line += f"  {_said(entry.get(history.SPEED), ',.0f')} tokens/s"
    if number(entry.get("skipped_steps")) > 0:
        line += f"  {_said(entry['skipped_steps'], '.0f')} steps skipped"
    if history.HELDOUT in entry:
        line += f"  held-out loss {_said(entry[history.HELDOUT], '.4f')}"
    if history.HELDOUT_OF_AVERAGE in entry:
        line += f"  of the average {_said(entry[history.HELDOUT_OF_AVERAGE], '.4f')}"
    return f"step {step_of(entry) or 0}{'' if planned is None else f'/{planned}'}  {line}"


def _said(value: object, form: str) -> str:
    """Format a figure; a value that is not a finite number is returned as text."""
    return format(number(value), form) if math.isfinite(number(value)) else str(value)[:20]


class RunWatch:
    """Follows a run, given the path or URL of its folder, reading only new records at each poll.

    Attributes:
        step: step of the last record, or 0.
        planned: number of steps, or None if the settings do not contain it.
        state: reason why no new records come, or "".
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.source = history.RunSource(run)
        self.step, self.state = 0, ""
        self.planned = history.planned_steps(self.source.config())
        self._metrics, self._statistics = self.source.records(history.METRICS), self.source.records(history.STATISTICS)
        self._starts_until = time.monotonic() + START_SECONDS

    def poll(self, most: int) -> list[str]:
        """Read new records, and return a line for each new step and alarm, at most the last `most` of both.

        After a resume has rewritten the file, steps seen before do not count as new.
        """
        last_step = -1
        if self._metrics.was_rewritten():
            # A resume rewrote the file, possibly with a new number of steps.
            last_step, self.step = self.step, 0
            self._statistics.clear()
            self.planned = history.planned_steps(self.source.config())
        added: deque[Record] = deque(maxlen=most)
        for record in self._metrics.records():
            step = step_of(record)
            if step is not None:
                self.step = step
                if step > last_step:
                    added.append(record)
        self._statistics.was_rewritten()
        reader = StatisticsReader()
        reader.add({"step": r.get("step"), "alarms": r.get("alarms")} for r in self._statistics.records())
        alarms = [alarm for alarm in reader.alarms if alarm.step > last_step]
        return [
            *(step_line(record, self.planned) for record in added),
            *(f"ALARM ({alarm.kind}): {alarm.text}" for alarm in alarms[-most:]),
        ]

    def has_ended(self) -> bool:
        """Whether no more records will come, with the reason in `state`.

        The run has ended if its last step is done, if its process has stopped, or if none started in `START_SECONDS`.
        """
        is_trained = self.source.is_trained()
        if is_trained:
            self._starts_until = 0.0
            return False
        self.planned = history.planned_steps(self.source.config())
        if self.planned is not None and self.step >= self.planned:
            self.state = "done"
        elif is_trained is False and time.monotonic() >= self._starts_until:
            self.state = "stopped"
        return bool(self.state)
