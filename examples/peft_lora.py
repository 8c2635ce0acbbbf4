"""LoRA over frozen quantized weights with PEFT: train, save, load into a new model, merge and export.

python examples/peft_lora.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import quantshard
from quantshard.integrations.peft import load_adapter, register

SIZES = {"hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(recipe: str) -> LlamaForCausalLM:
    """Build and convert a small model; use LlamaForCausalLM.from_pretrained(...) for a real one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=101)).to(torch.bfloat16)
    quantshard.convert(model, recipe)
    return model


def train(model: nn.Module, tokens: Tensor, steps: int) -> list[float]:
    """Train the adapters. They are in high precision, so any optimizer can."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(recipe: str = "auto", folder: str | Path = "adapter", dora: bool = False) -> list[float]:
    """Return the losses of training, and of continuing from the saved adapter."""
    config = LoraConfig(r=8, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM")
    model = get_peft_model(build(recipe), register(config))
    model.print_trainable_parameters()
    tokens = torch.randint(101, (4, 16))
    losses = train(model, tokens, 10)
    model.save_pretrained(str(folder))

    model = load_adapter(build(recipe), folder, is_trainable=True)
    losses += train(model, tokens, 5)
    # adds the adapters to the weights and quantizes the sums
    merged = model.merge_and_unload(safe_merge=True)
    # back to plain layers
    quantshard.revert(merged)
    merged.save_pretrained(Path(folder) / "merged")
    return losses


if __name__ == "__main__":
    for index, value in enumerate(main()):
        print(f"step {index} loss {value:.4f}")
