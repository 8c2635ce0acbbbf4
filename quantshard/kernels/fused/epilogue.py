"""The epilogue of fused kernels: what happens to a tile of computed values.

    result   = round(values) to the dtype, once
    codes    = quantize(result), and of its transpose         (`quantize.matrix.emit`)
    amax     = max(amax, |result|)                            NaN wins
    nan_flag = NaN if any result is infinite or NaN, else unchanged
    sums     = sum of result over rows
    amaxes of blocks of result, and of its transpose          (`quantize.amax.measure`)

Each output is optional; codes and amaxes of blocks exclude each other. Codes saturate, so a gradient that overflowed
would look finite; `nan_flag` is therefore added to the results of its GEMMs. Sums are taken in float32, over the rows
of a tile and then over tiles. Their order depends only on shape, format and device.
"""

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.graph_launch import sum_rows, writes_fields
from quantshard.kernels.quantize import targets as kt
from quantshard.kernels.quantize.amax import measure, plan_amaxes
from quantshard.kernels.quantize.matrix import NAN, allocate_results, emit
from quantshard.kernels.quantize.random_words import NO_KEY, NO_STREAMS, random_arguments
from quantshard.kernels.quantize.targets import KernelOutputs, Targets
from quantshard.numerics import Pair


class EpilogueArguments(NamedTuple):
    """Arguments of a kernel: memory for results other than codes; None for what was not requested."""

    high: Any
    high_stride: int
    amax: Any
    nan_flag: Any
    sums: Any
    sums_stride: int
    spans: Any = None
    """If blocks are measured: numbers of blocks along rows and columns, for the results and for their transpose."""


writes_fields(EpilogueArguments, "high", "amax", "nan_flag", "sums")


@triton.jit
def load_tile(ptr, stride, i, j, valued):
    """Load float32 values at local rows i and columns j; zero where masked."""
    return ql.widen(tl.load(ptr + i.to(tl.int64)[:, None] * stride + j[None, :], mask=valued, other=0.0))


