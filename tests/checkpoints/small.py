"""Small checkpoints of one process, for tests that damage, forge or describe them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quantshard as qs
from quantshard import checkpoints
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.optimizers import FusedAdam
from tests.distributed.models import RECIPES

SHAPES = ((24, 18), (18, 5))


def built(
    recipe: str | None, seed: int = 3, shapes: tuple[tuple[int, int], ...] = SHAPES, **options: Any
) -> tuple[nn.Sequential, FusedAdam]:
    """Two layers and an optimizer after one step, of one of the names of `RECIPES`, or in BF16."""
    torch.manual_seed(seed)
    with qs.quantized_model_init(enabled=recipe is not None, recipe=None if recipe is None else RECIPES[recipe]):
        model = nn.Sequential(*[qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in shapes])
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2, **options)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def written(path: Path, recipe: str | None, **options: Any) -> Path:
    """A checkpoint of these, without a manifest, which would be the first to find what is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.save(path, *built(recipe, **options), {"step": 1, "name": "run", "words": torch.arange(5)})
    (path / MANIFEST).unlink()
    return path
