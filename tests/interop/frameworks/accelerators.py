"""accelerate on processes of a CPU, and the small model that tests of integrations train. For ranks of the pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import quantshard as qs
from quantshard.tensor import components

SIZES = {
    "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
LINEAR_LAYERS = 2 * 7


@contextmanager
def accelerator(kind: str = "fsdp2", mixed: str = "no", accumulate: int = 1, **plugin: Any) -> Iterator[Accelerator]:
    """An Accelerator on this rank's CPU. accelerate itself offers FSDP only where there are accelerators: so here its
    state is told afterwards, as its constructor tells it there."""
    before = dict(os.environ)
    os.environ["MASTER_ADDR"] = "localhost"  # looked for, and not used: there is a process group
    states = (AcceleratorState, PartialState, GradientState)
    try:
        for state in states:
            state._reset_state()
        made = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulate)
        if kind == "fsdp2":
            made.state.fsdp_plugin = fsdp2(mixed, **plugin)
            made.state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        yield made
    finally:
        for state in states:
            state._reset_state()
        os.environ.clear()
        os.environ.update(before)


def fsdp2(mixed: str = "no", **plugin: Any) -> FullyShardedDataParallelPlugin:
    defaults = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": False}
    made = FullyShardedDataParallelPlugin(**{**defaults, **plugin})
    if mixed != "no":
        made.set_mixed_precision(mixed)
    return made


def plain(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).to(torch.bfloat16)


def build(recipe: str, seed: int = 0, keep: bool = False, **sizes: Any) -> LlamaForCausalLM:
    model = plain(seed, **sizes)
    report = qs.convert(model, recipe, preserve_high_precision_init_val=keep)
    assert len(report.converted) == LINEAR_LAYERS
    return model


def batches(micro_batches: int = 1) -> list[Tensor]:
    """This rank's part of a global batch, the same in every step."""
    tokens = torch.randint(101, (6 * micro_batches, 8), generator=torch.Generator().manual_seed(0))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return [part.chunk(world)[rank] for part in tokens.chunk(micro_batches)]


def quantized(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if components.quantized_local(p) is not None}


def codes(model: torch.nn.Module) -> dict[str, list[Tensor]]:
    """Copies of what this rank holds of each quantized weight, under its name without adapters."""
    return {
        name.replace(".base_layer", ""): [part.clone() for part in components.storage_of(param).components.values()]
        for name, param in quantized(model).items()
    }


def changed(before: dict[str, list[Tensor]], model: torch.nn.Module) -> int:
    """How many quantized weights have other codes or scales than before."""
    after = codes(model)
    assert before.keys() == after.keys()
    return sum(not all(map(torch.equal, value, after[name])) for name, value in before.items())


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many of the model's quantized weights the optimizer's groups hold."""
    members = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return sum(id(param) in members for param in quantized(model).values())
