"""Train, save and resume a Hugging Face model with quantized weights by accelerate under FSDP2.

    accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
        --fsdp_cpu_ram_efficient_loading false --num_processes 2 examples/accelerate_fsdp2.py

On a machine without GPUs, accelerate has no FSDP, and the same script trains replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import quantshard
from quantshard.integrations.accelerate import prepare

SIZES = {"hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(recipe: str) -> LlamaForCausalLM:
    """Build and convert a small model; use LlamaForCausalLM.from_pretrained(...) for a real one."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=101)).to(torch.bfloat16)
    print(quantshard.convert(model, recipe))
    return model


def train(accelerator: Accelerator, model: Any, optimizer: Any, data: Iterable[Tensor]) -> list[float]:
    """Train, and return this rank's losses."""
    losses = []
    for tokens in data:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(accelerator: Accelerator, recipe: str = "auto", folder: str | Path = "state") -> list[float]:
    """Train, save, continue, then load and continue again from the same state."""
    torch.manual_seed(0)
    data = DataLoader(torch.randint(101, (40, 16)), batch_size=4)
    # a function instead of an optimizer, so that no rank holds masters of the whole model
    optimizer = partial(quantshard.optimizers.FusedAdam, lr=3e-3, weight_decay=0.01)
    model, optimizer, data = prepare(accelerator, build(recipe), optimizer, data)

    losses = train(accelerator, model, optimizer, data)
    accelerator.save_state(str(folder))
    losses += train(accelerator, model, optimizer, data)
    # works in a new process and on any number of ranks
    accelerator.load_state(str(folder))
    return losses + train(accelerator, model, optimizer, data)


if __name__ == "__main__":
    accelerator = Accelerator(mixed_precision="no")
    for index, value in enumerate(main(accelerator)):
        accelerator.print(f"step {index} loss {value:.4f}")
    accelerator.end_training()
