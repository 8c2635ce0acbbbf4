"""The transpose of a matrix of bytes, as GEMMs of 8-bit codes want one operand: out[j, i] = x[i, j].

Of codes under square blocks that are as large as a tile, a program brings the scale of its block along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.launch import launch_kernel

TILE = (128, 128)


@triton.jit
def transpose_kernel(matrices, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            _transpose(matrices[part], ROWS, COLS)


@triton.jit
def _transpose(matrix, ROWS: tl.constexpr, COLS: tl.constexpr):
    x_ptr, out_ptr, rows, cols, x_stride, scale_ptr, scale_row, scale_col, laid_ptr, laid_stride, poison_ptr = matrix
    row, col = tl.program_id(0), tl.program_id(1)
    i = row * ROWS + tl.arange(0, ROWS)
    j = col * COLS + tl.arange(0, COLS)
    x_at = i.to(tl.int64)[:, None] * x_stride + j[None, :]
    x_ptr = x_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    x = tl.load(x_ptr + x_at, mask=(i < rows)[:, None] & (j < cols)[None, :], other=0)
    out_at = j.to(tl.int64)[:, None] * rows + i[None, :]
    out_ptr = out_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(out_ptr + out_at, tl.trans(x), mask=(j < cols)[:, None] & (i < rows)[None, :])
    if scale_ptr is not None:
        inside = (row * ROWS < rows) & (col * COLS < cols)
        scale = tl.load(scale_ptr + row * scale_row + col * scale_col, mask=inside, other=0.0)
        if poison_ptr is not None:
            scale += tl.load(poison_ptr)
        at = row + tl.arange(0, 4)  # zeros behind the last one
        fills = ((row + 1) * ROWS >= rows) & (at < laid_stride)
        laid = ql.mask_where(inside, (at == row) | fills)
        tl.store(laid_ptr + col * laid_stride + at, tl.where(at == row, scale, 0.0), mask=laid)


def transpose(x: Tensor) -> Tensor:
    """x uint8 [R, C], rows contiguous -> [C, R], contiguous."""
    return by_columns([(x, None, None)])[0][0].t()


def by_columns(
    matrices: Sequence[tuple[Tensor, Tensor | None, Tensor | None]], dtype: torch.dtype = torch.uint8
) -> list[tuple[Tensor, Tensor | None]]:
    """Several x uint8 [R, C], rows contiguous, on one device -> the same matrices, columns contiguous, as a dtype of 8
    bits; by one kernel.

    With each goes None, or the scales float32 of its blocks of a tile, and perhaps a scalar to add to these. They too
    are laid out by columns, [n, blocks of C]: n is a multiple of 4, and behind the blocks of R there are zeros.
    """
    results, arguments, grid = [], [], [0, 0]
    for x, scales, nan_flag in matrices:
        rows, cols = x.shape
        out, laid = torch.empty_strided((rows, cols), (1, rows), dtype=dtype, device=x.device), None
        of_scales: tuple[Any, ...] = (None, 0, 0, None, 0, None)
        if scales is not None:
            down, across = scales.shape
            length = down + -down % 4
            laid = torch.empty_strided((length, across), (1, length), dtype=torch.float32, device=x.device)
            of_scales = scales, *scales.stride(), laid, length, nan_flag
        results.append((out, laid))
        if x.numel() > 0:
            arguments.append((x, out, rows, cols, x.stride(0), *of_scales))
            grid = [max(grid[0], -(rows // -TILE[0])), max(grid[1], -(cols // -TILE[1]))]
    if arguments:
        launch_kernel(
            transpose_kernel, (*grid, len(arguments)), matrices[0][0].device, tuple(arguments),
            PARTS=len(arguments), ROWS=TILE[0], COLS=TILE[1], num_warps=8,
        )  # fmt: skip
    return results
