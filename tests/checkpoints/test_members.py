"""A model is saved and loaded with an optimizer of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import checkpoints
from quantshard.checkpoints import saving
from quantshard.errors import QuantshardError
from quantshard.optimizers import FusedAdam
from tests.distributed.pool import run_ranks


def sharded(_: object) -> list[str]:
    """What is said of an optimizer from before `fully_shard`; others are taken."""
    said = []
    for recipe in ("mxfp8", None):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 7))
        if recipe is not None:
            qs.convert(model, recipe)
        before = torch.optim.AdamW(model.parameters())
        fully_shard(model)
        with pytest.raises(QuantshardError) as refused:
            saving.checkpoint_state(model, before, {})
        said.append(str(refused.value))
        saving.checkpoint_state(model, torch.optim.AdamW(model.parameters()), {})
        masters = [nn.Parameter(each.detach().clone()) for each in nn.Linear(32, 7).parameters()]
        by_hand = torch.optim.AdamW(masters)
        by_hand.param_groups[0]["params"] = []  # as of a rank without parameters
        saving.checkpoint_state(model, by_hand, {})
    return said


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 3])
def test_an_optimizer_from_before_fully_shard_is_refused_on_every_rank(world: int) -> None:
    for said in run_ranks(world, sharded, None):
        assert all("save: none of the 4 parameters of this AdamW" in text for text in said) and len(said) == 2


def converted() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 7))
    qs.convert(model, "mxfp8")
    return model


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
def test_an_optimizer_of_another_model_is_refused(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    model, other = converted(), converted()
    own, others = (kind(each.parameters(), lr=1e-3) for each in (model, other))
    refused = rf"none of the 4 parameters of this {kind.__name__} is in this Sequential"
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
