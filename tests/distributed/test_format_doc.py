"""docs/format.md is true: its script reads a checkpoint with PyTorch alone, and gets the very values that were saved.

Written on 1 and 3 ranks; read in a process that cannot import quantshard.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from quantshard import formats
from quantshard.tensor import components
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from tests.distributed.models import OTHERS, RECIPES, Case, build, optimizer_of, train
from tests.distributed.pool import run_ranks
from tests.pages import section, snippets

pytestmark = pytest.mark.distributed
PAGE = "docs/format.md"
WITHOUT_QUANTSHARD = "import sys; sys.modules['quantshard'] = None\n"


def script() -> str:
    [code] = snippets(PAGE)
    return code


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
        local = components.quantized_local(layer.weight)
        assert local is not None
        found[f"model.{index}.weight"] = local.quantized_storage.dequantize()
    return found


SHAPES = ((96, 300), (300, 257), (257, 3))
CASES = [
    (recipe, ranks)
    for turn, recipe in enumerate(RECIPES)
    for ranks in ((1, 3) if recipe in ("delayed", "nvfp4") else (1 + 2 * (turn % 2),))
] + [(recipe, 3) for recipe in OTHERS]
"""On 1 and 3 ranks what has a history and what has an amax; all others take turns."""


def write_all(ranks: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    return {
        recipe: write(Case(recipe, (ranks,), shapes=SHAPES), f"{folder}/{recipe} {ranks}")
        for recipe, of in CASES
        if of == ranks
    }


FOR_EACH = """
import pathlib
import sys
for folder in sys.argv[1:]:
    sys.argv[1:] = [folder, folder + ".pt"]
    exec(compile(pathlib.Path("script.py").read_text(), "script.py", "exec"), {"__name__": "__main__"})
"""


def test_the_script_reads_what_was_written(tmp_path: Path) -> None:
    """All checkpoints in one process: each by a script that finds nothing of the others' names."""
    (tmp_path / "script.py").write_text(script())
    written = {ranks: run_ranks(ranks, write_all, ranks, str(tmp_path))[0] for ranks in (1, 3)}
    paths = [f"{tmp_path}/{recipe} {ranks}" for recipe, ranks in CASES]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_QUANTSHARD + FOR_EACH, *paths],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for (recipe, ranks), path in zip(CASES, paths, strict=True):
        weights, expected = torch.load(f"{path}.pt", weights_only=True), written[ranks][recipe]
        assert weights.keys() == expected.keys()
        for name, values in weights.items():
            assert torch.equal(values.view(torch.int32), expected[name].view(torch.int32)), (recipe, ranks, name)


def test_the_script_is_short() -> None:
    lines = [line for line in script().splitlines() if line.strip() and not line.startswith(("import", "if len"))]
    assert len(lines) <= 30


def test_the_document_names_every_format_and_key() -> None:
    text = section(PAGE)
    for row in formats.FORMATS.values():
        assert f"`{row.name}`" in text, row.name
        for component in row.components:
            assert f"`X{component.key_suffix}`" in text
    for state in (RNG_KEY, RNG_DRAWS, AMAX_HISTORY):
        assert f"`X_{state}`" in text
    assert f"version {components.CHECKPOINT_VERSION}" in text
