"""What a fused kernel does with a tile of values that it computed.

    result = round(values) to the dtype, once
    codes  = quantize(result), and of the transpose            (`quantize.matrix.emit`)
    amax   = max(amax, |result|)                               NaN wins
    poison = NaN if any result is infinite or NaN, else as it was
    sums   = sum of result over rows
    amaxes of blocks of result, and of its transpose           (`quantize.amax.measure`)

Each is optional, and codes and amaxes of blocks exclude each other. Codes saturate, so a gradient that overflowed would
come out finite: `nan_flag` is what is added to the results of its GEMMs. Sums are taken in float32, over the rows of a
tile and then over tiles, in an order that depends on nothing but shape, format and device.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.quantize.amax import measure, plan_amaxes
from quantshard.kernels.quantize.matrix import NAN, emit
from quantshard.kernels.quantize.random_words import NO_KEY, NO_STREAMS, random_arguments
from quantshard.kernels.quantize.targets import (
    BOTH_WAYS,
    MOST_PLANS,
    WARPS,
    KernelOutputs,
    QuantizePlan,
    QuantizeSpec,
    Region,
    Rounding,
    Specs,
    Targets,
    TileShape,
    layout,
    padding,
    registers,
    smallest_tile,
    touched,
)
from quantshard.numerics import Pair


class EpilogueArguments(NamedTuple):
    """Arguments of a kernel: where results go that are not codes; None for what is not asked for."""

    high: Any
    high_stride: int
    amax: Any
    nan_flag: Any
    sums: Any
    sums_stride: int
    spans: Any = None
    """How many blocks there are along rows and columns, of the results and of their transpose, if they are measured."""


@triton.jit
def load_tile(ptr, stride, i, j, valued):
    """Float32 values at local rows i and columns j; zero where there is none."""
    return ql.widen(tl.load(ptr + i.to(tl.int64)[:, None] * stride + j[None, :], mask=valued, other=0.0))


@triton.jit
def deliver(
    values, place, where, sink, out, other_where, other_out,
    key, stream, width, other_stream, other_width, dtype: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Round a tile of float32 values to dtype and do with it what is asked for; `place`: that of
    `quantize.matrix.tile_of`; `out`, `other_out`: where amaxes go, if blocks are measured.

    Values must be zero where there are none.
    """
    row, col, i, j, valued = place
    x = ql.rounded(values, dtype)
    if sink.high is not None:
        at = i.to(tl.int64)[:, None] * sink.high_stride + j[None, :]
        tl.store(sink.high + at, ql.narrow(x, dtype), mask=valued)
    if sink.amax is not None:
        tl.atomic_max(ql.as_bits(sink.amax), ql.largest_bits(x), sem="relaxed")
    if sink.nan_flag is not None:  # not a store: a scale may be written there by another program
        tl.atomic_max(ql.as_bits(sink.nan_flag), NAN, mask=ql.largest_bits(x) >= 0x7F800000, sem="relaxed")
    if sink.sums is not None:
        at = tl.program_id(0).to(tl.int64) * sink.sums_stride + j
        tl.store(sink.sums + at, tl.sum(x, 0), mask=(j >= 0) & (j < where.value_cols))
    if sink.spans is not None:
        measure(x, row, col, where, out, sink.spans[0], other_where, other_out, sink.spans[1], dtype, H, T)
    else:
        words = (key, stream, width)
        other_words = (key, other_stream, other_width)
        emit(x, row, col, where, out, words, other_where, other_out, other_words, dtype, H, T)


# ------------------------------------------------------------------------------------------------------------- launch


TILE: Final = TileShape(32, 256)
"""The tile of a kernel that quantizes nothing."""

_MOST_REGISTERS: Final = 255
"""The most registers that a thread can have."""


class EpilogueLaunch(NamedTuple):
    """`KernelOutputs` as the launch of a kernel. `arguments`: those of `deliver` that follow the tile's place."""

    targets: Targets
    programs: Pair
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    sums: Tensor | None
    partial: Tensor | None

    def finish(self) -> Targets:
        """What is left to do after the launch; the targets."""
        if self.sums is not None and self.partial is not None:
            self.sums.copy_(self.partial.sum(0))
        return self.targets


def plan_epilogue(
    outputs: KernelOutputs, like: Tensor, beside: KernelOutputs | None = None, backward: bool = False
) -> EpilogueLaunch:
    """For results of the shape and dtype of `like` [R, C]; `beside`: other results of the same kernel."""
    one, two, high, amax, nan_flag, sums, measured = outputs
    if measured is not None or (beside is not None and beside.measured is not None):
        return _plan_measurement(outputs, beside, like, backward)
    key, streams, *roundings = random_arguments(one, two)
    plan = _plan(
        outputs.specs, None if beside is None else beside.specs, like.shape, like.dtype, like.device, backward,
        *roundings,
    )  # fmt: skip
    partial, cols = None, like.shape[1]
    assert high is None or high.shape == like.shape, "high must have the shape of the results"
    if sums is not None:
        new = torch.empty if like.numel() > 0 else torch.zeros
        partial = new((plan.programs[0], cols), dtype=torch.float32, device=like.device)
    targets = plan.outputs(one, two, like.device)
    sink = EpilogueArguments(high, 0 if high is None else high.stride(0), amax, nan_flag, partial, cols)
    arguments = plan.where, sink, targets[0], plan.two and plan.two.where, targets[1], *key, *streams
    return EpilogueLaunch(targets, plan.programs, arguments, plan.constants, sums, partial)


