"""docs/checkpoints.md is true: its snippets run as they stand, on 2 ranks, and bring every bit back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.models import Case
from tests.distributed.pool import run_ranks
from tests.distributed.saving import Run
from tests.pages import snippets

pytestmark = pytest.mark.distributed
PAGE = "docs/checkpoints.md"
DIVIDE = "# in a new process\n"
CASE = Case("current", (2,), shapes=((100, 100), (100, 100)))


def run_document(folder: str) -> list[str]:
    """The first words of each snippet that did not bring all bits back."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        return wrong_snippets(Path(folder))
    finally:
        os.chdir(here)


def wrong_snippets(folder: Path) -> list[str]:
    start, *rest = snippets(PAGE)
    names: dict[str, Any] = {}
    exec(start, names)

    def new_run(seed: int) -> Run:
        torch.manual_seed(seed)
        names["model"], names["optimizer"] = names["build"]()
        return Run(CASE, names["model"], names["optimizer"], folder)

    wrong = []
    for snippet in rest:
        save, load = snippet.split(DIVIDE)
        source = new_run(0)
        source.train(1)
        exec(save, names)
        target = new_run(1)
        born = target.held()
        exec(load, names)
        parts = "model." if "reseed_masters" in load else ("model.", "optimizer.", "group ")
        expected, found = ({k: v for k, v in run.held().items() if k.startswith(parts)} for run in (source, target))
        if found != expected or found.items() <= born.items():
            wrong.append(snippet[:60])
    return wrong


def test_the_snippets_bring_every_bit_back(tmp_path: Path) -> None:
    """2 ranks."""
    assert len(snippets(PAGE)) == 9
    assert run_ranks(2, run_document, str(tmp_path)) == [[], []]
