"""Matrix products of several experts in one launch: FP8 codes with a scale for each expert or for each block.

    fprop  y[i]  = x[i]  @ w[e]^T + b[e]            for rows i of expert e
    dgrad  dx[i] = dy[i] @ w[e]
    wgrad  dw[e] = sum of dy[i]^T x[i]              over the rows i of e

With one scale for each expert, which is applied at the end, tensor cores of Hopper and later GPUs multiply the codes
themselves. They read both operands along the summed dim, so a matrix that is stored otherwise is transposed first.
Sums over 128 products are added in float32, as in PyTorch's scaled product.

Other products read codes as float16, which is exact, and can read such operands along either dim. Scales of blocks are
applied to the sum over each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quantshard.formats import Encoding
from quantshard.kernels import language as ql, scale_rule as sr
from quantshard.kernels.experts.segments import FEW_ROWS, MANY_ROWS, ExpertSegments
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.optimizer.multi_tensor import TYPES
from quantshard.kernels.quantize.transpose import by_columns
from quantshard.kernels.workspace import DeviceTable, lasting_table


class GroupedGemmConfig(NamedTuple):
    """Tile of a program: rows and columns of the result, length of a step along the summed dim; warps, stages."""

    rows: int
    cols: int
    summed: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        names = ("ROWS", "COLS", "SUMMED", "num_warps", "num_stages")
        return dict(zip(names, self, strict=True))

    def options_of_codes(self, fast: bool) -> dict[str, Any]:
        # None: Triton's default, with which sums stay in Hopper's tensor cores
        return {**self.options, "PROMOTED": None if fast else self.summed}


FEW_ROWS_LAUNCH: Final = GroupedGemmConfig(FEW_ROWS, 128, 64, 4, 4)
ROWS_LAUNCH: Final = {
    0: GroupedGemmConfig(MANY_ROWS, 256, 64, 8, 3),
    128: GroupedGemmConfig(MANY_ROWS, 128, 128, 8, 3),
    32: GroupedGemmConfig(MANY_ROWS, 64, 32, 4, 4),
}
WEIGHTS_LAUNCH: Final = {
    0: GroupedGemmConfig(128, 256, 64, 8, 3),
    128: GroupedGemmConfig(128, 64, 64, 4, 3),
    32: GroupedGemmConfig(64, 128, 32, 4, 4),
}
"""Launch configs, tuned on an H200, by elements under one scale, a multiple of `summed`; 0: one scale for an expert."""
CODES_LAUNCH: Final = GroupedGemmConfig(MANY_ROWS, 128, 128, 4, 3)
"""Launch config of products of codes, tuned on an H200."""


@triton.jit
def scale_at(ptr, there):
    """Load scales, decoded if they are stored as E8M0."""
    scales = tl.load(ptr, mask=there, other=0)
    if scales.dtype == tl.uint8:
        return sr.decode_e8m0(scales)
    else:
        return scales


@triton.jit
def rows_kernel(
    a_ptr, a_scales, nan_flag, tiles, weights, biases, experts, out, summed, cols,
    TURNED: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Multiply rows [R, summed] by their expert's weight, [summed, cols] or, if TURNED, [cols, summed]."""
    row = tiles + tl.program_id(1) * 4
    expert, first, end, shift = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    i = first + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, SUMMED)
    weight_entry = weights + expert
    weight = tl.load(weight_entry).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
    grid = tl.load(weight_entry + experts).to(tl.pointer_type(SCALE))
    a = a_ptr + i[:, None] * summed + k[None, :]
    if TURNED:
        b = weight + k[:, None] + j[None, :] * summed
    else:
        b = weight + k[:, None] * cols + j[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, tl.where(first < end, summed, 0), SUMMED):  # no steps for a surplus tile
        inside = k < summed - start
        a_codes = tl.load(a, mask=(i < end)[:, None] & inside[None, :], other=0)
        b_codes = tl.load(b, mask=inside[:, None] & (j < cols)[None, :], other=0)
        if BLOCK == 0:
            total = tl.dot(ql.decode(a_codes, A, tl.float16), ql.decode(b_codes, B, tl.float16), total)
        else:
            step = start // BLOCK
            row_scales = scale_at(a_scales + i * tl.cdiv(summed, BLOCK) + step, i < end)
            if TURNED:
                scale_offsets = j // BLOCK * tl.cdiv(summed, BLOCK) + step
            else:
                scale_offsets = j // BLOCK + step * tl.cdiv(cols, BLOCK)
            col_scales = scale_at(grid + scale_offsets, j < cols)
            total += (
                tl.dot(ql.decode(a_codes, A, tl.float16), ql.decode(b_codes, B, tl.float16))
                * row_scales[:, None]
                * col_scales[None, :]
            )
        a += SUMMED
        b += SUMMED * (1 if TURNED else cols)
    if BLOCK == 0:
        total = total * tl.load(a_scales + expert) * tl.load(grid)
    if nan_flag is not None:
        total = total * tl.load(nan_flag + expert)
    if BIAS is not None:
        bias = tl.load(biases + expert).to(tl.pointer_type(BIAS))
        total += ql.widen(tl.load(bias + j, mask=j < cols, other=0.0))[None, :]
    out_ptrs = out + (i - shift)[:, None] * cols + j[None, :]
    tl.store(out_ptrs, ql.narrow(total, out.dtype.element_ty), mask=(i < end)[:, None] & (j < cols)[None, :])


