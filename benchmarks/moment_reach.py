"""How far second moments lie below the largest of their 128, by kind of weight, beside what 8-bit formats reach.

    python benchmarks/moment_reach.py CHECKPOINT

CHECKPOINT is one of `quantshard train` whose `exp_avg_sq` is float32 (the default). Second moments of 8 bits have one
scale for 128 elements of a row; what lies below the smallest code beside the largest cannot be told from it. Prints, of
each kind of matrix, how many elements there are, which share lies below the smallest code of E4M3 and of UE5M3, and the
median distance, as a power of two.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quantshard.checkpoints.safe_read import SafeReader
from quantshard.formats import E4M3, UE5M3
from quantshard.interop.layouts.source import optimizer_parameters
from quantshard.numerics.adam import EXP_AVG_SQ

BLOCK: Final = 128
ENCODINGS: Final = (E4M3, UE5M3)


class Reach(NamedTuple):
    """Of second moments: how many that are not alone in their block, shares below the smallest code of `ENCODINGS`,
    and the median of log2 of them beside the largest of their block."""

    elements: int
    below: tuple[float, ...]
    median: float


def beside_largest(values: Tensor) -> Tensor:
    """Of a matrix [R, C] each value beside the largest of its 128 of a row, float32 [n]; blocks of zeros are left
    out."""
    padded = F.pad(values.float(), (0, -values.shape[1] % BLOCK), value=-1.0).reshape(-1, BLOCK)
    top = padded.amax(1, keepdim=True)
    return (padded / top)[(padded >= 0) & (top > 0)]


def reach(values: Tensor) -> Reach:
    """Of what `beside_largest` gave."""
    below = tuple(float((values < encoding.relative_min).double().mean()) for encoding in ENCODINGS)
    return Reach(values.numel(), below, math.log2(max(float(values.median()), 2.0**-149)))


def by_kind(path: Path) -> dict[str, Reach]:
    """The matrices of a checkpoint with float32 second moments, by the last words of their names."""
    reader = SafeReader(path)
    found: dict[str, list[Tensor]] = defaultdict(list)
    for number, name, _ in optimizer_parameters(reader):
        entry = reader.entries.get(key := f"optimizer.state.{number}.{EXP_AVG_SQ}")
        is_tensor = isinstance(entry, TensorStorageMetadata) and len(entry.size) == 2
        if is_tensor and entry.properties.dtype is torch.float32:
            kind = ".".join(part for part in name.split(".") if not part.isdecimal()).removeprefix("layers.")
            found[kind].append(beside_largest(reader.value(key)))
    if not found:
        raise SystemExit(f"{path} has no float32 second moments of matrices under the optimizer's names")
    return {kind: reach(torch.cat(values)) for kind, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    found = by_kind(parser.parse_args().checkpoint)
    print("| matrices | elements |", " | ".join(f"below {each.name}, %" for each in ENCODINGS), "| median, log2 |")
    print("|---" * (3 + len(ENCODINGS)) + "|")
    for kind, each in found.items():
        shares = " | ".join(f"{100 * share:.4f}" for share in each.below)
        print(f"| {kind} | {each.elements:,} | {shares} | {each.median:.1f} |")


if __name__ == "__main__":
    main()
