"""The ledger of bits, in a process of its own: torch chooses a CPU's instructions when it is imported."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the ledger was recorded with MKL on x86-64"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan, which has public names, needs Python 3.11"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the ledger was recorded with torch 2.13"),
]


@pytest.mark.parametrize("flags", [["--few"], pytest.param([], marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_nothing_differs_from_the_ledger(flags: list[str]) -> None:
    """A commit that changes a row says why; `python -m tests.bits --write` records it."""
    command = [sys.executable, "-m", "tests.bits", *flags]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
