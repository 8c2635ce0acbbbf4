"""Similar names shown as one: `layers.{0-31}.{q,k}_proj.weight x64`."""

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby, takewhile
from typing import TypeVar

Hashable_ = TypeVar("Hashable_", bound=Hashable)
T = TypeVar("T")

_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])")
"""A numeric part of a dotted name, such as a layer index."""

_MODULE = re.compile(r"((?:.*?\.)??)((?!\d+(?:\.|$))[^.{}]+)((?:\.(?:weight|bias))?)", re.DOTALL)
"""A pattern's parent, the name of its module there, and what follows that name."""


def by_pattern(named: Iterable[tuple[str, Hashable_]]) -> list[tuple[str, int, Hashable_]]:
    """Merge names that differ only in numbers and have equal values: (`layers.{0-31}.q_proj`, 32, value)."""
    groups = pattern_groups((name, value, value) for name, value in named)
    return [(pattern, len(members), members[0]) for pattern, members in groups]


def pattern_groups(items: Iterable[tuple[str, Hashable, T]]) -> list[tuple[str, list[T]]]:
    """Group items (name, value, item) with names that differ only in numbers and with equal values."""
    groups: dict[tuple[tuple[str, ...], Hashable], tuple[list[list[int]], list[T]]] = {}
    for name, value, item in items:
        numbers, members = groups.setdefault((tuple(_NUMBER.split(name)), value), ([], []))
        numbers.append([int(number) for number in _NUMBER.findall(name)])
        members.append(item)
    return [(_joined(texts, numbers), members) for (texts, _), (numbers, members) in groups.items()]


def united_groups(items: Iterable[tuple[str, Hashable, T]]) -> list[tuple[str, list[T]]]:
    """Group items as `pattern_groups` does, and unite names of one parent: `layers.{0-31}.{q,k}_proj.weight`."""
    united: dict[tuple[str, str, Hashable], tuple[list[str], list[T]]] = {}
    for pattern, members in pattern_groups((name, said, (said, item)) for name, said, item in items):
        said = members[0][0]
        parts = _MODULE.fullmatch(pattern)
        parent, name, leaf = (pattern, "", "") if parts is None else parts.groups()
        names, united_members = united.setdefault((parent, leaf, said), ([], []))
        names.append(name)
        united_members += [item for _, item in members]
    return [(parent + _alternatives(names) + leaf, members) for (parent, leaf, _), (names, members) in united.items()]


def counted_name(pattern: str, count: int) -> str:
    """Format a pattern and the number of names that it matches."""
    return f"{pattern} x{count}" if count > 1 else pattern


def _joined(texts: tuple[str, ...], numbers: list[list[int]]) -> str:
    ranges = [_range(column) for column in zip(*numbers, strict=True)]
    return texts[0] + "".join(number + text for number, text in zip(ranges, texts[1:], strict=True))


def common_start(lists: Iterable[Sequence[str]]) -> list[str]:
    columns = zip(*lists, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def _alternatives(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    words = [name.split("_") for name in names]
    shortest = min(map(len, words)) - 1
    start = common_start(words)[:shortest]
    end = common_start([name[::-1] for name in words])[: shortest - len(start)][::-1]
    between = ["_".join(name[len(start) : len(name) - len(end)]) for name in words]
    return "_".join([*start, "{" + ",".join(between) + "}", *end])


def _range(numbers: Iterable[int]) -> str:
    """Format numbers as `3` or `{0-3,5}`."""
    values = sorted(set(numbers))
    runs = [[value for _, value in run] for _, run in groupby(enumerate(values), lambda pair: pair[1] - pair[0])]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return parts[0] if len(values) == 1 else "{" + ",".join(parts) + "}"


def human_bytes(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
