"""Train a Hugging Face Llama in a plain FSDP2 loop: convert, shard, load, compile, train, save and export it.

    torchrun --nproc-per-node 2 examples/plain_fsdp2_llama.py --out /tmp/run

The model is built on the meta device, and no rank holds all of it in BF16. `--model` takes a folder with a Llama; the
default is a small one with random weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import quantshard as qs

# for save_pretrained of quantized models
import quantshard.integrations.transformers

VOCABULARY, LENGTH = 32, 48


def small_model(folder: Path) -> Path:
    """Let rank 0 write a Llama with random weights."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
            max_position_embeddings=64, eos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    return folder


def sharded(path: Path, recipe: str, device: torch.device) -> LlamaForCausalLM:
    """Load the model in a folder, quantized and sharded."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    report = qs.convert(model, recipe)
    if dist.get_rank() == 0:
        print(report)
    for layer in model.model.layers:
        if device.type == "cuda":
            layer.compile()
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    # its buffers are not saved
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    files = sorted(path.glob("*.safetensors"))
    qs.checkpoints.load_high_precision(
        model, {name: value for file in files for name, value in load_file(file).items()}
    )
    return model


def batch(step: int, device: torch.device) -> Tensor:
    """Return sequences that count upwards, different ones on each rank."""
    first = torch.arange(8)[:, None] + 8 * (step * dist.get_world_size() + dist.get_rank())
    return ((first + torch.arange(LENGTH)) % VOCABULARY).to(device)


def main(arguments: list[str] | None = None) -> tuple[LlamaForCausalLM, list[float], Tensor]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = sharded(args.model or small_model(args.out / "model"), args.recipe, device)
    optimizer = qs.optimizers.FusedAdam(model.named_parameters(), lr=3e-3, weight_decay=0.01)
    losses = []
    for step in range(args.steps):
        tokens = batch(step, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # any number of ranks can load it
    qs.checkpoints.save(args.out / "checkpoint", model, optimizer)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        # transformers and vLLM read it
        model.save_pretrained(args.out / "served", layout="compressed-tensors", state_dict=whole)
        print("losses:", ", ".join(f"{loss:.3f}" for loss in losses))
    register_fsdp_forward_method(model, "generate")
    start = torch.arange(8, device=device)[None]
    return model, losses, model.eval().generate(start, max_new_tokens=8, do_sample=False)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
