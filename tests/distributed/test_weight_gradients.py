"""Weight gradients outside of autograd on 2 ranks: tensor parallelism, and what owns gradients itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard.errors import ConfigurationError
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
WIDTH = 64


def build(recipe: str, options: dict[str, bool], mesh: Any = None) -> nn.Module:
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe=recipe):
        layer = qs.LayerNormMLP(WIDTH, 96, set_parallel_mode=mesh is not None, tp_mesh=mesh, **options)
    for param in layer.parameters():
        if param.ndim == 2:
            local = param.to_local() if isinstance(param, DTensor) else param
            param.main_grad = torch.zeros(local.shape)
    return layer


def backward(layer: nn.Module, recipe: str) -> None:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    with qs.autocast(recipe=recipe):
        layer(x).square().mean().backward()


def tensor_parallel() -> list[str]:
    """Weights whose gradients on a shard differ from autograd's, by options."""
    mesh, wrong = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for recipe in ("current", "mxfp8"):
        expected = build(recipe, {}, mesh)
        backward(expected, recipe)
        for fuses in (False, True):
            for delays in (False, True):
                layer = build(recipe, {"fuse_wgrad_accumulation": fuses, "delay_wgrad_compute": delays}, mesh)
                backward(layer, recipe)
                layer.backward_dw()
                for (name, param), other in zip(layer.named_parameters(), expected.parameters(), strict=True):
                    grad = param.main_grad if fuses and param.ndim == 2 else param.grad.to_local()
                    if not torch.equal(grad, other.grad.to_local()):
                        wrong.append(f"{recipe} {fuses} {delays} {name}")
    return wrong


def test_shards_of_tensor_parallelism() -> None:
    assert run_ranks(2, tensor_parallel) == [[], []]


def refusals() -> list[str]:
    messages = []
    for options in ({"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        for wrap in (fully_shard, lambda layer: nn.parallel.DistributedDataParallel(layer, init_sync=False)):
            try:
                backward(wrap(build("current", options)), "current")
            except ConfigurationError as error:
                messages.append(str(error))
    # FSDP2 reduces float32 gradients of bfloat16 weights from torch 2.15 on
    layer = build("current", {"fuse_wgrad_accumulation": True})
    for param in layer.parameters():
        vars(param).pop("main_grad", None)
    try:
        backward(fully_shard(layer.bfloat16()), "current")
    except ConfigurationError as error:
        messages.append(str(error))
    return messages


def test_owners_of_gradients_are_refused_by_name() -> None:
    first, second = run_ranks(2, refusals)
    assert first == second and len(first) == 5
    for message, owner in zip(first, ["FSDP2", "DistributedDataParallel"] * 2, strict=False):
        assert f"LayerNormMLP.fc1_weight: {owner} owns the gradient" in message
    assert "reduce_dtype=torch.float32" in first[4] and not dist.is_initialized()


def wide_gradients() -> bool:
    """Float32 gradients of parameters that FSDP2 shards need no `main_grad`."""
    layer, expected = build("current", {"fuse_wgrad_accumulation": True}), build("current", {})
    for module in (layer, expected):
        for param in module.parameters():
            vars(param).pop("main_grad", None)
        backward(fully_shard(module), "current")
    pairs = zip(layer.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(param.grad.to_local(), other.grad.to_local()) for param, other in pairs)


def test_fsdp_of_float32_gradients() -> None:
    assert run_ranks(2, wide_gradients) == [True, True]
