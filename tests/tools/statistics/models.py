"""A small model of several kinds of layers, trained for some steps with statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.optimizers import FusedAdam
from quantshard.statistics import StatisticsSample

FEATURES = 48
TOKENS = 32


def perceptron(recipe: Any = "mxfp8", dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return nn.Sequential(
            qs.LayerNormMLP(FEATURES, 64, activation="swiglu", params_dtype=dtype, device=device),
            qs.Linear(FEATURES, FEATURES, params_dtype=dtype, device=device),
            qs.LayerNormLinear(FEATURES, FEATURES, params_dtype=dtype, device=device),
        )


def tokens(step: int) -> Tensor:
    return torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(step)).bfloat16()


def loss_of(model: nn.Module, step: int, recipe: Any = "mxfp8") -> Tensor:
    x = tokens(step).to(next(model.parameters()).device)
    with qs.autocast(recipe=recipe):
        return model(x).float().square().mean()


def trained(
    model: nn.Module,
    steps: int,
    every: int,
    recipe: Any = "mxfp8",
    make: Callable[..., torch.optim.Optimizer] = FusedAdam,
    **options: Any,
) -> list[StatisticsSample]:
    optimizer = make(model.parameters(), lr=1e-3)
    found = []
    with qs.Statistics(model, optimizer, every=every, **options) as statistics:
        for step in range(steps):
            loss = loss_of(model, step, recipe)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += statistics.step(loss.item())
        found += statistics.close()
    return found
