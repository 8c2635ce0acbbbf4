"""`torch.set_default_device` chooses where parameters are made that are given no device, and changes nothing else.

Under "meta" any tensor of our own that followed it would have no values; under "cuda" it would lie on a GPU, or be one
that cannot be pinned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.optimizers import FusedAdam, MasterWeights, clip_grad_norm_
from quantshard.tools.cli import app
from tests.covering import exhaustive
from tests.distributed.models import RECIPES, bits, sha

CPU: dict[str, Any] = {"device": "cpu"}
OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": lambda model: FusedAdam(model.named_parameters(), exp_avg_dtype=torch.uint8),
    "FusedAdam, capturable": lambda model: FusedAdam(model.named_parameters(), capturable=True),
    "MasterWeights": lambda model: MasterWeights(torch.optim.SGD, model.named_parameters(), lr=1e-2, momentum=0.9),
}


def model_of(recipe: Any) -> nn.Module:
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, **CPU}
    with qs.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return nn.Sequential(
            qs.TransformerLayer(64, 96, 2, hidden_dropout=0.0, attention_dropout=0.0, **options),
            qs.Linear(64, 40, **options),
        )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Any, seed: int) -> str:
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(seed), **CPU).bfloat16().requires_grad_()
    with qs.autocast(recipe=recipe):
        y: Tensor = model(x)
    y.square().mean().backward()
    norm = clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert x.grad is not None
    return f"{norm.item()} {sha(x.grad)} {sha(y.detach())}"


def lived(recipe: Any, optimizer: str, folder: Path) -> list[Any]:
    """What a training leaves that is saved, restored in a second model, and trained on."""
    torch.manual_seed(0)
    first, second = model_of(recipe), model_of(recipe)
    found: list[Any] = []
    optimizers = [OPTIMIZERS[optimizer](each) for each in (first, second)]
    found += [step(first, optimizers[0], recipe, seed) for seed in range(2)]
    with qs.checkpoints.Manager(folder) as manager:
        manager.save(2, first, optimizers[0])
        manager.restore(second, optimizers[1])
    found += [step(second, optimizers[1], recipe, 2), bits(second)]
    state = optimizers[1].state.values()
    return [*found, [(key, sha(each[key])) for each in state for key in sorted(each) if isinstance(each[key], Tensor)]]


@pytest.mark.parametrize("name", exhaustive([(name,) for name in RECIPES], [("nvfp4",)]))
def test_bits_do_not_depend_on_the_default_device(name: str, tmp_path: Path) -> None:
    optimizer = list(OPTIMIZERS)[list(RECIPES).index(name) % len(OPTIMIZERS)]
    expected = lived(RECIPES[name], optimizer, tmp_path / "expected")
    try:
        torch.set_default_device("meta")
        found = lived(RECIPES[name], optimizer, tmp_path / "found")
        for command in ("inspect", "verify"):
            assert app()([command, str(tmp_path / "found" / "step-000002")], standalone_mode=False) in (None, 0)
    finally:
        torch.set_default_device(None)
    assert found == expected
