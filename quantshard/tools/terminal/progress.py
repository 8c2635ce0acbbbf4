"""A bar of the work that is done, on standard error, where that is a terminal; elsewhere nothing is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from quantshard.checkpoints.disk import transfer
from quantshard.tools.terminal.screen import Screen


class WorkBar:
    """How much is done of how much, in bytes; the whole is what was expected so far."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self.bar, self.task = bar, task
        self.total = 0

    def expect(self, count: int) -> None:
        """So many more bytes are to be done."""
        self.total += count
        self.bar.update(self.task, total=self.total)

    def moved(self, count: int) -> None:
        """So many more were done."""
        self.bar.update(self.task, advance=count)


@contextmanager
def work_bar(what: str) -> Iterator[WorkBar]:
    """While it lasts, show a bar of `what` is done; it moves by the methods of what is yielded, and is gone then."""
    screen = Screen(stderr=True, soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        yield WorkBar(bar, bar.add_task(what, total=None))


@contextmanager
def transfer_bar(what: str) -> Iterator[None]:
    """While it lasts, show the bytes that saves, loads and checks move."""
    with work_bar(what) as bar, transfer.watched(bar):
        yield
