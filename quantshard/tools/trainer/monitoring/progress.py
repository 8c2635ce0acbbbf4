"""Progress output of a run: a live view in a terminal, plain lines otherwise, nothing on ranks other than 0."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from rich.live import Live

from quantshard.checkpoints.disk import transfer
from quantshard.tools.observe.table import Report
from quantshard.tools.report.figures import LiveView, RunFigures, TransferFigures, step_line
from quantshard.tools.report.source import CheckpointRow
from quantshard.tools.terminal.progress import transfer_bar
from quantshard.tools.terminal.screen import Screen
from quantshard.tools.trainer.settings.config import TrainSettings

_log = logging.getLogger(__name__)


class Progress:
    """Prints steps and notes, and logs the notes. `shown`: whether this process prints. `name`: name of the run."""

    def __init__(self, settings: TrainSettings, shown: bool, name: str = "") -> None:
        self.settings, self.shown = settings, shown
        self.console = Screen(soft_wrap=True)
        tokens = settings.global_batch * settings.seq_length
        self.figures = RunFigures(name, planned=settings.steps, tokens_per_step=float(tokens))
        self._is_live = False

    @contextmanager
    def running(self, done: int) -> Iterator[None]:
        """Show the live view during training, if the output is a terminal."""
        if not self.shown or not self.console.is_terminal:
            yield
            return
        self.figures.entry = {"step": done} if done else {}
        with Live(LiveView(self.figures), console=self.console, refresh_per_second=4):
            self._is_live = True
            yield
        self._is_live = False

    def step(self, entry: Mapping[str, Any]) -> None:
        """Show a record of `metrics.jsonl`."""
        if not self.shown:
            return
        self.figures.add(entry)
        has_heldout = "heldout_loss" in entry
        if has_heldout or (not self._is_live and entry["step"] % self.settings.log_every == 0):
            self._lines(step_line(entry, self.settings.steps))

    def statistics(self, record: Mapping[str, Any]) -> None:
        """Show the alarms of a record of `statistics.jsonl` in the live view."""
        self.figures.add_statistics(record)

    def saved(self, step: int) -> None:
        """Mark a checkpoint as just saved in the live view."""
        self.figures.checkpoint = CheckpointRow(step, True, saved_at=datetime.now(timezone.utc))

    @contextmanager
    def moving(self, what: str) -> Iterator[None]:
        """Show the transferred bytes while saving or loading, if the output is a terminal."""
        if not self.shown or not self.console.is_terminal:
            yield
        elif self._is_live:
            self.figures.transfer = TransferFigures(what)
            with transfer.watched(self.figures.transfer):
                yield
            self.figures.transfer = None
        else:
            with transfer_bar(what):
                yield

    def report(self, found: Report) -> None:
        """Show the report of `explain`; outside of a terminal without trailing blanks."""
        if self.shown:
            is_terminal = self.console.is_terminal
            self.console.print(found if is_terminal else str(found), soft_wrap=not is_terminal)

    def note(self, line: str, level: int = logging.INFO) -> None:
        """Show a line, and log it with `level`. Only this method writes the line to the terminal."""
        if self.shown:
            _log.log(level, "%s", line)
            self._lines(line)

    def _lines(self, line: str) -> None:
        self.console.lines(line)
        self.console.file.flush()
