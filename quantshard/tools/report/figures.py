"""Current figures of a run, updated step by step, and their live view for `watch` and `train`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quantshard.readable import human_bytes
from quantshard.tools.report.history import HELDOUT, HELDOUT_OF_AVERAGE, LOSS, MEMORY, SECONDS, SPEED
from quantshard.tools.report.metrics import number, step_of
from quantshard.tools.report.samples import AlarmEntry, StatisticsReader
from quantshard.tools.report.source import CheckpointRow
from quantshard.tools.report.summary import said, said_age, said_seconds

_RECENT = 50
"""Number of recent steps averaged for the ETA."""

_MARKS, _PLAIN_MARKS = "▁▂▃▄▅▆▇█", "_.,-=+*#"
_MOST_POINTS = 256


@dataclass
class Sparkline:
    """A one-line text chart of all added values, averaged over growing windows so that memory stays bounded."""

    points: list[float] = field(default_factory=list)
    values_per_point: int = 1
    _sum: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Add the next value; values that are not finite are skipped."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self.values_per_point:
            return
        self.points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.points) >= _MOST_POINTS:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self.values_per_point *= 2

    def text(self, width: int, ascii_only: bool = False) -> str:
        """Render the curve in at most `width` characters."""
        points, marks = self.points, _PLAIN_MARKS if ascii_only else _MARKS
        if len(points) > width > 0:
            ends = [round(index * len(points) / width) for index in range(width + 1)]
            points = [sum(points[a:b]) / (b - a) for a, b in pairwise(ends)]
        low, high = min(points, default=0.0), max(points, default=0.0)
        span = (high - low) or 1.0
        return "".join(marks[round((point - low) / span * (len(marks) - 1))] for point in points)


@dataclass
class TransferFigures:
    """Progress of a save or load: a description, the known total and the completed bytes."""

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
    losses: Sparkline = field(default_factory=Sparkline)
    heldout: float | None = None
    best: tuple[float, int] | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    alarms: deque[AlarmEntry] = field(default_factory=lambda: deque(maxlen=3))
    checkpoint: CheckpointRow | None = None
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
        self.losses.add(number(entry.get(LOSS)))
        heldout = number(entry.get(HELDOUT))
        if math.isfinite(heldout):
            self.heldout = heldout
            if self.best is None or heldout < self.best[0]:
                self.best = heldout, self.step
        seconds = number(entry.get(SECONDS))
        speed = number(entry.get(SPEED))
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
        self.entry, self.losses, self.heldout, self.best = {}, Sparkline(), None, None
        self.recent.clear()
        self.alarms.clear()

    def eta(self) -> float | None:
        """Estimated seconds until the last step at the recent speed, or None if unknown."""
        if self.planned is None or not self.recent or self.step > self.planned:
            return None
        return (self.planned - self.step) * sum(self.recent) / len(self.recent)


def step_line(entry: Mapping[str, Any], planned: int | None) -> str:
    """Format a step as one line of a log."""
    line = f"loss {_said(entry.get(LOSS), '.4f')}  lr {_said(entry.get('lr'), '.2e')}"
    line += f"  {_said(entry.get(SPEED), ',.0f')} tokens/s"
    if number(entry.get("skipped_steps")) > 0:
        line += f"  {_said(entry['skipped_steps'], '.0f')} steps skipped"
    if HELDOUT in entry:
        line += f"  held-out loss {_said(entry[HELDOUT], '.4f')}"
    if HELDOUT_OF_AVERAGE in entry:
        line += f"  of the average {_said(entry[HELDOUT_OF_AVERAGE], '.4f')}"
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
        if figures.state:
            end = figures.state
        else:
            end = "" if eta is None else f"eta {said_seconds(eta)}"
        total = "" if planned is None else f"/{planned:,}"
        bar: RenderableType = ProgressBar(planned, figures.step) if planned else Text("")
        row.add_row(Text(f"step {figures.step:,}{total}", style="bold"), bar, Text(end))
        return row

    def _rows(self, width: int, ascii_only: bool) -> Iterator[tuple[str, str | Text]]:
        figures, entry = self.figures, self.figures.entry
        if not entry:
            yield "", "waiting for the first step"
        else:
            loss = number(entry.get(LOSS))
            loss_text = f"{loss:.4f}" if math.isfinite(loss) else str(entry.get(LOSS, "-"))[:20]
            yield (
                LOSS,
                Text(f"{loss_text}  ").append(
                    figures.losses.text(max(8, width - len(loss_text) - 2), ascii_only), "cyan"
                ),
            )
            if figures.heldout is not None and figures.best is not None:
                best = f"best {figures.best[0]:.4f} at step {figures.best[1]:,}"
                yield "held-out", f"{figures.heldout:.4f}  {best}"
            yield "speed", "   ".join(self._speed())
            yield "step", "   ".join(self._step())
        if figures.transfer is not None:
            total = f" of {human_bytes(figures.transfer.total)}" if figures.transfer.total else ""
            yield figures.transfer.what, f"{human_bytes(figures.transfer.done)}{total}"
        if figures.elsewhere:
            yield "saved", f"elsewhere: {said(figures.elsewhere)}"
        elif figures.checkpoint is not None:
            saved_at = figures.checkpoint.saved_at
            age = "" if saved_at is None else f", {said_age(saved_at, datetime.now(timezone.utc))}"
            yield "saved", f"step {figures.checkpoint.step:,}{age}"
        for alarm in figures.alarms:
            yield "alarm", Text(f"step {alarm.step:,}, {alarm.kind}: {alarm.text}", "red", overflow="ellipsis")

    def _speed(self) -> Iterator[str]:
        entry = self.figures.entry
        speed, mfu, memory = (number(entry.get(name)) for name in (SPEED, "mfu", MEMORY))
        if math.isfinite(speed):
            yield f"{speed:,.0f} tokens/s"
        if math.isfinite(mfu):
            yield f"MFU {mfu:.1%}"
        if math.isfinite(memory):
            yield f"memory {human_bytes(int(memory))}"

    def _step(self) -> Iterator[str]:
        entry = self.figures.entry
        rate, norm, skipped = (number(entry.get(name)) for name in ("lr", "grad_norm", "skipped_steps"))
        if not math.isnan(rate):
            yield f"lr {rate:.2e}"
        if not math.isnan(norm):
            yield f"grad norm {norm:.3g}"
        if not math.isnan(skipped):
            yield f"skipped {skipped:.0f}"
