"""What commands are given: places that must be there."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from quantshard.errors import ConfigurationError

P = TypeVar("P", str, Path)

_URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""How a URL begins, also after `Path` took one of its slashes: what is to be said of it is not said here."""

_NAMES = 1 << 12
"""The most names of a folder that are looked at for one that was meant."""


def existing(path: P, what: str) -> P:
    """A path that is there, and is no empty folder; a URL as it is.

    Raises:
        ConfigurationError: it is missing, with a name that was perhaps meant, or an empty folder; `what` it should be.
    """
    text = os.fspath(path)
    place = Path(text)
    if _URL.match(text):
        return path
    if not text.strip():
        raise ConfigurationError(f"a path is empty; name {what}")
    if not os.path.lexists(place):
        raise ConfigurationError(f"there is nothing at {text}{meant_path(place)}; name {what}")
    if place.is_dir() and not any(place.iterdir()):
        raise ConfigurationError(f"{text} is an empty folder; name {what}")
    return path


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
