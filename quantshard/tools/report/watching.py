"""Follows a run trained by another process, reading only new records at each poll."""

from __future__ import annotations

import os
import time

from quantshard.checkpoints.disk.store import LocalStore
from quantshard.tools.report.figures import RunFigures
from quantshard.tools.report.history import checkpoints_elsewhere, planned_steps, tokens_per_step
from quantshard.tools.report.metrics import step_of
from quantshard.tools.report.records import Record
from quantshard.tools.report.source import METRICS, STATISTICS, STATISTICS_BYTES, RunSource

_LISTED_SECONDS = 10.0
"""Seconds between listings of the checkpoints."""

NOT_RUNNING = "not running"
START_SECONDS = 30.0
"""Seconds to wait for a run to start, because its processes lock it only after importing PyTorch."""


class RunWatch:
    """Follows a run, given the path or URL of its folder.

    Raises:
        ConfigurationError: the folder does not contain a run, or its settings cannot be read.
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
        """Whether the run is on a file system of this machine, not at a URL."""
        return isinstance(self.source.store, LocalStore)

    def poll(self, most: int) -> list[Record]:
        """Read new records into `figures`, and return the records of new steps, at most the last `most`.

        After a resume has rewritten the file, steps seen before do not count as new.

        Raises:
            OSError: a file cannot be read now.
            ConfigurationError: the settings are damaged.
        """
        last_step = -1
        if self._metrics.was_rewritten():
            # A resume rewrote the file, possibly with a new number of steps.
            last_step = self.figures.step
            self.figures.clear()
            self._statistics.clear()
            self._read_settings()
        added: list[Record] = []
        for batch in self._metrics.batches():
            batch = [record for record in batch if step_of(record) is not None]
            for record in batch:
                self.figures.add(record)
            added = [*added, *(record for record in batch if (step_of(record) or 0) > last_step)][-most:]
        if self._statistics.was_rewritten():
            self.figures.alarms.clear()
        for batch in self._statistics.batches(STATISTICS_BYTES):
            for record in batch:
                self.figures.add_statistics(record)
        if time.monotonic() - self._listed >= _LISTED_SECONDS:
            self._listed = time.monotonic()
            complete = [row for row in self.source.checkpoints() if row.complete]
            self.figures.checkpoint = complete[-1] if complete else None
        return added

    def has_ended(self) -> bool:
        """Whether no more records will come, with the reason in `figures.state`.

        The run has ended if its last step is done, if its process has stopped, or if none started in `START_SECONDS`.
        """
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
