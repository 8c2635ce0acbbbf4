"""Matrix products of several experts in one launch: FP8 codes of their rows, under a scale for each expert.

    fprop  y[i]  = x[i]  @ w[e]^T + b[e]            for rows i of expert e
    dgrad  dx[i] = dy[i] @ w[e]
    wgrad  dw[e] = sum of dy[i]^T x[i]              over the rows i of e

Codes of 8 bits are float16 numbers, so tensor cores multiply them as such: a product of two is exact, and summed in
float32, to which scales are applied at the end. In this type they read an operand along either dim, where those for
FP8 want the summed one last: neither weights nor activations need be transposed, and no bits of sums are lost.

Weights are separate tensors, whose addresses a table has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import Encoding
from quantshard.kernels import language as ql
from quantshard.kernels.grouped import FEW_ROWS, MANY_ROWS, Segments
from quantshard.kernels.multi_tensor import TYPES, rows_of


class Launch(NamedTuple):
    """Rows and columns of the result that a program works on, how much of the summed dim at once, by how many warps,
    and for how many of these steps data are on their way."""

    rows: int
    cols: int
    summed: int
    warps: int
    stages: int


FEW_ROWS_LAUNCH: Final = Launch(FEW_ROWS, 128, 128, 4, 3)
MANY_ROWS_LAUNCH: Final = Launch(MANY_ROWS, 128, 128, 8, 3)
WEIGHTS_LAUNCH: Final = Launch(128, 128, 64, 8, 3)


@triton.jit
def exact(codes, E: tl.constexpr):
    """Codes of FP8 -> float16."""
    if E.cast == 1:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif E.cast == 2:
        return codes.to(tl.float8e5, bitcast=True).to(tl.float16)
    else:
        return ql.decode(codes, E).to(tl.float16)


@triton.jit
def rows_kernel(
    a_ptr, a_scales, tiles, weights, experts, out, summed, cols,
    TURNED: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Rows [R, summed] times the weight of their expert, [summed, cols] or, if TURNED, [cols, summed]."""
    row = tiles + tl.program_id(1) * 3
    expert, end = tl.load(row), tl.load(row + 2)
    i = tl.load(row + 1) + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, SUMMED)
    held = weights + expert
    weight = tl.load(held).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
    a = a_ptr + i[:, None] * summed + k[None, :]
    if TURNED:
        b = weight + k[:, None] + j[None, :] * summed
    else:
        b = weight + k[:, None] * cols + j[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, summed, SUMMED):
        inside = k < summed - start
        left = tl.load(a, mask=(i < end)[:, None] & inside[None, :], other=0)
        right = tl.load(b, mask=inside[:, None] & (j < cols)[None, :], other=0)
        total = tl.dot(exact(left, A), exact(right, B), total)
        a += SUMMED
        b += SUMMED * (1 if TURNED else cols)
    total = total * tl.load(a_scales + expert) * tl.load(tl.load(held + experts).to(tl.pointer_type(tl.float32)))
    if BIAS is not None:
        bias = tl.load(held + 2 * experts).to(tl.pointer_type(BIAS))
        total += ql.widen(tl.load(bias + j, mask=j < cols, other=0.0))[None, :]
    at = out + i[:, None] * cols + j[None, :]
    tl.store(at, ql.narrow(total, out.dtype.element_ty), mask=(i < end)[:, None] & (j < cols)[None, :])


