"""Two processes that share a compile cache: training steps of a compiled layer, under one of several recipes.

Two of the recipes have one name, and of the input both keep as many tensors for backward, but of other shapes.
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
    """Output and gradients of a layer, which is stored quantized if the recipe has a name of its own."""
    torch.manual_seed(0)
    with qs.quantized_model_init(enabled=isinstance(recipe, str), recipe=recipe):
        layer = qs.Linear(64, 32, device="cpu")
    x = torch.randn(48, 64, requires_grad=True)
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    with qs.autocast(recipe=recipe):
        y = call(x)
    y.sum().backward()
    return [y, x.grad, layer.weight.grad, layer.bias.grad]


def ran(name: str) -> tuple[bool, int, int]:
    """Whether a step has the bits of an uncompiled one, and how many compiled functions and graphs the cache had."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    recipe = RECIPES.get(name, name)
    alike = all(map(torch.equal, step(recipe, True), step(recipe, False)))
    return alike, counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]


def steps_of_a_cache(folder: str, recipe: str, other: str) -> list[tuple[bool, int, int]]:
    """Rank 0 fills the cache with one recipe; then rank 1 compiles with the same, and with another if there is one."""
    caching = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    with mock.patch.dict(os.environ, caching), kernels_on("cpu"):
        found = [ran(recipe)] if dist.get_rank() == 0 else []
        dist.barrier()
        if dist.get_rank() == 1:
            found = [*([ran(other)] if other else []), ran(recipe)]
        dist.barrier()
    return found
