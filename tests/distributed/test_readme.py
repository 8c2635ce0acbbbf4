"""The scripts in README run as they stand, on 2 ranks; the one with quantized weights learns as the other does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


def scripts() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def run(script: str, folder: Path) -> list[float]:
    """The losses of rank 0."""
    folder.mkdir()
    shown = script.replace(
        "    loss.backward()", "    print('loss', loss.item()) if dist.get_rank() == 0 else None\n    loss.backward()"
    )
    (folder / "train.py").write_text(shown)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "checkpoint" / ".metadata").is_file()
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]


def test_before_and_after(tmp_path: Path) -> None:
    before, after = scripts()
    assert all(len([line for line in script.splitlines() if line.strip()]) <= 25 for script in (before, after))
    assert len(run(before, tmp_path / "before")) == 10
    losses = run(after, tmp_path / "after")
    assert len(losses) == 10
    assert all(loss == loss and loss < 2 for loss in losses)
