"""Measure training steps of converted transformers models against BF16 and torchao's convert_to_float8_training.

    python benchmarks/convert_models.py [--models llama-1b,qwen3-8b-10] [--variants bf16,current,block fused,...]
        [--runs eager,compiled,graph,compiled graph] [--loss auto] [--jsonl FILE]

Models have the shapes of Llama-3.2-1B and 3B, Gemma 3 4B (text) and Qwen3-8B, with random weights. A step is forward,
loss, backward and optimizer: PyTorch's fused AdamW with BF16 states for BF16 and torchao, `FusedAdam(preset="lean8")`
for quantshard. Each row runs in a process of its own.

Variants are "bf16", "torchao RECIPE", "flashoptim" (BF16 weights), or a recipe of quantshard; with the suffix " fused"
the model is converted with `convert(modules="fused")`. With the suffix " release" gradients are released during
backward (`FusedAdam(release_gradients=True)`, FlashOptim's `enable_gradient_release`).

Runs are "eager", "compiled" (each layer by itself, so that all share one graph), "graph" (a `StepGraph` of the whole
step) and "compiled graph".

"host" is the time in which the host launches a step, "compiled later" the number of graphs compiled after the second
step. `--loss model` keeps the loss of transformers, which computes all logits at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quantshard as qs
from benchmarks.harness import DEVICE, GIB, append_json, make_parser, synchronize, table_head, table_row, to_float8

Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A transformers model by the names of its classes and the arguments of its config, and the size of a batch."""

    config: str
    model: str
    sizes: dict[str, Any]
    batch: int
    length: int
    recompute: bool = False


def config_sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocabulary, **others,
    }  # fmt: skip


LLAMA, GEMMA = ("LlamaConfig", "LlamaForCausalLM"), ("Gemma3TextConfig", "Gemma3ForCausalLM")
QWEN = ("Qwen3Config", "Qwen3ForCausalLM")
RELEASE = " release"
LLAMA_1B = config_sizes(2048, 8192, 16, 32, 8, 64, 128256, tie_word_embeddings=True)
LLAMA_3B = config_sizes(3072, 8192, 28, 24, 8, 128, 128256, tie_word_embeddings=True)
LLAMA_8B = config_sizes(4096, 14336, 32, 32, 8, 128, 128256)
QWEN_8B = config_sizes(4096, 12288, 36, 32, 8, 128, 151936)
GEMMA3_4B = config_sizes(2560, 10240, 34, 8, 4, 256, 262208, sliding_window=1024)
MODELS = {
    "llama-1b": Model(*LLAMA, LLAMA_1B, batch=4, length=2048),
    "llama-3b": Model(*LLAMA, LLAMA_3B, batch=4, length=2048),
    "gemma3-4b": Model(*GEMMA, GEMMA3_4B, batch=2, length=2048),
    "llama-8b": Model(*LLAMA, LLAMA_8B, batch=1, length=8192, recompute=True),
    "llama-8b-32k": Model(*LLAMA, LLAMA_8B, batch=1, length=32768, recompute=True),
    "qwen3-8b": Model(*QWEN, QWEN_8B, batch=2, length=4096, recompute=True),
    "qwen3-8b-10": Model(*QWEN, QWEN_8B | {"num_hidden_layers": 10}, batch=2, length=4096),
}
"""llama-8b and qwen3-8b recompute the activations of each layer; Qwen's first ten layers fit without that."""

PEERS = ("bf16", "torchao tensorwise", "torchao rowwise", "flashoptim")
OURS = ("current", "current fused", "delayed", "block", "block fused", "rowwise", "mxfp8", "mxfp8 fused")
WARMUP = 6
"""Untimed steps, for compilation, tuning and allocation."""
COLUMNS = (
    "model", "weights", "run", "ms", "of BF16", "host", "peak GiB", "of BF16", "first step s", "compiled later", "loss"
)  # fmt: skip


def build(subject: Model, variant: str, device: str, loss: str = "auto") -> nn.Module:
    """Build a model and convert its linear layers to the variant."""
    import transformers

    config = getattr(transformers, subject.config)(**subject.sizes, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = getattr(transformers, subject.model)._from_config(config, dtype=torch.bfloat16)
    if variant.startswith("torchao"):
        to_float8(model, variant.split()[1], device, skip="lm_head")
    elif variant not in PEERS:
        recipe, _, fused = variant.partition(" ")
        # masters start from the BF16 values, as those of other optimizers do
        qs.convert(model, recipe, modules=fused or "linear", loss=loss, preserve_high_precision_init_val=True)
    if subject.recompute:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        # There is no dropout, and CUDA graphs cannot read the RNG state.
        enable({"use_reentrant": False, "preserve_rng_state": False})
    return model.train()


def make_optimizer(model: nn.Module, variant: str, capturable: bool, releases: bool) -> torch.optim.Optimizer:
    """Create fused AdamW with BF16 states, or for quantshard FusedAdam with 5 bytes per quantized parameter."""
    if variant == "flashoptim":
        import flashoptim

        flash: torch.optim.Optimizer = flashoptim.FlashAdamW(model.parameters(), lr=1e-5)
        if releases:
            flashoptim.enable_gradient_release(model, flash)
        return flash
    if variant not in PEERS:
        return qs.optimizers.FusedAdam(
            model.named_parameters(), lr=1e-5, preset="lean8", capturable=capturable, release_gradients=releases
        )
    device = next(model.parameters()).device
    lr = torch.tensor(1e-5, device=device) if capturable else 1e-5
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=device.type == "cuda", capturable=capturable)


