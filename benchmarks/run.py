"""Measure quantization, linear layers and optimizer steps on this machine, as ratios to baselines of the same run.

    python benchmarks/run.py [--device cpu|cuda] [--size N] [--repeats N]

Prints three Markdown tables: quantize and dequantize in plain PyTorch against a copy; forward and backward of a linear
layer against BF16; a FusedAdam step against torch.optim.AdamW in float32.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import quantshard as qs
from benchmarks.harness import DEVICE, make_parser, synchronize, table_head, table_row
from quantshard import numerics
from quantshard.formats import FORMATS
from quantshard.optimizers import FusedAdam

RECIPES = ("bf16", "delayed", "current", "block", "mxfp8", "nvfp4")
UNTIMED_CALLS = 2


def seconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median wall time of a call that is synchronized with the device."""
    times = []
    for _ in range(repeats + UNTIMED_CALLS):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[UNTIMED_CALLS:])


def print_table(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    print(f"\n### {title}\n\n{table_head(columns)}")
    for row in rows:
        print(table_row(row))


def measure_formats(size: int, device: str, repeats: int) -> None:
    """Compare quantizing and dequantizing a BF16 matrix with copying it."""
    x = torch.randn(size, size, device=device).bfloat16()
    copy = seconds(x.clone, device, repeats)
    rows = [["copy", f"{copy * 1e3:.2f} ms", "1"]]
    for name, fmt in FORMATS.items():
        quantize = seconds(lambda fmt=fmt: numerics.quantize(x, fmt), device, repeats)
        parts = numerics.quantize(x, fmt)
        first = next(iter(fmt.copies.values()))
        dequantize = seconds(
            lambda first=first, parts=parts: numerics.dequantize(first, parts, (size, size)), device, repeats
        )
        times = f"{quantize * 1e3:.2f} ms, {dequantize * 1e3:.2f} ms"
        rows.append([name, times, f"{quantize / copy:.1f}, {dequantize / copy:.1f}"])
    print_table(f"Oracle, {size} x {size} bf16", ("format", "quantize, dequantize", "times a copy"), rows)


def measure_layers(size: int, device: str, repeats: int) -> None:
    """Compare forward and backward of one linear layer with BF16."""
    rows, baseline = [], 0.0
    x = torch.randn(size, size, device=device).bfloat16().requires_grad_()
    for recipe in RECIPES:
        layer = make_layer(recipe, size, device)

        def step(layer: qs.Linear = layer, recipe: str = recipe) -> None:
            with qs.autocast(recipe=recipe):
                out = layer(x)
            out.backward(torch.ones_like(out))

        duration = seconds(step, device, repeats)
        baseline = baseline or duration
        rows.append([recipe, f"{duration * 1e3:.2f} ms", f"{duration / baseline:.2f}"])
    title = f"Linear {size} x {size}, {size} tokens, forward and backward"
    print_table(title, ("recipe", "time", "times BF16"), rows)


def measure_optimizers(size: int, device: str, repeats: int) -> None:
    """Compare a FusedAdam step of one weight with torch.optim.AdamW in float32."""
    weight = torch.nn.Parameter(torch.randn(size, size, device=device))
    weight.grad = torch.randn_like(weight)
    adamw = seconds(torch.optim.AdamW([weight]).step, device, repeats)
    rows = [["torch.optim.AdamW, float32", f"{adamw * 1e3:.2f} ms", "1"]]
    for recipe in RECIPES:
        for moments, name in ((torch.float32, "float32"), (torch.uint8, "FP8")):
            layer = make_layer(recipe, size, device)
            layer.weight.grad = torch.randn(size, size, device=device).bfloat16()
            optimizer = FusedAdam(layer.parameters(), exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
            duration = seconds(optimizer.step, device, repeats)
            rows.append([f"{recipe}, {name} moments", f"{duration * 1e3:.2f} ms", f"{duration / adamw:.2f}"])
    print_table(f"FusedAdam, {size} x {size}", ("weight", "step", "times AdamW"), rows)


def make_layer(recipe: str, size: int, device: str) -> qs.Linear:
    with qs.quantized_model_init(recipe=recipe):
        return qs.Linear(size, size, bias=False, params_dtype=torch.bfloat16, device=device)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--size", type=int, default=0, help="rows and columns (default: 4096, on a CPU 1024)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device, size = options.device, options.size or (4096 if options.device == "cuda" else 1024)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    print(f"## {name}, {datetime.date.today()}\n\ntorch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    for measure in (measure_formats, measure_layers, measure_optimizers):
        measure(size, device, options.repeats)


if __name__ == "__main__":
    main()
