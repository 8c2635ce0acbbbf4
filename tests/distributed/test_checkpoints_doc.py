"""docs/checkpoints.md#checkpoints-of-a-run is true: its snippets run as they stand, on 2 ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import run_ranks
from tests.pages import snippets

pytestmark = pytest.mark.distributed
CHAPTER = "docs/checkpoints.md#checkpoints-of-a-run"


def run_document(folder: str) -> int:
    blocks = [snippets("docs/checkpoints.md")[0], *snippets(CHAPTER)]
    names: dict[str, Any] = {}
    here = Path.cwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for snippet in blocks:
                exec(snippet, names)
    finally:
        os.chdir(here)
    return len(blocks)


def test_the_snippets_run(tmp_path: Path) -> None:
    """2 ranks."""
    assert run_ranks(2, run_document, str(tmp_path)) == [3, 3]
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-000004", "step-000006"]
