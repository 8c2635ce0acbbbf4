"""RMSNorm and LayerNorm: statistics of rows, normalization with quantization, and backward.

    z    = x, or x + residual rounded to their dtype
    mean = sum(z) / n                                  LayerNorm only
    rstd = 1 / sqrt(sum((z - mean)**2) / n + eps)      RMSNorm: without the mean
    unit = (z - mean) * rstd
    y    = unit * (gamma + offset) + beta

    g    = dy * (gamma + offset)
    dx   = (g - unit * mean(g * unit) - mean(g)) * rstd + residual gradient
    dgamma = sum over rows of dy * unit,  dbeta = sum over rows of dy

in float32; y and dx are rounded once to the dtype of x. Registers hold rows of up to `LONGEST` elements. Longer rows
are read again, in pieces of that size.

One kernel computes statistics of whole rows. A second kernel normalizes tiles and quantizes them, so that one program
has a whole block of any shape. Both call `normalized`, so an amax from the first kernel is, bit for bit, the amax of
the second kernel's results.

Sums along a row are trees, in which no term passes through more than d = 32 + 10 + ceil(n / `LONGEST_CENTERED`)
additions (in one of 512 threads, over 1024 threads, over pieces). Let u = 2**-24, and m the mean of |z| * rstd, which
measures cancellation in LayerNorm's centering (RMSNorm: m = 0). Before the rounding

    |rstd - exact| <= e rstd,          e = (d / 2 + 8) u + d u m
    |unit - exact| <= a |unit| + b,    a = e + 4 u, b = (a + d u) m
    |y    - exact| <= (a |unit| + b) |gamma + offset| + 4 u (|unit (gamma + offset)| + |beta|)
    |dx   - exact| <= (3 a + (d + 16) u) rstd (|g| + |unit| mean(|g unit|) + mean(|g|))
                      + b rstd (|unit| mean(|g|) + mean(|g unit|))

Sums over R rows are off by at most R u of the sum of the magnitudes, plus the error of unit. The order of summation
depends only on the shape.
"""

import math
from functools import lru_cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.fused import epilogue
from quantshard.kernels.fused.epilogue import KernelOutputs, Targets, deliver, load_tile
from quantshard.kernels.graph_launch import sum_rows, writes
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import tile_of
from quantshard.kernels.quantize.random_words import RANDOM

LONGEST: Final = 16384
"""The most elements of a row, or of a piece of it, in registers: `PER_THREAD` for each of a program's 1024 threads."""
LONGEST_CENTERED: Final = 8192
"""The limit for LayerNorm's backward, which also keeps two sums in registers, and for every backward in pieces."""
PROGRAMS: Final = 528
"""The most programs of backward: 4 for each of the 132 multiprocessors of an H100 or H200. Each writes its sums once.
The number is fixed, so that the order of sums, and with it their bits, depends only on the shape."""
PROGRAMS_IN_PIECES: Final = 132
"""The most programs of backward for rows in pieces: few enough to keep the sums that they update in the L2 cache."""
PER_THREAD: Final = 16


@triton.jit
def load_row(ptr, j, size):
    """Load a vector as float32 at columns j; zero outside."""
    return ql.widen(tl.load(ptr + j, mask=(j >= 0) & (j < size), other=0.0))


@triton.jit
def load_z(x_ptr, x_stride, residual_ptr, residual_stride, i, j, valued):
    z = load_tile(x_ptr, x_stride, i, j, valued)
    if residual_ptr is not None:  # rounded, like the stored sum that backward reads, and like the oracle
        total = z + load_tile(residual_ptr, residual_stride, i, j, valued)
        z = ql.widen(ql.narrow(total, x_ptr.dtype.element_ty))
    return z


@triton.jit
def normalized(z, mean, rstd, gamma_ptr, beta_ptr, j, size, CENTERED: tl.constexpr, OFFSET: tl.constexpr):
    """y, float32, of a tile z at columns j, with one mean and rstd per row."""
    if CENTERED:
        z = z - mean[:, None]
    y = z * rstd[:, None] * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
    if beta_ptr is not None:
        y = y + load_row(beta_ptr, j, size)[None, :]
    return y


