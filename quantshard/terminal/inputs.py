"""What commands are given: places that must be there, and words that are one of a few."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from quantshard.errors import ConfigurationError

_NAMES = 1 << 12
"""The most names of a folder that are looked at for one that was meant."""


def existing(path: str | os.PathLike[str], what: str) -> str:
    """A path that is there, and is no empty folder; a URL as it is.

    Raises:
        ConfigurationError: it is missing, with a name that was perhaps meant, or an empty folder; `what` it should be.
    """
    text = os.fspath(path)
    place = Path(text)
    if "://" in text:
        return text
    if not text.strip():
        raise ConfigurationError(f"a path is empty; name {what}")
    if not os.path.lexists(place):
        raise ConfigurationError(f"there is nothing at {text}{meant_path(place)}; name {what}")
    if place.is_dir() and not any(place.iterdir()):
        raise ConfigurationError(f"{text} is an empty folder; name {what}")
    return text


def meant(word: str, known: Iterable[str]) -> str:
    """A question about the known word that was perhaps meant, or nothing."""
    near = get_close_matches(word[:80], list(known), 1, 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def meant_path(path: Path) -> str:
    """The name beside a missing path that was perhaps meant, or where the path breaks off."""
    above = path.parent
    while not above.is_dir() and above != above.parent:
        path, above = above, above.parent
    try:
        names = sorted(entry.name for _, entry in zip(range(_NAMES), os.scandir(above), strict=False))
    except OSError:
        return ""
    near = get_close_matches(path.name, names, 1, 0.6)
    return f" (did you mean {above / near[0]}?)" if near else ""
