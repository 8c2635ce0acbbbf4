"""Measure forward and backward of a mixture-of-experts block of transformers, converted and in BF16.

    python -m benchmarks.mixtures [--models qwen3-30b-a3b,mixtral] [--tokens 8192,32768] [--recipes current,rowwise]

A block has a router and experts of the model's own sizes, with random weights and inputs. Variants:

- "BF16": transformers' `grouped_mm`; "compiled": the block under `torch.compile`; "captured": as a CUDA graph.
- a recipe: the same block after `quantshard.convert`, eager, compiled and captured.

"host ms" is the time that Python takes to launch a step. The peak is that of a step, weights and gradients included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import quantshard as qs
from benchmarks.harness import (
    add_sizes,
    capture,
    heading,
    make_parser,
    milliseconds,
    spread,
    synchronize,
    table_head,
    table_row,
)  # fmt: skip

BF16 = "BF16"
COLUMNS = ("model, tokens", "variant", "ms (min, max)", "host ms", "of BF16's time", "peak GiB")
Step = Callable[[], Any]


class Result(NamedTuple):
    ms: list[float]
    host_ms: float
    peak: float


def block(model: str, tiny: bool, device: str) -> nn.Module:
    """The mixture of one layer, in BF16 and in training mode."""
    import transformers

    with torch.device(device):
        if model == "mixtral":
            from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

            sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
            small = {"hidden_size": 64, "intermediate_size": 96}
            config = transformers.MixtralConfig(**(sizes | small if tiny else sizes))
            kind: Any = MixtralSparseMoeBlock
        else:
            from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

            sizes = {
                "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                "norm_topk_prob": True,
            }  # fmt: skip
            small = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
            config = transformers.Qwen3MoeConfig(**(sizes | small if tiny else sizes))
            kind = Qwen3MoeSparseMoeBlock
        config._experts_implementation = "grouped_mm"
        result: nn.Module = kind(config).bfloat16().train()
    with torch.no_grad():
        for param in result.parameters():
            param.normal_(std=0.02)
    return result


def make_step(module: nn.Module, tokens: int, hidden: int, device: str, compiled: bool) -> Step:
    torch.manual_seed(1)
    x, dy = (torch.randn(1, tokens, hidden, device=device).bfloat16() for _ in range(2))
    x.requires_grad_()
    run = torch.compile(module) if compiled else module
    params = [x, *module.parameters()]

    def step() -> Any:
        out = run(x)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, params, dy)

    return step


def measured(step: Step, repeats: int, device: str) -> Result:
    times = milliseconds(step, repeats, device)
    peak = 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() / 2**30
    host_times = []
    for _ in range(min(repeats, 5)):
        synchronize(device)
        start = time.perf_counter()
        step()
        host_times.append((time.perf_counter() - start) * 1e3)
    return Result(times, statistics.median(host_times), peak)


def variants(model: str, tokens: int, options: Any, device: str) -> Iterator[tuple[str, Result]]:
    for recipe in (BF16, *options.recipes.split(",")):
        module = block(model, options.tiny, device)
        hidden = next(param for name, param in module.named_parameters() if name.endswith("down_proj")).shape[1]
        if recipe != BF16:
            holder = nn.Sequential(module)
            qs.convert(holder, recipe)
            module = holder
        for way in ("", ", compiled", ", captured"):
            if device != "cuda" and way:
                continue
            try:
                step = make_step(module, tokens, hidden, device, way == ", compiled")
                if way == ", captured":
                    with torch.cuda.stream(torch.cuda.Stream()):
                        step()
                    synchronize(device)
                    step = capture(step)
                yield recipe + way, measured(step, options.repeats, device)
            except Exception as error:
                print(f"{model}, {tokens}, {recipe}{way}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            torch._dynamo.reset()
        del module


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default="qwen3-30b-a3b,mixtral")
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--recipes", default="current,rowwise")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try this script on a CPU")
    add_sizes(parser, {"repeats": 10})
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{heading(device)}\n\n{table_head(COLUMNS)}")
    for model in options.models.split(","):
        for tokens in map(int, options.tokens.split(",")):
            results = {}
            for variant, result in variants(model, tokens, options, device):
                results[variant] = median = statistics.median(result.ms)
                ratio = f"{median / results[BF16]:.2f}" if BF16 in results else ""
                cells = (f"{model}, {tokens}", variant, spread(result.ms, 2), f"{result.host_ms:.2f}", ratio)
                print(table_row((*cells, f"{result.peak:.2f}")), flush=True)


if __name__ == "__main__":
    main()
