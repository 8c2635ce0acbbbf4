"""Graphs of torch.compile break at a step of an optimizer, which runs as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.optimizers import FusedAdam, Lion, MasterWeights, Muon, muon_groups
from tests.covering import exhaustive

OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "FusedAdam": lambda model: FusedAdam(model.parameters(), lr=1e-2),
    "Lion": lambda model: Lion(model.parameters(), lr=1e-3),
    "Muon": lambda model: Muon(muon_groups(model, head=(), adamw={"lr": 1e-3}), lr=1e-2),
    "MasterWeights": lambda model: MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", exhaustive([(kind,) for kind in OPTIMIZERS], [("FusedAdam",)]))
def test_a_compiled_training_step_has_the_bits_of_an_eager_one(kind: str) -> None:
    def trained(is_compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()
        qs.convert(model, "mxfp8")
        optimizer = OPTIMIZERS[kind](model)
        x = torch.randn(8, 32, dtype=torch.bfloat16)

        def step() -> Tensor:
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        function = torch.compile(step, backend="eager") if is_compiled else step
        return [function() for _ in range(3)]

    eager, compiled = trained(False), trained(True)
    assert all(map(torch.equal, eager, compiled)) and not torch.equal(eager[0], eager[-1])
