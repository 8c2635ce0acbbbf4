"""An output head and its loss, forward and backward: ms, memory and errors of several implementations.

    python benchmarks/linear_cross_entropy.py [--shapes llama-1b,qwen3-8b] [--names ours,logits,...] [--at-once N]
        [--jsonl FILE]

"logits" is F.linear and F.cross_entropy of float32 logits, as in transformers; "torch" is
torch.nn.functional.linear_cross_entropy (torch 2.13), "liger" Liger's fused kernel, "cce" Cut Cross-Entropy with its
default filter of small gradients, "cce exact" without; each is skipped where it is not installed. "peak GiB" is what a
call allocates above its inputs, gradients included. Errors are relative, to float64 logits of the first tokens for the
loss, and to gradients that "logits" computes in float32 of the same values.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import quantshard as qs
from quantshard.modules import chunked_loss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

SHAPES = {"llama-1b": (8192, 2048, 128256), "qwen3-8b": (8192, 4096, 151936), "small": (512, 64, 1000)}
"""Tokens, features, vocabulary."""


def of_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def of_torch() -> Loss:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, options=options)


def of_liger() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: loss(weight, hidden, labels)


def of_cce(**options: Any) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, **options)


IMPLEMENTATIONS: dict[str, Callable[[], Loss]] = {
    "logits": lambda: of_logits,
    "ours": lambda: qs.linear_cross_entropy,
    "torch": of_torch,
    "liger": of_liger,
    "cce": of_cce,
    "cce exact": lambda: of_cce(filter_eps=None),
}


def inputs(shape: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and a weight in bfloat16, with logits of standard deviation 2; labels."""
    tokens, features, vocabulary = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, features, device=device, generator=generator, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, features, device=device, generator=generator, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
    return hidden.requires_grad_(), weight.mul_(2 / features**0.5).requires_grad_(), labels


def exact(hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss and its gradients in float32, some tokens at a time."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    w = weight.detach().float().requires_grad_()
    grads = []
    for h, part in zip(hidden.detach().split(512), labels.split(512), strict=True):
        x = h.float().requires_grad_()
        loss = F.cross_entropy(F.linear(x, w), part, reduction="sum") / len(labels)
        loss.backward()
        total += loss.detach().double()
        grads.append(x.grad)
    assert w.grad is not None
    return [total, torch.cat(grads), w.grad]


def measure(name: str, shape: str, repeats: int, device: str) -> dict[str, Any]:
    hidden, weight, labels = inputs(shape, device)
    expected = exact(hidden, weight, labels)
    loss_of = IMPLEMENTATIONS[name]()
    is_gpu = device == "cuda"

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        loss = loss_of(hidden, weight, labels)
        loss.backward()
        return loss.detach()

    loss = step()
    results = [loss, hidden.grad, weight.grad]
    errors = [
        float((a.double() - e.double()).norm() / e.double().norm()) for a, e in zip(results, expected, strict=True)
    ]
    del expected, results
    hidden.grad = weight.grad = None
    times, peak = [], 0.0
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    for _ in range(repeats if is_gpu else 0):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    ms = statistics.median(times) if times else 0.0
    return {"name": name, "shape": shape, "ms": ms, "peak GiB": peak, "errors": errors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-1b,qwen3-8b")
    parser.add_argument("--names", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--at-once", type=int, help="LOGITS_AT_ONCE of ours, if above the weight's size")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jsonl", help="a file that each row is appended to")
    options = parser.parse_args()
    chunked_loss.LOGITS_AT_ONCE = options.at_once or chunked_loss.LOGITS_AT_ONCE  # type: ignore[misc]
    print("| shape | implementation | ms | peak GiB | error of loss | of grad hidden | of grad weight |")
    print("|---|---|---|---|---|---|---|")
    for shape in options.shapes.split(","):
        for name in options.names.split(","):
            try:
                row = measure(name, shape, options.repeats, options.device)
            except (ImportError, AttributeError, RuntimeError) as error:
                print(f"| {shape} | {name} | {type(error).__name__}: {str(error).splitlines()[0][:90]} |", flush=True)
                continue
            errors = " | ".join(f"{error:.1e}" for error in row["errors"])
            print(f"| {shape} | {name} | {row['ms']:.2f} | {row['peak GiB']:.2f} | {errors} |", flush=True)
            if options.jsonl:
                with open(options.jsonl, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
