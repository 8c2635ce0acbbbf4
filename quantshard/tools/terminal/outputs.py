"""Checks of input paths, and safe file output: only this module creates, replaces or extends the files of commands.

A received run or archive can hold a link in place of an output file, so that a plain write would overwrite another file
of the user. So no output is written through a link, and with `within`, no link below that folder is followed either.
Links in the path of the run itself, or in a path that the user typed, are followed.
"""

import mmap
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from quantshard.errors import ConfigurationError

P = TypeVar("P", str, Path)

_URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""The beginning of a URL, also after `Path` removed a slash."""

_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.new")


def existing(path: P, what: str) -> P:
    """Return `path` if it exists; URLs are returned unchecked. `what`: the expected kind of file, for the error."""
    if not _URL.match(os.fspath(path)) and not os.path.lexists(path):
        raise ConfigurationError(f"there is nothing at {os.fspath(path) or 'an empty path'}; name {what}")
    return path


def write_file(path: Path, content: str | bytes, *, within: Path | None = None) -> None:
    """Atomically write a file, replacing a regular one. `within`: the run's folder; folders below it are made."""
    with written_file(path, within=within) as file, _errors_of(path):
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def written_file(path: Path, *, within: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file for incremental writing, and rename it to `path` at the end; after an error it is removed."""
    _prepare(path, within)
    new = path.with_name(f".{secrets.token_hex(8)}.new")
    with _errors_of(path):
        file = open(new, "xb")
    try:
        yield file
        with _errors_of(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            if path.exists():
                shutil.copymode(path, new)
            os.replace(new, path)
    except BaseException:
        with suppress(OSError):  # on a full disk, close() raises again
            file.close()
        new.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path, *names: str) -> None:
    """Remove temporary files of a killed process in a locked `folder`, and the files `names`."""
    with _errors_of(folder):
        for name in os.listdir(folder):
            if name in names or _UNFINISHED.fullmatch(name):
                os.unlink(folder / name)


def create_file(path: Path) -> BinaryIO:
    with _errors_of(path):
        return open(path, "xb")


def append_text(path: Path, text: str, *, within: Path | None = None) -> None:
    _prepare(path, within)
    with _errors_of(path), open(path, "ab") as file:
        file.write(text.encode("utf-8"))


def cut_after(path: Path, is_last: Callable[[bytes], bool], *, within: Path | None = None) -> None:
    """Truncate a file after its last line for which `is_last` is true; without such a line it becomes empty."""
    _prepare(path, within)
    with _errors_of(path), open(path, "r+b") as file:
        if not file.seek(0, os.SEEK_END):
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                if is_last(content[start : end - 1]):
                    break
                end = start
        file.truncate(end)


def make_folder(path: Path) -> None:
    with _errors_of(path):
        path.mkdir(parents=True, exist_ok=True)


def check_no_links(folder: Path, names: tuple[str, ...]) -> None:
    """Raise if an entry of a folder among `names` is a link."""
    for name in names:
        if (folder / name).is_symlink():
            raise ConfigurationError(_LINK.format(folder / name))


_LINK = "{} is a link, and links are not followed there; put what it leads to in its place"


def _prepare(path: Path, within: Path | None) -> None:
    """Check that `path` is missing or a regular file or folder, and make its folders below `within`."""
    if within is not None:
        _, *folders = reversed(path.relative_to(within).parents)
        check_no_links(within, tuple(map(os.fspath, folders)))
        with _errors_of(path):
            path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise ConfigurationError(_LINK.format(path))
    if path.exists() and not path.is_file():
        raise ConfigurationError(f"{path} is no regular file, so it is not replaced; name another place")


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}") from None
