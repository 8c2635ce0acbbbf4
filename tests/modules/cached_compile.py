"""Two processes that share a compile cache: training steps of a compiled layer, under one of two recipes.

The recipes have one name, and of the input both keep as many tensors for backward, but of other shapes.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import quantshard as qs
from quantshard.recipe import TableRecipe, resolve
from tests.interpreter import kernels_on

RECIPES = {name: TableRecipe("mine", resolve(name).table) for name in ("rowwise", "block")}


def step(recipe: Any, compiled: bool) -> list[Tensor]:
    """Output and gradients."""
    torch.manual_seed(0)
    layer = qs.Linear(64, 32, device="cpu")
    x = torch.randn(48, 64, requires_grad=True)
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    with qs.autocast(recipe=recipe):
        y = call(x)
    y.sum().backward()
    return [y, x.grad, layer.weight.grad, layer.bias.grad]


def ran(name: str) -> tuple[bool, int]:
    """Whether a step has the bits of an uncompiled one, and how many graphs were read from the cache."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    alike = all(map(torch.equal, step(RECIPES[name], True), step(RECIPES[name], False)))
    return alike, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


def steps_of_a_cache(folder: str) -> list[tuple[bool, int]]:
    """Rank 0 fills the cache with one recipe; then rank 1 compiles with the other, and with the same."""
    caching = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    with mock.patch.dict(os.environ, caching), kernels_on("cpu"):
        found = [ran("rowwise")] if dist.get_rank() == 0 else []
        dist.barrier()
        if dist.get_rank() == 1:
            found = [ran("block"), ran("rowwise")]
        dist.barrier()
    return found
