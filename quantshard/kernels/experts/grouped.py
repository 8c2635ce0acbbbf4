"""Rows of several experts, those of one after those of another in one matrix, quantized for each expert apart.

    amax[e]    = max |x[i, j]|                   over the rows i of expert e and all columns
    code[i, j] = round(x[i, j] * multiplier[e])  for rows i of e
    sums[e, j] = sum of x[i, j]                  over the rows i of e

or, under a scale for each block, codes of the rows and of their transpose, in which each expert begins a block: between
the rows of two experts are so many rows of zeros. A program works on a tile with rows of one expert, so one launch
serves all of them. The codes and scales are those that `quantize_expert_rows` gives for the rows of each expert alone.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import Encoding
from quantshard.kernels import language as ql
from quantshard.kernels.experts.segments import MANY_ROWS, ExpertSegments
from quantshard.kernels.fused.epilogue import by_rows, load_tile
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import emit
from quantshard.kernels.quantize.matrix import tile_of as quantize_tile_of
from quantshard.kernels.quantize.targets import (
    QuantizedOutput,
    QuantizeRequest,
    plan_quantization,
)

COLS: Final = 128
WARPS: Final = 8


@triton.jit
def expert_tile(tiles, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's tile: the number of its expert, its rows and columns, and which of its places have a value."""
    row = tiles + tl.program_id(0) * 4
    i = tl.load(row + 1) + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    return tl.load(row), i, j, (i < tl.load(row + 2))[:, None] & (j < cols)[None, :]


@triton.jit
def expert_amax_kernel(x_ptr, stride, cols, tiles, amaxes, ROWS: tl.constexpr, COLS: tl.constexpr):
    expert, i, j, valued = expert_tile(tiles, cols, ROWS, COLS)
    tl.atomic_max(ql.as_bits(amaxes + expert), ql.largest_bits(load_tile(x_ptr, stride, i, j, valued)), sem="relaxed")


