"""Adapters over frozen quantized weights: examples/lora.py, whose base must cost the bytes of its codes and no more.

Each test names its rank count.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quantshard as qs
from quantshard.gemm import backend
from quantshard.tensor import components
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import lora

pytestmark = pytest.mark.distributed

MANY = 64
"""Tokens, more than other dims, so that a kept activation is seen."""


def of_the_base(found: dict[str, str]) -> dict[str, str]:
    """All of the base that is not a record of activations."""
    recorded = ("draws", "input_amax_history", "grad_output_amax_history")
    return {name: value for name, value in found.items() if ".base." in name and not name.endswith(recorded)}


class Kept(TorchDispatchMode):
    """Which plain tensors as large as a base weight are made, and how many bytes of them are still alive.

    A view of something older, as codes seen as FP8 numbers, costs nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        older = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if type(t) is Tensor}
        for t in tree_leaves(out):
            if type(t) is not Tensor or t.untyped_storage().data_ptr() in older:
                continue
            if t.is_floating_point() and t.numel() >= lora.FEATURES**2:
                self.made.append((StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()))
        return out

    def bytes(self) -> int:
        gc.collect()
        return sum(size for storage, size in self.made if not storage.expired())


def trained(recipe_name: str, path: str) -> dict[str, Any]:
    recipe = RECIPES[recipe_name]
    with Kept() as kept:
        model = lora.shard(lora.build(recipe))
        optimizer = lora.optimizer_of(model)
        before = bits(model)
        lora.train(model, optimizer, recipe, range(2))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=f"{path}/full")
    dcp.save(lora.adapters(model), checkpoint_id=f"{path}/adapters")
    after = bits(model, optimizer)
    return {
        "base changed": [name for name in of_the_base(before) if before[name] != after[name]],
        "with a state": len(optimizer.state),
        "adapters": sum(".base." not in name for name, _ in model.named_parameters()),
        "gradients of the base": sum(p.grad is not None for n, p in model.named_parameters() if ".base." in n),
        "copies": (len(kept.made) > 0, kept.bytes()),
        "bits": after,
    }


def loaded(recipe_name: str, path: str) -> tuple[dict[str, str], dict[str, str]]:
    """The full checkpoint into one new model, the adapters alone into another."""
    recipe = RECIPES[recipe_name]
    model = lora.shard(lora.build(recipe))
    optimizer = lora.optimizer_of(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=f"{path}/full")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    onto_base = lora.shard(lora.build(recipe))
    part = lora.adapters(onto_base)
    dcp.load(part, checkpoint_id=f"{path}/adapters")
    onto_base.load_state_dict(part, strict=False)
    return bits(model, optimizer), bits(onto_base)


def over_recipes(function: Any, path: str, recipes: list[str]) -> dict[str, Any]:
    return {name: function(name, f"{path}/{name}") for name in recipes}


@pytest.mark.parametrize(
    "runs",
    [
        [(1, 2, ["current"]), (3, 1, ["nvfp4"])],
        pytest.param(
            [(1, 2, ["rowwise"]), (2, 1, ["block", "mxfp8"]), (3, 2, ["delayed", "mxfp8 two copies"])],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["some", "others"],
)
def test_only_adapters_train_and_checkpoints_load_on_other_ranks(
    runs: list[tuple[int, int, list[str]]], tmp_path: Path
) -> None:
    """Saved by so many ranks, loaded by others: all recipes, on 3 those that keep something between steps."""
    for ranks, others, recipes in runs:
        path = str(tmp_path / str(ranks))
        ran = run_ranks(ranks, over_recipes, trained, path, recipes)
        for found in (found for rank in ran for found in rank.values()):
            assert found["base changed"] == []
            assert found["with a state"] == found["adapters"] == 2 * lora.LAYERS
            assert found["gradients of the base"] == 0
            assert found["copies"] == (True, 0)
        for rank in run_ranks(others, over_recipes, loaded, path, recipes):
            for recipe, (full, onto_base) in rank.items():
                want = ran[0][recipe]["bits"]
                assert full == want
                assert all(onto_base[name] == want[name] for name in onto_base if ".base." not in name)
                assert of_the_base(onto_base) == of_the_base(want)


def test_the_example_runs(tmp_path: Path) -> None:
    """2 ranks."""
    for losses in run_ranks(2, lora.main, "nvfp4", str(tmp_path)):
        assert losses[-1] < losses[0] / 2


def fp32_adapters() -> tuple[set[torch.dtype], bool]:
    """A nominal dtype of float32 costs the base nothing, and lets float32 adapters share its group."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = lora.shard(lora.build("mxfp8", torch.float32), mp_policy=policy)
    optimizer = lora.optimizer_of(model)
    before = of_the_base(bits(model))
    losses = lora.train(model, optimizer, "mxfp8", range(6))
    with qs.autocast(recipe="mxfp8"):
        model(torch.ones(2, lora.FEATURES)).float().sum().backward()
    dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return dtypes, of_the_base(bits(model)) == before and losses[-1] < losses[0]


def test_adapters_in_float32() -> None:
    """2 ranks."""
    assert run_ranks(2, fp32_adapters) == [({torch.float32}, True)] * 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_frozen_layer_keeps_no_activation_and_computes_no_wgrad(recipe: str, monkeypatch: Any) -> None:
    """No ranks: dgrad is that of a layer that is not frozen, bit for bit."""
    found = []
    products, kept = [], []
    matmul = backend.matmul
    monkeypatch.setattr(backend, "matmul", lambda *args, **options: products.append(1) or matmul(*args, **options))
    for requires_grad in (True, False):
        torch.manual_seed(1)
        with qs.quantized_model_init(recipe=RECIPES[recipe]):
            layer = qs.Linear(40, 33, bias=False, params_dtype=torch.bfloat16, device="cpu")
        layer.requires_grad_(requires_grad)
        x = torch.randn(MANY, 40, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        products.clear()
        kept.clear()

        def pack(tensor: Tensor) -> Tensor:
            if components.quantized_local(tensor) is None:
                kept.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), qs.autocast(recipe=RECIPES[recipe]):
            y = layer(x)
        y.float().square().sum().backward()
        found.append((x.grad, len(products), sum(kept)))
    (free_dgrad, free_products, free_kept), (dgrad, frozen_products, frozen_kept) = found
    assert torch.equal(dgrad, free_dgrad)
    assert (free_products, frozen_products) == (3, 2)
    assert free_kept >= MANY * 40 / 2
    assert frozen_kept == 0
