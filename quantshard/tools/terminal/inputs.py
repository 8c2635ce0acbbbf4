"""Checks of input paths on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

from quantshard.errors import ConfigurationError

P = TypeVar("P", str, Path)

_URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""The beginning of a URL, also after `Path` removed a slash."""


def existing(path: P, what: str) -> P:
    """Return `path` if it exists; URLs are returned unchecked. `what`: the expected kind of file, for the error."""
    if not _URL.match(os.fspath(path)) and not os.path.lexists(path):
        raise ConfigurationError(f"there is nothing at {os.fspath(path) or 'an empty path'}; name {what}")
    return path
