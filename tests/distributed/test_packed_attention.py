"""Packed sequences, sinks, windows and cross-attention under FSDP2 and tensor parallelism, against one process."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from tests.distributed.pool import run_ranks

HIDDEN, HEADS, LENGTHS, OF_SOURCE = 64, 4, (5, 1, 6), (4, 2, 2)
TOLERANCE = 2e-5
"""Relative: float32 sums over ranks in another order, through two attentions and an MLP."""


def boundaries(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def layer(recipe: str, **options: Any) -> qs.TransformerLayer:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        module = qs.TransformerLayer(
            HIDDEN, 128, HEADS, 2, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True,
            layer_type="decoder", self_attn_mask_type="padding_causal", enc_dec_attn_mask_type="padding",
            attn_input_format="thd", softmax_type="learnable", window_size=(3, 0), device="cpu", **options,
        )  # fmt: skip
    for attention in (module.self_attention, module.inter_attention):
        for head, sink in enumerate(_local(attention.core_attention.softmax_offset.data)):
            sink.fill_(head + 1.0)
    return module


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def run(module: qs.TransformerLayer, recipe: str, x: Tensor, source: Tensor) -> Tensor:
    freqs = qs.RotaryPositionEmbedding(HIDDEN // HEADS)(8, device="cpu")
    with qs.autocast(recipe=recipe):
        out: Tensor = module(
            x, encoder_output=source, cu_seqlens_q=boundaries(LENGTHS), cu_seqlens_kv=boundaries(OF_SOURCE),
            max_seqlen_q=8, max_seqlen_kv=4, rotary_pos_emb=freqs,
        )  # fmt: skip
    return out


def differences(wrapping: str, recipe: str) -> dict[str, float]:
    """Relative differences from one process: of the output, and of the gradients of the parameters."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    x, source = (torch.randn(sum(n), HIDDEN, generator=generator) for n in (LENGTHS, OF_SOURCE))
    plain = layer(recipe)
    want = run(plain, recipe, x, source)
    want.square().sum().backward()
    module = layer(recipe, tp_size=ranks if wrapping == "tp" else 1, sequence_parallel=wrapping == "tp")
    if wrapping == "tp":
        module.set_device_mesh(init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
        rows = [part.chunk(ranks)[rank] for part in (x, source, want)]
    else:
        fully_shard(module)
        rows = [x, source, want]
    out = run(module, recipe, *rows[:2])
    out.square().sum().backward()
    found = {"output": ((out - rows[2]).norm() / want.norm()).item()}
    for (name, param), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None, name
        found[name] = ((_whole(param.grad) - other.grad).norm() / other.grad.norm().clamp(min=1e-3)).item()
    return found


@pytest.mark.parametrize(("wrapping", "ranks"), [("tp", 2), ("fsdp", 2), ("fsdp", 3)])
def test_sharding_changes_no_result(wrapping: str, ranks: int) -> None:
    """The sinks are sharded by heads; each rank has the boundaries of all tokens."""
    for found in run_ranks(ranks, differences, wrapping, "bf16"):
        assert "self_attention.core_attention.softmax_offset" in found
        assert max(found.values()) <= TOLERANCE, found


def saved(recipe: str) -> dict[str, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = layer(recipe, tp_size=2)
    module.set_device_mesh(mesh)
    module.reset_parameters()
    sinks = module.inter_attention.core_attention.softmax_offset
    assert isinstance(sinks, DTensor) and sinks.to_local().shape == (HEADS // 2,) and not sinks.to_local().any()
    return {name: tuple(value.shape) for name, value in module.state_dict().items() if "softmax" in name}


def test_sinks_are_saved_whole() -> None:
    of_self, of_cross = (f"{name}.core_attention.softmax_offset" for name in ("self_attention", "inter_attention"))
    assert run_ranks(2, saved, "current") == [{of_self: (HEADS,), of_cross: (HEADS,)}] * 2
