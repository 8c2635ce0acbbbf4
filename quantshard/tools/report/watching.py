"""Following a run that is trained elsewhere: only what was added is read each time."""

from __future__ import annotations

import os
import time

from quantshard.checkpoints.disk.store import LocalStore
from quantshard.tools.report.figures import RunFigures
from quantshard.tools.report.history import checkpoints_elsewhere, planned_steps, tokens_per_step
from quantshard.tools.report.metrics import step_of
from quantshard.tools.report.record_sample import alarms_added
from quantshard.tools.report.records import Record
from quantshard.tools.report.source import METRICS, STATISTICS, RunSource

_LISTED_SECONDS = 10.0
"""How often the checkpoints are looked at."""

NOT_RUNNING = "not running"
START_SECONDS = 30.0
"""How long a run that no process trains may be starting: its processes lock it after they have imported PyTorch."""


class RunWatch:
    """A run that is followed, by the path or the URL of its folder.

    Raises:
        ConfigurationError: there is no run, or its settings cannot be read.
        CheckpointError: the URL cannot be reached.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.source = RunSource(run)
        self.figures = RunFigures(self.source.name)
        self._metrics, self._statistics = self.source.records(METRICS), self.source.records(STATISTICS)
        self._listed = -_LISTED_SECONDS
        self._starts_until = time.monotonic() + START_SECONDS
        self._read_settings()

    @property
    def is_local(self) -> bool:
        """Whether it is on a file system of this machine."""
        return isinstance(self.source.store, LocalStore)

    def poll(self, most: int) -> list[Record]:
        """Read what was added, into `figures`; the new records of steps, the last `most` of them. Of a file that a
        resume has written anew, those of steps that were known are not new.

        Raises:
            OSError: it cannot be read now.
            ConfigurationError: its settings are damaged.
        """
        known = -1
        if self._metrics.was_rewritten():  # by a resume, which may also have been told of more steps
            known = self.figures.step
            self.figures.clear()
            self._statistics.clear()
            self._read_settings()
        found: list[Record] = []
        for batch in self._metrics.batches():
            batch = [record for record in batch if step_of(record) is not None]
            for record in batch:
                self.figures.add(record)
            found = [*found, *(record for record in batch if (step_of(record) or 0) > known)][-most:]
        if self._statistics.was_rewritten():
            self.figures.alarms.clear()
        for batch in alarms_added(self._statistics):
            for record in batch:
                self.figures.add_statistics(record)
        if time.monotonic() - self._listed >= _LISTED_SECONDS:
            self._listed = time.monotonic()
            complete = [row for row in self.source.checkpoints() if row.complete]
            self.figures.checkpoint = complete[-1] if complete else None
        return found

    def has_ended(self) -> bool:
        """Whether nothing more will come, with the reason in `figures.state`: the last step is done, or no process
        trains the run any more, or none has begun to within `START_SECONDS`."""
        is_trained, figures = self.source.is_trained(), self.figures
        if is_trained:
            figures.state, self._starts_until = "", 0.0
            return False
        self._read_settings()
        if figures.planned is not None and figures.step >= figures.planned:
            figures.state = "done"
        elif is_trained is False:
            figures.state = NOT_RUNNING if time.monotonic() < self._starts_until else "stopped"
        return figures.state in ("done", "stopped")

    def _read_settings(self) -> None:
        config = self.source.config()
        self.figures.planned, self.figures.tokens_per_step = planned_steps(config), tokens_per_step(config)
        self.figures.elsewhere = checkpoints_elsewhere(config)
