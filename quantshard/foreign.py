"""Parsing of untrusted files: JSON, TOML and their fields.

`open_regular` decides what is opened. Callers pass a maximum length, so that memory is bounded.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from quantshard.checkpoints.disk.store import Path_, open_regular, why
from quantshard.errors import ConfigurationError, QuantshardError, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MIB: Final = 1 << 20
FILE_BYTES: Final = {
    "index": 64 * _MIB,
    "configuration": _MIB,
    "settings": _MIB,
    "run": 16 * _MIB,
    "tokenizer": 256 * _MIB,
}
"""Maximum bytes of whole files, far above what honest files need.

A safetensors index has about 130 bytes per tensor, and a run's `config.toml` 150 per data file. The largest tokenizers
have 35 MB.
"""


def read_regular(
    path: Path_, limit: int, *, raising: type[QuantshardError] = ConfigurationError, follow: bool = False
) -> bytes:
    """Read a regular file of at most `limit` bytes, or raise `raising`; see `open_regular`."""
    try:
        with open_regular(path, limit=limit, follow=follow) as file:
            return file.read(limit)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise raising(f"cannot read {os.fspath(path)}: {getattr(error, 'strerror', None) or error}") from None


def read_json(
    path: Path_, limit: int, *, raising: type[QuantshardError] = ConfigurationError, follow: bool = False
) -> dict[str, Any]:
    """Read a JSON file that contains an object; see `read_regular` and `json_object`."""
    return json_object(read_regular(path, limit, raising=raising, follow=follow), os.fspath(path), raising)


def json_object(content: bytes, where: str, raising: type[QuantshardError] = ConfigurationError) -> dict[str, Any]:
    """Parse the content of a JSON file that contains an object. `where`: source of the content, for error messages."""
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise raising(f"{where} is not JSON: {why(error)}") from None
    if not isinstance(value, dict):
        raise raising(f"{where} is not a JSON object")
    return value


class FieldReader:
    """Typed access to the fields of a mapping from a file. A missing or null field is None.

    Each method raises an error with the field's name and value if it has another type or is out of range.
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content, self.where = content, where

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self._typed(name, (int,), expected := f"an integer from {least} to {most}")
        if value is not None and not least <= value <= most:
            raise self.wrong(name, expected)
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self._typed(name, (int, float), expected := f"a number from {least:g} to {most:g}")
        if value is not None and not least <= value <= most:
            raise self.wrong(name, expected)
        return None if value is None else float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean; False if it is missing."""
        return bool(self._typed(name, (bool,), "true or false"))

    def text(self, name: str) -> str | None:
        return self._typed(name, (str,), "a text")

    def table(self, name: str) -> dict[str, Any] | None:
        return self._typed(name, (dict,), "an object")

    def _typed(self, name: str, types: tuple[type, ...], expected: str) -> Any:
        value = self.content.get(name)
        if value is not None and type(value) not in types:
            raise self.wrong(name, expected)
        return value

    def wrong(self, name: str, expected: str) -> ConfigurationError:
        return ConfigurationError(f"{self.where}: {name} is {shown(self.content.get(name))}, and must be {expected}")


def read_toml(path: Path_, limit: int, *, follow: bool = False) -> dict[str, Any]:
    return toml_table(read_regular(path, limit, follow=follow), os.fspath(path))


def toml_table(content: bytes, where: str) -> dict[str, Any]:
    """Parse the content of a TOML file. `where`: source of the content, for error messages."""
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is not TOML: {why(error)}") from None


_OFFLINE: Final = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE", True),
    ("datasets.config", "HF_HUB_OFFLINE", True),
    ("transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE", 0),
)


@contextmanager
def errors_in_one_line(where: str) -> Iterator[None]:
    """Convert errors of a library that reads untrusted content, of any type, to a `ConfigurationError`."""
    try:
        yield
    except (QuantshardError, KeyboardInterrupt, SystemExit):
        raise
    # a Rust panic is not an Exception
    except BaseException as error:
        line = " ".join(str(error).split()) or "no reason given"
        raise ConfigurationError(f"{where}: {type(error).__name__}: {line:.300}") from None


@contextmanager
def hub_offline() -> Iterator[None]:
    """Prevent transformers and datasets from sending requests and running code of a folder, also in nested models."""
    with ExitStack() as stack:
        for name, switch, value in _OFFLINE:
            if name.partition(".")[0] in sys.modules:
                stack.enter_context(mock.patch.object(importlib.import_module(name), switch, value, create=True))
        yield
