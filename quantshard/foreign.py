"""Reading untrusted files: the one place that opens them and parses their text.

Only regular files are opened. Pipes and devices could block or never end, and links could lead anywhere. Links in the
Hugging Face cache that lead to its own `blobs` are the only exception. Every caller that reads a whole file passes a
maximum length, which is checked before reading, so that memory is bounded.
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
"""Target of a link in the Hugging Face cache: from snapshots/REVISION/FILE to blobs/HASH."""

_JSON_TEXT: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

_KEY: Final = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY: Final = re.compile(rf"(?<![\w-]){_KEY}(?:[ \t]*\.[ \t]*{_KEY}){{64}}")
"""A dotted key with more than 64 parts, which no file of ours has. `tomllib` takes quadratic time for such keys."""


def open_regular(path: Path_, *, limit: int | None = None, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading. Anything else is rejected before it is opened, without blocking.

    Args:
        limit: maximum bytes.
        follow: follow links, as for a path that the user named. Paths inside an untrusted folder are not followed.

    Raises:
        OSError: the file is missing, cannot be opened, is not a regular file or is too long; `strerror` gives the
            reason.
    """
    real_path, _ = _found(path, limit, follow)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(real_path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    try:
        _check(os.fstat(handle), path, limit)  # again: the file could have been replaced
        return io.BufferedReader(io.FileIO(handle))
    except BaseException:
        os.close(handle)
        raise


def regular_size(path: Path_, *, follow: bool = False) -> int:
    """Return the length of a regular file; see `open_regular`.

    Raises:
        OSError: the file is missing or is not a regular file.
    """
    return _found(path, None, follow)[1]


def _found(path: Path_, limit: int | None, follow: bool) -> tuple[str, int]:
    """Return the path at which to open a regular file, and its length."""
    real_path = os.fspath(path)
    try:
        if not follow:
            real_path = _blob(real_path) or real_path
        status = os.stat(real_path, follow_symlinks=follow)
    except ValueError:  # a null byte, a surrogate
        raise OSError(errno.EINVAL, "that is no name of a file", path) from None
    _check(status, path, limit)
    return real_path, status.st_size


def _blob(place: str) -> str | None:
    """Return the file that a link in the Hugging Face hub cache stands for, or None for all other paths."""
    try:
        match = _BLOB.fullmatch(os.readlink(place).replace(os.sep, "/"))
    except OSError:
        return None
    folder = os.path.dirname(os.path.abspath(place))
    snapshots = os.path.dirname(folder)
    if match is None or os.path.basename(snapshots) != "snapshots":
        return None
    blobs = os.path.join(os.path.dirname(snapshots), "blobs")
    return None if os.path.islink(blobs) else os.path.join(blobs, match[1])


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
    """Read a regular file; see `open_regular`.

    Raises:
        OSError: the file cannot be read; `strerror` gives the reason.
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
    """Read a regular file of at most `limit` bytes.

    Args:
        raising: class of the error to raise.
        follow: follow links, as for a path that the user named.

    Raises:
        QuantshardError: of class `raising`: the file is missing, not a regular file, too long, or cannot be read.
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
    """Read a JSON file that contains an object; see `read_regular` and `json_object`.

    Raises:
        QuantshardError: of class `raising`: the file cannot be read, or is not a JSON object.
    """
    return json_object(read_regular(path, limit, raising=raising, follow=follow), os.fspath(path), raising, wide)


def json_object(
    content: bytes, where: str, raising: type[QuantshardError] = ConfigurationError, wide: bool = False
) -> dict[str, Any]:
    """Parse the content of a JSON file that contains an object. Duplicate names in an object are rejected.

    Args:
        where: source of the content, for error messages.
        wide: read integers beyond 64 bits as floats instead of rejecting them. transformers writes int(1e30) for no
            limit.

    Raises:
        QuantshardError: of class `raising`: the content is not a JSON object.
    """
    try:
        check_json_values(content)
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_object, parse_int=_wide if wide else _integer)
    except (ValueError, RecursionError) as error:
        raise raising(f"{where} is not JSON: {_line(error)}") from None
    if not isinstance(value, dict):
        raise raising(f"{where} is not a JSON object")
    return value