@triton.jit
def weights_kernel(
    a_ptr, b_ptr, a_scales, b_scales, spans, out, rows, cols, A: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """[R, rows]^T @ [R, cols], summed over each expert's rows -> [experts, rows, cols]."""
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(spans + expert * 3 + 1)
    count = (tl.load(spans + expert * 3 + 2) - first).to(tl.int32)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, SUMMED)
    a = a_ptr + (first + k)[:, None] * rows + i[None, :]
    b = b_ptr + (first + k)[:, None] * cols + j[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, count, SUMMED):
        inside = (k < count - start)[:, None]
        left = tl.load(a, mask=inside & (i < rows)[None, :], other=0)
        right = tl.load(b, mask=inside & (j < cols)[None, :], other=0)
        total = tl.dot(tl.trans(exact(left, A)), exact(right, B), total)
        a += SUMMED * rows
        b += SUMMED * cols
    total = total * tl.load(a_scales + expert) * tl.load(b_scales + expert)
    at = out + expert * rows * cols + i[:, None] * cols + j[None, :]
    tl.store(at, ql.narrow(total, out.dtype.element_ty), mask=(i < rows)[:, None] & (j < cols)[None, :])


# ------------------------------------------------------------------------------------------------------------- launch


class Codes(NamedTuple):
    """Codes of 8 bits of rows, uint8 [R, C], contiguous; float32 [experts], their scales; and how they are encoded."""

    codes: Tensor
    scales: Tensor
    encoding: Encoding

    def element(self) -> ql.Element:
        """What a kernel knows of the encoding."""
        return ql.element(self.encoding, self.codes.device)


class Weights(NamedTuple):
    """Of each expert the codes of 8 bits of its weight, uint8 [out_features, in_features], contiguous, its scale,
    float32, and its bias [out_features], if it has one. All of one shape, encoding and device."""

    codes: Sequence[Tensor]
    scales: Sequence[Tensor]
    biases: Sequence[Tensor]
    encoding: Encoding


def rows_times_weights(a: Codes, weights: Weights, segments: Segments, dtype: torch.dtype, *, turned: bool) -> Tensor:
    """Rows [R, C] times the weight [C, cols] of their expert or, if `turned`, its transpose, plus the bias: `dtype`
    [R, cols], rounded once."""
    rows, summed = a.codes.shape
    cols = weights.codes[0].shape[0 if turned else 1]
    out = torch.empty((rows, cols), dtype=dtype, device=a.codes.device)
    if out.numel() == 0:
        return out
    pointers, aligned = _table(weights)
    bias = TYPES[weights.biases[0].dtype] if weights.biases else None
    launch = FEW_ROWS_LAUNCH if segments.rows == FEW_ROWS else MANY_ROWS_LAUNCH
    with ql.on(out.device):
        rows_kernel[triton.cdiv(cols, launch.cols), segments.tiles.shape[0]](
            a.codes, a.scales, segments.tiles, pointers, len(segments), out, summed, cols,
            TURNED=turned, ALIGNED=aligned, BIAS=bias,
            A=a.element(), B=ql.element(weights.encoding, out.device), ROWS=launch.rows, COLS=launch.cols,
            SUMMED=launch.summed, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return out


def _table(weights: Weights) -> tuple[Tensor, bool]:
    """Addresses of codes, scales and biases, int64 [2 or 3, experts]; and whether all codes are at multiples of 16."""
    parts = [[part.data_ptr() for part in of] for of in (weights.codes, weights.scales, weights.biases) if of]
    return rows_of(parts, weights.codes[0].device), not any(at % 16 for at in parts[0])


def weight_gradients(a: Codes, b: Codes, segments: Segments, dtype: torch.dtype) -> Tensor:
    """Of rows a [R, M] and b [R, N] the sums of a^T b over each expert's rows: `dtype` [experts, M, N], rounded once;
    zeros for an expert without rows."""
    rows, cols = a.codes.shape[1], b.codes.shape[1]
    out = torch.empty((len(segments), rows, cols), dtype=dtype, device=a.codes.device)
    launch = WEIGHTS_LAUNCH
    grid: Any = (triton.cdiv(cols, launch.cols), triton.cdiv(rows, launch.rows), len(segments))
    with ql.on(out.device):
        weights_kernel[grid](
            a.codes, b.codes, a.scales, b.scales, segments.spans, out, rows, cols,
            A=a.element(), B=b.element(), ROWS=launch.rows, COLS=launch.cols, SUMMED=launch.summed,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return out
