"""Live terminal view of a run, for `watch` and for the first process of `train`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timezone

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quantshard.readable import human_bytes
from quantshard.tools.report.figures import RunFigures
from quantshard.tools.report.history import LOSS, MEMORY, SPEED
from quantshard.tools.report.metrics import number
from quantshard.tools.report.summary import said, said_age, said_seconds

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
