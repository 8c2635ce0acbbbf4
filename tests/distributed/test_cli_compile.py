"""`quantshard train --compile`: with it a layer may be recomputed too, which changes no bit."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import nn

from quantshard.checkpoints.comparison import compare
from tests.distributed import commands
from tests.distributed.commands import quantshard
from tests.distributed.test_cli import losses

pytestmark = pytest.mark.distributed

SIZES = (
    "--hidden 64 --heads 2 --layers 1 --ffn 96 --seq-length 16 --global-batch 4 --eval-sequences 4 --warmup 1 "
    "--steps 3 --compile"
)


_work = commands._work


def traced(run: str, order: str) -> tuple[str, str]:
    """What a process does, with graphs that run as they were traced: Inductor takes long."""
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        return _work(run, order)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_compiled_layers_are_recomputed(tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 rank: losses, weights, histories and draws."""
    monkeypatch.setattr(commands, "_work", traced)
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text() * 2)
    for name, more in (("kept", ""), ("again", "--recompute layer")):
        told = quantshard(
            "train", "--run", tmp_path / name, "--data", text, "--recipe", recipe, *SIZES.split(), *more.split()
        )
        assert told.returncode == 0, told.stderr
    assert losses(tmp_path / "again") == losses(tmp_path / "kept")
    assert compare(*(tmp_path / run / "checkpoints" / "step-000003" for run in ("kept", "again"))).equal
