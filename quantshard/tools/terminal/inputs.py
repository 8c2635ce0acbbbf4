"""Checks of input paths on the command line."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from quantshard.errors import ConfigurationError

P = TypeVar("P", str, Path)

_URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""The beginning of a URL, also after `Path` removed a slash. URLs are not checked here."""

_NAMES = 1 << 12
"""Maximum number of folder entries searched for a similar name."""


def existing(path: P, what: str) -> P:
    """Return `path` if it exists and is not an empty folder; URLs are returned unchecked.

    `what`: the expected kind of file, for the error message.
    """
    text = os.fspath(path)
    local_path = Path(text)
    if _URL.match(text):
        return path
    if not text.strip():
        raise ConfigurationError(f"a path is empty; name {what}")
    if not os.path.lexists(local_path):
        raise ConfigurationError(f"there is nothing at {text}{meant_path(local_path)}; name {what}")
    if local_path.is_dir() and not any(local_path.iterdir()):
        raise ConfigurationError(f"{text} is an empty folder; name {what}")
    return path


def meant_path(path: Path) -> str:
    """Suggest an existing path similar to a missing one, searching its deepest existing parent folder."""
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    try:
        names = sorted(entry.name for _, entry in zip(range(_NAMES), os.scandir(parent), strict=False))
    except OSError:
        return ""
    matches = get_close_matches(path.name, names, 1, 0.6)
    return f" (did you mean {parent / matches[0]}?)" if matches else ""
