"""Models of transformers, converted: ms a step and peak memory beside BF16 and torchao's convert_to_float8_training.

    python benchmarks/convert_models.py [--models llama-1b,qwen3-8b] [--variants bf16,current,block fused,...]
        [--runs eager,compiled,graphed] [--jsonl FILE]

Models have the shapes of Llama-3.2-1B and Qwen3-8B and random weights. A step is forward, loss, backward and optimizer:
fused AdamW of PyTorch with states of bfloat16 for BF16 and torchao, `FusedAdam` with masters of 16 bits and moments of
8 for ours. "host" is the time in which the host has launched a step. Layers are compiled one by one, so that one graph
serves all; activations of every layer are recomputed where the table says so. Each variant has a fresh process. A
recipe with " fused" behind it is `convert(modules="fused")`. In a graphed run the decoder layers are captured by
`make_graphed_callables`.
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
from quantshard.recipe import Recipe

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

PEERS = ("bf16", "torchao tensorwise", "torchao rowwise")
OURS = ("current", "current fused", "delayed", "block", "block fused", "rowwise", "mxfp8", "mxfp8 fused")
WARMUP = 4
"""Steps before the first that is timed: compilation, tuning, allocation."""


def build(subject: Subject, variant: str, device: str) -> nn.Module:
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
        qs.convert(model, recipe, modules=fused or "linear")
    if subject.recompute:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "preserve_rng_state": False})  # there is no dropout, and graphs cannot ask
    return model.train()


class _LastLayerError(Exception):
    """Ends a forward that is run for the layers' arguments."""


def capture_layers(model: nn.Module, recipe: str | Recipe | None, **inputs: Tensor) -> None:
    """Capture the decoder layers of a model of transformers with the arguments that its forward, on such inputs, gives
    them; None: in high precision."""
    layers = list(model.model.layers)
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs))
        if len(found) == len(layers):
            raise _LastLayerError
        return args[0]

    for layer in layers:
        layer.forward = note
    try:
        model(**inputs)
    except _LastLayerError:
        pass
    finally:
        for layer in layers:
            del layer.forward
    qs.make_graphed_callables(
        layers, [args for args, _ in found], sample_kwargs=[kwargs for _, kwargs in found],
        enabled=recipe is not None, recipe=recipe,
    )  # fmt: skip


def optimizer_of(model: nn.Module, variant: str) -> torch.optim.Optimizer:
    """Fused AdamW, and for ours FusedAdam of 5 bytes a quantized parameter."""
    if variant in PEERS:
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=next(model.parameters()).is_cuda)
    lean = {"master_weight_dtype": torch.float16, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    return qs.optimizers.FusedAdam(model.named_parameters(), lr=1e-5, **lean)


def measure(subject: Subject, variant: str, run: str, steps: int, device: str) -> Steps:
    """Median milliseconds of a step, of its forward and backward, and of the host; peak GiB; the losses."""
    model = build(subject, variant, device)
    if run == "compiled":
        for layer in model.model.layers:
            layer.compile()
    optimizer = optimizer_of(model, variant)
    tokens = torch.randint(subject.sizes["vocab_size"], (subject.batch, subject.length), device=device)
    if run == "graphed":
        recipe = None if variant in PEERS else variant.partition(" ")[0]
        capture_layers(model, recipe, input_ids=tokens, labels=tokens)
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {"step": [], "forward and backward": [], "host": []}
    losses: list[Tensor] = []
    for step in range(WARMUP + steps):
        if step == WARMUP and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        launched = time.perf_counter()
        wait()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        launched_all = launched - start + time.perf_counter() - middle
        wait()
        losses.append(loss.detach())
        if step >= WARMUP:
            end = time.perf_counter()
            for name, value in zip(times, (end - start, middle - start, launched_all), strict=True):
                times[name].append(value * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    found = {name: statistics.median(values) for name, values in times.items()}
    first, last = float(losses[0]), float(losses[-1])
    return {**found, "peak GiB": peak, "first loss": first, "last loss": last}


def table(rows: list[Steps]) -> list[str]:
    """Markdown; ratios are to BF16 of the same model in the same run: eager, compiled or graphed."""
    base = {(row["model"], row["run"]): row for row in rows if row["variant"] == "bf16"}
    lines = [
        "| model | weights | run | ms a step | of BF16 | forward, backward | host | peak GiB | of BF16 | loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        like = base.get((row["model"], row["run"]))
        ratios = [f"{row[key] / like[key]:.2f}" if like else "-" for key in ("step", "peak GiB")]
        lines.append(
            f"| {row['model']} | {row['variant']} | {row['run']} | {row['step']:.1f} "
            f"| {ratios[0]} | {row['forward and backward']:.1f} | {row['host']:.1f} | {row['peak GiB']:.1f} "
            f"| {ratios[1]} | {row['first loss']:.3f} to {row['last loss']:.3f} |"
        )
    return lines


def main() -> int:
    """Each row in a process of its own, whose line of JSON this one collects; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", default=",".join([*PEERS, *OURS]))
    parser.add_argument("--runs", default="eager,compiled,graphed")
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
        found = measure(subject, variant, run, asked.steps, asked.device)
        print(json.dumps({"model": model, "variant": variant, "run": run, **found}))
        return 0
    rows = []
    for model in asked.models.split(","):
        for run in asked.runs.split(","):
            for variant in asked.variants.split(","):
                gc.collect()
                given = ["--one", f"{model},{variant},{run}", "--steps", str(asked.steps), "--device", asked.device]
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
