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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.formats import ALL, FORMATS, Copy, Format, Role, Scaling
from quantshard.kernels import amax, dequantize, transpose
from quantshard.kernels.quantize import Request, quantize
from quantshard.numerics import Words


class Case(NamedTuple):
    """One kernel: how to call it on a matrix, the bytes that it moves, and whether its result is the oracle's."""

    name: str
    call: Callable[[], Any]
    moved: int
    is_right: Callable[[Any], bool]


def milliseconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Times of `repeats` calls on the GPU, after three that are not counted."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats + 3)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events[3:]]


def bytes_of(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.itemsize for t in tensors if t is not None)


def same(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.equal(found.contiguous().view(torch.uint8), expected.view(torch.uint8))


def one_way(x: Tensor, fmt: Format, turned: bool, next_amax: bool) -> Case:
    """Codes and scales by rows, and the transpose's codes: with the amax known, or taken from the blocks."""
    copy, scaling = fmt.copies[Copy.ROWWISE], Scaling()
    grids = numerics.amaxes(x, fmt)
    known = numerics.encode_scales(grids, fmt, scaling, x.dtype)[copy.scale.name] if ALL in copy.block else None
    request = Request(copy, scaling, multipliers=known, second_amax=grids.get("amax"), turned=turned)
    seen = torch.zeros((), device=x.device) if next_amax else None
    sample, _ = quantize(x, request, None, seen)
    expected = numerics.quantize(x, fmt)

    def is_right(found: Any) -> bool:
        target, _ = found
        codes = expected[copy.codes.name]
        if turned and not same(target.turned, numerics.transpose_parts(fmt, expected, x.shape)[copy.codes.name]):
            return False
        return same(target.codes, codes) and (known is not None or same(target.scale, expected[copy.scale.name]))

    name = f"quantize {fmt.name}" + (" + transpose" if turned else "") + (" + next amax" if next_amax else "")
    moved = bytes_of(x, sample.codes, sample.scale, sample.turned)
    return Case(name, lambda: quantize(x, request, None, seen), moved, is_right)


def both_ways(x: Tensor, fmt: Format, scaling: Scaling) -> Case:
    """Codes and scales by rows and, with scales of their own, by columns."""
    copy = fmt.copies[Copy.ROWWISE]
    padded = x.shape[0] + (-x.shape[0] % 16 if scaling.random_hadamard else 0)  # what the transform sees of a column
    shapes = [(x.shape[0], x.shape[1]), (x.shape[1], padded)]
    words = [Words(5, 1, stream, shape) for stream, shape in enumerate(shapes)]
    expected, requests = [], []
    for values, drawn, way in (
        (x, words[0], Scaling(stochastic_rounding=scaling.stochastic_rounding)),
        (x.t(), words[1], scaling),
    ):
        tensor = {Copy.ROWWISE: drawn.tensor(x.device)} if way.stochastic_rounding else None
        parts = numerics.quantize(values, fmt, way, words=tensor)
        expected.append(parts)
        requests.append(
            Request(copy, way, second_amax=parts.get("amax"), words=drawn if way.stochastic_rounding else None)
        )
    sample = quantize(x, *requests)

    def is_right(found: Any) -> bool:
        return all(
            same(target.codes, parts[copy.codes.name]) and same(target.scale, parts[copy.scale.name])
            for target, parts in zip(found, expected, strict=True)
        )

    extras = [word for word in ("stochastic_rounding", "random_hadamard") if getattr(scaling, word)]
    moved = bytes_of(x, *(part for target in sample if target for part in (target.codes, target.scale)))
    name = f"quantize {fmt.name}, both directions" + "".join(f" + {extra}" for extra in extras)
    return Case(name, lambda: quantize(x, *requests), moved, is_right)


def amaxes(x: Tensor, fmt: Format) -> Case:
    (part,) = (c for c in fmt.components if c.role is Role.SCALE)
    expected = numerics.block_amax(x, part.covers)
    moved = bytes_of(x, expected)
    return Case(f"amax {fmt.name}", lambda: amax.block_amax(x, part.covers), moved, lambda out: same(out, expected))


def back(x: Tensor, fmt: Format) -> Case:
    copy, shape, parts = fmt.copies[Copy.ROWWISE], (x.shape[0], x.shape[1]), numerics.quantize(x, fmt)
    expected = numerics.dequantize(copy, parts, shape).bfloat16()
    moved = bytes_of(expected, *parts.values())
    call = lambda: dequantize.dequantize(copy, parts, shape, dtype=torch.bfloat16)  # noqa: E731
    return Case(f"dequantize {fmt.name} to bf16", call, moved, lambda out: same(out, expected))


def turn(x: Tensor) -> Case:
    codes = x.view(torch.uint8)[:, : x.shape[1]].contiguous()
    return Case(
        "transpose of bytes", lambda: transpose.transpose(codes), 2 * bytes_of(codes),
        lambda out: same(out, codes.t().contiguous()),
    )  # fmt: skip


def cases(x: Tensor) -> list[Callable[[], Case]]:
    """Each as a function, so that what one needs is freed before the next."""
    row = FORMATS
    per_tensor, blocks = row["fp8_e4m3"], row["fp8_128x128"]
    return [
        lambda: one_way(x, per_tensor, False, False),
        lambda: one_way(x, per_tensor, False, True),
        lambda: one_way(x, per_tensor, True, True),
        lambda: one_way(x, row["fp8_e5m2"], True, True),
        lambda: one_way(x, row["fp8_1xrow"], False, False),
        lambda: one_way(x, blocks, False, False),
        lambda: one_way(x, blocks, True, False),
        lambda: one_way(x, row["fp8_1x128"], False, False),
        lambda: both_ways(x, row["fp8_1x128"], Scaling()),
        lambda: one_way(x, row["mxfp8_1x32"], False, False),
        lambda: one_way(x, row["mxfp8_32x32"], True, False),
        lambda: both_ways(x, row["mxfp8_1x32"], Scaling()),
        lambda: one_way(x, row["nvfp4_1x16"], False, False),
        lambda: both_ways(x, row["nvfp4_1x16"], Scaling(stochastic_rounding=True, random_hadamard=True)),
        lambda: amaxes(x, per_tensor),
        lambda: amaxes(x, row["fp8_1xrow"]),
        lambda: back(x, per_tensor),
        lambda: back(x, row["mxfp8_32x32"]),
        lambda: back(x, row["nvfp4_16x16"]),
        lambda: turn(x),
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
    copy = statistics.median(milliseconds(lambda: other.copy_(x), given.repeats))
    bandwidth = 2 * bytes_of(x) / copy
    print(f"## {torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}\n")
    print(f"bf16 [{given.rows}, {given.cols}], medians of {given.repeats}; a copy moves {bandwidth / 1e9:.2f} TB/s\n")
    print("| kernel | ms (min, max) | TB/s | of copy | oracle's bits |\n|---|---|---|---|---|")
    results = {}
    for make in cases(x):
        case = make()
        is_right = case.is_right(case.call())
        times = milliseconds(case.call, given.repeats)
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
