"""Tables of two or three axes of which `make test` runs every second or third cell, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest

Axis = Mapping[str, Any] | Sequence[Any]
"""Values by their names, or values that name themselves."""


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
