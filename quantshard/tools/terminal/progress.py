"""Progress bars on standard error, shown only on a terminal."""

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

from quantshard.checkpoints.disk.store import watch_transfers
from quantshard.tools.terminal.screen import Screen


class WorkBar:
    """Progress in bytes, relative to the total expected so far."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self.bar, self.task = bar, task
        self.total = 0

    def expect(self, count: int) -> None:
        """Add `count` bytes to the expected total."""
        self.total += count
        self.bar.update(self.task, total=self.total)

    def moved(self, count: int) -> None:
        """Add `count` bytes to the completed bytes."""
        self.bar.update(self.task, advance=count)


@contextmanager
def work_bar(what: str) -> Iterator[WorkBar]:
    """Show a progress bar during the block, advanced by the methods of the yielded `WorkBar`.

    `what`: description of the work.
    """
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
    """Show the bytes transferred by saves, loads and checks during the block."""
    with work_bar(what) as bar, watch_transfers(bar):
        yield
