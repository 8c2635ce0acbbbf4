"""Runs with stock optimizers go on in a new process: their states, which a first step makes, are made for the load.

Each test names its rank count. Those of one process without a group are in `tests/checkpoints/test_stock_optimizers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.checkpoints import Manager
from tests.checkpoints.stock import KINDS, make
from tests.distributed.models import bits, set_gradients
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed


def build(seed: int) -> nn.Sequential:
    """Quantized layers, one in high precision, and one of which some ranks hold nothing."""
    torch.manual_seed(seed)
    with qs.quantized_model_init(recipe="mxfp8"):
        first, last = (qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in ((96, 150), (67, 1)))
    model = nn.Sequential(first, nn.Linear(150, 67, dtype=torch.bfloat16), last)
    for layer in [*model, model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        model[1].bias.grad = None if step < 2 else model[1].bias.grad  # has a state later than the others
        optimizer.step()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The bits of all tensors, and the numbers in states and groups."""
    state = optimizer.state_dict()
    numbers = {n: {k: v for k, v in own.items() if not isinstance(v, Tensor)} for n, own in state["state"].items()}
    return {**bits(model, optimizer), "groups": repr(state["param_groups"]), "numbers": numbers}


def saved(kinds: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Save each run after two steps, and go on; what it held then and at the end."""
    found = {}
    for kind in kinds:
        model = build(3)
        optimizer = make(kind, model)
        stepped(model, optimizer, range(2))
        with Manager(f"{folder}/{kind}") as manager:
            manager.save(2, model, optimizer)
        found[kind] = held(model, optimizer)
        stepped(model, optimizer, range(2, 4))
        found[f"{kind}, resumed"] = held(model, optimizer)
    return found


def restored(kinds: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """What new objects hold after they are loaded."""
    found = {}
    for kind in kinds:
        model = build(4)
        optimizer = make(kind, model)
        with Manager(f"{folder}/{kind}", read_only=True) as manager:
            assert manager.restore(model, optimizer) is not None
        found[kind] = held(model, optimizer)
        stepped(model, optimizer, range(2, 4))
        found[f"{kind}, resumed"] = held(model, optimizer)
    return found


def wrong(kinds: list[str], folder: str) -> list[str]:
    """Which runs, saved after two steps and resumed in new objects, are not those that went on."""
    wanted = saved(kinds, folder)
    found = restored(kinds, folder)
    return [kind for kind in wanted if wanted[kind] != found[kind]]


EVERY = list(KINDS)
ON_ANOTHER_MESH = ["AdamW", "SGD"]


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (1, EVERY[::2]),
        (2, [kind for kind in EVERY[1::2] if kind not in ON_ANOTHER_MESH]),
        *(pytest.param(ranks, EVERY, marks=pytest.mark.exhaustive) for ranks in (1, 2, 3)),
    ],
    ids=["1", "2", "1, all", "2, all", "3"],
)
def test_runs_go_on(ranks: int, kinds: list[str], tmp_path: Path) -> None:
    """On 1, 2 and 3 ranks."""
    assert run_ranks(ranks, wrong, kinds, str(tmp_path)) == [[]] * ranks


def test_states_on_another_mesh(tmp_path: Path) -> None:
    """Saved on 2 ranks, loaded on 3 and on 1."""
    kinds, folder = ON_ANOTHER_MESH, str(tmp_path)
    wanted = run_ranks(2, saved, kinds, folder)[0]
    for ranks in (1, 3):
        for found in run_ranks(ranks, restored, kinds, folder):
            assert {kind: found[kind] for kind in kinds} == {kind: wanted[kind] for kind in kinds}
