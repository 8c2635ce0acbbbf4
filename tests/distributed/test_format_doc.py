"""docs/format.md is true: its script reads a checkpoint with PyTorch alone, and gets the very values that were saved.

Written on 1 and 3 ranks; read in a process that cannot import quantshard.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from quantshard import components, formats
from quantshard.storage import AMAX_HISTORY, DRAWS, KEY
from tests.distributed.models import RECIPES, Case, build, optimizer_of, train
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
DOC = Path(__file__).parents[2] / "docs" / "format.md"
READER = """
import sys
sys.modules["quantshard"] = None
name, script, *paths = sys.argv
for checkpoint, out in zip(paths[::2], paths[1::2]):
    sys.argv = [name, checkpoint, out]
    exec(compile(script, name, "exec"), {"__name__": "__main__"})
"""
"""Runs the script for each checkpoint in turn; as often as not, starting Python and PyTorch would take longest."""


def script() -> str:
    [code] = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), flags=re.S)
    return code


def write_all(ranks: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    shapes = ((96, 300), (300, 257), (257, 3))
    return {recipe: write(Case(recipe, (ranks,), shapes=shapes), f"{folder}/{ranks} {recipe}") for recipe in RECIPES}


def write(case: Case, path: str) -> dict[str, torch.Tensor]:
    """Save after a step; the dequantized whole weights."""
    model = build(case)
    optimizer = optimizer_of(model, case)
    train(model, optimizer, case, 0, 1)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    found = {}
    for index, layer in enumerate(model):
        if hasattr(layer, "unshard"):
            layer.unshard()
        local = components.quantized(layer.weight)
        assert local is not None
        found[f"model.{index}.weight"] = local._storage.dequantize()
    return found


def test_the_script_reads_what_was_written(tmp_path: Path) -> None:
    """1 and 3 ranks, each recipe."""
    expected = {
        str(tmp_path / f"{ranks} {recipe}"): weights
        for ranks in (1, 3)
        for recipe, weights in run_ranks(ranks, write_all, ranks, str(tmp_path))[0].items()
    }
    paths = [path for checkpoint in expected for path in (checkpoint, f"{checkpoint}.pt")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READER, script(), *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for checkpoint, written in expected.items():
        weights = torch.load(f"{checkpoint}.pt", weights_only=True)
        assert weights.keys() == written.keys()
        for name, values in weights.items():
            assert torch.equal(values.view(torch.int32), written[name].view(torch.int32)), (checkpoint, name)


def test_the_script_is_short() -> None:
    lines = [line for line in script().splitlines() if line.strip() and not line.startswith(("import", "if len"))]
    assert len(lines) <= 30


def test_the_document_names_every_format_and_key() -> None:
    text = DOC.read_text(encoding="utf-8")
    for row in formats.FORMATS.values():
        assert f"`{row.name}`" in text, row.name
        for component in row.components:
            assert f"`X{component.key_suffix}`" in text
    for state in (KEY, DRAWS, AMAX_HISTORY):
        assert f"`X_{state}`" in text
    assert f"version {components.CHECKPOINT_VERSION}" in text
