"""torch.amp.GradScaler with quantized weights: it trains float32 parameters, and refuses float16 gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import private_torch
from quantshard.optimizers import FusedAdam, MasterWeights
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, max_skipped_in_a_row=1),
    "capturable": lambda params: FusedAdam(params, lr=1e-2, capturable=True),
    "MasterWeights": lambda params: MasterWeights(torch.optim.AdamW, params, lr=1e-2, max_skipped_in_a_row=1),
    "torch.optim.AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
}
BAD = 1
"""The step that has an infinite gradient, on the last rank alone."""


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(7)
    with qs.quantized_model_init(recipe="mxfp8"):
        layers: list[nn.Module] = [qs.Linear(a, b, params_dtype=dtype) for a, b in ((70, 131), (131, 1))]
    model = nn.Sequential(*layers, nn.Linear(1, 7, dtype=dtype))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module, scaler: torch.amp.GradScaler, dtype: torch.dtype, step: int) -> None:
    x = torch.randn(4, 70, dtype=dtype, generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float32), qs.autocast(recipe="mxfp8"):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()


def train(name: str, unscales: bool) -> tuple[list[float], list[bool], dict[str, str]]:
    """The scale after each step, whether the step changed anything, and the bits at the end."""
    model = build(torch.float32)
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, moved, before = [], [], bits(model)
    for step in range(4):
        backward(model, scaler, torch.float32, step)
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        local = private_torch.local_tensor(model[0].weight.grad)
        assert local.dtype is torch.float32 and local.abs().max() < 1e3
        if step == BAD and rank == world - 1:
            local[-1, -1] = float("inf")
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = bits(model)
        scales.append(scaler.get_scale())
        moved.append(after != before)
        before = after
    if name != "torch.optim.AdamW":
        assert optimizer.skipped_steps == 0  # the scaler's, which calls no step
    return scales, moved, before


def refuse(name: str) -> tuple[str, bool]:
    model = build(torch.float16)
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = bits(model)
    backward(model, scaler, torch.float16, 0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as error:
        scaler.step(optimizer)
    return str(error.value), bits(model) == before


def scale_by_hand() -> bool:
    """float16 gradients, unscaled in float32 and given as decoupled ones: the bits of a loss that was not scaled, but
    for gradients that only the scale keeps from vanishing."""
    model = build(torch.float16)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, use_decoupled_grad=True)
    before = bits(model)
    backward(model, torch.amp.GradScaler("cpu", init_scale=2.0**10), torch.float16, 0)
    for param in model.parameters():
        param.decoupled_grad = param.grad.float() / 2**10
    optimizer.step()
    return bits(model) != before


def run(turns: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """With one turn, each optimizer unscales or does not."""
    trained = {
        f"{name} {unscales}": train(name, unscales)
        for number, name in enumerate(OPTIMIZERS)
        for unscales in (True, False)
        if (number + unscales) % 2 in turns
    }
    return trained, {name: refuse(name) for name in OPTIMIZERS}, scale_by_hand()


@pytest.mark.parametrize(
    ("ranks", "turns"),
    [(1, (1,)), (2, (0,)), *(pytest.param(*rest, marks=pytest.mark.exhaustive) for rest in ((1, (0,)), (3, (0, 1))))],
)
def test_a_scaler(ranks: int, turns: tuple[int, ...]) -> None:
    """1, 2 and 3 ranks: an infinite gradient on one of them skips the step on all, and halves the scale on all."""
    found = run_ranks(ranks, run, turns)
    for trained, refused, by_hand in found:
        for name, (scales, moved, _) in trained.items():
            assert moved == [True, False, True, True], name
            assert scales == [1024.0, 512.0, 512.0, 1024.0], name
        assert all(unchanged for _, unchanged in refused.values()) and by_hand
    for name, ran in found[0][0].items():
        assert all(other[0][name] == ran for other in found), name
