"""Current figures of a run, updated step by step, and their live view for `watch` and `train`."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quantshard.readable import human_bytes
from quantshard.tools.report import history
from quantshard.tools.report.records import AlarmEntry, Record, StatisticsReader, number, step_of

_RECENT = 50
"""Number of recent steps averaged for the ETA."""

_LONGEST = 300
"""Maximum number of characters of a text."""


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """A one-line text chart of the finite values, averaged to at most `width` characters."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return ""
    points = np.array([part.mean() for part in np.array_split(finite, min(width, len(finite)))])
    marks = "_.,-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
    span = np.ptp(points) or 1.0
    return "".join(marks[round((point - points.min()) / span * (len(marks) - 1))] for point in points)


@dataclass
class TransferFigures:
    """Progress of a save or load in bytes."""

    what: str
    total: int = 0
    done: int = 0

    def expect(self, count: int) -> None:
        """Add `count` bytes to the known total."""
        self.total += count

    def moved(self, count: int) -> None:
        """Add `count` bytes to the completed bytes."""
        self.done += count


@dataclass
class RunFigures:
    """Current figures of a watched run.

    Attributes:
        planned: number of steps, or None if the settings do not contain it.
        tokens_per_step: number of tokens per step, or None if the settings do not contain it.
        entry: last record of `metrics.jsonl`.
        best: smallest held-out loss and its step.
        checkpoint: last complete checkpoint.
        elsewhere: location of checkpoints outside the run's folder, which is not read.
        state: reason why no new records come, or "".
        transfer: save in progress.
    """

    name: str
    planned: int | None = None
    tokens_per_step: float | None = None
    entry: dict[str, Any] = field(default_factory=dict)
    losses: array[float] = field(default_factory=lambda: array("d"))
    heldout: float | None = None
    best: tuple[float, int] | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    alarms: deque[AlarmEntry] = field(default_factory=lambda: deque(maxlen=3))
    checkpoint: history.CheckpointRow | None = None
    elsewhere: str = ""
    state: str = ""
    transfer: TransferFigures | None = None

    @property
    def step(self) -> int:
        """Step of the last record, or 0 before the first record."""
        return step_of(self.entry) or 0

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a record of `metrics.jsonl`."""
        self.entry = dict(entry)
        self.losses.append(number(entry.get(history.LOSS)))
        heldout = number(entry.get(history.HELDOUT))
        if math.isfinite(heldout):
            self.heldout = heldout
            if self.best is None or heldout < self.best[0]:
                self.best = heldout, self.step
        seconds = number(entry.get(history.SECONDS))
        speed = number(entry.get(history.SPEED))
        if math.isnan(seconds) and self.tokens_per_step and speed > 0:
            seconds = number(self.tokens_per_step / speed)
        if math.isfinite(seconds) and seconds >= 0:
            self.recent.append(seconds)

    def add_statistics(self, record: Mapping[str, Any]) -> None:
        """Add the alarms of a record of `statistics.jsonl`."""
        reader = StatisticsReader()
        reader.add([{"step": record.get("step"), "alarms": record.get("alarms")}])
        self.alarms.extend(reader.alarms())

    def clear(self) -> None:
        """Drop the figures of all steps before the files are read again."""
        self.entry, self.losses, self.heldout, self.best = {}, array("d"), None, None
        self.recent.clear()
        self.alarms.clear()

    def eta(self) -> float | None:
        """Estimated seconds until the last step at the recent speed, or None if unknown."""
        if self.planned is None or not self.recent or self.step > self.planned:
            return None
        return (self.planned - self.step) * sum(self.recent) / len(self.recent)


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


# Live view

_NARROWEST = 40
_LABEL = 9
"""Width of the label column, in characters."""


class LiveView:
    """Renderable view of the current figures, redrawn by rich at every refresh."""

    def __init__(self, figures: RunFigures) -> None:
        self.figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(_NARROWEST, options.max_width) - 4
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", min_width=_LABEL, no_wrap=True)
        grid.add_column(overflow="ellipsis", no_wrap=True)
        for label, content in self._rows(width - _LABEL - 2, options.ascii_only):
            grid.add_row(label, Text(content) if isinstance(content, str) else content)
        yield Panel(
            Group(self._progress(width), grid), title=Text(self.figures.name), title_align="left", width=width + 4
        )

    def _progress(self, width: int) -> RenderableType:
        figures, planned = self.figures, self.figures.planned
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        eta = figures.eta()
        end = figures.state or ("" if eta is None else f"eta {said_seconds(eta)}")
        total = "" if planned is None else f"/{planned:,}"
        bar: RenderableType = ProgressBar(planned, figures.step) if planned else Text("")
        row.add_row(Text(f"step {figures.step:,}{total}", style="bold"), bar, Text(end))
        return row

    def _rows(self, width: int, ascii_only: bool) -> Iterator[tuple[str, str | Text]]:
        figures, entry = self.figures, self.figures.entry
        if not entry:
            yield "", "waiting for the first step"
        else:
            loss = _said(entry.get(history.LOSS, "-"), ".4f")
            curve = sparkline(figures.losses, max(8, width - len(loss) - 2), ascii_only)
            yield history.LOSS, Text(f"{loss}  ").append(curve, "cyan")
            if figures.heldout is not None and figures.best is not None:
                best = f"best {figures.best[0]:.4f} at step {figures.best[1]:,}"
                yield "held-out", f"{figures.heldout:.4f}  {best}"
            figure = {
                name: number(entry.get(name))
                for name in (history.SPEED, "mfu", history.MEMORY, "lr", "grad_norm", "skipped_steps")
            }
            speeds = {history.SPEED: "{:,.0f} tokens/s", "mfu": "MFU {:.1%}"}
            texts = [form.format(figure[name]) for name, form in speeds.items() if math.isfinite(figure[name])]
            texts += (
                [f"memory {human_bytes(int(figure[history.MEMORY]))}"] if math.isfinite(figure[history.MEMORY]) else []
            )
            yield "speed", "   ".join(texts)
            steps = {"lr": "lr {:.2e}", "grad_norm": "grad norm {:.3g}", "skipped_steps": "skipped {:.0f}"}
            texts = [form.format(figure[name]) for name, form in steps.items() if not math.isnan(figure[name])]
            yield "step", "   ".join(texts)
        if figures.transfer is not None:
            total = f" of {human_bytes(figures.transfer.total)}" if figures.transfer.total else ""
            yield figures.transfer.what, f"{human_bytes(figures.transfer.done)}{total}"
        if figures.elsewhere:
            yield "saved", f"elsewhere: {said(figures.elsewhere)}"
        elif figures.checkpoint is not None:
            saved_at = figures.checkpoint.saved_at
            seconds = 0.0 if saved_at is None else (datetime.now(timezone.utc) - saved_at).total_seconds()
            age = "" if saved_at is None else f", {said_seconds(max(0.0, seconds))} ago"
            yield "saved", f"step {figures.checkpoint.step:,}{age}"
        for alarm in figures.alarms:
            yield "alarm", Text(f"step {alarm.step:,}, {alarm.kind}: {alarm.text}", "red", overflow="ellipsis")


# Texts


def said_seconds(seconds: float) -> str:
    """Format a duration in its two largest units: "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60):02d} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def said(value: object) -> str:
    """Format a value as a table cell."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        value = ", ".join(str(item)[:_LONGEST] for item in value[:_LONGEST])
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# A run that another process trains

_LISTED_SECONDS = 10.0
"""Seconds between listings of the checkpoints."""

NOT_RUNNING = "not running"
START_SECONDS = 30.0
"""Seconds to wait for a run to start, because its processes lock it only after importing PyTorch."""


class RunWatch:
    """Follows a run, given the path or URL of its folder, reading only new records at each poll."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.source = history.RunSource(run)
        self.figures = RunFigures(self.source.name)
        self._metrics, self._statistics = self.source.records(history.METRICS), self.source.records(history.STATISTICS)
        self._listed = -_LISTED_SECONDS
        self._starts_until = time.monotonic() + START_SECONDS
        self._read_settings()

    def poll(self, most: int) -> list[Record]:
        """Read new records into `figures`, and return the records of new steps, at most the last `most`.

        After a resume has rewritten the file, steps seen before do not count as new.
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
        for batch in self._statistics.batches(history.STATISTICS_BYTES):
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
        self.figures.planned = history.planned_steps(config)
        self.figures.tokens_per_step = history.tokens_per_step(config)
        self.figures.elsewhere = history.checkpoints_elsewhere(config)
