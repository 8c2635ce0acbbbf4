"""One process of those that share a compile cache: a training step of a compiled layer, under one of two recipes.

The recipes have one name, and of the input both keep as many tensors for backward, but of other shapes and dtypes.
Prints whether the step has the bits of an uncompiled one, and how many graphs were read from the cache.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import quantshard as qs
from quantshard.recipe import TableRecipe, resolve

RECIPES = {name: TableRecipe("mine", resolve(name).table) for name in ("mxfp8", "block")}


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


if __name__ == "__main__":
    asked = RECIPES[sys.argv[1]]
    alike = all(map(torch.equal, step(asked, True), step(asked, False)))
    print(alike, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
