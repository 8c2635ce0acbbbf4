"""Models of transformers, converted: ms a step and peak memory beside BF16 and torchao's convert_to_float8_training.

    python benchmarks/convert_models.py [--models llama-1b,qwen3-8b-10] [--variants bf16,current,block fused,...]
        [--runs eager,compiled,graph,compiled graph] [--loss auto] [--jsonl FILE]

Models have the shapes of Llama-3.2-1B and 3B, Gemma 3 4B (text) and Qwen3-8B, and random weights. A step is forward, loss, backward and optimizer:
fused AdamW of PyTorch with states of bfloat16 for BF16 and torchao, `FusedAdam(preset="lean8")` for ours. "host" is the
time in which the host has launched a step. Layers are compiled one by one, so that one graph serves all; activations of
every layer are recomputed where the table says so. Each variant has a fresh process. A recipe with " fused" behind it
is `convert(modules="fused")`. A graph is a `StepGraph` of the whole step. "compiled later": graphs compiled after the
second step. `--loss model` keeps the loss of transformers, on all logits at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import quantshard as qs

Steps = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model of transformers by its config's class and sizes, and what a step sees."""

    config: str
    model: str
    sizes: dict[str, Any]
    batch: int
    length: int
    recompute: bool = False


MODELS = {
    "llama-1b": Subject(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
        },
        batch=4,
        length=2048,
    ),
    "llama-3b": Subject(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": True,
        },
        batch=4,
        length=2048,
    ),
    "gemma3-4b": Subject(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024,
        },
        batch=2,
        length=2048,
    ),
    "qwen3-8b": Subject(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        },
        batch=2,
        length=4096,
        recompute=True,
    ),
}  # fmt: skip

MODELS["qwen3-8b-10"] = replace(
    MODELS["qwen3-8b"], sizes={**MODELS["qwen3-8b"].sizes, "num_hidden_layers": 10}, recompute=False
)
"""Ten layers, which fit without recomputation."""

PEERS = ("bf16", "torchao tensorwise", "torchao rowwise")
OURS = ("current", "current fused", "delayed", "block", "block fused", "rowwise", "mxfp8", "mxfp8 fused")
WARMUP = 6
"""Steps before the first that is timed: compilation, tuning, allocation."""


def build(subject: Subject, variant: str, device: str, loss: str = "auto") -> nn.Module:
    """The model, its linear layers converted as the variant says."""
    import transformers

    config = getattr(transformers, subject.config)(**subject.sizes, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = getattr(transformers, subject.model)._from_config(config, dtype=torch.bfloat16)
    if variant.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        found = Float8LinearConfig.from_recipe_name(variant.split()[1])
        convert_to_float8_training(model, config=found, module_filter_fn=lambda _, name: "lm_head" not in name)
    elif variant != "bf16":
        recipe, _, fused = variant.partition(" ")
        qs.convert(model, recipe, modules=fused or "linear", loss=loss)
    if subject.recompute:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "preserve_rng_state": False})  # there is no dropout, and graphs cannot ask
    return model.train()


def optimizer_of(model: nn.Module, variant: str, capturable: bool) -> torch.optim.Optimizer:
    """Fused AdamW with states of bfloat16, and for ours FusedAdam of 5 bytes a quantized parameter."""
    if variant not in PEERS:
        return qs.optimizers.FusedAdam(model.named_parameters(), lr=1e-5, preset="lean8", capturable=capturable)
    device = next(model.parameters()).device
    lr = torch.tensor(1e-5, device=device) if capturable else 1e-5
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=device.type == "cuda", capturable=capturable)


def measure(subject: Subject, variant: str, run: str, steps: int, device: str, loss: str = "auto") -> Steps:
    """Median milliseconds of a step and of its host time; peak GiB; seconds until the first step ended; graphs that
    were compiled after it; the losses."""
    model = build(subject, variant, device, loss)
    is_graph = "graph" in run
    if "compiled" in run:
        for layer in model.model.layers:
            layer.compile()
    optimizer = optimizer_of(model, variant, is_graph)
    vocabulary, shape = subject.sizes["vocab_size"], (subject.batch, subject.length)
    batches = [torch.randint(vocabulary, shape, device=device) for _ in range(2)]

    def train_step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = qs.StepGraph(train_step, model, optimizer) if is_graph else train_step
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, hosts, losses, compiled = list[float](), list[float](), list[Tensor](), 0
    begin = time.perf_counter()
    for number in range(WARMUP + steps):
        if number == WARMUP and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        losses.append(step(batches[number % 2]))
        host = time.perf_counter() - start
        wait()
        if number == 0:
            first_step = time.perf_counter() - begin
        if number == 1:
            compiled = graphs_compiled()
        if number >= WARMUP:
            times.append((time.perf_counter() - start) * 1e3)
            hosts.append(host * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "step": statistics.median(times), "host": statistics.median(hosts), "peak GiB": peak,
        "first step s": first_step, "compiled later": graphs_compiled() - compiled,
        "first loss": float(losses[0]), "last loss": float(losses[-1]),
    }  # fmt: skip


def graphs_compiled() -> int:
    """Graphs that torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def table(rows: list[Steps]) -> list[str]:
    """Markdown; ratios are to BF16 of the same model in the same kind of run."""
    base = {(row["model"], row["run"]): row for row in rows if row["variant"] == "bf16"}
    lines = [
        "| model | weights | run | ms | of BF16 | host | peak GiB | of BF16 | first step s | compiled later | loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        like = base.get((row["model"], row["run"]))
        ratios = [f"{row[key] / like[key]:.2f}" if like and like[key] else "-" for key in ("step", "peak GiB")]
        lines.append(
            f"| {row['model']} | {row['variant']} | {row['run']} | {row['step']:.1f} | {ratios[0]} "
            f"| {row['host']:.1f} | {row['peak GiB']:.1f} | {ratios[1]} | {row['first step s']:.0f} "
            f"| {row['compiled later']} | {row['first loss']:.3f} to {row['last loss']:.3f} |"
        )
    return lines


def main() -> int:
    """Each row in a process of its own, whose line of JSON this one collects; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", default=",".join([*PEERS, *OURS]))
    parser.add_argument("--runs", default="eager,compiled,graph,compiled graph")
    parser.add_argument("--loss", default="auto", help="convert(loss=...)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, help="fewer layers, to try it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jsonl", help="a file that each row is appended to")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        model, variant, run = asked.one.split(",")
        subject = MODELS[model]
        if asked.layers:
            subject = replace(subject, sizes={**subject.sizes, "num_hidden_layers": asked.layers})
        found = measure(subject, variant, run, asked.steps, asked.device, asked.loss)
        print(json.dumps({"model": model, "variant": variant, "run": run, **found}))
        return 0
    rows = []
    for model in asked.models.split(","):
        for run in asked.runs.split(","):
            for variant in asked.variants.split(","):
                gc.collect()
                given = ["--one", f"{model},{variant},{run}", "--steps", str(asked.steps), "--device", asked.device]
                given += ["--loss", asked.loss]
                given += ["--layers", str(asked.layers)] if asked.layers else []
                done = subprocess.run(
                    [sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True, check=False
                )
                if done.returncode:
                    print(f"{model}, {variant}, {run}: failed with status {done.returncode}", flush=True)
                    continue
                rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(table(rows)[-1], flush=True)
                if asked.jsonl:
                    with open(asked.jsonl, "a", encoding="utf-8") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
