"""Train quantized weights with the Trainer of transformers: one process, DDP or FSDP2, with bit-exact resumes.

    python examples/hf_trainer.py --out /tmp/run
    python examples/hf_trainer.py --out /tmp/run --resume /tmp/run/checkpoint-5
    torchrun --nproc-per-node 2 examples/hf_trainer.py --out /tmp/run [--fsdp]

`--model` takes a folder with a model; the default is a small Llama with random weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from quantshard.integrations.transformers import QuantizedTraining, QuantshardConfig

VOCABULARY, LENGTH = 32, 48
FSDP2 = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}


class QuantizedTrainer(QuantizedTraining, Trainer):
    """The Trainer with FusedAdam instead of AdamW, and without buffers for quantized weights in DDP."""


def small_model(folder: Path) -> Path:
    """Write a Llama with random weights, the same in each process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def samples(count: int = 64) -> list[dict[str, Tensor]]:
    """Return sequences that count upwards."""
    rows = [(torch.arange(LENGTH) + start) % VOCABULARY for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(arguments: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume")
    parser.add_argument("--fsdp", action="store_true")
    args = parser.parse_args(arguments)
    settings = TrainingArguments(
        str(args.out), max_steps=args.steps, per_device_train_batch_size=8, learning_rate=3e-3, save_steps=5,
        logging_steps=5, report_to=[], use_cpu=not torch.cuda.is_available(), seed=1,
        fsdp=True if args.fsdp else None, fsdp_config=FSDP2 if args.fsdp else None,
    )  # fmt: skip
    with settings.main_process_first():
        path = args.model or small_model(args.out / "model")
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=QuantshardConfig(args.recipe))
    trainer = QuantizedTrainer(model, settings, train_dataset=samples())
    if trainer.is_world_process_zero():
        print(model.quantshard_report)
    trainer.train(resume_from_checkpoint=args.resume)
    # AutoModelForCausalLM.from_pretrained loads it, still quantized
    trainer.save_model(str(args.out / "trained"))
    return trainer


if __name__ == "__main__":
    main()