@triton.jit
def weights_kernel(
    a_ptr, b_ptr, a_scales, b_scales, spans, out, rows, cols, A: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Compute [R, rows]^T @ [R, cols] for each expert's rows: [experts, rows, cols]."""
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(spans + expert * 4 + 1)
    count = (tl.load(spans + expert * 4 + 2) - first).to(tl.int32)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, SUMMED)
    a = a_ptr + (first + k)[:, None] * rows + i[None, :]
    b = b_ptr + (first + k)[:, None] * cols + j[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, count, SUMMED):
        inside = (k < count - start)[:, None]
        a_codes = tl.load(a, mask=inside & (i < rows)[None, :], other=0)
        b_codes = tl.load(b, mask=inside & (j < cols)[None, :], other=0)
        total = tl.dot(tl.trans(ql.decode(a_codes, A, tl.float16)), ql.decode(b_codes, B, tl.float16), total)
        a += SUMMED * rows
        b += SUMMED * cols
    total = total * tl.load(a_scales + expert) * tl.load(b_scales + expert)
    out_ptrs = out + expert * rows * cols + i[:, None] * cols + j[None, :]
    tl.store(out_ptrs, ql.narrow(total, out.dtype.element_ty), mask=(i < rows)[:, None] & (j < cols)[None, :])


@triton.jit
def rows_of_codes_kernel(
    a, b, a_scales, weights, tiles, biases, experts, out, summed, cols, b_row, b_col, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SUMMED: tl.constexpr, PROMOTED: tl.constexpr,
):  # fmt: skip
    """`rows_kernel` for matrices of codes with the summed dim last: rows a [R, summed] and all weights b.

    The weight of expert e starts at row e * b_row and column e * b_col of b. Elements past the end of a are zeros.
    """
    tile = tiles + tl.program_id(1) * 4
    expert, first, end, shift = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, col = (first - shift).to(tl.int32), tl.program_id(0) * COLS
    top, left = (expert * b_row).to(tl.int32) + col, (expert * b_col).to(tl.int32)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, tl.where(first < end, summed, 0), SUMMED):  # no steps for a surplus tile
        a_codes, b_codes = a.load([row, start]), b.load([top, left + start])
        total = tl.dot(a_codes, b_codes.T, total, max_num_imprecise_acc=PROMOTED)
    grid = tl.load(weights + experts + expert).to(tl.pointer_type(tl.float32))
    total = total * tl.load(a_scales + expert) * tl.load(grid)
    j = col + tl.arange(0, COLS)
    if BIAS is not None:
        bias = tl.load(biases + expert).to(tl.pointer_type(BIAS))
        total += ql.widen(tl.load(bias + j, mask=j < cols, other=0.0))[None, :]
    i = first + tl.arange(0, ROWS)
    out_ptrs = out + (i - shift)[:, None] * cols + j[None, :]
    tl.store(out_ptrs, ql.narrow(total, out.dtype.element_ty), mask=(i < end)[:, None] & (j < cols)[None, :])


@triton.jit
def weights_of_codes_kernel(
    a, b, a_scales, b_scales, spans, out, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, SUMMED: tl.constexpr, PROMOTED: tl.constexpr,
):  # fmt: skip
    """`weights_kernel` for transposes [rows, length] and [cols, length].

    Each expert starts at a multiple of SUMMED, and zeros follow its last row up to the next one.
    """
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(spans + expert * 4 + 1).to(tl.int32)
    end = tl.load(spans + expert * 4 + 2).to(tl.int32)
    row, col = tl.program_id(1) * ROWS, tl.program_id(0) * COLS
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(first, end, SUMMED):
        total = tl.dot(a.load([row, start]), b.load([col, start]).T, total, max_num_imprecise_acc=PROMOTED)
    total = total * tl.load(a_scales + expert) * tl.load(b_scales + expert)
    i, j = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    out_ptrs = out + expert * rows * cols + i[:, None] * cols + j[None, :]
    tl.store(out_ptrs, ql.narrow(total, out.dtype.element_ty), mask=(i < rows)[:, None] & (j < cols)[None, :])


