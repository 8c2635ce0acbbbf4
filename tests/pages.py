"""Parts of the documentation, as tests read them: a page or a chapter of it, and its blocks of code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST_CHAPTERS = {
    "docs/checkpoints.md": "checkpoints-of-a-run",
    "docs/distributed.md": "tensor-parallelism",
    "docs/existing-models.md": "from-bf16",
}
"""Pages whose first part has a test of its own, and the anchor at which the next chapter begins."""


def section(link: str) -> str:
    """Return the text that a link leads to.

    With an anchor: from that heading to the next one of the same or a higher level. Without: the page, up to the anchor
    in `FIRST_CHAPTERS`.
    """
    page, _, anchor = link.partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    if not anchor:
        return text[: heading(text, FIRST_CHAPTERS[page])[0]] if page in FIRST_CHAPTERS else text
    start, level = heading(text, anchor)
    return text[start : min((at for at, other, _ in headings(text) if at > start and other <= level), default=None)]


def snippets(link: str, language: str = "python") -> list[str]:
    """Return the blocks of code of a section in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", section(link), flags=re.S | re.M)


def heading(text: str, anchor: str) -> tuple[int, int]:
    """Return the position and the level of the heading with this anchor."""
    ((start, level),) = ((at, level) for at, level, title in headings(text) if slug(title) == anchor)
    return start, level


def headings(text: str) -> list[tuple[int, int, str]]:
    """Return the position, level and title of each heading outside of blocks of code."""
    lines = re.finditer(r"^```.*?^```|^(#+) ([^\n]*)$", text, flags=re.S | re.M)
    return [(line.start(), len(line[1]), line[2]) for line in lines if line[1]]


def slug(title: str) -> str:
    """Return the anchor that mkdocs gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
