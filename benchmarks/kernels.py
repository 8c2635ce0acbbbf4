"""Measure the kernels on this GPU: bytes a second beside a copy of the device's, after a check against the oracle.

    python benchmarks/kernels.py [--rows 16384] [--cols 14336] [--repeats 20] [--json FILE]

The default shape is that of the activations of a Llama-3-8B block with 2 x 8192 tokens. Bytes are those that a kernel
must move: values read once, codes and scales written once; so the fraction is of what memory allows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quantshard.doctor.cases import (
    KernelCase,
    amax_case,
    dequantize_case,
    quantize_both_case,
    quantize_case,
    rounded_sum_case,
    transpose_case,
)
from quantshard.doctor.timing import bytes_of, milliseconds
from quantshard.formats import FORMATS, Scaling


def cases(x: Tensor) -> list[Callable[[], KernelCase]]:
    """Each as a function, so that what one needs is freed before the next."""
    row = FORMATS
    per_tensor, blocks = row["fp8_e4m3"], row["fp8_128x128"]
    return [
        lambda: quantize_case(x, per_tensor, False, False),
        lambda: quantize_case(x, per_tensor, False, True),
        lambda: quantize_case(x, per_tensor, True, True),
        lambda: quantize_case(x, row["fp8_e5m2"], True, True),
        lambda: quantize_case(x, row["fp8_1xrow"], False, False),
        lambda: quantize_case(x, blocks, False, False),
        lambda: quantize_case(x, blocks, True, False),
        lambda: quantize_case(x, row["fp8_1x128"], False, False),
        lambda: quantize_both_case(x, row["fp8_1x128"], Scaling()),
        lambda: quantize_case(x, row["mxfp8_1x32"], False, False),
        lambda: quantize_case(x, row["mxfp8_32x32"], True, False),
        lambda: quantize_both_case(x, row["mxfp8_1x32"], Scaling()),
        lambda: quantize_case(x, row["nvfp4_1x16"], False, False),
        lambda: quantize_both_case(x, row["nvfp4_1x16"], Scaling(stochastic_rounding=True, random_hadamard=True)),
        lambda: amax_case(x, per_tensor),
        lambda: amax_case(x, row["fp8_1xrow"]),
        lambda: dequantize_case(x, per_tensor),
        lambda: dequantize_case(x, row["mxfp8_32x32"]),
        lambda: dequantize_case(x, row["nvfp4_16x16"]),
        lambda: transpose_case(x),
        lambda: rounded_sum_case(x),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py: there is no GPU that torch can use")
    x = torch.randn(given.rows, given.cols, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(x)
    copy = statistics.median(milliseconds(lambda: other.copy_(x), given.repeats, "cuda"))
    bandwidth = 2 * bytes_of(x) / copy
    print(f"## {torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}\n")
    print(f"bf16 [{given.rows}, {given.cols}], medians of {given.repeats}; a copy moves {bandwidth / 1e9:.2f} TB/s\n")
    print("| kernel | ms (min, max) | TB/s | of copy | oracle's bits |\n|---|---|---|---|---|")
    results = {}
    for make in cases(x):
        case = make()
        is_right = case.is_right(case.call())
        times = milliseconds(case.call, given.repeats, "cuda")
        middle = statistics.median(times)
        rate = case.moved / middle
        results[case.name] = {"ms": times, "bytes": case.moved, "of copy": rate / bandwidth, "right": is_right}
        spread = f"{middle:.3f} ({min(times):.3f}, {max(times):.3f})"
        print(f"| {case.name} | {spread} | {rate / 1e9:.2f} | {rate / bandwidth:.0%} | {is_right} |", flush=True)
        del case
        torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
