"""How a file is changed: its bytes, or what they say.

What a file says is a tree of plain values. It is changed at any of its places: the value there becomes another of any
type and magnitude, a copy of another place's, or is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

NUMBERS = [-(2**63), -1, 0, 1, 2, 3, 7, 16, 255, 2**20, 2**24, 2**31, 2**40, 2**60, 2**62 - 1, 2**62, 2**63 - 1, 2**64]
FLOATS = [-0.0, 0.5, 1e308, -1e308, float("inf"), float("nan")]
TEXTS = [
    "", "x", "0", "model", "model.", ".", "..", "../x", "/etc/passwd", "a/b", "__0_0.distcp", ".metadata", "a\0b",
    "a\nb", "\x1b[31mred", "[bold]x[/bold]", "[/]", "\u202eabc", "\ud800", "ä" * 300, "x" * 100_000, "{n}", "{", "%s",
    "fp8", "float32", "torch.strided", "cpu", "latin1", "state.0.exp_avg", "model.0.weight_format",
]  # fmt: skip


def deep(depth: int) -> Any:
    """A list in a list in a list."""
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


PLAIN: SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, *NUMBERS, *FLOATS, *TEXTS]),
    st.sampled_from([[], {}, [0], [None, "x"], {"a": 1}, {"": {}}, [[1, 2], [3]], deep(40)]),
    st.integers(-(2**65), 2**65),
    st.text(max_size=20),
)
"""A value where another was expected."""


Place = tuple[Any, ...]


def children(tree: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a value, each with what it is found by."""
    if isinstance(tree, dict):
        yield from tree.items()
    elif isinstance(tree, list | tuple):
        yield from enumerate(tree)


def places(tree: Any, limit: int = 20_000) -> list[Place]:
    """All places of a tree but its root."""
    found: list[Place] = []
    waiting: list[tuple[Place, Any]] = [((), tree)]
    for place, part in waiting:
        for by, child in children(part):
            found.append((*place, by))
            waiting.append((found[-1], child))
        if len(found) > limit:
            break
    return found


def at(tree: Any, place: Place) -> Any:
    """What stands at a place."""
    for by in place:
        tree = tree[by]
    return tree


def put(tree: Any, place: Place, change: Callable[[Any, Any], Any]) -> Any:
    """A tree, copied along a place, whose parent there is `change(parent, by)`."""
    by, rest = place[0], place[1:]
    if not rest:
        return change(tree, by)
    return replaced(tree, by, put(tree[by], rest, change))


def replaced(parent: Any, by: Any, value: Any) -> Any:
    """A parent with another child."""
    if isinstance(parent, tuple):
        return (*parent[:by], value, *parent[by + 1 :])
    found = copy.copy(parent)
    found[by] = value
    return found


def without(parent: Any, by: Any) -> Any:
    """A parent that lacks a child."""
    if isinstance(parent, tuple):
        return parent[:by] + parent[by + 1 :]
    found = copy.copy(parent)
    del found[by]
    return found


@st.composite
def trees(draw: DrawFn, tree: Any, values: SearchStrategy[Any] = PLAIN) -> Any:
    """A tree that is changed at one to three places."""
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        known = places(tree)
        if not known:
            return draw(values)
        place = known[draw(st.integers(0, len(known) - 1))]
        how, value = draw(st.integers(0, 9)), draw(values)
        if how == 0:
            tree = put(tree, place, without)
        elif how == 1:
            value = at(tree, known[draw(st.integers(0, len(known) - 1))])
        elif how == 2 and isinstance(at(tree, place), int):
            value = at(tree, place) + draw(st.sampled_from((-1, 1)))
        elif how == 3 and isinstance(parent := at(tree, place[:-1]), dict):
            key = value if isinstance(value, str) else str(value)[:100]
            tree = put(tree, (*place[:-1], place[-1]), without)
            tree = put(tree, (*place[:-1], key), lambda p, by: replaced(p, by, parent[place[-1]]))  # noqa: B023
            continue
        if how:
            tree = put(tree, place, lambda p, by: replaced(p, by, value))  # noqa: B023
    return tree


REPEATED = (b"[", b"[],", b'{"a":', b"{},", b"0,", b"\n", b"\0", b"a.", b"]", b"}NNs", b"\x8f", b"(", b"\x85")
"""What is nested, or made an object of, where JSON, TOML, lines or pickles are read."""


@st.composite
def changed_bytes(draw: DrawFn, content: bytes) -> bytes:
    """Bytes with flipped bits, an end that is cut off, a stretch that is other, left out, doubled or of zeros, or some
    megabytes of what takes many times its bytes once it is parsed."""
    if not content:
        return draw(st.binary(max_size=50))
    if not draw(st.integers(0, 19)):
        inserted = draw(st.sampled_from(REPEATED)) * draw(st.sampled_from((1 << 10, 1 << 16, 1 << 20)))
        start = draw(st.integers(0, len(content)))
        return content[:start] + inserted + content[start:]
    where = st.integers(0, len(content) - 1)
    kind, start = draw(st.integers(0, 5)), draw(where)
    length = draw(st.sampled_from((1, 2, 4, 8, 30, 500, 5000)))
    if kind <= 1:
        found = bytearray(content)
        for _ in range(draw(st.sampled_from((1, 1, 1, 8, 64)))):
            found[draw(where)] ^= 1 << draw(st.integers(0, 7))
        return bytes(found)
    if kind == 2:
        return content[:start]
    if kind == 3:
        return content[:start] + draw(st.binary(max_size=40)) + content[start + length :]
    if kind == 4:
        return content[:start] + content[start : start + length] * 2 + content[start + length :]
    return content[:start] + bytes(len(content[start : start + length])) + content[start + length :]