@triton.jit
def expert_quantize_kernel(
    x_ptr, stride, cols, tiles, multipliers, codes_ptr, next_amaxes, has_nan,
    E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    expert, i, j, valued = expert_tile(tiles, cols, ROWS, COLS)
    x = load_tile(x_ptr, stride, i, j, valued)
    if next_amaxes is not None:
        tl.atomic_max(ql.as_bits(next_amaxes + expert), ql.largest_bits(x), sem="relaxed")
    if has_nan is not None:
        tl.store(has_nan + expert, float("nan"), mask=ql.largest_bits(x) >= 0x7F800000)
    codes = ql.encode(x * tl.load(multipliers + expert), E)
    tl.store(codes_ptr + i[:, None] * cols + j[None, :], codes.to(tl.uint8), mask=valued)


@triton.jit
def quantize_blocks_kernel(
    x_ptr, stride, tiles, where, out, other_where, other_out, has_nan,
    H: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, col, i, j, valued = quantize_tile_of(where, H)
    segment = tiles + row // ROWS * 4
    valued = valued & (i < tl.load(segment + 2))[:, None]
    values = tl.load(x_ptr + (i - tl.load(segment + 3))[:, None] * stride + j[None, :], mask=valued, other=0.0)
    if has_nan is not None:
        tl.store(has_nan + tl.load(segment), float("nan"), mask=ql.largest_bits(ql.widen(values)) >= 0x7F800000)
    words = (0, 0, 0, 0, 0)  # none
    emit(values, row, col, where, out, words, other_where, other_out, words, values.dtype, H, T)


@triton.jit
def sums_kernel(x_ptr, stride, cols, spans, sums, ROWS: tl.constexpr, COLS: tl.constexpr):
    span = spans + tl.program_id(0) * 4
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    shift = tl.load(span + 3)
    end = tl.load(span + 2) - shift
    total = tl.zeros((COLS,), tl.float32)
    for first in range(tl.load(span + 1) - shift, end, ROWS):
        i = first + tl.arange(0, ROWS)
        total += tl.sum(load_tile(x_ptr, stride, i, j, (i < end)[:, None] & (j < cols)[None, :]), 0)
    tl.store(sums + tl.program_id(0).to(tl.int64) * cols + j, total, mask=j < cols)


# ------------------------------------------------------------------------------------------------------------- launch


def expert_amaxes(x: Tensor, segments: ExpertSegments) -> Tensor:
    """The largest |x| of each expert's rows of x [R, C], float32 [experts]: 0 of no rows, NaN where there is one.

    x: float32, bfloat16 or float16, as in what follows.
    """
    found, x = torch.zeros(len(segments), dtype=torch.float32, device=x.device), by_rows(x)
    if x.numel() > 0:
        launch_kernel(
            expert_amax_kernel, _programs(x, segments), x.device,
            x, x.stride(0), x.shape[1], segments.tiles, found, segments.rows, COLS, num_warps=WARPS,
        )  # fmt: skip
    return found


def quantize_expert_rows(
    x: Tensor,
    segments: ExpertSegments,
    encoding: Encoding,
    multipliers: Tensor,
    next_amaxes: Tensor | None = None,
    has_nan: Tensor | None = None,
) -> Tensor:
    """Codes of x [R, C], uint8 of its shape, of an encoding of 8 bits.

    Args:
        multipliers: float32 [experts], of the values of each expert.
        next_amaxes: float32 [experts], each made the larger of itself and the amax of the expert's rows.
        poisoned: float32 [experts], made NaN where not all values of the expert's rows are finite.
    """
    codes, x = torch.empty(x.shape, dtype=torch.uint8, device=x.device), by_rows(x)
    if x.numel() > 0:
        launch_kernel(
            expert_quantize_kernel, _programs(x, segments), x.device,
            x, x.stride(0), x.shape[1], segments.tiles, multipliers, codes, next_amaxes, has_nan,
            ql.element(encoding, x.device), segments.rows, COLS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return codes


def quantize_expert_blocks(
    x: Tensor,
    segments: ExpertSegments,
    request: QuantizeRequest,
    other: QuantizeRequest | None,
    has_nan: Tensor | None = None,
) -> tuple[QuantizedOutput, QuantizedOutput | None]:
    """Codes and scales of x [R, C] and, as `other` says, of its transpose: of `segments.total` rows, and columns.

    Blocks of neither have more than `MANY_ROWS` rows of x, and `segments` begin at multiples of that. `has_nan`: as of
    `quantize_expert_rows`.
    """
    x = by_rows(x)
    plan = plan_quantization(
        request.spec, None if other is None else other.spec, (segments.total, x.shape[1]), x.dtype, x.device
    )
    one, two = plan.outputs(request, other, x.device)
    assert plan.one is not None and one is not None
    assert segments.rows == MANY_ROWS and MANY_ROWS % plan.one.how.rows == 0, "a tile has rows of one expert"
    if x.numel() > 0:
        launch_kernel(
            quantize_blocks_kernel, plan.programs, x.device,
            x, x.stride(0), segments.tiles, plan.where, one, plan.two and plan.two.where, two, has_nan,
            ROWS=MANY_ROWS, **plan.constants,
        )  # fmt: skip
    return one, two


def expert_sums(x: Tensor, segments: ExpertSegments) -> Tensor:
    """Sums over each expert's rows of x [R, C], float32 [experts, C]."""
    found, x = torch.empty((len(segments), x.shape[1]), dtype=torch.float32, device=x.device), by_rows(x)
    if found.numel() > 0:
        launch_kernel(
            sums_kernel, (len(segments), -(x.shape[1] // -COLS)), x.device,
            x, x.stride(0), x.shape[1], segments.spans, found, segments.rows, COLS, num_warps=WARPS,
        )  # fmt: skip
    return found


def _programs(x: Tensor, segments: ExpertSegments) -> tuple[int, int]:
    return segments.tiles.shape[0], -(x.shape[1] // -COLS)
