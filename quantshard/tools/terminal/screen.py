"""What commands show: the one place that prints, whose texts may come from anybody.

A terminal obeys what it is shown: sequences that begin with an escape, and characters that reorder or hide text. Names
tensors, files and settings can hold them. So all that is no printable character is escaped here, whatever the command
has done with it before; colors and the progress bar are rich's own, and rich reads no markup in texts.
"""

from __future__ import annotations

import os
import sys
import textwrap
import warnings
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from quantshard.errors import QuantshardError, printable
from quantshard.tools.terminal.outputs import null_stream

_WIDTH = 80
"""The width of output that does not go to a terminal, unless COLUMNS is set."""

_SIZES = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
"""Variables from which rich and typer read the size of a terminal."""

_LONGEST_SIZE = 5
"""The most digits of such a size: rich pads lines to any width."""

_UNBOUNDED = 10000

_KEPT = "\n\t"


class OutputError(QuantshardError):
    """Standard output cannot be written: it is full, or its reader has closed it."""


class StandardOutput:
    """Standard output whose failed writes raise an `OutputError`; what follows such a failure is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, and flush it if it ends a line."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._failure(error) from None

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._stream.flush()
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> OutputError:
        # Otherwise Python would fail once more when it flushes the stream at exit.
        with null_stream() as null:
            os.dup2(null.fileno(), self._stream.fileno())
        return OutputError(f"cannot write to standard output: {error.strerror}")


class Screen(Console):
    """A rich console that escapes what a terminal would obey. `wide`: as wide as what is shown, everywhere."""

    def __init__(self, *, wide: bool = False, stderr: bool = False, soft_wrap: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        is_sized = stream.isatty() or "COLUMNS" in os.environ
        width = _UNBOUNDED if wide else None if is_sized else _WIDTH
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False, markup=False, emoji=False)

    def lines(self, *lines: str) -> None:
        """Show lines, wrapped between words; a path or a name is never broken."""
        for text in printable("\n".join(lines), but=_KEPT).split("\n"):
            inside = " " * (len(text) - len(text.lstrip()) + 2)
            found = textwrap.wrap(
                text, self.width, subsequent_indent=inside, expand_tabs=False, replace_whitespace=False,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
            for line in found or [""]:
                self.print(line, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text before rich measures it: a table then knows how wide it is."""
        return super().render_str(printable(text, but=_KEPT), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape what rich renders: texts that were made for it elsewhere did not pass `render_str`."""
        for segment in super().render(renderable, options):
            text = segment.text
            yield segment if segment.control else Segment(printable(text, but=_KEPT), segment.style)


def say(*lines: str) -> None:
    """Show lines on standard output, as `Screen.lines` does."""
    Screen().lines(*lines)


def say_whole(text: str) -> None:
    """Show a text on standard output whose lines are to stay as they are, as JSON."""
    print(printable(text, but=_KEPT))


def complain(message: str) -> None:
    """Show one line on standard error."""
    print(f"quantshard: {printable(' '.join(message.split()))}", file=sys.stderr)


def prepare_output() -> None:
    """Prepare for any encoding, closed or full streams and impossible terminal sizes; format warnings as lines."""
    sys.stdout = sys.stdout or null_stream()
    sys.stderr = sys.stderr or null_stream()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    if not isinstance(sys.stdout, StandardOutput):
        sys.stdout = StandardOutput(sys.stdout)  # type: ignore[assignment]  # a stream by its attributes
    for name in _SIZES:
        size = os.environ.get(name, "")
        if not (size.isdecimal() and len(size) <= _LONGEST_SIZE and int(size) > 0):
            os.environ.pop(name, None)
    warnings.formatwarning = _warning_line


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"quantshard: WARNING: {printable(' '.join(str(message).split()))}\n"