@triton.jit
def deliver(
    values, place, where, sink, out, other_where, other_out,
    key, stream, width, other_stream, other_width, dtype: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Round a tile of float32 values to dtype, and write the requested outputs.

    `values`: zero where masked. `place`: result of `quantize.matrix.tile_of`. `out`, `other_out`: amax grids, if blocks
    are measured; else the `QuantizedOutput`s.
    """
    row, col, i, j, valued = place
    x = ql.rounded(values, dtype)
    if sink.high is not None:
        offsets = i.to(tl.int64)[:, None] * sink.high_stride + j[None, :]
        tl.store(sink.high + offsets, ql.narrow(x, dtype), mask=valued)
    if sink.amax is not None:
        tl.atomic_max(ql.as_bits(sink.amax), ql.largest_bits(x), sem="relaxed")
    if sink.nan_flag is not None:  # no store, because another program can write a scale there
        tl.atomic_max(ql.as_bits(sink.nan_flag), NAN, mask=ql.largest_bits(x) >= 0x7F800000, sem="relaxed")
    if sink.sums is not None:
        offsets = tl.program_id(0).to(tl.int64) * sink.sums_stride + j
        tl.store(sink.sums + offsets, tl.sum(x, 0), mask=(j >= 0) & (j < where.value_cols))
    if sink.spans is not None:
        measure(x, row, col, where, out, sink.spans[0], other_where, other_out, sink.spans[1], dtype, H, T)
    else:
        words = (key, stream, width)
        other_words = (key, other_stream, other_width)
        emit(x, row, col, where, out, words, other_where, other_out, other_words, dtype, H, T)


TILE: Final = kt.TileShape(32, 256)
"""The tile of a kernel that does not quantize."""


class EpilogueLaunch(NamedTuple):
    """Launch parameters for `KernelOutputs`. `arguments`: arguments of `deliver` after `place`."""

    programs: Pair
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    targets: Targets = (None, None)
    sums: Tensor | None = None
    partial: Tensor | None = None

    def finish(self) -> Targets:
        if self.sums is not None and self.partial is not None:
            self.sums.copy_(sum_rows(self.partial))
        return self.targets


def plan_epilogue(
    outputs: KernelOutputs, like: Tensor, beside: KernelOutputs | None = None, backward: bool = False
) -> EpilogueLaunch:
    """Plan the epilogue for results with the shape and dtype of `like` [R, C].

    `beside`: outputs for the kernel's other result. `backward`: the kernel is a backward kernel.
    """
    request, transposed_request, high, amax, nan_flag, sums, measured = outputs
    if measured is not None or (beside is not None and beside.measured is not None):
        return _plan_measurement(outputs, beside, like, backward)
    key, streams, *roundings = random_arguments(request, transposed_request)
    others = None if beside is None else beside.specs
    plan = _plan(outputs.specs, others, like.shape, like.dtype, like.device, backward, *roundings)
    partial, cols = None, like.shape[1]
    if sums is not None:
        allocate = torch.empty if like.numel() > 0 else torch.zeros
        partial = allocate((plan.programs[0], cols), dtype=torch.float32, device=like.device)
    targets = allocate_results(plan, (request, transposed_request), like.device)
    sink = EpilogueArguments(high, 0 if high is None else high.stride(0), amax, nan_flag, partial, cols)
    arguments = plan.where, sink, targets[0], plan.columnwise and plan.columnwise.where, targets[1], *key, *streams
    return EpilogueLaunch(plan.programs, arguments, plan.constants, targets, sums, partial)


def _plan_measurement(
    outputs: KernelOutputs, beside: KernelOutputs | None, like: Tensor, backward: bool
) -> EpilogueLaunch:
    """`plan_epilogue` if amaxes of blocks are requested for these results, for the kernel's other results, or both."""
    _, _, high, amax, nan_flag, _, measured = outputs
    request = measured or (beside and beside.measured)
    assert request is not None
    plan = plan_amaxes(like.shape, request.rowwise, request.columnwise)
    # kernels cannot compare a tuple with None in it
    spans = plan.spans or (0, 0), plan.other_spans or (0, 0)
    sink = EpilogueArguments(high, 0 if high is None else high.stride(0), amax, nan_flag, None, 0, spans)
    grids, kinds = (request.grids, plan.kinds) if measured else ((None, None), dict.fromkeys(plan.kinds))
    arguments = plan.where, sink, grids[0], plan.other, grids[1], *NO_KEY, *NO_STREAMS
    constants = {"TILE": plan.tile, **kinds, **_launch_options(plan.tile, backward)}
    return EpilogueLaunch(plan.programs, arguments, constants)


@lru_cache(kt.MOST_PLANS)
def _plan(
    specs: kt.Specs, beside: kt.Specs | None, shape: Pair, dtype: torch.dtype, device: torch.device, backward: bool,
    rounding: kt.Rounding | None, other_rounding: kt.Rounding | None,
) -> kt.QuantizePlan:  # fmt: skip
    spec, transposed_spec = specs
    lead_spec, lead_other = leader = specs if specs != (None, None) or beside is None else beside
    tile = TILE if leader == (None, None) else _joint(_tile(*specs), _tile(*(beside or specs)))
    rowwise = spec and kt.layout(spec, shape, dtype, device, tile, rounding)
    columnwise = transposed_spec and kt.layout(
        transposed_spec, shape[::-1], dtype, device, tile, other_rounding, transposed=True
    )
    origin = lead_spec.origin if lead_spec else lead_other.origin[::-1] if lead_other else (0, 0)
    rows, cols = shape
    padded_rows, padded_cols = rows + kt.padding(rows, lead_other), cols + kt.padding(cols, lead_spec)
    programs = kt.touched(origin, (padded_rows, padded_cols), tile[:2])
    kinds = {"H": rowwise and rowwise.how, "T": columnwise and columnwise.how}
    constants = {"TILE": tile, **kinds, **_launch_options(tile, backward)}
    return kt.QuantizePlan(rowwise, columnwise, kt.Region(rows, padded_cols, cols, *origin), programs, constants)


def _tile(spec: kt.QuantizeSpec | None, other: kt.QuantizeSpec | None) -> kt.TileShape:
    """The smallest tile of whole blocks for both directions that stores efficiently in both."""
    blocks = kt.whole_blocks(spec and spec.copy.block, other and other.copy.block)
    if other is None:
        return blocks
    return blocks._replace(together=16) if other.scaling.random_hadamard else kt.smallest_tile(blocks)


def _joint(one: kt.TileShape, other: kt.TileShape) -> kt.TileShape:
    """A tile of whole blocks of both tiles. Rows stay in order, which is fastest, if one direction has all scales."""
    joint = kt.TileShape(*map(max, one, other))
    if joint.together == kt.BOTH_WAYS.together:
        return joint
    return joint._replace(rows=max(joint.rows, 64), cols=max(joint.cols, 128))


def _launch_options(tile: kt.TileShape, backward: bool) -> dict[str, Any]:
    """Warps and register limit, so that two programs run at a time (three of four warps); measured on an H200.

    No limit for forward in one direction, which would use more registers, and for transformed columns.
    """
    if tile.together == 16:
        return {"num_warps": tile.warps}
    size, both_ways = tile.rows * tile.cols, tile.together == kt.BOTH_WAYS.together
    if both_ways:
        warps = tile.warps
    else:
        warps = min(max(kt.WARPS, size // (512 if backward and tile.together == 1 else 1024)), 16)
    max_registers = kt.registers(warps, 3 if backward and warps == 4 else 2)
    is_limited = both_ways or (backward and tile.together == 1)
    return {"num_warps": warps, "maxnreg": max_registers if is_limited and max_registers <= 255 else None}


def matrix(x: Tensor) -> Tensor:
    """Reshape x [..., C] to [R, C]; a scalar becomes [1, 1]."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), *(x.shape[-1:] or (1,)))


def by_rows(x: Tensor) -> Tensor:
    """Return x [R, C] with adjacent elements in each row, as kernels need it; a copy only if necessary."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
