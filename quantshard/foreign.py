"""Files that anybody may have written: the one place that opens them, and the texts and objects that they hold.

What is opened is a regular file: not a pipe or a device, which would be waited for or never end, and no link, which
could lead anywhere (but for those of Hugging Face's cache, which lead to its own `blobs`). Whoever reads a whole file
says how long it may be; that is looked at before anything is read, so that memory is bounded by it.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

from quantshard.errors import ConfigurationError, QuantshardError, printable
from quantshard.read_limits import JSON_VALUES, TOML_MARKS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "hub_offline",
    "open_regular",
    "printable",
    "read_json",
    "read_regular",
    "read_toml",
    "regular_content",
    "regular_size",
    "toml_table",
]

Path_ = str | os.PathLike[str]

_BLOB: Final = re.compile(r"\.\./\.\./blobs/([0-9a-f]{40,64})")
"""Where a link in Hugging Face's cache leads: from snapshots/REVISION/FILE to blobs/HASH."""

_JSON_TEXT: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

_KEY: Final = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY: Final = re.compile(rf"(?<![\w-]){_KEY}(?:[ \t]*\.[ \t]*{_KEY}){{64}}")
"""A dotted key of more parts than any of ours; `tomllib` takes quadratic time for such."""


def open_regular(path: Path_, *, limit: int | None = None, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading; anything else is refused before it is opened, and never waited for.

    Args:
        limit: bytes that it may have.
        follow: whether a link is followed, as for a path that the user has named. What lies in a folder that came from
            somebody else is not followed.

    Raises:
        OSError: it is missing, cannot be opened, is no regular file or too long; `strerror` says so.
    """
    place, _ = _found(path, limit, follow)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(place, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    try:
        _check(os.fstat(handle), path, limit)  # it may be another one by now
        return io.BufferedReader(io.FileIO(handle))
    except BaseException:
        os.close(handle)
        raise


def regular_size(path: Path_, *, follow: bool = False) -> int:
    """The length of a regular file; see `open_regular`.

    Raises:
        OSError: it is missing, or no regular file.
    """
    return _found(path, None, follow)[1]


def _found(path: Path_, limit: int | None, follow: bool) -> tuple[str, int]:
    """Where a regular file is to be opened, and its length."""
    place = os.fspath(path)
    try:
        if not follow:
            place = _blob(place) or place
        found = os.stat(place, follow_symlinks=follow)
    except ValueError:  # a null byte, a surrogate
        raise OSError(errno.EINVAL, "that is no name of a file", path) from None
    _check(found, path, limit)
    return place, found.st_size


def _blob(place: str) -> str | None:
    """The file in the cache of Hugging Face's hub that a link there stands for; None for all other paths."""
    try:
        found = _BLOB.fullmatch(os.readlink(place).replace(os.sep, "/"))
    except OSError:
        return None
    folder = os.path.dirname(os.path.abspath(place))
    snapshots = os.path.dirname(folder)
    if found is None or os.path.basename(snapshots) != "snapshots":
        return None
    blobs = os.path.join(os.path.dirname(snapshots), "blobs")
    return None if os.path.islink(blobs) else os.path.join(blobs, found[1])


def _check(found: os.stat_result, path: Path_, limit: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link, and links are not followed here", path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file but a pipe, a device or a socket", path)
    if limit is not None and found.st_size > limit:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, and at most {limit} are read of such a file", path)


def regular_content(path: Path_, limit: int, *, follow: bool = False) -> bytes:
    """The content of a regular file; see `open_regular`.

    Raises:
        OSError: it cannot be read; `strerror` says why.
    """
    with open_regular(path, limit=limit, follow=follow) as file:
        length = os.fstat(file.fileno()).st_size
        content = file.read(length + 1)
    if len(content) > length:
        raise OSError(errno.EIO, "it grew while it was read", path)
    return content


def read_regular(
    path: Path_, limit: int, *, raising: type[QuantshardError] = ConfigurationError, follow: bool = False
) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Args:
        raising: the error that says what is wrong.
        follow: whether a link is followed, as for a path that the user has named.

    Raises:
        QuantshardError: of the kind `raising`; it is missing, no regular file, too long, or cannot be read.
    """
    try:
        return regular_content(path, limit, follow=follow)
    except OSError as error:
        raise raising(f"cannot read {os.fspath(path)}: {error.strerror or error}") from None


def read_json(
    path: Path_,
    limit: int,
    *,
    raising: type[QuantshardError] = ConfigurationError,
    follow: bool = False,
    wide: bool = False,
) -> dict[str, Any]:
    """The object in a JSON file; see `read_regular` and `json_object`.

    Raises:
        QuantshardError: of the kind `raising`; it cannot be read, or is no JSON object.
    """
    return json_object(read_regular(path, limit, raising=raising, follow=follow), os.fspath(path), raising, wide)


def json_object(
    content: bytes, where: str, raising: type[QuantshardError] = ConfigurationError, wide: bool = False
) -> dict[str, Any]:
    """The object that is the content of a JSON file; a name that stands in one object twice is refused.

    `wide`: integers beyond 64 bits are read as floats, and not refused. transformers writes int(1e30) for no limit.

    Raises:
        QuantshardError: of the kind `raising`; it is not one. `where` it is from is said.
    """
    try:
        check_json_values(content)
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_object, parse_int=_wide if wide else _integer)
    except (ValueError, RecursionError) as error:
        raise raising(f"{where} is not JSON: {_line(error)}") from None
    if not isinstance(found, dict):
        raise raising(f"{where} is not a JSON object")
    return found


def check_json_values(content: bytes) -> None:
    """Bound the memory that a JSON text takes once it is parsed, which may be many times its bytes.

    Raises:
        ValueError: it has more than `JSON_VALUES` values.
    """
    if _delimiters(content) > JSON_VALUES and _delimiters(_JSON_TEXT.sub(b"", content)) > JSON_VALUES:
        raise ValueError(f"it has more than {JSON_VALUES} values")


def _delimiters(content: bytes) -> int:
    return sum(map(content.count, (b",", b"[", b"{")))


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (found := int(text)) < 1 << 64:
        raise ValueError(f"the number {text:.20} has more than 64 bits")
    return found


def _wide(text: str) -> int | float:
    if len(text) <= 20 and -(1 << 63) <= (found := int(text)) < 1 << 64:
        return found
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text:.20} has {len(text)} digits")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has two entries {twice!r:.80}")
    return found


class FieldReader:
    """The fields of a mapping from a file, each read as what it has to be; one that is missing or null is None.

    Args:
        content: the mapping.
        where: the file, for the errors.
        raising: their class.

    Raises:
        QuantshardError: of the kind `raising`, by every method: a field is something else. It and its value are named.
    """

    def __init__(
        self, content: Mapping[str, Any], where: str, raising: type[QuantshardError] = ConfigurationError
    ) -> None:
        self.content, self.where, self.raising = content, where, raising

    def integer(self, name: str, least: int, most: int) -> int | None:
        """A whole number of a range."""
        value = self.content.get(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number of a range, whole or not."""
        value = self.content.get(name)
        if value is not None and (type(value) not in (int, float) or not least <= value <= most):
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        return None if value is None else float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        value = self.content.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        """A text."""
        value = self.content.get(name)
        if value is not None and type(value) is not str:
            raise self.wrong(name, "a text")
        return value

    def table(self, name: str) -> dict[str, Any] | None:
        """A mapping."""
        value = self.content.get(name)
        if value is not None and type(value) is not dict:
            raise self.wrong(name, "an object")
        return value

    def wrong(self, name: str, wanted: str) -> QuantshardError:
        """The error that says what a field is and what it must be."""
        return self.raising(f"{self.where}: {name} is {shown(self.content.get(name))}, and must be {wanted}")


def shown(value: object, most: int = 80) -> str:
    """A value from a file for a message, cut if it is long."""
    text = repr(value)
    return printable(text if len(text) <= most else text[: most - 3] + "...")


def read_toml(
    path: Path_, limit: int, *, raising: type[QuantshardError] = ConfigurationError, follow: bool = False
) -> dict[str, Any]:
    """What a TOML file says; see `read_regular`.

    Raises:
        QuantshardError: of the kind `raising`; it cannot be read, or is not TOML.
    """
    return toml_table(read_regular(path, limit, raising=raising, follow=follow), os.fspath(path), raising)


def toml_table(content: bytes, where: str, raising: type[QuantshardError] = ConfigurationError) -> dict[str, Any]:
    """What the content of a TOML file says; `where` it is from is said.

    Raises:
        QuantshardError: of the kind `raising`; it is not TOML.
    """
    try:
        text = content.decode("utf-8")
        if sum(map(text.count, "=,[{.\n\\")) > TOML_MARKS:
            raise ValueError(f"it has more than {TOML_MARKS} keys, values and lines")
        if _LONG_KEY.search(text):
            raise ValueError("a dotted key has more than 64 parts")
        found = tomllib.loads(text)
        _check_integers(found)
        return found
    except (ValueError, RecursionError) as error:
        raise raising(f"{where} is not TOML: {_line(error)}") from None


def _check_integers(found: dict[str, Any]) -> None:
    """Refuse integers beyond 64 bits, as TOML does: `tomllib` reads longer ones, which cannot even be printed."""
    waiting: list[Any] = [found]
    for value in waiting:
        if isinstance(value, dict | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError("a number has more than 64 bits")


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_OFFLINE: Final = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE", True),
    ("datasets.config", "HF_HUB_OFFLINE", True),
    ("transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE", 0),
)


@contextmanager
def hub_offline() -> Iterator[None]:
    """Keep transformers and datasets from sending requests, and from offering to run code of a folder.

    `local_files_only=True` and `trust_remote_code=False` do not reach models and configurations that others contain.
    """
    switches = []
    for name, switch, value in _OFFLINE:
        if name.partition(".")[0] in sys.modules:
            module = importlib.import_module(name)
            switches.append((module, switch, getattr(module, switch, None)))
            setattr(module, switch, value)
    try:
        yield
    finally:
        for module, switch, before in switches:
            setattr(module, switch, before)
