"""Gradients released under FSDP2 give the bits of whole steps, on any number of ranks; clipping; DDP is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam, Muon, clip_grad_norm_, gradient_release, muon_groups
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

SIZES = (40, 70, 33, 2)
"""Of 3 ranks, the last has no part of the last layer."""
CASES = [("mxfp8", "lean8"), ("current", "no masters"), ("block", "Muon"), ("delayed", "lean8")]
SETTINGS = [(1, 0.0), (2, 1e-3)]
"""Micro-batches per step, and the maximum norm."""
CELLS = [(*case, *setting) for case in CASES for setting in SETTINGS]
IN_TURNS = [(*case, *SETTINGS[turn % 2]) for turn, case in enumerate(CASES, 1)]


def build(recipe: str, mesh: Any) -> nn.Sequential:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        layers = [
            qs.Linear(width, height, params_dtype=torch.bfloat16, device="cpu") for width, height in pairwise(SIZES)
        ]
    model = nn.Sequential(*layers)
    for layer in layers if mesh else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh) if mesh else model


def optimizer_of(kind: str, model: nn.Module, releases: bool, **options: Any) -> Any:
    options["release_gradients"] = releases
    if kind == "Muon":
        return Muon(muon_groups(model, head=(), adamw={"lr": 1e-2}), lr=1e-2, **options)
    states = {"preset": "lean8"} if kind == "lean8" else {"master_weights": False}
    return FusedAdam(model.named_parameters(), lr=1e-2, **states, **options)


def train(
    recipe: str, kind: str, mesh: Any, releases: bool, micro_batches: int, max_norm: float
) -> tuple[dict[str, str], float]:
    """Whole steps clip by the norm of the step before, as steps of released gradients do."""
    model = build(recipe, mesh)
    optimizer = optimizer_of(kind, model, releases, **({"max_grad_norm": max_norm} if releases else {}))
    norm = 0.0
    for step in range(3):
        for micro_batch in range(micro_batches):
            if mesh:
                model.set_requires_gradient_sync(micro_batch == micro_batches - 1)  # type: ignore[operator]
            x = torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(10 * step + micro_batch)).bfloat16()
            with qs.autocast(recipe=recipe):
                model(x).float().square().mean().backward()
        if releases:
            assert any(param.grad is None for param in model.parameters())
        elif max_norm:
            new_norm = float(clip_grad_norm_(model, float("inf")))
            scale = gradient_release.clipping.scale_to(torch.tensor(norm, dtype=torch.float64), max_norm)
            for param in model.parameters() if norm else ():
                grad: Any = param.grad
                (grad.to_local() if mesh else grad).mul_(scale)
            norm = new_norm
        optimizer.step()
        optimizer.zero_grad()
    return bits(model, optimizer), float(optimizer.state_dict()["param_groups"][0].get("grad_norm", norm))


def compare(cells: list[tuple[str, str, int, float]]) -> list[tuple[str, bool, Any]]:
    gradient_release.UNIT_ELEMENTS, before = 2000, gradient_release.UNIT_ELEMENTS  # type: ignore[misc]
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for recipe, kind, micro_batches, max_norm in cells:
        whole = train(recipe, kind, mesh, False, micro_batches, max_norm)
        released = train(recipe, kind, mesh, True, micro_batches, max_norm)
        found.append((f"{recipe} {kind} {micro_batches}", whole[0] == released[0], (whole[1], released[1])))
    gradient_release.UNIT_ELEMENTS = before  # type: ignore[misc]
    return found


@pytest.mark.parametrize(
    ("world", "cells"),
    [
        (1, CELLS),
        (3, IN_TURNS),
        pytest.param(3, [cell for cell in CELLS if cell not in IN_TURNS], marks=pytest.mark.exhaustive),
    ],
    ids=["1 rank", "3 ranks", "3 ranks, rest"],
)
def test_the_bits_are_those_of_whole_steps(world: int, cells: list[tuple[str, str, int, float]]) -> None:
    results = run_ranks(world, compare, cells)
    assert all(result == results[0] for result in results)
    for case, are_equal, (expected, found) in results[0]:
        assert are_equal and found == expected, case


def released_by_ddp() -> str:
    model = build("current", None)
    optimizer = FusedAdam(model.named_parameters(), release_gradients=True)
    qs.broadcast_(model)
    ddp = nn.parallel.DistributedDataParallel(model, init_sync=False)
    try:
        with qs.autocast(recipe="current"):
            ddp(torch.ones(2, SIZES[0]).bfloat16()).float().sum().backward()
        optimizer.step()
    except ConfigurationError as error:
        return str(error)
    return ""


def test_ddp_is_refused_on_every_rank() -> None:
    assert all("use fully_shard for the whole model, not DDP" in message for message in run_ranks(2, released_by_ddp))


def norms_of_sharded_experts() -> tuple[float, float]:
    """Each rank holds a shard of one of two experts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "ep"))
    norms = []
    for releases in (False, True):
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe="current"):
            layer = qs.GroupedLinear(2, 40, 33, ep_mesh=mesh["ep"], params_dtype=torch.bfloat16, device="cpu")
        fully_shard(layer, mesh=mesh["dp"])
        options: dict[str, Any] = {"max_grad_norm": 1e-3} if releases else {}
        optimizer = FusedAdam(layer.parameters(), lr=1e-2, release_gradients=releases, **options)
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
        with qs.autocast(recipe="current"):
            layer(x, [6]).float().square().mean().backward()
        norms.append(0.0 if releases else float(clip_grad_norm_(layer, float("inf"))))
        optimizer.step()
    return norms[0], float(optimizer.state_dict()["param_groups"][0]["grad_norm"])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_sharded_experts_of_other_ranks_count_in_the_norm(world: int) -> None:
    results = run_ranks(world, norms_of_sharded_experts)
    expected, released = results[0]
    assert released == expected > 0 and set(results) == {results[0]}
