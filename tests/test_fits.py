"""docs/memory.md shows what `python -m benchmarks.fits` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fits
from benchmarks.harness import table_row

pytest.importorskip("triton")
pytest.importorskip("transformers")

PAGE = Path(__file__).parents[1] / "docs/memory.md"


@pytest.mark.parametrize("name", [*fits.MODELS][:1])
def test_a_row_is_as_planned(name: str) -> None:
    planned = [f"{fits.planned(name, 8192, **setup).peak / fits.GIB:.1f}" for setup in fits.SETUPS.values()]
    assert table_row((name, *planned)).rstrip(" |") in PAGE.read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*fits.MODELS])
def test_a_whole_row_is_as_planned(name: str) -> None:
    assert table_row(fits.row(name, 8192)) in PAGE.read_text(encoding="utf-8")
