"""What a fused kernel does with a tile of values that it computed.

    result = round(values) to the dtype, once
    codes  = quantize(result), and of the transpose            (`quantize.matrix.emit`)
    amax   = max(amax, |result|)                               NaN wins
    poison = NaN if any result is infinite or NaN, else as it was
    sums   = sum of result over rows

Each is optional. Codes saturate, so a gradient that overflowed would come out finite: `poison` is what is added to the
results of its GEMMs. Sums are taken in float32, over the rows of a tile and then over tiles, in an order that depends
on nothing but shape, format and device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.quantize import targets
from quantshard.kernels.quantize.matrix import emit
from quantshard.kernels.quantize.targets import (
    NO_WORDS,
    KernelConfig,
    OutputPointers,
    QuantizedOutput,
    QuantizeRequest,
    Region,
    TileShape,
)


class EpilogueArguments(NamedTuple):
    """Arguments of a kernel: where results go that are not codes; None for what is not asked for."""

    high: Any
    high_stride: int
    amax: Any
    poison: Any
    sums: Any
    sums_stride: int


@triton.jit
def largest_bits(x):
    """The bits of the largest |x| of a float32 tile, int32, in which NaN is larger than infinity."""
    return tl.max(tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1), 0)


@triton.jit
def load_tile(ptr, stride, i, j, valued):
    """Float32 values at local rows i and columns j; zero where there is none."""
    return ql.widen(tl.load(ptr + i.to(tl.int64)[:, None] * stride + j[None, :], mask=valued, other=0.0))


@triton.jit
def deliver(
    values, place, where, sink, out, other_where, other_out,
    k0, k1, draw, stream, width, other_stream, other_width, dtype: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Round a tile of float32 values to dtype and do with it what is asked for; `place`: that of
    `quantize.matrix.tile_of`.

    Values must be zero where there are none.
    """
    row, col, i, j, valued = place
    x = ql.rounded(values, dtype)
    if sink.high is not None:
        at = i.to(tl.int64)[:, None] * sink.high_stride + j[None, :]
        tl.store(sink.high + at, ql.narrow(x, dtype), mask=valued)
    if sink.amax is not None:
        tl.atomic_max(sink.amax, largest_bits(x), sem="relaxed")
    if sink.poison is not None:
        tl.store(sink.poison, float("nan"), mask=largest_bits(x) >= 0x7F800000)
    if sink.sums is not None:
        at = tl.program_id(0).to(tl.int64) * sink.sums_stride + j
        tl.store(sink.sums + at, tl.sum(x, 0), mask=(j >= 0) & (j < where.value_cols))
    words = (k0, k1, draw, stream, width)
    other_words = (k0, k1, draw, other_stream, other_width)
    emit(x, row, col, where, out, words, other_where, other_out, other_words, dtype, H, T)


# ------------------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class EpilogueRequest:
    """What is asked for of one matrix of results [R, C]; the tensors are the caller's, and are written by the kernel.

    Args:
        request: how they are quantized.
        other: how their transpose is, with scales of its own. Words of both have one key and draw.
        high: the results themselves, [R, C] with adjacent columns, of the kernel's dtype.
        amax: float32 scalar, made the larger of itself and the amax of the results; NaN wins.
        poison: float32 scalar, made NaN if not all results are finite, else left as it is.
        sums: [C], any float dtype: the sum of the rounded results over rows, taken in float32.
    """

    request: QuantizeRequest | None = None
    other: QuantizeRequest | None = None
    high: Tensor | None = None
    amax: Tensor | None = None
    poison: Tensor | None = None
    sums: Tensor | None = None

    @property
    def quantizes(self) -> bool:
        """Whether codes are asked for."""
        return self.request is not None or self.other is not None

    @property
    def tile(self) -> TileShape:
        """The smallest that has whole blocks of both directions, and is written fast in both."""
        one, two = (request.block if request is not None else (1, 1) for request in (self.request, self.other))
        blocks = TileShape(max(one[0], two[1]), max(one[1], two[0]))
        if self.other is None:
            return blocks
        return blocks._replace(together=16) if self.other.scaling.random_hadamard else targets.smallest_tile(blocks)

    def extent(self, rows: int, cols: int) -> Region:
        """Where the results lie in the global matrix, and how many columns codes have besides."""
        origin = self.request.origin if self.request else self.other.origin[::-1] if self.other else (0, 0)
        return Region(rows, cols + _padding(cols, self.request), cols, *origin)

    def programs(self, rows: int, cols: int, tile: TileShape) -> tuple[int, int]:
        """Tiles along both dims; either direction may pad."""
        where = self.extent(rows, cols)
        return (
            targets.touched(where.row_origin, rows + _padding(rows, self.other), tile.rows),
            targets.touched(where.col_origin, where.cols, tile.cols),
        )


