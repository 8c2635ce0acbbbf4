"""What a run shows while it trains: a bar in a terminal, plain lines elsewhere; nothing on ranks other than 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from quantshard.observe.table import Report
from quantshard.terminal.screen import Screen
from quantshard.trainer.config import TrainSettings


class Progress:
    """Prints steps and notes. `shown`: whether this process prints at all."""

    def __init__(self, settings: TrainSettings, shown: bool) -> None:
        self.settings, self.shown = settings, shown
        self.console = Screen(soft_wrap=True)
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    @contextmanager
    def running(self, done: int) -> Iterator[None]:
        """While steps are trained: show the bar, if this is a terminal."""
        if not self.shown or not self.console.is_terminal:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bar(*columns, console=self.console) as bar:
            self._bar = bar
            self._task = bar.add_task("", total=self.settings.steps, completed=done)
            yield
        self._bar = self._task = None

    def step(self, entry: Mapping[str, Any]) -> None:
        """Show a line of `metrics.jsonl`."""
        if not self.shown:
            return
        line = f"loss {entry['loss']:.4f}  lr {entry['lr']:.2e}  {entry['tokens_per_s']:,.0f} tokens/s"
        if entry["skipped_steps"]:
            line += f"  {entry['skipped_steps']} steps skipped"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=entry["step"], description=line)
            if "heldout_loss" not in entry:
                return
        if "heldout_loss" in entry:
            line += f"  held-out loss {entry['heldout_loss']:.4f}"
        if "heldout_loss_ema" in entry:
            line += f"  of the average {entry['heldout_loss_ema']:.4f}"
        every = self.settings.log_every
        if "heldout_loss" in entry or entry["step"] % every == 0:
            self.note(f"step {entry['step']}/{self.settings.steps}  {line}")

    def report(self, found: Report) -> None:
        """Show what `explain` found; in a file without blanks at the ends of lines."""
        if self.shown:
            is_terminal = self.console.is_terminal
            self.console.print(found if is_terminal else str(found), soft_wrap=not is_terminal)

    def note(self, line: str) -> None:
        """Show a line."""
        if self.shown:
            self.console.lines(line)
            self.console.file.flush()
