"""A format that the package does not have: MXFP8 with E5M2 elements (OCP Microscaling Formats v1.0), two rows.

`pytest -p tests.new_format ...` runs any test with them in the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import quantshard as qs
from quantshard import formats
from quantshard.recipe import QuantSpec, TableRecipe, TensorRole

VECTORS, SQUARES = "mx_e5m2_1x32", "mx_e5m2_32x32"


def add() -> None:
    """All that a format costs."""
    formats._row(VECTORS, formats.E5M2, formats.E8M0, (1, 32))
    formats._row(SQUARES, formats.E5M2, formats.E8M0, (32, 32))


@contextmanager
def added() -> Iterator[TableRecipe]:
    """With the rows in the table, a recipe of them."""
    add()
    name = {role: SQUARES if role is TensorRole.WEIGHT else VECTORS for role in TensorRole}
    table = {(role, gemm): QuantSpec(formats.FORMATS[name[role]]) for role, gemm in qs.recipe.resolve("mxfp8").table}
    try:
        yield TableRecipe("new", table)
    finally:
        del formats.FORMATS[VECTORS], formats.FORMATS[SQUARES]


def pytest_configure() -> None:
    add()