def _padding(size: int, request: QuantizeRequest | None) -> int:
    return -size % 16 if request is not None and request.scaling.random_hadamard else 0


Targets = tuple[QuantizedOutput | None, QuantizedOutput | None]
"""Codes and scales of a matrix and of its transpose, as far as asked for."""

TILE: Final = TileShape(32, 256)
"""The tile of a kernel that quantizes nothing."""

_MOST_REGISTERS: Final = 255
"""The most registers that a thread can have."""


@dataclass(frozen=True)
class EpilogueLaunch:
    """`EpilogueRequest` as the arguments of a kernel."""

    outputs: EpilogueRequest
    targets: Targets
    tile: TileShape
    where: Region
    sink: EpilogueArguments
    programs: tuple[int, int]

    @property
    def out(self) -> tuple[OutputPointers | None, Region | None, OutputPointers | None]:
        """Arguments of `deliver` after `sink`."""
        one, two = self.targets
        return one.out if one else None, two.where if two else None, two.out if two else None

    @property
    def words(self) -> tuple[Any, ...]:
        """Arguments of `deliver` after those of `out`."""
        one, two = (NO_WORDS if target is None else target.words for target in self.targets)
        drawn = one if self.outputs.request is not None and self.outputs.request.words is not None else two
        widths = one.global_shape[1], two.global_shape[1]
        return *targets.halves(drawn.key), drawn.draw, one.stream, widths[0], two.stream, widths[1]

    @property
    def how(self) -> tuple[KernelConfig | None, KernelConfig | None]:
        """Constants H and T of `deliver`."""
        one, two = self.targets
        return one.how if one else None, two.how if two else None

    def launch(self, backward: bool = False) -> dict[str, Any]:
        """Keyword arguments of a launch: warps and, where the compiler would take more, the registers of a thread with
        which two programs run beside each other, or three of four warps, as some wait for memory or for their threads.

        Measured on an H200; forward, in one direction, a bound makes the compiler take more registers than without.
        """
        size = self.tile.rows * self.tile.cols
        both = self.tile.together == targets.BOTH_WAYS.together
        if both:
            warps = self.tile.warps
        else:
            warps = min(max(targets.WARPS, size // (512 if backward and self.tile.together == 1 else 1024)), 16)
        registers = targets.registers(warps, 3 if backward and warps == 4 else 2)
        bound = both or (backward and self.tile.together == 1)
        return {"num_warps": warps, "maxnreg": registers if bound and registers <= _MOST_REGISTERS else None}

    def finish(self) -> Targets:
        """What is left to do after the launch; the targets."""
        if self.outputs.sums is not None:
            self.outputs.sums.copy_(self.sink.sums.sum(0))
        return self.targets


def _joint(one: TileShape, other: TileShape) -> TileShape:
    """Whole blocks of both. Rows are held in order unless the transpose has scales of its own: beside what such a
    kernel computes, another order is slower."""
    joint = TileShape(*map(max, one, other))
    if joint.together == targets.BOTH_WAYS.together:
        return joint
    return joint._replace(rows=max(joint.rows, 64), cols=max(joint.cols, 128))


def plan_epilogue(outputs: EpilogueRequest, like: Tensor, beside: EpilogueRequest | None = None) -> EpilogueLaunch:
    """For results of the shape and dtype of `like` [R, C]; `beside`: other results of the same kernel."""
    (rows, cols), beside = like.shape, beside or outputs
    tile = TILE
    if outputs.quantizes or beside.quantizes:
        tile = _joint(outputs.tile, beside.tile)
    one = two = None
    if outputs.request is not None:
        one = targets.target((rows, cols), like.dtype, like.device, outputs.request, tile)
    if outputs.other is not None:
        two = targets.target((cols, rows), like.dtype, like.device, outputs.other, tile, held_transposed=True)
    leader = outputs if outputs.quantizes else beside
    programs = leader.programs(rows, cols, tile)
    high, sums = outputs.high, None
    assert high is None or high.shape == like.shape, "high must have the shape of the results"
    if outputs.sums is not None:
        sums = torch.zeros((programs[0], cols), dtype=torch.float32, device=like.device)
    amax = None if outputs.amax is None else outputs.amax.view(torch.int32)
    sink = EpilogueArguments(high, 0 if high is None else high.stride(0), amax, outputs.poison, sums, cols)
    return EpilogueLaunch(outputs, (one, two), tile, leader.extent(rows, cols), sink, programs)


def matrix(x: Tensor) -> Tensor:
    """x [..., C] as [R, C]; a scalar as [1, 1]."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), *(x.shape[-1:] or (1,)))


def by_rows(x: Tensor) -> Tensor:
    """x [R, C] with the elements of a row next to each other, as kernels read it; itself if they are."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