def measure(subject: Model, variant: str, run: str, steps: int, device: str, loss: str = "auto") -> Row:
    """Train and return median ms of a step and of its host time, peak GiB, compilation, and losses."""
    releases, variant = variant.endswith(RELEASE), variant.removesuffix(RELEASE)
    model = build(subject, variant, device, loss)
    is_graph = "graph" in run
    if "compiled" in run:
        for layer in model.model.layers:
            layer.compile()
    optimizer = make_optimizer(model, variant, is_graph, releases)
    vocabulary, shape = subject.sizes["vocab_size"], (subject.batch, subject.length)
    batches = [torch.randint(vocabulary, shape, device=device) for _ in range(2)]

    def train_step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = qs.StepGraph(train_step, model, optimizer) if is_graph else train_step
    times, host_times, losses, compiled = list[float](), list[float](), list[Tensor](), 0
    begin = time.perf_counter()
    for number in range(WARMUP + steps):
        if number == WARMUP and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        start = time.perf_counter()
        losses.append(step(batches[number % 2]))
        host_time = time.perf_counter() - start
        synchronize(device)
        if number == 0:
            first_step = time.perf_counter() - begin
        if number == 1:
            compiled = compiled_graphs()
        if number >= WARMUP:
            times.append((time.perf_counter() - start) * 1e3)
            host_times.append(host_time * 1e3)
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
    return {
        "step": statistics.median(times), "host": statistics.median(host_times), "peak GiB": peak,
        "first step s": first_step, "compiled later": compiled_graphs() - compiled,
        "first loss": float(losses[0]), "last loss": float(losses[-1]),
    }  # fmt: skip


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def format_row(row: Row, rows: list[Row]) -> str:
    """Format a row with ratios to BF16 of the same model and run, if `rows` has it."""
    key = {"model": row["model"], "run": row["run"], "variant": "bf16"}
    bf16 = next((candidate for candidate in rows[::-1] if key.items() <= candidate.items()), None)
    time_ratio, peak_ratio = (
        f"{row[name] / bf16[name]:.2f}" if bf16 and bf16[name] else "-" for name in ("step", "peak GiB")
    )
    return table_row([
        row["model"], row["variant"], row["run"], f"{row['step']:.1f}", time_ratio, f"{row['host']:.1f}",
        f"{row['peak GiB']:.1f}", peak_ratio, f"{row['first step s']:.0f}", row["compiled later"],
        f"{row['first loss']:.3f} to {row['last loss']:.3f}",
    ])  # fmt: skip


def measure_in_process(model: str, variant: str, run: str, options: argparse.Namespace) -> Row | None:
    """Measure a row in a new process, which prints it as JSON; None if the process failed."""
    arguments = ["--one", f"{model},{variant},{run}", "--steps", str(options.steps), "--device", options.device]
    arguments += ["--loss", options.loss]
    arguments += ["--layers", str(options.layers)] if options.layers else []
    process = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        print(f"{model}, {variant}, {run}: failed with status {process.returncode}", flush=True)
        return None
    return json.loads(process.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", default=",".join([*PEERS, *OURS]))
    parser.add_argument("--runs", default="eager,compiled,graph,compiled graph")
    parser.add_argument("--loss", default="auto", help="argument of quantshard.convert")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, help="use fewer layers, for a quick try")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--jsonl", type=Path, help="append each row to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, variant, run = options.one.split(",")
        subject = MODELS[model]
        if options.layers:
            subject = replace(subject, sizes={**subject.sizes, "num_hidden_layers": options.layers})
        row = measure(subject, variant, run, options.steps, options.device, options.loss)
        print(json.dumps({"model": model, "variant": variant, "run": run, **row}))
        return
    rows: list[Row] = []
    for model in options.models.split(","):
        for run in options.runs.split(","):
            for variant in options.variants.split(","):
                if row := measure_in_process(model, variant, run, options):
                    rows.append(row)
                    print(format_row(row, rows), flush=True)
                    if options.jsonl:
                        append_json(options.jsonl, row)
    print("\n".join([table_head(COLUMNS), *(format_row(row, rows) for row in rows)]))


if __name__ == "__main__":
    main()
