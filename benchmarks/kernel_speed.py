"""Measure the memory throughput of quantshard's kernels on this GPU, as a fraction of a device copy.

    python -m benchmarks.kernel_speed [--rows 16384] [--cols 14336] [--repeats 20] [--only WORD] [--json FILE]

The default shape is the activations of a Llama-3-8B block with 2 x 8192 tokens. "TB/s" counts only bytes that a
kernel must move: values read once, codes and scales written once. "of copy" is relative to copying a BF16 matrix of
this shape. "right" is the result of a comparison with plain PyTorch before timing.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import heading, make_parser, milliseconds, spread, table_head, table_row
from tests.kernels import cases as case_table
from tests.kernels.cases.base import KernelCase, bytes_of

DEVICE = "cuda"


def cases(x: Tensor) -> dict[str, Callable[[], KernelCase]]:
    """Return factories of the timed cases by name, so that a case is freed before the next is built."""
    return {name: partial(row.make, x, **row.cases[name]) for row in case_table.ROWS for name in row.timed}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="run cases whose name contains this, such as quantize, amax, Adam")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernel_speed.py: needs a GPU that torch can use")
    x = torch.randn(options.rows, options.cols, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = statistics.median(milliseconds(lambda: y.copy_(x), options.repeats, DEVICE))
    bandwidth = 2 * bytes_of(x) / copy
    print(f"{heading('cuda')}\n\nbf16 [{options.rows}, {options.cols}], medians of {options.repeats}; ", end="")
    print(f"a copy moves {bandwidth / 1e9:.2f} TB/s\n")
    print(table_head(("kernel", "ms (min, max)", "TB/s", "of copy", "right")))
    results = {}
    for name, make_case in cases(x).items():
        if options.only not in name:
            continue
        case = make_case()
        is_right = case.is_right()
        times = milliseconds(case.launch, options.repeats, DEVICE)
        rate = case.moved / statistics.median(times)
        results[name] = {"ms": times, "bytes": case.moved, "of copy": rate / bandwidth, "right": is_right}
        cells = (name, spread(times, 3), f"{rate / 1e9:.2f}", f"{rate / bandwidth:.0%}", is_right)
        print(table_row(cells), flush=True)
        del case
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
