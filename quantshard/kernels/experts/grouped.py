"""Rows of several experts, concatenated in one matrix, quantized separately for each expert.

    amax[e]    = max |x[i, j]|                   over the rows i of expert e and all columns
    code[i, j] = round(x[i, j] * multiplier[e])  for rows i of e
    sums[e, j] = sum of x[i, j]                  over the rows i of e

With a scale for each block: codes of the rows and of their transpose, where rows of zeros make each expert start a
block. A program works on a tile with rows of one expert, and one launch serves all experts, each as if it were alone.
"""

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
from quantshard.kernels.quantize.matrix import allocate_results, emit, tile_of as quantize_tile_of
from quantshard.kernels.quantize.targets import QuantizedOutput, QuantizeRequest, plan_quantization

COLS: Final = 128
WARPS: Final = 8


@triton.jit
def expert_tile(x_ptr, stride, index, cols, tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's tile: its expert, rows and columns, mask, and values, read from rows `index` of x."""
    row = tiles + tl.program_id(0) * 4
    shift = tl.load(row + 3)
    i = tl.load(row + 1) - shift + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = i < tl.load(row + 2) - shift
    valued = inside[:, None] & (j < cols)[None, :]
    source = i if index is None else tl.load(index + i, mask=inside, other=0)
    return tl.load(row), i, j, valued, load_tile(x_ptr, stride, source, j, valued)


@triton.jit
def expert_amax_kernel(x_ptr, stride, index, cols, tiles, amaxes, ROWS: tl.constexpr, COLS: tl.constexpr):
    expert, _i, _j, _valued, x = expert_tile(x_ptr, stride, index, cols, tiles, ROWS, COLS)
    tl.atomic_max(ql.as_bits(amaxes + expert), ql.largest_bits(x), sem="relaxed")


@triton.jit
def expert_quantize_kernel(
    x_ptr, stride, index, cols, tiles, multipliers, codes_ptr, next_amaxes, has_nan,
    E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    expert, i, j, valued, x = expert_tile(x_ptr, stride, index, cols, tiles, ROWS, COLS)
    if next_amaxes is not None:
        tl.atomic_max(ql.as_bits(next_amaxes + expert), ql.largest_bits(x), sem="relaxed")
    if has_nan is not None:
        tl.store(has_nan + expert, float("nan"), mask=ql.largest_bits(x) >= 0x7F800000)
    codes = ql.encode(x * tl.load(multipliers + expert), E)
    tl.store(codes_ptr + i[:, None] * cols + j[None, :], codes.to(tl.uint8), mask=valued)


@triton.jit
def turn_kernel(codes, cols, tiles, out, length, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tiles + tl.program_id(0) * 4
    first, end, shift = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    i = first + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_column = j < cols
    tile = tl.load(
        codes + (i - shift)[:, None] * cols + j[None, :], mask=(i < end)[:, None] & is_column[None, :], other=0
    )
    is_written = ql.mask_where(first < end, is_column[:, None])  # a surplus tile has no columns of its own
    tl.store(out + j.to(tl.int64)[:, None] * length + i[None, :], tl.trans(tile), mask=is_written)


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
    words = (0, 0, 0, 0, 0)  # no random words
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


def expert_amaxes(x: Tensor, segments: ExpertSegments, index: Tensor | None = None) -> Tensor:
    """Return the largest |x| of each expert's rows of x or x[index]: float32 [experts], 0 without rows; NaN wins."""
    amaxes, x = torch.zeros(len(segments), dtype=torch.float32, device=x.device), by_rows(x)
    if x.numel() > 0:
        launch_kernel(
            expert_amax_kernel, _programs(x, segments), x.device,
            x, x.stride(0), index, x.shape[1], segments.tiles, amaxes, segments.rows, COLS, num_warps=WARPS,
        )  # fmt: skip
    return amaxes


def quantize_expert_rows(
    x: Tensor, segments: ExpertSegments, encoding: Encoding, multipliers: Tensor, next_amaxes: Tensor | None = None,
    has_nan: Tensor | None = None, index: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Quantize x [R, C], or x[index], to 8-bit codes, uint8 of the same shape, by a multiplier for each expert.

    `next_amaxes`: float32 [experts], raised to the amaxes of the experts' rows. `has_nan`: float32 [experts], set to
    NaN where a value of the expert's rows is not finite.
    """
    codes, x = torch.empty((segments.values, x.shape[1]), dtype=torch.uint8, device=x.device), by_rows(x)
    if x.numel() > 0:
        launch_kernel(
            expert_quantize_kernel, _programs(x, segments), x.device,
            x, x.stride(0), index, x.shape[1], segments.tiles, multipliers, codes, next_amaxes, has_nan,
            ql.element(encoding, x.device), segments.rows, COLS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return codes


def turned_rows(codes: Tensor, segments: ExpertSegments) -> Tensor:
    """Transpose uint8 codes [R, C] to [C, segments.total], with zeros between the rows of two experts."""
    out = torch.empty((codes.shape[1], segments.total), dtype=torch.uint8, device=codes.device)
    if codes.numel() > 0:
        launch_kernel(
            turn_kernel, _programs(codes, segments), codes.device,
            codes, codes.shape[1], segments.tiles, out, segments.total, MANY_ROWS, COLS, num_warps=4,
        )  # fmt: skip
    return out


def quantize_expert_blocks(
    x: Tensor, segments: ExpertSegments, request: QuantizeRequest, other: QuantizeRequest | None,
    has_nan: Tensor | None = None,
) -> tuple[QuantizedOutput, QuantizedOutput | None]:  # fmt: skip
    """Quantize x [R, C] and, if `other` is given, its transpose, with `segments.total` rows (or columns) of codes.

    Blocks have at most `MANY_ROWS` rows. `has_nan`: see `quantize_expert_rows`.
    """
    x = by_rows(x)
    plan = plan_quantization(
        request.spec, None if other is None else other.spec, (segments.total, x.shape[1]), x.dtype, x.device
    )
    rowwise, columnwise = allocate_results(plan, (request, other), x.device)
    assert plan.rowwise is not None and rowwise is not None
    if x.numel() > 0:
        launch_kernel(
            quantize_blocks_kernel, plan.programs, x.device,
            x, x.stride(0), segments.tiles, plan.where, rowwise, plan.columnwise and plan.columnwise.where, columnwise,
            has_nan, ROWS=MANY_ROWS, **plan.constants,
        )  # fmt: skip
    return rowwise, columnwise


def expert_sums(x: Tensor, segments: ExpertSegments) -> Tensor:
    """Sum x [R, C] over each expert's rows, float32 [experts, C]."""
    sums, x = torch.empty((len(segments), x.shape[1]), dtype=torch.float32, device=x.device), by_rows(x)
    if sums.numel() > 0:
        launch_kernel(
            sums_kernel, (len(segments), -(x.shape[1] // -COLS)), x.device,
            x, x.stride(0), x.shape[1], segments.spans, sums, segments.rows, COLS, num_warps=WARPS,
        )  # fmt: skip
    return sums


def _programs(x: Tensor, segments: ExpertSegments) -> tuple[int, int]:
    return segments.tiles.shape[0], -(x.shape[1] // -COLS)
