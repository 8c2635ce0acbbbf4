"""The scripts in the README run and learn: `convert` in one process, the FSDP2 script on 2 ranks.

They run unchanged, except that the first takes fewer steps, and that the process group of the second exists already.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.distributed.pool import run_ranks
from tests.pages import snippets

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
JOIN = 'dist.init_process_group("gloo")\n'


def scripts() -> list[str]:
    return snippets("README.md")


def run(script: str, folder: str) -> list[float]:
    """Run the FSDP2 script in `folder` and return the losses of this rank."""
    before, rest = script.split(JOIN)
    here = Path.cwd()
    os.chdir(folder)
    try:
        return losses_of(before + rest)
    finally:
        os.chdir(here)


def losses_of(script: str) -> list[float]:
    assert script.count("    loss.backward()\n") == 1
    losses: list[float] = []
    recorded = script.replace("    loss.backward()", "    seen.append(loss.item())\n    loss.backward()")
    exec(recorded, {"__name__": "__main__", "seen": losses})
    return losses


def test_a_converted_model_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    script, _ = scripts()
    assert len([line for line in script.splitlines() if line.strip()]) <= 18
    losses = losses_of(script.replace("range(10)", "range(4)"))
    assert len(losses) == 4 and losses[-1] < 0.95 * losses[0], losses
    assert "converted 28 linear layers: 6.0 MiB of weights are 3.0 MiB now" in capsys.readouterr().out


def test_the_fsdp2_script(tmp_path: Path) -> None:
    _, script = scripts()
    assert len([line for line in script.splitlines() if line.strip()]) <= 25
    first, second = run_ranks(2, run, script, str(tmp_path))
    assert len(first) == len(second) == 10 and first[0] != second[0]  # each rank has data of its own
    assert all(losses[-1] < 0.8 * losses[0] for losses in (first, second)), (first, second)
    assert (tmp_path / "checkpoint" / ".metadata").is_file()