def _plan_measurement(
    outputs: KernelOutputs, beside: KernelOutputs | None, like: Tensor, backward: bool
) -> EpilogueLaunch:
    """The same where amaxes of blocks are asked for, of these results or of others beside them, or of both alike."""
    _, _, high, amax, nan_flag, sums, measured = outputs
    of_tile = measured or (beside and beside.measured)
    assert of_tile, "nothing is measured"
    assert outputs.specs == (None, None) and sums is None, "what is quantized, or summed, is measured by another launch"
    assert high is None or high.shape == like.shape, "high must have the shape of the results"
    plan = plan_amaxes(like.shape, of_tile.one, of_tile.two)
    # kernels do not compare a tuple that holds None
    kinds, spans, (one, two) = plan.kinds, (plan.spans or (0, 0), plan.other_spans or (0, 0)), of_tile.grids
    if measured is None:
        kinds, one, two = dict.fromkeys(kinds), None, None
    sink = EpilogueArguments(high, 0 if high is None else high.stride(0), amax, nan_flag, None, 0, spans)
    constants = {"TILE": plan.tile, **kinds, **_launch_options(plan.tile, backward)}
    arguments = plan.where, sink, one, plan.other, two, *NO_KEY, *NO_STREAMS
    return EpilogueLaunch((None, None), plan.programs, arguments, constants, None, None)


@lru_cache(MOST_PLANS)
def _plan(
    specs: Specs, beside: Specs | None, shape: Pair, dtype: torch.dtype, device: torch.device, backward: bool,
    rounding: Rounding | None, other_rounding: Rounding | None,
) -> QuantizePlan:  # fmt: skip
    (spec, other), leader, (rows, cols) = specs, specs, shape
    tile = TILE
    if specs != (None, None) or beside not in (None, (None, None)):
        tile = _joint(_tile(*specs), _tile(*(beside or specs)))
        leader = specs if specs != (None, None) or beside is None else beside
    one = two = None
    if spec is not None:
        one = layout(spec, (rows, cols), dtype, device, tile, rounding)
    if other is not None:
        two = layout(other, (cols, rows), dtype, device, tile, other_rounding, transposed=True)
    first, second = leader
    origin = first.origin if first is not None else second.origin[::-1] if second is not None else (0, 0)
    where = Region(rows, cols + padding(cols, first), cols, *origin)
    programs = (  # either direction may pad
        touched(where.row_origin, rows + padding(rows, second), tile.rows),
        touched(where.col_origin, where.cols, tile.cols),
    )
    constants = {"TILE": tile, "H": one and one.how, "T": two and two.how, **_launch_options(tile, backward)}
    return QuantizePlan(one, two, where, programs, constants)


def _tile(spec: QuantizeSpec | None, other: QuantizeSpec | None) -> TileShape:
    """The smallest that has whole blocks of both directions, and is written fast in both."""
    one, two = ((1, 1) if each is None else each.block for each in (spec, other))
    blocks = TileShape(max(one[0], two[1]), max(one[1], two[0]))
    if other is None:
        return blocks
    return blocks._replace(together=16) if other.scaling.random_hadamard else smallest_tile(blocks)


def _joint(one: TileShape, other: TileShape) -> TileShape:
    """Whole blocks of both. Rows are held in order unless the transpose has scales of its own: beside what such a
    kernel computes, another order is slower."""
    joint = TileShape(*map(max, one, other))
    if joint.together == BOTH_WAYS.together:
        return joint
    return joint._replace(rows=max(joint.rows, 64), cols=max(joint.cols, 128))


def _launch_options(tile: TileShape, backward: bool) -> dict[str, Any]:
    """Warps and, where the compiler would take more, the registers of a thread with which two programs run beside each
    other, or three of four warps, as some wait for memory or for their threads.

    Measured on an H200; forward, in one direction, a bound makes the compiler take more registers than without. Where
    columns are transformed, a warp has the rows of a block, and then the compiler does best.
    """
    if tile.together == 16:
        return {"num_warps": tile.warps}
    size, both = tile.rows * tile.cols, tile.together == BOTH_WAYS.together
    if both:
        warps = tile.warps
    else:
        warps = min(max(WARPS, size // (512 if backward and tile.together == 1 else 1024)), 16)
    most = registers(warps, 3 if backward and warps == 4 else 2)
    bound = both or (backward and tile.together == 1)
    return {"num_warps": warps, "maxnreg": most if bound and most <= _MOST_REGISTERS else None}


def matrix(x: Tensor) -> Tensor:
    """x [..., C] as [R, C]; a scalar as [1, 1]."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), *(x.shape[-1:] or (1,)))


def by_rows(x: Tensor) -> Tensor:
    """x [R, C] with the elements of a row next to each other, as kernels read it; itself if they are."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
