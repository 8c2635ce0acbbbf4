"""What is told of bytes while they are moved: as many as were expected, of which the files have that many."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import quantshard as qs
from quantshard.checkpoints.disk.manifest import read_manifest
from quantshard.checkpoints.disk.store import watch_transfers
from quantshard.checkpoints.inspection import verify
from tests.interop.layouts import models
from tests.tools.cli.hostile import told

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass
class TransferFigures:
    """Counts bytes."""

    total: int = 0
    done: int = 0

    def expect(self, count: int) -> None:
        self.total += count

    def moved(self, count: int) -> None:
        self.done += count


def watched(work: Callable[[], Any]) -> TransferFigures:
    with watch_transfers(figures := TransferFigures()):
        work()
    return figures


def test_bytes_are_told_as_they_are_moved(tmp_path: Path) -> None:
    model, checkpoint = models.save(tmp_path, "mxfp8")
    described = read_manifest(checkpoint)
    assert described is not None
    held = {
        "save": watched(lambda: qs.checkpoints.save(tmp_path / "again", model, None)),
        "load": watched(lambda: qs.checkpoints.load(checkpoint, model, None)),
        "verify": watched(lambda: verify(checkpoint)),
        "export": watched(
            lambda: qs.layouts.export(checkpoint, "sglang-mxfp8", tmp_path / "out", config=models.CONFIG)
        ),
        "import": watched(lambda: qs.layouts.load(tmp_path / "out", model)),
    }
    weights = sum(param.numel() for param in model.parameters())
    for name, figures in held.items():
        assert weights < figures.total and 0.98 < figures.done / figures.total < 1.3, (name, figures)
    assert held["verify"].done >= sum(entry.bytes for entry in described.files.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, out, err = told("verify", checkpoint)
    assert code == 0 and not err and "whole: " in " ".join(out)
