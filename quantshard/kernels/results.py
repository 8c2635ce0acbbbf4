"""What a fused kernel does with a tile of values that it computed.

    result = round(values) to the dtype, once
    codes  = quantize(result)                                  (`quantize.emit`)
    amax   = max(amax, |result|)                               NaN wins
    poison = NaN if any result is infinite or NaN, else as it was
    sums   = sum of result over rows

Each is optional. Codes saturate, so a gradient that overflowed would come out finite: `poison` is what is added to the
results of its GEMMs. Sums are taken in float32, over the rows of a tile and then over tiles, in an order that depends
on nothing but shape, format and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard import kernels
from quantshard.kernels import quantize
from quantshard.kernels.quantize import How, Target, Where, emit

BY_HAND = tl.constexpr(kernels.INTERPRETED)  # the interpreter truncates to bfloat16, and gets its subnormals wrong


class Tile(NamedTuple):
    """Rows and columns that a program works on; a constant of a kernel."""

    rows: int
    cols: int


class Sink(NamedTuple):
    """Arguments of a kernel: where results go that are not codes; None for what is not asked for."""

    high: Any
    high_stride: int
    amax: Any
    poison: Any
    sums: Any
    sums_stride: int


@triton.jit
def widen(x):
    """Any float dtype -> float32, exactly."""
    if BY_HAND and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 -> dtype, rounded to nearest even."""
    if BY_HAND and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def largest(x):
    """The bits of the largest |x| of a float32 tile, int32, in which NaN is larger than infinity."""
    return tl.max(tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1), 0)


@triton.jit
def load_tile(ptr, stride, i, j, valued):
    """Float32 values at local rows i and columns j; zero where there is none."""
    return widen(tl.load(ptr + i.to(tl.int64)[:, None] * stride + j[None, :], mask=valued, other=0.0))


@triton.jit
def deliver(values, place, where, sink, out, words, dtype: tl.constexpr, H: tl.constexpr):
    """Round a tile of float32 values to dtype and do with it what is asked for; `place`: that of `quantize.tile_of`."""
    row, col, i, j, valued = place
    rounded = narrow(tl.where(valued, values, 0.0), dtype)
    if sink.high is not None:
        at = i.to(tl.int64)[:, None] * sink.high_stride + j[None, :]
        tl.store(sink.high + at, rounded, mask=valued)
    x = widen(rounded)
    if sink.amax is not None:
        tl.atomic_max(sink.amax, largest(x), sem="relaxed")
    if sink.poison is not None:
        tl.store(sink.poison, float("nan"), mask=largest(x) >= 0x7F800000)
    if sink.sums is not None:
        at = tl.program_id(0).to(tl.int64) * sink.sums_stride + j
        tl.store(sink.sums + at, tl.sum(x, 0), mask=(j >= 0) & (j < where.value_cols))
    if H is not None:
        emit(x, row, col, where, out, words, dtype, H)


# ------------------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Outputs:
    """What is asked for of one matrix of results [R, C]; all tensors are the caller's, and are written by the kernel.

    Args:
        target: its codes, from `quantize.target`.
        high: the results themselves, [R, C] with adjacent columns, of the kernel's dtype.
        amax: float32 scalar, made the larger of itself and the amax of the results; NaN wins.
        poison: float32 scalar, made NaN if not all results are finite, else left as it is.
        sums: [C], any float dtype: the sum of the rounded results over rows, taken in float32.
    """

    target: Target | None = None
    high: Tensor | None = None
    amax: Tensor | None = None
    poison: Tensor | None = None
    sums: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """`Outputs` as the arguments of a kernel."""

    outputs: Outputs
    tile: Tile
    where: Where
    sink: Sink
    out: Any
    words: tuple[Any, ...]
    how: How | None
    programs: tuple[int, int]
    partial: Tensor | None

    def warps(self, elements: int = 32) -> int:
        """So many that a thread has this many elements of the tile, or fewer; 8 to 16."""
        return min(max(quantize.WARPS, self.tile.rows * self.tile.cols // (32 * elements)), 16)

    def finish(self) -> None:
        """What is left to do after the launch."""
        if self.outputs.sums is not None and self.partial is not None:
            self.outputs.sums.copy_(self.partial.sum(0))


NO_WORDS = (0, 0, 0, 0, 1)
TILE = Tile(32, 256)
"""Of a kernel that quantizes nothing."""


def plan(outputs: Outputs, shape: Sequence[int], device: torch.device, like: Target | None = None) -> Plan:
    """For results of `shape`. The tiles are those of its target, else of the target `like`, else `TILE`."""
    rows, cols = shape
    target, leader = outputs.target, outputs.target or like
    tile, where, programs = TILE, Where(rows, cols, cols, 0, 0), (-(rows // -TILE.rows), -(cols // -TILE.cols))
    if leader is not None:
        tile, where, programs = Tile(leader.how.rows, leader.how.cols), leader.where, leader.programs
        assert (where.rows, where.value_cols) == (rows, cols), f"a target of {where} for results of {tuple(shape)}"
    partial = None
    if outputs.sums is not None:
        partial = torch.empty((programs[0], cols), dtype=torch.float32, device=device)
    amax = None if outputs.amax is None else outputs.amax.view(torch.int32)
    high = outputs.high
    assert high is None or tuple(high.shape) == (rows, cols), "high must have the shape of the results"
    sink = Sink(high, 0 if high is None else high.stride(0), amax, outputs.poison, partial, cols)
    if target is None:
        return Plan(outputs, tile, where, sink, None, NO_WORDS, None, programs, partial)
    return Plan(outputs, tile, where, sink, target.out, target.words, target.how, programs, partial)


def by_rows(x: Tensor) -> Tensor:
    """x [R, C] with the elements of a row next to each other, as kernels read it; itself if they are."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
