"""The average of the weights (`ema_decay`) is sharded, saved, loaded on other ranks and evaluated with, bit for bit.

Each test names its rank counts.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import quantshard as qs
from quantshard.optimizers import FusedAdam, MasterWeights, averaged_weights
from tests.distributed.models import Case, bits, build, set_gradients
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

SHAPES = ((96, 150), (150, 67), (67, 1))
CASES = [("delayed", "FusedAdam"), ("nvfp4", "MasterWeights")]


def made(recipe: str, kind: str, seed: int) -> tuple[nn.Sequential, Any]:
    """Of what is gathered nothing is freed by itself."""
    model = build(Case(recipe, (dist.get_world_size(),), seed=seed, reshard=False, shapes=SHAPES))
    if kind == "FusedAdam":
        return model, FusedAdam(model.named_parameters(), lr=1e-2, ema_decay=0.9)
    return model, MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=1e-2, ema_decay=0.9)


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.ones(2, 96, dtype=torch.bfloat16))


def evaluated(model: nn.Sequential, optimizer: Any) -> tuple[dict[str, str], list[float]]:
    """The bits of the model with its averages; its outputs before, inside and afterwards."""
    model.eval()
    outputs = [output(model)]
    with averaged_weights(model, optimizer):
        inside = bits(model)
        outputs.append(output(model))  # the last, for a state dict frees what was gathered
    outputs.append(output(model))
    model.train()
    for layer in [*model, model]:
        layer.reshard()
    return inside, [float(one.double().sum()) for one in outputs]


def trained(folder: str, loads: bool) -> list[Any]:
    """Of each case: bits after two steps, at which it is saved, or loaded; evaluated; and after two steps more."""
    found = []
    for number, (recipe, kind) in enumerate(CASES):
        model, optimizer = made(recipe, kind, number + 10 * loads)
        for step in () if loads else range(2):
            set_gradients(model, step)
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (qs.checkpoints.load if loads else qs.checkpoints.save)(f"{folder}/{number}", model, optimizer)
        before = bits(model, optimizer)
        inside, outputs = evaluated(model, optimizer)
        assert bits(model, optimizer) == before and inside != bits(model)
        assert outputs[0] == outputs[2] != outputs[1]  # FSDP2 gathered what there was
        for step in range(2, 4):
            set_gradients(model, step)
            optimizer.step()
        found.append((before, inside, outputs, bits(model, optimizer)))
    return found


def test_the_same_bits_on_one_rank_and_on_three_and_after_resharding(tmp_path: Path) -> None:
    """1 rank; 3 ranks, loaded on 2."""
    [alone] = run_ranks(1, trained, str(tmp_path / "1"), False)
    assert all(ran == alone for ran in run_ranks(3, trained, str(tmp_path / "3"), False))
    assert all(ran == alone for ran in run_ranks(2, trained, str(tmp_path / "3"), True))
    assert any(key.endswith(".ema_param") for key in alone[0][0])
