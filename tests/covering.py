"""Fewer cells than a product of three axes has: every pair of values of any two axes, and the rest when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


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
