"""Terminal output of commands, with untrusted text escaped.

A terminal executes escape sequences and obeys characters that reorder or hide text, and names of tensors, files and
settings can contain both. This module therefore escapes every character that is not printable. Colors and progress
bars come from rich, which does not interpret markup in texts here.
"""

import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from quantshard.checkpoints.disk.store import watch_transfers
from quantshard.errors import printable

_KEPT = "\n\t"


class Screen(Console):
    """A rich console that escapes control characters. `wide`: do not limit the width of output."""

    def __init__(self, *, wide: bool = False, stderr: bool = False, soft_wrap: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        is_sized = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
        width = 10_000 if wide else None if is_sized else 80
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False, markup=False, emoji=False)

    def lines(self, *lines: str) -> None:
        """Print lines, wrapped between words; paths and names are never broken."""
        for text in printable("\n".join(lines), but=_KEPT).split("\n"):
            indent = " " * (len(text) - len(text.lstrip()) + 2)
            wrapped = textwrap.wrap(
                text, self.width, subsequent_indent=indent, expand_tabs=False, replace_whitespace=False,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
            for line in wrapped or [""]:
                self.print(line, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text before rich measures it, so that tables know its width."""
        return super().render_str(printable(text, but=_KEPT), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape rendered segments, because `Text` objects do not pass through `render_str`."""
        for segment in super().render(renderable, options):
            text = segment.text
            yield segment if segment.control else Segment(printable(text, but=_KEPT), segment.style)


def say(*lines: str) -> None:
    """Print lines on standard output, wrapped as by `Screen.lines`."""
    if lines:
        Screen().lines(*lines)


def say_whole(text: str) -> None:
    """Print a text such as JSON on standard output, without wrapping its lines."""
    print(printable(text, but=_KEPT))


def complain(message: str) -> None:
    print(f"quantshard: {printable(' '.join(message.split()))}", file=sys.stderr)


def prepare_output() -> None:
    """Make output robust to any encoding, and format Python warnings as single lines."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    warnings.formatwarning = _warning_line


def _warning_line(message: Warning | str, *where: Any, **named: Any) -> str:
    return f"quantshard: WARNING: {printable(' '.join(str(message).split()))}\n"


class TransferBar(progress.Progress):
    """Progress in bytes, relative to the total expected so far."""

    def expect(self, count: int) -> None:
        self.update(self.tasks[0].id, total=(self.tasks[0].total or 0) + count)

    def moved(self, count: int) -> None:
        self.advance(self.tasks[0].id, count)


@contextmanager
def transfer_bar(what: str) -> Iterator[None]:
    """Show a bar of the bytes that are transferred during the block, if standard error is a terminal."""
    screen = Screen(stderr=True, soft_wrap=True)
    columns = (
        progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn(),
        progress.TransferSpeedColumn(), progress.TimeRemainingColumn(),
    )  # fmt: skip
    bar = TransferBar(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    bar.add_task(what, total=None)
    with bar, watch_transfers(bar):
        yield
