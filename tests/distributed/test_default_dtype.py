"""`torch.set_default_dtype` chooses the dtype of parameters that are given none, and changes nothing else.

Births, steps and norms have the bits that they have under the default of float32, on 1, 2 and 3 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from quantshard.optimizers import FusedAdam, MasterWeights, clip_grad_norm_
from tests.covering import exhaustive
from tests.distributed.models import RECIPES, Case, bits, build, set_gradients, sha
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": lambda model: FusedAdam(model.named_parameters(), exp_avg_dtype=torch.uint8),
    "FusedAdam, capturable": lambda model: FusedAdam(model.named_parameters(), capturable=True),
    "MasterWeights": lambda model: MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """With gradients in float32 whatever the default is; the norm that they had."""
    with default_dtype(torch.float32):
        set_gradients(model, number)
    norm = clip_grad_norm_(model, 0.1)
    optimizer.step()
    assert norm.dtype is torch.float32
    return norm.item()


def norm_of_one_row() -> float:
    """All ranks but one hold no element of the model."""
    layer = nn.Linear(5, 1, bias=False, dtype=torch.bfloat16)
    fully_shard(layer)
    with default_dtype(torch.float32):
        set_gradients(layer, 0)
    return clip_grad_norm_(layer, 1.0).item()


def trained(dtype: torch.dtype) -> dict[str, Any]:
    """Everything that two steps leave behind, of each recipe and optimizer; ranks without rows among them."""
    found: dict[str, Any] = {}
    world = torch.distributed.get_world_size()
    with default_dtype(dtype):
        found["norm of one row"] = norm_of_one_row()
        for number, recipe in enumerate(RECIPES):
            name = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
            model = build(Case(recipe, (world,), init="cpu", shapes=((40, 131), (131, 1))))
            optimizer = OPTIMIZERS[name](model)
            norms = [step(model, optimizer, number) for number in range(2)]
            updates = [state["updates"] for state in optimizer.state.values() if "updates" in state]
            found |= {f"{recipe} {key}": value for key, value in bits(model).items()}
            found |= {
                f"{recipe} {name} {index} {key}": sha(value)
                for index, state in enumerate(optimizer.state.values())
                for key, value in state.items()
                if key != "step"  # torch's own count is float64 under that default
            }
            assert {count.dtype for count in updates} <= {torch.float32}
            found[f"{recipe} norms"] = norms
    return found


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    exhaustive(product((torch.bfloat16, torch.float64), (1, 2, 3)), [(torch.bfloat16, 2)]),
    ids=str,
)
def test_bits_do_not_depend_on_the_default_dtype(dtype: torch.dtype, ranks: int) -> None:
    for rank, (found, expected) in enumerate(
        zip(run_ranks(ranks, trained, dtype), run_ranks(ranks, trained, torch.float32), strict=True)
    ):
        assert not [key for key in expected if found[key] != expected[key]], f"rank {rank}"