@triton.jit
def weights_by_blocks_kernel(
    a_ptr, b_ptr, a_scales, b_scales, nan_flag, spans, out, rows, cols, length, A: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`weights_kernel` for transposes [rows, length] and [cols, length] with a scale for BLOCK elements of a row."""
    expert = tl.program_id(2).to(tl.int64)
    first = tl.multiple_of(tl.load(spans + expert * 4 + 1), BLOCK)
    count = (tl.load(spans + expert * 4 + 2) - first).to(tl.int32)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, SUMMED)
    a = a_ptr + first + i.to(tl.int64)[:, None] * length + k[None, :]
    b = b_ptr + first + j.to(tl.int64)[None, :] * length + k[:, None]
    a_scale = a_scales + (first + i.to(tl.int64) * length) // BLOCK
    b_scale = b_scales + (first + j.to(tl.int64) * length) // BLOCK
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, count, SUMMED):  # codes after the last row are zero up to the end of its block
        a_codes = tl.load(a, mask=(i < rows)[:, None], other=0)
        b_codes = tl.load(b, mask=(j < cols)[None, :], other=0)
        row_scales = scale_at(a_scale + start // BLOCK, i < rows)
        col_scales = scale_at(b_scale + start // BLOCK, j < cols)
        total += (
            tl.dot(ql.decode(a_codes, A, tl.float16), ql.decode(b_codes, B, tl.float16))
            * row_scales[:, None]
            * col_scales[None, :]
        )
        a += SUMMED
        b += SUMMED
    total = total * tl.load(nan_flag + expert)
    out_ptrs = out + expert * rows * cols + i[:, None] * cols + j[None, :]
    tl.store(out_ptrs, ql.narrow(total, out.dtype.element_ty), mask=(i < rows)[:, None] & (j < cols)[None, :])


class EncodedRows(NamedTuple):
    """8-bit codes of rows, uint8 [R, C], contiguous, with their scales and encoding.

    `block`: 0 for `scales` float32 [experts]; otherwise the elements of a row per scale, float32 or E8M0 [R, blocks].
    `nan_flag`: float32 [experts], 1, or NaN for an expert that is not finite.
    """

    codes: Tensor
    scales: Tensor
    encoding: Encoding
    block: int = 0
    nan_flag: Tensor | None = None

    def element(self) -> ql.KernelEncoding:
        return ql.element(self.encoding, self.codes.device)


class ExpertBias(NamedTuple):
    """Biases [out_features] of all experts, contiguous: a table of their addresses, and their dtype."""

    table: DeviceTable
    dtype: torch.dtype

    @staticmethod
    def of(biases: Sequence[Tensor] | Tensor) -> ExpertBias:
        return ExpertBias(lasting_table((_addresses(biases),), biases[0].device), biases[0].dtype)


class ExpertWeights(NamedTuple):
    """Weights of all experts: a table of the addresses of their codes and scales, int64 [2, experts].

    `shape`: [out_features, in_features] of each weight. `aligned`: all codes start at multiples of 16 bytes. `scales`:
    stored dtype of the scales. `block`: 0 if a weight has one scale; otherwise rows and columns of the square under one
    scale. `codes`: uint8 [experts * out_features, in_features], for products of codes; None for other products.
    """

    table: DeviceTable
    shape: tuple[int, int]
    aligned: bool
    scales: torch.dtype
    encoding: Encoding
    block: int = 0
    codes: Tensor | None = None

    @staticmethod
    def of(
        codes: Sequence[Tensor] | Tensor, scales: Sequence[Tensor] | Tensor, encoding: Encoding, block: int = 0
    ) -> ExpertWeights:
        """Make the table for uint8 codes [out_features, in_features] and float32 or E8M0 scales, all contiguous."""
        addresses, first_codes = _addresses(codes), codes[0]
        table = lasting_table((addresses, _addresses(scales)), first_codes.device)
        shape = (first_codes.shape[0], first_codes.shape[1])
        return ExpertWeights(
            table, shape, not any([address % 16 for address in addresses]), scales[0].dtype, encoding, block
        )


def _addresses(tensors: Sequence[Tensor] | Tensor) -> tuple[int, ...]:
    """Return the address of each tensor, or of each part of a stack."""
    if not isinstance(tensors, Tensor):
        return tuple(map(Tensor.data_ptr, tensors))
    first, step = tensors.data_ptr(), tensors.stride(0) * tensors.element_size()
    return tuple(range(first, first + step * len(tensors), step))


def rows_times_weights(
    a: EncodedRows, weights: ExpertWeights, segments: ExpertSegments, dtype: torch.dtype, *, transposed: bool,
    biases: ExpertBias | None = None, fast: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply rows by their expert's weight [C, cols] or, if `transposed`, by its transpose, and add its bias.

    Returns `dtype` [segments.values, cols], rounded once, without the rows of codes [R, C] between experts.
    `fast`: whether sums of products of codes may stay in the tensor cores; see `recipe.MMParams`. Float32 results
    ignore it.
    """
    summed, cols = a.codes.shape[1], weights.shape[0 if transposed else 1]
    out = torch.empty((segments.values, cols), dtype=dtype, device=a.codes.device)
    if out.numel() == 0:
        return out
    table, bias = (None, None) if biases is None else (biases.table.tensor(), TYPES[biases.dtype])
    if weights.codes is not None:
        codes, b_row, b_col = weights.codes, cols, 0
        if not transposed:
            codes, b_row, b_col = by_columns([(codes, None, None)])[0][0].t(), 0, summed
        launch = CODES_LAUNCH
        launch_kernel(
            rows_of_codes_kernel, (-(cols // -launch.cols), segments.tiles.shape[0]), out.device,
            _tiles_of(a.codes, a.encoding, launch.rows), _tiles_of(codes, weights.encoding, launch.cols),
            a.scales, weights.table.tensor(), segments.tiles, table, len(segments), out, summed, cols, b_row, b_col,
            BIAS=bias, **launch.options_of_codes(fast and dtype.itemsize == 2),
        )  # fmt: skip
        return out
    launch = FEW_ROWS_LAUNCH if segments.rows == FEW_ROWS else ROWS_LAUNCH[a.block]
    launch_kernel(
        rows_kernel, (-(cols // -launch.cols), segments.tiles.shape[0]), out.device,
        a.codes, a.scales, a.nan_flag, segments.tiles, weights.table.tensor(), table, len(segments), out, summed, cols,
        TURNED=transposed, ALIGNED=weights.aligned, BIAS=bias, BLOCK=a.block,
        SCALE=tl.uint8 if weights.scales is torch.uint8 else tl.float32,
        A=a.element(), B=ql.element(weights.encoding, out.device), **launch.options,
    )  # fmt: skip
    return out


def _tiles_of(codes: Tensor, encoding: Encoding, rows: int) -> TensorDescriptor:
    """Describe codes [R, C] for kernels that load tiles of `rows` rows and of a step along the summed dim."""
    block = [rows, CODES_LAUNCH.summed]
    return TensorDescriptor(codes.view(encoding.gemm_dtype), list(codes.shape), list(codes.stride()), block)


def weight_gradients(
    a: EncodedRows, b: EncodedRows, segments: ExpertSegments, dtype: torch.dtype, turned: bool = False,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    """Compute a^T b over each expert's rows, a [R, M] and b [R, N]; with blocks, of transposes [M, R] and [N, R].

    Returns `dtype` [experts, M, N], rounded once; zeros for an expert without rows. `turned`: multiply codes of
    transposes (`grouped.turned_rows`). `fast`: see `rows_times_weights`.
    """
    across = 0 if a.block or turned else 1
    rows, cols, experts = a.codes.shape[across], b.codes.shape[across], len(segments)
    out = torch.empty((experts, rows, cols), dtype=dtype, device=a.codes.device)
    if turned and segments.total == 0:
        return out.zero_()
    launch = CODES_LAUNCH if turned else WEIGHTS_LAUNCH[a.block]
    nan_flag = b.nan_flag if a.nan_flag is None else a.nan_flag
    grid: Any = (-(cols // -launch.cols), -(rows // -launch.rows), experts)
    if turned:
        launch_kernel(
            weights_of_codes_kernel, grid, out.device,
            _tiles_of(a.codes, a.encoding, launch.rows), _tiles_of(b.codes, b.encoding, launch.cols),
            a.scales, b.scales, segments.spans, out, rows, cols,
            **launch.options_of_codes(fast and dtype.itemsize == 2),
        )  # fmt: skip
        return out
    operands = (a.codes, b.codes, a.scales, b.scales)
    options = {"A": a.element(), "B": b.element(), **launch.options}
    if a.block:
        launch_kernel(
            weights_by_blocks_kernel, grid, out.device,
            *operands, nan_flag, segments.spans, out, rows, cols, segments.total, BLOCK=a.block, **options,
        )  # fmt: skip
    else:
        launch_kernel(weights_kernel, grid, out.device, *operands, segments.spans, out, rows, cols, **options)
    return out