@triton.jit
def statistics_kernel(
    x_ptr, x_stride, residual_ptr, residual_stride, sum_ptr, mean_ptr, rstd_ptr, gamma_ptr, beta_ptr, amax_ptr,
    amax_of_row_ptr, amax_of_col_ptr, rows, size, eps,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for piece in tl.static_range(PIECES):
        j = piece * PIECE + tl.arange(0, PIECE)
        valued = (i < rows)[:, None] & (j < size)[None, :]
        z = load_z(x_ptr, x_stride, residual_ptr, residual_stride, i, j, valued)
        if sum_ptr is not None:
            offsets = i.to(tl.int64)[:, None] * size + j[None, :]
            tl.store(sum_ptr + offsets, ql.narrow(z, sum_ptr.dtype.element_ty), mask=valued)
        total += tl.sum(z if CENTERED else z * z, 1)
    # div_rn and sqrt_rn, here and below: Triton's own `/` and `sqrt` are approximations
    mean = tl.div_rn(total, tl.zeros_like(total) + size)
    square = mean  # RMSNorm: the total was of squares
    if CENTERED:  # a second pass, because mean square - squared mean would cancel for large means
        tl.store(mean_ptr + i, mean, mask=i < rows)
        total = tl.zeros((ROWS,), tl.float32)
        for piece in tl.static_range(PIECES):
            j = piece * PIECE + tl.arange(0, PIECE)
            valued = (i < rows)[:, None] & (j < size)[None, :]
            if PIECES > 1:  # one piece is still in registers
                z = load_z(x_ptr, x_stride, residual_ptr, residual_stride, i, j, valued)
            centered = tl.where(valued, z - mean[:, None], 0.0)
            total += tl.sum(centered * centered, 1)
        square = tl.div_rn(total, tl.zeros_like(total) + size)
    rstd = tl.div_rn(tl.zeros_like(square) + 1.0, tl.sqrt_rn(square + eps))
    tl.store(rstd_ptr + i, rstd, mask=i < rows)
    if amax_ptr is not None or amax_of_row_ptr is not None:
        amax = 0
        amax_of_row = tl.zeros((ROWS,), tl.int32)
        for piece in tl.static_range(PIECES):
            j = piece * PIECE + tl.arange(0, PIECE)
            valued = (i < rows)[:, None] & (j < size)[None, :]
            if PIECES > 1:
                z = load_z(x_ptr, x_stride, residual_ptr, residual_stride, i, j, valued)
            y = normalized(z, mean, rstd, gamma_ptr, beta_ptr, j, size, CENTERED, OFFSET)
            y = ql.widen(ql.narrow(tl.where(valued, y, 0.0), x_ptr.dtype.element_ty))
            if amax_ptr is not None:
                amax = tl.maximum(amax, ql.largest_bits(y))
            bits = tl.abs(y).to(tl.int32, bitcast=True)
            if amax_of_row_ptr is not None:
                amax_of_row = tl.maximum(amax_of_row, tl.max(bits, 1))
            if amax_of_col_ptr is not None:
                tl.atomic_max(ql.as_bits(amax_of_col_ptr + j), tl.max(bits, 0), mask=j < size, sem="relaxed")
        # maxima of integers, so the order of programs does not matter
        if amax_ptr is not None:
            tl.atomic_max(ql.as_bits(amax_ptr), amax, sem="relaxed")
        if amax_of_row_ptr is not None:
            tl.store(ql.as_bits(amax_of_row_ptr + i), amax_of_row, mask=i < rows)


writes(statistics_kernel, "sum_ptr", "mean_ptr", "rstd_ptr", "amax_ptr", "amax_of_row_ptr", "amax_of_col_ptr")


@triton.jit(do_not_specialize=RANDOM)  # a draw of 1 or a multiple of 16 would recompile the kernel
def normalize_kernel(
    x_ptr, x_stride, mean_ptr, rstd_ptr, gamma_ptr, beta_ptr, where, sink, out, other_where, other_out,
    k0, k1, draw, stream, width, other_stream, other_width,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    position = tile_of(where, TILE)
    _, _, i, j, valued = position
    z = load_tile(x_ptr, x_stride, i, j, valued)
    rstd = load_row(rstd_ptr, i, where.rows)
    mean = load_row(mean_ptr, i, where.rows) if CENTERED else rstd  # RMSNorm does not read it
    y = normalized(z, mean, rstd, gamma_ptr, beta_ptr, j, where.value_cols, CENTERED, OFFSET)
    deliver(
        tl.where(valued, y, 0.0), position, where, sink, out, other_where, other_out,
        (k0, k1, draw), stream, width, other_stream, other_width, x_ptr.dtype.element_ty, H, T,
    )  # fmt: skip


writes(normalize_kernel, "out", "other_out")


@triton.jit
def load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED: tl.constexpr):
    z = load_tile(x_ptr, x_stride, i, j, valued)
    if CENTERED:
        z = z - load_row(mean_ptr, i, rows)[:, None]
    return z * load_row(rstd_ptr, i, rows)[:, None]


@triton.jit
def store_dx(
    g, unit, of_unit, of_g, rstd, residual_ptr, residual_stride, dx_ptr, i, j, size, valued, CENTERED: tl.constexpr
):  # fmt: skip
    dx = g - unit * of_unit[:, None]
    if CENTERED:
        dx = dx - of_g[:, None]
    dx = dx * rstd[:, None]
    if residual_ptr is not None:
        dx = dx + load_tile(residual_ptr, residual_stride, i, j, valued)
    offsets = i.to(tl.int64)[:, None] * size + j[None, :]
    tl.store(dx_ptr + offsets, ql.narrow(dx, dx_ptr.dtype.element_ty), mask=valued)


@triton.jit
def backward_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, mean_ptr, rstd_ptr, gamma_ptr, residual_ptr, residual_stride,
    dx_ptr, dgamma_ptr, dbeta_ptr, rows, size,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Backward of whole rows. Partial sums for gamma and beta are added afterwards, in a fixed order."""
    j = tl.arange(0, PIECE)
    dgamma = tl.zeros((ROWS, PIECE), tl.float32)
    dbeta = tl.zeros((ROWS, PIECE), tl.float32)
    first = tl.program_id(0) * ROWS
    while first < rows:  # no range, because the interpreter does not support such bounds
        i = first + tl.arange(0, ROWS)
        valued = (i < rows)[:, None] & (j < size)[None, :]
        dy = load_tile(dy_ptr, dy_stride, i, j, valued)
        unit = load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED)
        g = dy * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
        mean_g_unit = tl.sum(g * unit, 1)
        mean_g_unit = tl.div_rn(mean_g_unit, tl.zeros_like(mean_g_unit) + size)
        mean_g = mean_g_unit
        if CENTERED:
            mean_g = tl.sum(g, 1)
            mean_g = tl.div_rn(mean_g, tl.zeros_like(mean_g) + size)
        if PIECE > 8192:  # the sums leave too few registers: load the values again, from the L1 cache
            tl.debug_barrier()  # otherwise the compiler reuses the earlier loads
            dy = load_tile(dy_ptr, dy_stride, i, j, valued)
            unit = load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED)
            g = dy * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
        rstd = load_row(rstd_ptr, i, rows)
        store_dx(
            g, unit, mean_g_unit, mean_g, rstd, residual_ptr, residual_stride, dx_ptr, i, j, size, valued, CENTERED
        )  # fmt: skip
        if dgamma_ptr is not None:
            dgamma += dy * unit
        if dbeta_ptr is not None:
            dbeta += dy
        first += tl.num_programs(0) * ROWS
    offsets = tl.program_id(0).to(tl.int64) * size + j
    if dgamma_ptr is not None:
        tl.store(dgamma_ptr + offsets, tl.sum(dgamma, 0), mask=j < size)
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + offsets, tl.sum(dbeta, 0), mask=j < size)


writes(backward_kernel, "dx_ptr", "dgamma_ptr", "dbeta_ptr")


@triton.jit
def add_to(ptr, values, mask, at):
    tl.store(ptr + at, tl.load(ptr + at, mask=mask, other=0.0) + values, mask=mask)


@triton.jit
def backward_pieces_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, mean_ptr, rstd_ptr, gamma_ptr, residual_ptr, residual_stride,
    dx_ptr, dgamma_ptr, dbeta_ptr, rows, size,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Backward of rows longer than a piece, which are read twice. Sums, zero at first, are kept in memory."""
    row = tl.program_id(0)
    while row < rows:
        i = row + tl.arange(0, 1)
        mean_g_unit = tl.zeros((1,), tl.float32)
        mean_g = tl.zeros((1,), tl.float32)
        for piece in tl.range(PIECES):
            j = piece * PIECE + tl.arange(0, PIECE)
            valued = (i < rows)[:, None] & (j < size)[None, :]
            unit = load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED)
            g = load_tile(dy_ptr, dy_stride, i, j, valued) * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
            mean_g_unit += tl.sum(g * unit, 1)
            mean_g += tl.sum(g, 1)
        mean_g_unit = tl.div_rn(mean_g_unit, tl.zeros_like(mean_g_unit) + size)
        mean_g = tl.div_rn(mean_g, tl.zeros_like(mean_g) + size)
        rstd = load_row(rstd_ptr, i, rows)
        for piece in tl.range(PIECES):
            j = piece * PIECE + tl.arange(0, PIECE)
            valued = (i < rows)[:, None] & (j < size)[None, :]
            unit = load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED)
            dy = load_tile(dy_ptr, dy_stride, i, j, valued)
            g = dy * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
            store_dx(
                g, unit, mean_g_unit, mean_g, rstd, residual_ptr, residual_stride, dx_ptr, i, j, size, valued, CENTERED
            )  # fmt: skip
            offsets = tl.program_id(0).to(tl.int64) * size + j
            if dgamma_ptr is not None:
                add_to(dgamma_ptr, tl.sum(dy * unit, 0), j < size, offsets)
            if dbeta_ptr is not None:
                add_to(dbeta_ptr, tl.sum(dy, 0), j < size, offsets)
        row += tl.num_programs(0)
        tl.debug_barrier()  # other threads can read these sums next


