"""The transpose of a matrix of bytes, for GEMMs that need one 8-bit operand transposed: out[j, i] = x[i, j].

If each square block of codes is one tile, a program also copies the scale of its block.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.graph_launch import writes
from quantshard.kernels.launch import launch_kernel

TILE = (128, 128)


@triton.jit
def transpose_kernel(matrices, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            _transpose(matrices[part], ROWS, COLS)


writes(transpose_kernel, "matrices.*.1", "matrices.*.8")


@triton.jit
def _transpose(matrix, ROWS: tl.constexpr, COLS: tl.constexpr):
    (
        x_ptr, out_ptr, rows, cols, x_stride,
        scale_ptr, scale_row, scale_col, new_scale_ptr, new_scale_stride, nan_flag_ptr,
    ) = matrix  # fmt: skip
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
        if nan_flag_ptr is not None:
            scale += tl.load(nan_flag_ptr)
        index = row + tl.arange(0, 4)  # the last program also writes the zero padding
        fills = ((row + 1) * ROWS >= rows) & (index < new_scale_stride)
        mask = ql.mask_where(inside, (index == row) | fills)
        tl.store(new_scale_ptr + col * new_scale_stride + index, tl.where(index == row, scale, 0.0), mask=mask)


def by_columns(
    matrices: Sequence[tuple[Tensor, Tensor | None, Tensor | None]], dtype: torch.dtype = torch.uint8
) -> list[tuple[Tensor, Tensor | None]]:
    """Copy several matrices uint8 [R, C] on one device from contiguous rows to contiguous columns, with one kernel.

    Each x comes with None, or with the float32 scales of its blocks of one tile and optionally a scalar to add. These
    are copied to columns too, [n, blocks of C]: n is R's blocks rounded up to a multiple of 4, padded with zeros.
    """
    results, arguments, grid = [], [], [0, 0]
    for x, scales, nan_flag in matrices:
        rows, cols = x.shape
        out, padded_scales = torch.empty_strided((rows, cols), (1, rows), dtype=dtype, device=x.device), None
        scale_arguments: tuple[Any, ...] = (None, 0, 0, None, 0, None)
        if scales is not None:
            down, across = scales.shape
            length = down + -down % 4
            padded_scales = torch.empty_strided((length, across), (1, length), dtype=torch.float32, device=x.device)
            scale_arguments = scales, *scales.stride(), padded_scales, length, nan_flag
        results.append((out, padded_scales))
        if x.numel() > 0:
            arguments.append((x, out, rows, cols, x.stride(0), *scale_arguments))
            grid = [max(grid[0], -(rows // -TILE[0])), max(grid[1], -(cols // -TILE[1]))]
    if arguments:
        launch_kernel(
            transpose_kernel, (*grid, len(arguments)), matrices[0][0].device, tuple(arguments),
            PARTS=len(arguments), ROWS=TILE[0], COLS=TILE[1], num_warps=8,
        )  # fmt: skip
    return results
