"""The Python of docs/command-line.md#statistics-and-alarms runs."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import quantshard
from quantshard.optimizers import FusedAdam
from quantshard.tensor import observation
from tests.pages import snippets
from tests.tools.statistics.models import loss_of, perceptron

CHAPTER = "docs/command-line.md#statistics-and-alarms"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With an alarm in a step that is not sampled."""
    model = perceptron()
    optimizer = FusedAdam(model.parameters(), lr=1e-3)

    def train_step(batch: int) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss * math.inf if batch == 12 else loss

    names = {
        "quantshard": quantshard, "model": model, "optimizer": optimizer, "data": range(1, 13), "batch": 13,
        "train_step": train_step, "loss_of": loss_of,
    }  # fmt: skip
    for snippet in snippets(CHAPTER):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "step 12: the loss is inf")
            exec(snippet, names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("10 () ") and lines[-1] == "None"  # a sampled step, and nothing that is not finite
    assert lines[1].startswith("12 (Alarm(kind='loss spike'") and lines[1].endswith(" None") and len(lines) == 3
    assert observation.active is None
