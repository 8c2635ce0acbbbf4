"""The transpose of a matrix of bytes, as GEMMs of 8-bit codes want one operand: out[j, i] = x[i, j].

Of codes under square blocks that are as large as a tile, a program brings the scale of its block along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels.launch import launch_kernel

TILE = (128, 128)


@triton.jit
def transpose_kernel(
    x_ptr, x_stride, out_ptr, out_stride, rows, cols,
    scale_ptr, scale_row, scale_col, laid_ptr, laid_stride, poison_ptr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0), tl.program_id(1)
    i = row * ROWS + tl.arange(0, ROWS)
    j = col * COLS + tl.arange(0, COLS)
    x_at = i.to(tl.int64)[:, None] * x_stride + j[None, :]
    x = tl.load(x_ptr + x_at, mask=(i < rows)[:, None] & (j < cols)[None, :], other=0)
    out_at = j.to(tl.int64)[:, None] * out_stride + i[None, :]
    tl.store(
        out_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + out_at,
        tl.trans(x),
        mask=(j < cols)[:, None] & (i < rows)[None, :],
    )
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row * scale_row + col * scale_col)
        if poison_ptr is not None:
            scale += tl.load(poison_ptr)
        at = row + tl.arange(0, 4)  # zeros behind the last one
        fills = (row == tl.num_programs(0) - 1) & (at < laid_stride)
        tl.store(laid_ptr + col * laid_stride + at, tl.where(at == row, scale, 0.0), mask=(at == row) | fills)


def transpose(x: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """x uint8 [R, C], rows contiguous -> [C, R], contiguous, as a dtype of 8 bits."""
    return _launch(x, dtype)


def transpose_blocks(
    x: Tensor, scales: Tensor, poison: Tensor | None, dtype: torch.dtype = torch.uint8
) -> tuple[Tensor, Tensor]:
    """The same of codes under `scales` float32 of blocks of a tile; and the transpose of these, [blocks of C, n], plus
    the scalar `poison`: n is a multiple of 4, and behind the blocks of R there are zeros."""
    rows, cols = scales.shape
    laid = torch.empty((cols, rows + -rows % 4), dtype=torch.float32, device=x.device)
    return _launch(x, dtype, scales, laid, poison), laid


def _launch(
    x: Tensor,
    dtype: torch.dtype,
    scales: Tensor | None = None,
    laid: Tensor | None = None,
    poison: Tensor | None = None,
) -> Tensor:
    rows, cols = x.shape
    strides = (0, 0) if scales is None else scales.stride()
    out = torch.empty((cols, rows), dtype=dtype, device=x.device)
    if x.numel() > 0:
        launch_kernel(
            transpose_kernel, (-(rows // -TILE[0]), -(cols // -TILE[1])), x.device,
            x, x.stride(0), out, out.stride(0), rows, cols,
            scales, *strides, laid, 0 if laid is None else laid.shape[1], poison, *TILE, num_warps=8,
        )  # fmt: skip
    return out
