"""Models that `convert(modules="fused")` changed, under FSDP2; 2 and 3 ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import quantshard as qs
from quantshard import errors
from quantshard.optimizers import FusedAdam
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
SIZES = {
    "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip


def trained(modules: str, recipe: str, where: str) -> tuple[dict[str, str], list[float], int]:
    """Bits and losses of two steps in float32, and how many times it was said that layers run one by one.

    `where`: what is sharded by itself, decoder layers, or the projections of an MLP too.
    """
    errors._told.clear()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    qs.convert(model, recipe, modules=modules)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        if where == "projections":
            fully_shard(layer.mlp.up_proj, mesh=mesh)
        elif where == "mlps":
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = FusedAdam(model.named_parameters(), lr=3e-3)
    tokens = torch.randint(101, (6, 12), generator=torch.Generator().manual_seed(1))
    tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert all(isinstance(layer.mlp, nn.Module) for layer in model.model.layers)
    told = [each for each in caught if "one by one" in str(each.message)]
    return bits(model, optimizer), losses, len(told)


@pytest.mark.parametrize(
    ("ranks", "recipe", "where"),
    [
        (2, "mxfp8", "projections"),
        (3, "delayed", "layers"),
        pytest.param(2, "nvfp4", "mlps", marks=pytest.mark.exhaustive),
        pytest.param(3, "block", "projections", marks=pytest.mark.exhaustive),
    ],
)
def test_bits_under_fsdp2(ranks: int, recipe: str, where: str) -> None:
    """2 and 3 ranks: those of `modules="linear"`; a projection that is sharded by itself is called, which is said."""
    linear, fused = (run_ranks(ranks, trained, modules, recipe, where) for modules in ("linear", "fused"))
    for (bits_of, losses, told), (fused_bits, fused_losses, fused_told) in zip(linear, fused, strict=True):
        assert fused_bits == bits_of and fused_losses == losses
        assert (told, fused_told) == (0, 1 if where == "projections" else 0)