def check_json_values(content: bytes) -> None:
    """Bound the memory of a parsed JSON text, which can be many times its length.

    Raises:
        ValueError: the text has more than `JSON_VALUES` values.
    """
    if _delimiters(content) > JSON_VALUES and _delimiters(_JSON_TEXT.sub(b"", content)) > JSON_VALUES:
        raise ValueError(f"it has more than {JSON_VALUES} values")


def _delimiters(content: bytes) -> int:
    return sum(map(content.count, (b",", b"[", b"{")))


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 64:
        raise ValueError(f"the number {text:.20} has more than 64 bits")
    return number


def _wide(text: str) -> int | float:
    if len(text) <= 20 and -(1 << 63) <= (integer := int(text)) < 1 << 64:
        return integer
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text:.20} has {len(text)} digits")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has two entries {duplicate!r:.80}")
    return fields


class FieldReader:
    """Typed access to the fields of a mapping from a file. A missing or null field is None.

    Args:
        content: the mapping.
        where: the file, for error messages.
        raising: class of the errors.

    Raises:
        QuantshardError: of class `raising`, by every method: a field has another type or value. The message names the
            field and its value.
    """

    def __init__(
        self, content: Mapping[str, Any], where: str, raising: type[QuantshardError] = ConfigurationError
    ) -> None:
        self.content, self.where, self.raising = content, where, raising

    def integer(self, name: str, least: int, most: int) -> int | None:
        """Return an integer in a range."""
        value = self.content.get(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """Return an integer or float in a range."""
        value = self.content.get(name)
        if value is not None and (type(value) not in (int, float) or not least <= value <= most):
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        return None if value is None else float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean; False if it is missing."""
        value = self.content.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self.content.get(name)
        if value is not None and type(value) is not str:
            raise self.wrong(name, "a text")
        return value

    def table(self, name: str) -> dict[str, Any] | None:
        """Return a mapping."""
        value = self.content.get(name)
        if value is not None and type(value) is not dict:
            raise self.wrong(name, "an object")
        return value

    def wrong(self, name: str, wanted: str) -> QuantshardError:
        """Return the error for a field: its value and what it must be."""
        return self.raising(f"{self.where}: {name} is {shown(self.content.get(name))}, and must be {wanted}")


def shown(value: object, most: int = 80) -> str:
    """Format a value from a file for a message, shortened if it is long."""
    text = repr(value)
    return printable(text if len(text) <= most else text[: most - 3] + "...")


def read_toml(
    path: Path_, limit: int, *, raising: type[QuantshardError] = ConfigurationError, follow: bool = False
) -> dict[str, Any]:
    """Read a TOML file; see `read_regular`.

    Raises:
        QuantshardError: of class `raising`: the file cannot be read, or is not TOML.
    """
    return toml_table(read_regular(path, limit, raising=raising, follow=follow), os.fspath(path), raising)


def toml_table(content: bytes, where: str, raising: type[QuantshardError] = ConfigurationError) -> dict[str, Any]:
    """Parse the content of a TOML file. `where`: source of the content, for error messages.

    Raises:
        QuantshardError: of class `raising`: the content is not TOML.
    """
    try:
        text = content.decode("utf-8")
        if sum(map(text.count, "=,[{.\n\\")) > TOML_MARKS:
            raise ValueError(f"it has more than {TOML_MARKS} keys, values and lines")
        if _LONG_KEY.search(text):
            raise ValueError("a dotted key has more than 64 parts")
        table = tomllib.loads(text)
        _check_integers(table)
        return table
    except (ValueError, RecursionError) as error:
        raise raising(f"{where} is not TOML: {_line(error)}") from None


def _check_integers(found: dict[str, Any]) -> None:
    """Reject integers beyond 64 bits, as TOML requires. `tomllib` accepts longer ones, which cannot even be printed."""
    pending: list[Any] = [found]
    for value in pending:
        if isinstance(value, dict | list):
            pending.extend(value.values() if isinstance(value, dict) else value)
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
    """Prevent transformers and datasets from sending requests and from offering to run code of a folder.

    `local_files_only=True` and `trust_remote_code=False` do not reach nested models and configurations.
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
        for module, switch, previous in switches:
            setattr(module, switch, previous)
