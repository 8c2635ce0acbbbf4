"""Reads of weights that FSDP2 or tensor parallelism shards: the results of the same DTensor of values, bit for bit.

Each test names its rank count.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import private_torch
from tests.distributed.models import OTHERS, RECIPES, Case, build, recipe_of
from tests.distributed.pool import run_ranks
from tests.tensor.test_reads import COLS, READS, X, differing_reads, like
from tests.tensor.test_tensor import raw, same

pytestmark = pytest.mark.distributed
ROWS = 50
"""Uneven on 3 ranks: 17, 17 and 16."""
TENSOR_PARALLEL = ("delayed", "block", "rowwise", "mxfp8", "nvfp4", "mxfp4", "mxfp8 two copies")
"""One recipe per kind of block, and one with two copies."""


def sharded(recipe: str, parallel: str) -> Any:
    if parallel == "fsdp":
        return build(Case(recipe, (3,), shapes=((COLS, ROWS),)))[0].weight
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    with qs.quantized_model_init(recipe=recipe_of(Case(recipe))):
        return qs.Linear(COLS, 3 * 17, parallel_mode="column", tp_mesh=mesh["tp"], params_dtype=torch.bfloat16).weight


def of_values(weight: Any) -> Any:
    """The same DTensor of dequantized values."""
    local = weight.to_local().detach().dequantize()
    return private_torch.dtensor_around(local, weight.device_mesh, list(weight.placements), weight.shape)


def wrong_reads(recipes: list[str]) -> list[str]:
    wrong = []
    for recipe in recipes:
        for parallel in ("fsdp", "tp") if recipe in TENSOR_PARALLEL else ("fsdp",):
            weight = sharded(recipe, parallel)
            before = [raw(part).clone() for part in weight.to_local().quantized_storage.components.values()]
            plain = of_values(weight)
            with torch.no_grad():
                names = differing_reads(READS, weight, plain)
                if not same(weight.full_tensor(), plain.full_tensor()):
                    names.append("full_tensor")
            after = [raw(part) for part in weight.to_local().quantized_storage.components.values()]
            if not all(map(torch.equal, before, after)):
                names.append("bits")
            wrong += [f"{recipe} {parallel} {name}" for name in names]
    return wrong


def test_reads_through_dtensor() -> None:
    """3 ranks: every recipe under FSDP2, and those of `TENSOR_PARALLEL` under tensor parallelism."""
    assert run_ranks(3, wrong_reads, [*RECIPES, *OTHERS]) == [[], [], []]


def gradients(recipe: str) -> list[bool]:
    weight = sharded(recipe, "fsdp")
    plain = nn.Parameter(of_values(weight))
    x = X.bfloat16()
    for w in (weight, plain):
        (F.linear(like(x, w), w).sum() + w.norm()).backward()
    return [type(weight.grad) is type(plain.grad), same(weight.grad.to_local(), plain.grad.to_local())]


@pytest.mark.filterwarnings("ignore:aten.*reads the dequantized values")
def test_gradients_through_dtensor() -> None:
    """3 ranks."""
    assert run_ranks(3, gradients, "mxfp8") == [[True, True]] * 3


class DirectReader(nn.Module):
    """Multiplies with its layer's weight instead of calling the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight)


def trained(recipe: str) -> list[Tensor]:
    """Outputs and this rank's gradients of `fully_shard`-ed modules that read a quantized weight, and its values."""
    torch.manual_seed(7)
    with qs.quantized_model_init(recipe=recipe_of(Case(recipe))):
        layer = qs.Linear(COLS, ROWS, bias=False, params_dtype=torch.bfloat16)
    plain = nn.Linear(COLS, ROWS, bias=False)
    plain.weight = nn.Parameter(layer.weight.dequantize().detach())
    results = []
    for model in (DirectReader(layer), DirectReader(plain)):
        fully_shard(model)
        out = model(X.bfloat16())
        out.float().square().sum().backward()
        results += [out.detach(), model.layer.weight.grad.to_local()]
    return results


@pytest.mark.filterwarnings("ignore:aten.*reads the dequantized values")
@pytest.mark.parametrize("recipe", ["block", "mxfp8 two copies"])
def test_a_module_that_reads_an_unsharded_weight(recipe: str) -> None:
    """3 ranks."""
    for out, grad, expected_out, expected_grad in run_ranks(3, trained, recipe):
        assert same(out, expected_out) and same(grad, expected_grad) and grad.any()
