"""The transpose of a matrix of bytes, as GEMMs of 8-bit codes want one operand: out[j, i] = x[i, j]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels.launch import launch_kernel

TILE = (128, 128)


@triton.jit
def transpose_kernel(x_ptr, x_stride, out_ptr, out_stride, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    x_at = i.to(tl.int64)[:, None] * x_stride + j[None, :]
    x = tl.load(x_ptr + x_at, mask=(i < rows)[:, None] & (j < cols)[None, :], other=0)
    out_at = j.to(tl.int64)[:, None] * out_stride + i[None, :]
    tl.store(out_ptr + out_at, tl.trans(x), mask=(j < cols)[:, None] & (i < rows)[None, :])


def transpose(x: Tensor) -> Tensor:
    """x uint8 [R, C], rows contiguous -> [C, R], contiguous."""
    rows, cols = x.shape
    out = torch.empty((cols, rows), dtype=torch.uint8, device=x.device)
    if x.numel() > 0:
        launch_kernel(
            transpose_kernel, (triton.cdiv(rows, TILE[0]), triton.cdiv(cols, TILE[1])), x.device,
            x, x.stride(0), out, out.stride(0), rows, cols, *TILE, num_warps=8,
        )  # fmt: skip
    return out
