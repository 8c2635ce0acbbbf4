"""What a value of a configuration may be, and the line that refuses any other. Files come from anybody, and so may
commands that a user copies: each value is checked against its range before anything is done with it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantshard.argument_kinds import meant
from quantshard.errors import ConfigurationError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_TYPES: dict[type, str] = {
    tuple: "a list of paths", dict: "a table", list: "a list of strings", bool: "true or false",
}  # fmt: skip


@dataclass(frozen=True)
class SettingType:
    """What a value may be.

    `type`: a tuple or list is one of strings. `least`, `most`: of a number, or of the characters of a string, each
    string of a list included. `more`, `less`: the bounds themselves are left out. `choices`: the words that a string is
    one of; empty for any.
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
            return f"{_TYPES[self.type]}, each of {self.least} to {self.most} characters"
        if self.type is bool:
            return _TYPES[bool]
        if self.type is str:
            return f"text of {f'{self.least} to' if self.least else 'at most'} {self.most} characters"
        low = f"more than {self.least:,}" if self.more else f"{self.least:,} or more"
        return f"{low}, and {f'less than {self.most:,}' if self.less else f'at most {self.most:,}'}"

    @property
    def type_name(self) -> str:
        """The type in words."""
        return _TYPES.get(self.type, self.type.__name__)

    def read(self, value: object) -> object:
        """A value of a file, or of settings that are handed on, as it is used: an int may stand for a float, and a
        list for a tuple.

        Raises:
            TypeError: it is of another type.
        """
        if self.type is float and type(value) is int:
            return float(value)
        if self.type in (tuple, list):
            if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
                return self.type(value)
            raise TypeError
        if type(value) is not self.type:
            raise TypeError
        return value

    def holds(self, value: Any) -> bool:
        """Whether a value of the type is in range; NaN is in none."""
        if self.choices:
            return value in self.choices
        if self.type in (tuple, list):
            return all(self.least <= len(entry) <= self.most and "\0" not in entry for entry in value)
        if self.type is str:
            return self.least <= len(value) <= self.most
        low = self.least < value if self.more else self.least <= value
        return low and (value < self.most if self.less else value <= self.most)


def shown_value(value: object) -> str:
    """A value as a message says it, shortened."""
    return _short.repr(value)


def check_value(name: str, value: object, kind: SettingType) -> None:
    """Refuse a value out of range.

    Raises:
        ConfigurationError: naming it.
    """
    if kind.holds(value):
        return
    wanted = f"{meant(value, kind.choices)}choose {kind}" if kind.choices else f"must be {kind}"
    raise ConfigurationError(f"{name} = {shown_value(value)}: {wanted}")


def read_table(values: Mapping[str, Any], kinds: Mapping[str, SettingType], where: str, way_out: str) -> dict[str, Any]:
    """The values of a table of a file.

    Raises:
        ConfigurationError: naming the file, the first key that is wrong, and what its value must be; `way_out` says
            where the keys are listed.
    """
    found = {}
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None:
            raise ConfigurationError(f"{where}: there is no setting {shown_value(name)}; {meant(name, kinds)}{way_out}")
        try:
            found[name] = kind.read(value)
        except (TypeError, OverflowError):
            said = f"{where}: {name} = {shown_value(value)} must be {kind.type_name}"
            raise ConfigurationError(said if kind.type_name in str(kind) else f"{said}: {kind}") from None
        try:
            check_value(name, found[name], kind)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None
    return found
