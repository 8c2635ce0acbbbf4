"""The scripts in README run, on 2 ranks; the one with quantized weights learns as the other does.

They run as they stand, but that the ranks have joined already.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
JOIN = 'dist.init_process_group("gloo")\n'


def scripts() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def run(script: str, folder: str) -> list[float]:
    """The losses of this rank."""
    before, rest = script.split(JOIN)
    assert rest.count("    loss.backward()\n") == 1
    losses: list[float] = []
    names = {"__name__": "__main__", "seen": losses}
    here = Path.cwd()
    os.chdir(folder)
    try:
        exec(before + rest.replace("    loss.backward()", "    seen.append(loss.item())\n    loss.backward()"), names)
    finally:
        os.chdir(here)
    return losses


def test_before_and_after(tmp_path: Path) -> None:
    before, after = scripts()
    assert all(len([line for line in script.splitlines() if line.strip()]) <= 25 for script in (before, after))
    for name, script in (("before", before), ("after", after)):
        (tmp_path / name).mkdir()
        first, second = run_ranks(2, run, script, str(tmp_path / name))
        assert len(first) == len(second) == 10 and first[0] != second[0]  # each rank has data of its own
        assert all(losses[-1] < 0.8 * losses[0] for losses in (first, second)), (first, second)
        assert (tmp_path / name / "checkpoint" / ".metadata").is_file()