writes(backward_pieces_kernel, "dx_ptr", "dgamma_ptr", "dbeta_ptr")


class NormStatistics(NamedTuple):
    """Statistics of rows, float32 [R] each; `mean` is None for RMSNorm."""

    rstd: Tensor
    mean: Tensor | None


class NormParameters(NamedTuple):
    """Vectors [C] of any float dtype; `offset` is 1 for zero-centered gamma, else 0."""

    gamma: Tensor
    beta: Tensor | None = None
    offset: float = 0.0


class RowTiling(NamedTuple):
    """Layout of rows in a program: rows, elements of a piece, pieces, warps."""

    rows: int
    piece: int
    pieces: int
    warps: int


@lru_cache(maxsize=64)
def row_tiling(size: int, longest: int = LONGEST) -> RowTiling:
    """Return the layout for rows of `size` elements; a program has one row, or more up to 4096 elements."""
    piece = min(max(triton.next_power_of_2(size), 16), longest)
    rows = max(1, 4096 // piece)
    return RowTiling(rows, piece, -(size // -piece), max(rows * piece // (32 * PER_THREAD), 1))


def _addressed(x: Tensor | None) -> tuple[Tensor | None, int]:
    """x [..., C] with adjacent elements in each row, and the row stride."""
    if x is None or x.is_contiguous():
        return x, 0 if x is None else x.shape[-1]
    x = epilogue.by_rows(epilogue.matrix(x))
    return x, x.stride(0)


def norm_statistics(
    x: Tensor, eps: float, centered: bool, *, residual: Tensor | None = None, parameters: NormParameters | None = None,
    amax: Tensor | None = None, of_rows: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[NormStatistics, Tensor]:  # fmt: skip
    """Compute statistics of the R rows of x [..., C], or of x + residual. Also returns that sum, or x itself.

    `centered`: LayerNorm, not RMSNorm. `amax`: float32 scalar, raised to the amax of the normalized result in the dtype
    of x. `of_rows`: float32 [R] for the amaxes of rows, and None or float32 [C], raised to the amaxes of columns. Both
    need `parameters`.
    """
    rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows_of_x, rows_of_residual = _addressed(x), _addressed(residual)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    statistics = NormStatistics(rstd, torch.empty_like(rstd) if centered else None)
    gamma, beta, offset = parameters or NormParameters(rstd)  # without an amax the kernel does not read them
    tiling = row_tiling(size)
    # enable_fp_fusion=False: a fused multiply-add in one kernel would make its y differ from the other kernel's
    if rows > 0:
        launch_kernel(
            statistics_kernel, (-(rows // -tiling.rows),), x.device,
            *rows_of_x, *rows_of_residual, total, statistics.mean, rstd,
            gamma, beta, amax, *of_rows, rows, size, eps, CENTERED=centered,
            OFFSET=offset, ROWS=tiling.rows, PIECE=tiling.piece, PIECES=tiling.pieces,
            num_warps=tiling.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return statistics, x if total is None else total


def normalize_and_quantize(
    x: Tensor, statistics: NormStatistics, parameters: NormParameters, outputs: KernelOutputs
) -> Targets:
    """Normalize the rows of x [R, C], and quantize the result as `outputs` requests; oracle: `modules.norm`."""
    plan = epilogue.plan_epilogue(outputs, x)
    x = epilogue.by_rows(x)
    if x.numel() > 0:
        launch_kernel(
            normalize_kernel, plan.programs, x.device,
            x, x.stride(0), statistics.mean, statistics.rstd, parameters.gamma, parameters.beta,
            *plan.arguments, CENTERED=statistics.mean is not None, OFFSET=parameters.offset,
            **plan.constants, enable_fp_fusion=False,
        )  # fmt: skip
    return plan.finish()


def norm_backward(
    dy: Tensor, x: Tensor, statistics: NormStatistics, parameters: NormParameters, *,
    residual_gradient: Tensor | None = None, for_parameters: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients of x, in its dtype, and (`for_parameters`) of gamma and beta, float32 [C].

    `residual_gradient`: added to the gradient of x before rounding.
    """
    rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    fits = size <= (LONGEST_CENTERED if statistics.mean is not None else LONGEST)  # registers hold a row and its sums
    tiling = row_tiling(size, LONGEST if fits else LONGEST_CENTERED)
    grid = min(-(rows // -tiling.rows), PROGRAMS) if tiling.pieces == 1 else min(rows, PROGRAMS_IN_PIECES)
    rows_of_dy, rows_of_x, rows_of_residual = _addressed(dy), _addressed(x), _addressed(residual_gradient)
    dx = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
    # zeros, because the kernel in pieces adds to them, and no kernel runs without rows or columns
    allocate = torch.zeros if tiling.pieces > 1 or rows * size == 0 else torch.empty
    dgamma = allocate((grid, size), dtype=torch.float32, device=x.device) if for_parameters else None
    dbeta = None
    if dgamma is not None and parameters.beta is not None:
        dbeta = allocate((grid, size), dtype=torch.float32, device=x.device)
    if rows * size > 0:
        kernel, layout = backward_kernel, {"ROWS": tiling.rows}
        if tiling.pieces > 1:
            kernel, layout = backward_pieces_kernel, {"PIECES": tiling.pieces}
        launch_kernel(
            kernel, (grid,), x.device,
            *rows_of_dy, *rows_of_x, statistics.mean, statistics.rstd, parameters.gamma,
            *rows_of_residual, dx, dgamma, dbeta, rows, size,
            CENTERED=statistics.mean is not None, OFFSET=parameters.offset, PIECE=tiling.piece,
            num_warps=min(tiling.warps, 16), enable_fp_fusion=False, **layout,
        )  # fmt: skip
    return dx, None if dgamma is None else sum_rows(dgamma), None if dbeta is None else sum_rows(dbeta)
