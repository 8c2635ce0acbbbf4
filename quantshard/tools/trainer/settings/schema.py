"""Types and ranges of configuration values, and the messages for invalid ones.

Files, and commands that a user copies, are untrusted: each value is checked against its range before its first use.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantshard.errors import ConfigurationError, meant

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_NAMES: dict[type, str] = {
    tuple: "a list of paths", dict: "a table", list: "a list of strings", bool: "true or false",
}  # fmt: skip


@dataclass(frozen=True)
class SettingType:
    """The type and range of a value.

    Args:
        type: type; a tuple or list consists of strings.
        least, most: bounds of a number, of the length of a string, or of the length of each string in a list.
        more, less: exclude the lower or the upper bound.
        choices: valid strings; empty for any.
    """

    type: type
    least: float = 0
    most: float = 4096
    more: bool = False
    less: bool = False
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return f"one of: {', '.join(self.choices)}"
        if self.type in (tuple, list):
            return f"{_NAMES[self.type]}, each of {self.least} to {self.most} characters"
        if self.type is bool:
            return _NAMES[bool]
        if self.type is str:
            return f"text of {f'{self.least} to' if self.least else 'at most'} {self.most} characters"
        low = f"more than {self.least:,}" if self.more else f"{self.least:,} or more"
        return f"{low}, and {f'less than {self.most:,}' if self.less else f'at most {self.most:,}'}"

    def read(self, value: Any) -> Any:
        """Convert a value from a file or another process: an int can stand for a float, a list for a tuple."""
        if self.type is float and type(value) is int:
            return float(value)
        if self.type in (tuple, list) and type(value) in (tuple, list) and all(type(entry) is str for entry in value):
            return self.type(value)
        if type(value) is not self.type or self.type in (tuple, list):
            raise TypeError
        return value

    def holds(self, value: Any) -> bool:
        """Return True if a value of the type is in range; NaN never is."""
        if self.choices:
            return value in self.choices
        if self.type in (tuple, list):
            return all(self.least <= len(entry) <= self.most and "\0" not in entry for entry in value)
        if self.type is str:
            return self.least <= len(value) <= self.most
        low = self.least < value if self.more else self.least <= value
        return low and (value < self.most if self.less else value <= self.most)


def shown_value(value: object) -> str:
    """Format a value for a message, shortened."""
    return _short.repr(value)


def check_value(name: str, value: object, kind: SettingType, where: str = "") -> None:
    """Refuse a value out of range. `where`: the file of the value."""
    if not kind.holds(value):
        requirement = f"{meant(value, kind.choices)}choose {kind}" if kind.choices else f"must be {kind}"
        raise ConfigurationError(f"{where}{name} = {shown_value(value)}: {requirement}")


def read_table(values: Mapping[str, Any], kinds: Mapping[str, SettingType], where: str, way_out: str) -> dict[str, Any]:
    """Check and convert the values of a table of a file. `way_out`: the hint for unknown keys."""
    result = {}
    for name, value in values.items():
        if name not in kinds:
            raise ConfigurationError(f"{where}: there is no setting {shown_value(name)}; {meant(name, kinds)}{way_out}")
        kind = kinds[name]
        try:
            result[name] = kind.read(value)
        except (TypeError, OverflowError):
            type_name = _NAMES.get(kind.type, kind.type.__name__)
            range_ = "" if type_name in str(kind) else f": {kind}"
            raise ConfigurationError(f"{where}: {name} = {shown_value(value)} must be {type_name}{range_}") from None
        check_value(name, result[name], kind, f"{where}: ")
    return result
