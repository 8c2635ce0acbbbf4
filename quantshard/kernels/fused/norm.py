"""RMSNorm and LayerNorm: statistics of rows, normalization with quantization, and backward.

    z    = x, or x + residual rounded to their dtype
    mean = sum(z) / n                                  LayerNorm only
    rstd = 1 / sqrt(sum((z - mean)**2) / n + eps)      RMSNorm: of z
    unit = (z - mean) * rstd
    y    = unit * (gamma + offset) + beta

    g    = dy * (gamma + offset)
    dx   = (g - unit * mean(g * unit) - mean(g)) * rstd + residual gradient
    dgamma = sum over rows of dy * unit,  dbeta = sum over rows of dy

in float32; y and dx are rounded once to the dtype of x. Rows are held in registers up to `LONGEST` elements; longer
ones are read again, in pieces of so many.

Statistics come from a kernel that sees whole rows; a second one normalizes tiles and quantizes them, so that a block of
any shape is whole in one program. Both apply `normalized`, so the amax that the first one takes is that of the second
one's results, to the bit.

Sums along a row are trees, in which no term passes through more than d = `depth(n)` additions. With u = 2**-24 and m
the mean of |z| * rstd, to which LayerNorm's centering is exposed (RMSNorm: m = 0), before the one rounding

    |rstd - exact| <= e rstd,          e = (d / 2 + 8) u + d u m
    |unit - exact| <= a |unit| + b,    a = e + 4 u, b = (a + d u) m
    |y    - exact| <= (a |unit| + b) |gamma + offset| + 4 u (|unit (gamma + offset)| + |beta|)
    |dx   - exact| <= (3 a + (d + 16) u) rstd (|g| + |unit| mean(|g unit|) + mean(|g|))
                      + b rstd (|unit| mean(|g|) + mean(|g unit|))

Sums over R rows are off by at most R u of the sum of the magnitudes, besides the error of unit. The order in which they
are taken depends on the shape alone.
"""

from __future__ import annotations

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
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import tile_of
from quantshard.kernels.quantize.random_words import RANDOM

LONGEST: Final = 16384
"""Elements of a row, or of a piece of it, that are held in registers: `PER_THREAD` by each of 1024 threads, the most
that a program has."""
LONGEST_CENTERED: Final = 8192
"""Elements that the backward of LayerNorm, which keeps two sums beside them, and every backward in pieces hold so."""
PROGRAMS: Final = 528
"""The most programs of backward: 4 for each of the 132 multiprocessors of an H100 or H200. Each writes its sums once.
No device is asked for its number: the order of sums, and so their bits, follow from the shape alone."""
PROGRAMS_IN_PIECES: Final = 132
"""The most programs of backward for rows in pieces: so few that the sums to which they add stay in the L2 cache."""
PER_THREAD: Final = 16
"""Elements of a row that a thread holds."""


