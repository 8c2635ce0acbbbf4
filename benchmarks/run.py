"""Measure quantshard on this machine, each figure as a ratio to something named in the same run.

    python benchmarks/run.py [--device cpu|cuda] [--size N] [--repeats N]

Prints Markdown tables. Results that are kept stand in RESULTS.md, with device, versions and date, also the bad ones.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import quantshard as qs
from quantshard import numerics
from quantshard.formats import FORMATS
from quantshard.optimizers import FusedAdam

RECIPES = ("bf16", "delayed", "current", "block", "mxfp8", "nvfp4")


def seconds(function: Callable[[], Any], device: str, repeats: int) -> float:
    """Median time of one call, after two that are not counted."""
    times = []
    for index in range(repeats + 2):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        if index > 1:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(title: str, header: str, rows: list[str]) -> None:
    columns = header.count("|") + 1
    print(f"\n### {title}\n\n| {header} |\n|{'---|' * columns}")
    for row in rows:
        print(f"| {row} |")


def formats(size: int, device: str, repeats: int) -> None:
    """Quantizing and dequantizing a bf16 matrix, beside copying it."""
    x = torch.randn(size, size, device=device).bfloat16()
    copy = seconds(x.clone, device, repeats)
    rows = [f"copy | {copy * 1e3:.2f} ms | 1"]
    for name, fmt in FORMATS.items():
        there = seconds(lambda fmt=fmt: numerics.quantize(x, fmt), device, repeats)
        parts = numerics.quantize(x, fmt)
        first = next(iter(fmt.copies.values()))
        back = seconds(
            lambda first=first, parts=parts: numerics.dequantize(first, parts, (size, size)), device, repeats
        )
        rows.append(f"{name} | {there * 1e3:.2f} ms, {back * 1e3:.2f} ms | {there / copy:.1f}, {back / copy:.1f}")
    table(f"Oracle, {size} x {size} bf16", "format | quantize, dequantize | times a copy", rows)


def layers(size: int, device: str, repeats: int) -> None:
    """Forward and backward of one linear layer, beside BF16."""
    rows, baseline = [], 0.0
    x = torch.randn(size, size, device=device).bfloat16().requires_grad_()
    for recipe in RECIPES:
        with qs.quantized_model_init(recipe=recipe):
            layer = qs.Linear(size, size, bias=False, params_dtype=torch.bfloat16, device=device)

        def step(layer: qs.Linear = layer, recipe: str = recipe) -> None:
            with qs.autocast(recipe=recipe):
                out = layer(x)
            out.backward(torch.ones_like(out))

        took = seconds(step, device, repeats)
        baseline = baseline or took
        rows.append(f"{recipe} | {took * 1e3:.2f} ms | {took / baseline:.2f}")
    table(f"Linear {size} x {size}, {size} tokens, forward and backward", "recipe | time | times BF16", rows)


def optimizers(size: int, device: str, repeats: int) -> None:
    """One step over one weight, beside torch.optim.AdamW on float32."""
    weight = torch.nn.Parameter(torch.randn(size, size, device=device))
    weight.grad = torch.randn_like(weight)
    stock = seconds(torch.optim.AdamW([weight]).step, device, repeats)
    rows = [f"torch.optim.AdamW, float32 | {stock * 1e3:.2f} ms | 1"]
    for recipe in RECIPES:
        for moments in (torch.float32, torch.uint8):
            with qs.quantized_model_init(recipe=recipe):
                layer = qs.Linear(size, size, bias=False, params_dtype=torch.bfloat16, device=device)
            layer.weight.grad = torch.randn(size, size, device=device).bfloat16()
            optimizer = FusedAdam(layer.parameters(), exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
            took = seconds(optimizer.step, device, repeats)
            name = "float32" if moments is torch.float32 else "FP8"
            rows.append(f"{recipe}, {name} moments | {took * 1e3:.2f} ms | {took / stock:.2f}")
    table(f"FusedAdam, {size} x {size}", "weight | step | times AdamW", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    size = given.size or (4096 if given.device == "cuda" else 1024)
    where = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine()
    print(f"## {where}, {datetime.date.today()}\n\ntorch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    for measure in (formats, layers, optimizers):
        measure(size, given.device, given.repeats)


if __name__ == "__main__":
    main()
