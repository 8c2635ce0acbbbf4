"""Tables of which `make test` runs some cells, with every option at least once, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Axis = Mapping[str, Any] | Sequence[Any]
"""Values by their names, or values that name themselves."""


def in_turns(first: Iterable[Any], second: Iterable[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """The product of two axes, with values of the third in turns.

    Every value of the third meets all of both where neither of the two is shorter than the third; else this raises.
    """
    first, second, third = list(first), list(second), list(third)
    cells = [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]
    for (m, one), (n, other) in combinations(enumerate((first, second, third)), 2):
        assert {(cell[m], cell[n]) for cell in cells} == set(product(one, other)), "order the axes, the shortest last"
    return cells


def exhaustive(every: Iterable[tuple[Any, ...]], chosen: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: all cells, those that are not among the chosen for `make test-all` only."""
    every, chosen = list(every), set(chosen)
    assert chosen <= set(every)
    return [pytest.param(*cell, marks=() if cell in chosen else pytest.mark.exhaustive) for cell in every]


def by_turns(turns: int, **axes: Axis) -> pytest.MarkDecorator:
    """Parametrize over the product of axes; the cells whose places on the axes add up to a multiple of `turns` stay.

    No axis but one of two is shorter than `turns`, so each value of each axis meets every `turns`-th of another; of
    three axes all pairs stay.
    """
    values = [list(axis.values()) if isinstance(axis, Mapping) else list(axis) for axis in axes.values()]
    names = [list(axis) if isinstance(axis, Mapping) else [named(value) for value in axis] for axis in axes.values()]
    assert sorted(map(len, values))[-2] >= turns, "a value of the longest axis would stay nowhere"
    cells = [
        pytest.param(
            *(values[n][i] for n, i in enumerate(places)),
            id="-".join(str(names[n][i]) for n, i in enumerate(places)),
            marks=pytest.mark.exhaustive if sum(places) % turns else (),
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(tuple(axes), cells)


def named(value: Any) -> str:
    return str(getattr(value, "__name__", value))