def depth(n: int) -> int:
    """Most additions on the way of one of n terms to their sum: in a thread, over a row's 1024 threads, over pieces."""
    # 32: backward has 512 threads for LONGEST elements; 10: a tree over 1024
    return 32 + 10 + -(n // -LONGEST_CENTERED)


# ---------------------------------------------------------------------------------------------------------- statistics


@triton.jit
def load_row(ptr, j, size):
    """Float32 values of a vector at columns j; zero outside."""
    return ql.widen(tl.load(ptr + j, mask=(j >= 0) & (j < size), other=0.0))


@triton.jit
def load_z(x_ptr, x_stride, residual_ptr, residual_stride, i, j, valued):
    z = load_tile(x_ptr, x_stride, i, j, valued)
    if residual_ptr is not None:  # rounded, as the sum is stored: backward reads it there, and the oracle has it so
        total = z + load_tile(residual_ptr, residual_stride, i, j, valued)
        z = ql.widen(ql.narrow(total, x_ptr.dtype.element_ty))
    return z


@triton.jit
def normalized(z, mean, rstd, gamma_ptr, beta_ptr, j, size, CENTERED: tl.constexpr, OFFSET: tl.constexpr):
    """y, float32, of a tile z at columns j; statistics are one for each of its rows."""
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
            at = i.to(tl.int64)[:, None] * size + j[None, :]
            tl.store(sum_ptr + at, ql.narrow(z, sum_ptr.dtype.element_ty), mask=valued)
        total += tl.sum(z if CENTERED else z * z, 1)
    # div_rn and sqrt_rn, here and below: Triton's own `/` and `sqrt` are approximations
    mean = tl.div_rn(total, tl.zeros_like(total) + size)
    square = mean  # RMSNorm: that was the mean square
    if CENTERED:  # a second pass: the mean square less the squared mean would cancel where the mean is large
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
        # of integers, so the order of programs does not matter
        if amax_ptr is not None:
            tl.atomic_max(ql.as_bits(amax_ptr), amax, sem="relaxed")
        if amax_of_row_ptr is not None:
            tl.store(ql.as_bits(amax_of_row_ptr + i), amax_of_row, mask=i < rows)


@triton.jit(do_not_specialize=RANDOM)  # else a draw that is 1, or a multiple of 16, would compile another kernel
def normalize_kernel(
    x_ptr, x_stride, mean_ptr, rstd_ptr, gamma_ptr, beta_ptr, where, sink, out, other_where, other_out,
    k0, k1, draw, stream, width, other_stream, other_width,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    place = tile_of(where, TILE)
    _, _, i, j, valued = place
    z = load_tile(x_ptr, x_stride, i, j, valued)
    rstd = load_row(rstd_ptr, i, where.rows)
    mean = load_row(mean_ptr, i, where.rows) if CENTERED else rstd  # RMSNorm does not read it
    y = normalized(z, mean, rstd, gamma_ptr, beta_ptr, j, where.value_cols, CENTERED, OFFSET)
    deliver(
        tl.where(valued, y, 0.0), place, where, sink, out, other_where, other_out,
        (k0, k1, draw), stream, width, other_stream, other_width, x_ptr.dtype.element_ty, H, T,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ backward


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
    at = i.to(tl.int64)[:, None] * size + j[None, :]
    tl.store(dx_ptr + at, ql.narrow(dx, dx_ptr.dtype.element_ty), mask=valued)


@triton.jit
def backward_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, mean_ptr, rstd_ptr, gamma_ptr, residual_ptr, residual_stride,
    dx_ptr, dgamma_ptr, dbeta_ptr, rows, size,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Whole rows: each program takes every so many of them, in order, and writes its own sums of gamma and beta, which
    are added afterwards: atomic additions would come in any order."""
    j = tl.arange(0, PIECE)
    dgamma = tl.zeros((ROWS, PIECE), tl.float32)
    dbeta = tl.zeros((ROWS, PIECE), tl.float32)
    first = tl.program_id(0) * ROWS
    while first < rows:  # not a range: the interpreter knows none with bounds like these
        i = first + tl.arange(0, ROWS)
        valued = (i < rows)[:, None] & (j < size)[None, :]
        dy = load_tile(dy_ptr, dy_stride, i, j, valued)
        unit = load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED)
        g = dy * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
        of_unit = tl.sum(g * unit, 1)
        of_unit = tl.div_rn(of_unit, tl.zeros_like(of_unit) + size)
        of_g = of_unit
        if CENTERED:
            of_g = tl.sum(g, 1)
            of_g = tl.div_rn(of_g, tl.zeros_like(of_g) + size)
        if PIECE > 8192:  # beside the sums, registers do not hold so many: the nearest cache does
            tl.debug_barrier()  # else the compiler keeps what was read before
            dy = load_tile(dy_ptr, dy_stride, i, j, valued)
            unit = load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED)
            g = dy * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
        rstd = load_row(rstd_ptr, i, rows)
        store_dx(
            g, unit, of_unit, of_g, rstd, residual_ptr, residual_stride, dx_ptr, i, j, size, valued, CENTERED
        )  # fmt: skip
        if dgamma_ptr is not None:
            dgamma += dy * unit
        if dbeta_ptr is not None:
            dbeta += dy
        first += tl.num_programs(0) * ROWS
    at = tl.program_id(0).to(tl.int64) * size + j
    if dgamma_ptr is not None:
        tl.store(dgamma_ptr + at, tl.sum(dgamma, 0), mask=j < size)
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + at, tl.sum(dbeta, 0), mask=j < size)


@triton.jit
def add_to(ptr, values, mask, at):
    tl.store(ptr + at, tl.load(ptr + at, mask=mask, other=0.0) + values, mask=mask)


@triton.jit
def backward_pieces_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, mean_ptr, rstd_ptr, gamma_ptr, residual_ptr, residual_stride,
    dx_ptr, dgamma_ptr, dbeta_ptr, rows, size,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Rows longer than a piece, which are read twice. A program adds to its sums, zero at first, where they are stored:
    registers hold no whole row of them."""
    row = tl.program_id(0)
    while row < rows:
        i = row + tl.arange(0, 1)
        of_unit = tl.zeros((1,), tl.float32)
        of_g = tl.zeros((1,), tl.float32)
        for piece in tl.range(PIECES):
            j = piece * PIECE + tl.arange(0, PIECE)
            valued = (i < rows)[:, None] & (j < size)[None, :]
            unit = load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED)
            g = load_tile(dy_ptr, dy_stride, i, j, valued) * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
            of_unit += tl.sum(g * unit, 1)
            of_g += tl.sum(g, 1)
        of_unit = tl.div_rn(of_unit, tl.zeros_like(of_unit) + size)
        of_g = tl.div_rn(of_g, tl.zeros_like(of_g) + size)
        rstd = load_row(rstd_ptr, i, rows)
        for piece in tl.range(PIECES):
            j = piece * PIECE + tl.arange(0, PIECE)
            valued = (i < rows)[:, None] & (j < size)[None, :]
            unit = load_unit(x_ptr, x_stride, mean_ptr, rstd_ptr, i, j, rows, valued, CENTERED)
            dy = load_tile(dy_ptr, dy_stride, i, j, valued)
            g = dy * (load_row(gamma_ptr, j, size) + OFFSET)[None, :]
            store_dx(
                g, unit, of_unit, of_g, rstd, residual_ptr, residual_stride, dx_ptr, i, j, size, valued, CENTERED
            )  # fmt: skip
            at = tl.program_id(0).to(tl.int64) * size + j
            if dgamma_ptr is not None:
                add_to(dgamma_ptr, tl.sum(dy * unit, 0), j < size, at)
            if dbeta_ptr is not None:
                add_to(dbeta_ptr, tl.sum(dy, 0), j < size, at)
        row += tl.num_programs(0)
        tl.debug_barrier()  # the sums are read again, perhaps by other threads than wrote them


# ------------------------------------------------------------------------------------------------------------- launch


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
    """How rows of n elements are laid out over a program: rows, elements of a piece, pieces, warps."""

    rows: int
    piece: int
    pieces: int
    warps: int


@lru_cache(maxsize=64)
def row_tiling(size: int, longest: int = LONGEST) -> RowTiling:
    """How kernels that read rows lay them out: a program has at least 4096 elements, in one row or several."""
    piece = min(max(triton.next_power_of_2(size), 16), longest)
    rows = max(1, 4096 // piece)
    return RowTiling(rows, piece, -(size // -piece), max(rows * piece // (32 * PER_THREAD), 1))


@lru_cache(maxsize=64)
def backward_row_tiling(size: int, centered: bool) -> RowTiling:
    """How backward lays rows out: in pieces where registers would not hold a row and its sums."""
    whole = size <= (LONGEST_CENTERED if centered else LONGEST)
    r = row_tiling(size, LONGEST if whole else LONGEST_CENTERED)
    return r._replace(warps=min(r.warps, 16))


def _addressed(x: Tensor | None) -> tuple[Tensor | None, int]:
    """x [..., C] with the elements of a row next to each other, and how far one row is from the next."""
    if x is None or x.is_contiguous():
        return x, 0 if x is None else x.shape[-1]
    x = epilogue.by_rows(epilogue.matrix(x))
    return x, x.stride(0)


def norm_statistics(
    x: Tensor,
    eps: float,
    centered: bool,
    *,
    residual: Tensor | None = None,
    parameters: NormParameters | None = None,
    amax: Tensor | None = None,
    of_rows: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[NormStatistics, Tensor]:
    """Statistics of the R rows of x [..., C], or of x + residual; and that sum, or x itself.

    Args:
        x: float32, bfloat16 or float16.
        eps: added to the mean square.
        centered: subtract the mean (LayerNorm), or not (RMSNorm).
        residual: of the shape and dtype of x.
        parameters: those of the normalization, if amaxes are asked for.
        amax: float32 scalar, made the larger of itself and the amax of the normalized result in the dtype of x.
        of_rows: float32 [R], made the amaxes of its rows, and perhaps [C], made the larger of itself and those of its
            columns.
    """
    asked = amax is not None or of_rows[0] is not None
    assert asked == (parameters is not None), "amaxes need parameters, and they serve nothing else here"
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype), "x and residual differ"
    rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows_of_x, rows_of_residual = _addressed(x), _addressed(residual)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    found = NormStatistics(rstd, torch.empty_like(rstd) if centered else None)
    gamma, beta, offset = parameters or NormParameters(rstd)  # without an amax the kernel reads none
    r = row_tiling(size)
    # enable_fp_fusion=False: a fused multiply-add in one kernel would make its y another than the other kernel's
    if rows > 0:
        launch_kernel(
            statistics_kernel, (-(rows // -r.rows),), x.device,
            *rows_of_x, *rows_of_residual, total, found.mean, rstd,
            gamma, beta, amax, *of_rows, rows, size, eps, CENTERED=centered,
            OFFSET=offset, ROWS=r.rows, PIECE=r.piece, PIECES=r.pieces, num_warps=r.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return found, x if total is None else total


def normalize_and_quantize(
    x: Tensor, statistics: NormStatistics, parameters: NormParameters, outputs: KernelOutputs
) -> Targets:
    """LayerNorm or RMSNorm of the rows of x [R, C], given their statistics; oracle: `modules.norm`.

    Gives the codes, as far as `outputs` asks for them.

    Args:
        x: float32, bfloat16 or float16; with a residual, the sum.
        statistics: from `norm_statistics`, with a mean for LayerNorm.
        parameters: of the normalization.
        outputs: what is asked for of the result, of the shape and dtype of x.
    """
    p = epilogue.plan_epilogue(outputs, x)
    x = epilogue.by_rows(x)
    if x.numel() > 0:
        launch_kernel(
            normalize_kernel, p.programs, x.device,
            x, x.stride(0), statistics.mean, statistics.rstd, parameters.gamma, parameters.beta,
            *p.arguments, CENTERED=statistics.mean is not None, OFFSET=parameters.offset,
            **p.constants, enable_fp_fusion=False,
        )  # fmt: skip
    return p.finish()


def norm_backward(
    dy: Tensor,
    x: Tensor,
    statistics: NormStatistics,
    parameters: NormParameters,
    *,
    residual_gradient: Tensor | None = None,
    for_parameters: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, in its dtype, and of gamma and beta, in float32: dx of the shape of dy, dgamma [C], dbeta [C].

    Args:
        dy: [..., C], the gradient of the result.
        x, statistics, parameters: as of `normalize_and_quantize`; x may have more dims.
        residual_gradient: [..., C], added to dx before it is rounded.
        for_parameters: without it dgamma is None; dbeta is None if there is no beta, too.
    """
    rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    r = backward_row_tiling(size, statistics.mean is not None)
    grid = min(-(rows // -r.rows), PROGRAMS) if r.pieces == 1 else min(rows, PROGRAMS_IN_PIECES)
    rows_of_dy, rows_of_x, rows_of_residual = _addressed(dy), _addressed(x), _addressed(residual_gradient)
    dx = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
    # zeros: the kernel in pieces adds to them, and without rows or columns no kernel runs
    new = torch.zeros if r.pieces > 1 or rows * size == 0 else torch.empty
    dgamma = new((grid, size), dtype=torch.float32, device=x.device) if for_parameters else None
    dbeta = None
    if dgamma is not None and parameters.beta is not None:
        dbeta = new((grid, size), dtype=torch.float32, device=x.device)
    if rows * size > 0:
        kernel, layout = backward_kernel, {"ROWS": r.rows}
        if r.pieces > 1:
            kernel, layout = backward_pieces_kernel, {"PIECES": r.pieces}
        launch_kernel(
            kernel, (grid,), x.device,
            *rows_of_dy, *rows_of_x, statistics.mean, statistics.rstd, parameters.gamma,
            *rows_of_residual, dx, dgamma, dbeta, rows, size,
            CENTERED=statistics.mean is not None, OFFSET=parameters.offset, PIECE=r.piece,
            num_warps=r.warps, enable_fp_fusion=False, **layout,
        )  # fmt: skip
    return dx, None if dgamma is None else dgamma.sum(0), None if dbeta is None else dbeta.sum(0)
