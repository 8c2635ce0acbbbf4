"""A model is saved and loaded with an optimizer of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard import checkpoints
from quantshard.errors import QuantshardError
from quantshard.optimizers import FusedAdam


def converted() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 7))
    qs.convert(model, "mxfp8")
    return model


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
def test_an_optimizer_of_another_model_is_refused(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    model, other = converted(), converted()
    own, others = (kind(each.parameters(), lr=1e-3) for each in (model, other))
    refused = rf"none of the 4 parameters of this {kind.__name__} .*is one of this Sequential"
    with pytest.raises(QuantshardError, match=rf"save: {refused}"):
        checkpoints.save(tmp_path / "c", model, others)
    assert not (tmp_path / "c").exists()
    checkpoints.save(tmp_path / "c", model, own)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(QuantshardError, match=rf"load: {refused}"):
        checkpoints.load(tmp_path / "c", other, own)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in before.items())
    checkpoints.load(tmp_path / "c", other, others)


def test_one_of_a_part_of_a_model_or_of_masters_made_by_hand_is_taken(tmp_path: Path) -> None:
    model = converted()
    checkpoints.save(tmp_path / "part", model, FusedAdam(model[0].parameters(), lr=1e-3))
    masters = [nn.Parameter(each.detach().float()) for each in nn.Linear(32, 32, dtype=torch.bfloat16).parameters()]
    checkpoints.save(tmp_path / "masters", nn.Linear(32, 32, dtype=torch.bfloat16), torch.optim.AdamW(masters))
