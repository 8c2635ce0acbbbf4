"""Measure an output head with its loss, forward and backward: ms, memory and errors of several implementations.

    python benchmarks/linear_cross_entropy.py [--shapes llama-1b,qwen3-8b] [--names ours,logits,...] [--at-once N]
        [--jsonl FILE]

Implementations: "logits" is F.linear and F.cross_entropy of float32 logits, as in transformers; "torch" is
torch.nn.functional.linear_cross_entropy (torch 2.13); "liger" is Liger's fused kernel; "cce" is Cut Cross-Entropy,
which skips small gradients, and "cce exact" the same without skipping. Implementations that are not installed are
skipped.

"peak GiB" is what a call allocates in addition to its inputs, gradients included. Errors are relative to a loss that
is summed in float64 over chunks of tokens, and to gradients computed in float32.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import quantshard as qs
from benchmarks.harness import DEVICE, GIB, append_json, make_parser, table_head, table_row
from quantshard.modules import chunked_loss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

SHAPES = {"llama-1b": (8192, 2048, 128256), "qwen3-8b": (8192, 4096, 151936), "small": (512, 64, 1000)}
"""Tokens, features, vocabulary."""
CHUNK = 512
"""Tokens of a chunk of the reference."""
COLUMNS = ("shape", "implementation", "ms", "peak GiB", "error of loss", "of grad hidden", "of grad weight")


def loss_of_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def make_torch_loss() -> Loss:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, options=options)


def make_liger_loss() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: loss(weight, hidden, labels)


def make_cce_loss(**options: Any) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, **options)


IMPLEMENTATIONS: dict[str, Callable[[], Loss]] = {
    "logits": lambda: loss_of_logits,
    "ours": lambda: qs.linear_cross_entropy,
    "torch": make_torch_loss,
    "liger": make_liger_loss,
    "cce": make_cce_loss,
    "cce exact": lambda: make_cce_loss(filter_eps=None),
}


def make_inputs(shape: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw BF16 hidden states and a BF16 weight, with logits of standard deviation 2, and labels."""
    tokens, features, vocabulary = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, features, device=device, generator=generator, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, features, device=device, generator=generator, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
    return hidden.requires_grad_(), weight.mul_(2 / features**0.5).requires_grad_(), labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Compute the loss and its float32 gradients in chunks of tokens."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    w = weight.detach().float().requires_grad_()
    hidden_grads = []
    for hidden_chunk, labels_chunk in zip(hidden.detach().split(CHUNK), labels.split(CHUNK), strict=True):
        x = hidden_chunk.float().requires_grad_()
        loss = F.cross_entropy(F.linear(x, w), labels_chunk, reduction="sum") / len(labels)
        loss.backward()
        total += loss.detach().double()
        hidden_grads.append(x.grad)
    assert w.grad is not None
    return [total, torch.cat(hidden_grads), w.grad]


def measure(name: str, shape: str, repeats: int, device: str) -> dict[str, Any]:
    hidden, weight, labels = make_inputs(shape, device)
    expected = reference(hidden, weight, labels)
    loss_function = IMPLEMENTATIONS[name]()

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        loss = loss_function(hidden, weight, labels)
        loss.backward()
        return loss.detach()

    results = [step(), hidden.grad, weight.grad]
    errors = [
        float((a.double() - e.double()).norm() / e.double().norm()) for a, e in zip(results, expected, strict=True)
    ]
    del expected, results
    hidden.grad = weight.grad = None
    ms = peak = 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - allocated) / GIB
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        ms = statistics.median(times)
    return {"name": name, "shape": shape, "ms": ms, "peak GiB": peak, "errors": errors}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default="llama-1b,qwen3-8b", help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--names", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--at-once", type=int, help="overrides quantshard's LOGITS_AT_ONCE, the size of its chunks")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--jsonl", type=Path, help="append each row to this file")
    options = parser.parse_args()
    chunked_loss.LOGITS_AT_ONCE = options.at_once or chunked_loss.LOGITS_AT_ONCE  # type: ignore[misc]
    print(table_head(COLUMNS))
    for shape in options.shapes.split(","):
        for name in options.names.split(","):
            try:
                row = measure(name, shape, options.repeats, options.device)
            except (ImportError, AttributeError, RuntimeError) as error:
                message = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
                print(table_row([shape, name, message]), flush=True)
                continue
            errors = [f"{error:.1e}" for error in row["errors"]]
            print(table_row([shape, name, f"{row['ms']:.2f}", f"{row['peak GiB']:.2f}", *errors]), flush=True)
            if options.jsonl:
                append_json(options.jsonl, row)


if __name__ == "__main__":
    main()
