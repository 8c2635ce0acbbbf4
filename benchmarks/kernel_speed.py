"""Measure the kernels on this GPU: bytes a second beside a copy of the device's, after a check against the oracle.

    python -m benchmarks.kernel_speed [--rows 16384] [--cols 14336] [--repeats 20] [--only WORD] [--json FILE]

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
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import milliseconds
from tests.kernels import cases as case_table
from tests.kernels.cases.base import KernelCase, bytes_of

DEVICE = "cuda"


def cases(x: Tensor) -> dict[str, Callable[[], KernelCase]]:
    """Those of the case table that are timed, by name; each as a function, so that what one needs is freed before the
    next."""
    return {name: partial(row.make, x, **row.cases[name]) for row in case_table.ROWS for name in row.timed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="a word of the cases to run, such as quantize, amax, Adam")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernel_speed.py: there is no GPU that torch can use")
    x = torch.randn(given.rows, given.cols, device=DEVICE, dtype=torch.bfloat16)
    other = torch.empty_like(x)
    copy = statistics.median(milliseconds(lambda: other.copy_(x), given.repeats, DEVICE))
    bandwidth = 2 * bytes_of(x) / copy
    print(f"## {torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}\n")
    print(f"bf16 [{given.rows}, {given.cols}], medians of {given.repeats}; a copy moves {bandwidth / 1e9:.2f} TB/s\n")
    print("| kernel | ms (min, max) | TB/s | of copy | right |\n|---|---|---|---|---|")
    results = {}
    for name, make in cases(x).items():
        if given.only not in name:
            continue
        case = make()
        is_right = case.is_right()
        times = milliseconds(case.launch, given.repeats, DEVICE)
        middle = statistics.median(times)
        rate = case.moved / middle
        results[name] = {"ms": times, "bytes": case.moved, "of copy": rate / bandwidth, "right": is_right}
        spread = f"{middle:.3f} ({min(times):.3f}, {max(times):.3f})"
        print(f"| {name} | {spread} | {rate / 1e9:.2f} | {rate / bandwidth:.0%} | {is_right} |", flush=True)
        del case
        torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
