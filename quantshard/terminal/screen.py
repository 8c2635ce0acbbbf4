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
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from quantshard.errors import printable

_WIDTH = 80
"""That of what does not go to a terminal, if the environment's COLUMNS say no other: the same wherever it is made."""

_UNBOUNDED = 10000

_KEPT = "\n\t"


class Screen(Console):
    """A rich console that escapes what a terminal would obey. `wide`: as wide as what is shown, everywhere."""

    def __init__(self, *, wide: bool = False, stderr: bool = False, soft_wrap: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        columns = os.environ.get("COLUMNS", "")
        is_width = columns.isdecimal() and len(columns) < 6 and int(columns) > 0  # rich pads lines to any width
        is_terminal = stream.isatty() and (is_width or not columns)
        width = None if is_terminal else int(columns) if is_width else _WIDTH
        width = _UNBOUNDED if wide else width
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
    """See that nothing shown raises, whatever the encoding of the terminal or pipe is, and that a warning is a line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _warning_line


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"quantshard: WARNING: {printable(' '.join(str(message).split()))}\n"
