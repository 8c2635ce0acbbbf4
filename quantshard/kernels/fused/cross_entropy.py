"""The cross-entropy of logits: one read for the loss and log(Z) of the softmax; one read and one write for the
gradient.

The forward kernel reads a row once. It keeps the largest logit so far, and the sum of exponentials relative to it,
separately for each of `COLS` columns. Let u = 2**-24, S = ceil(V / COLS) the number of steps, and R the difference of
the largest and the smallest logit of a row. exp of z has a relative error of (|z| + 3) u
(`kernels/fused/activation.py`). A term passes through one exp at first, and at most one in each later step and at the
end; so

    |log_z - exact| <= ((S + 2) (R + 4) + log2(COLS) + 4) u + 2 u |exact|     also |loss - exact|

The gradient takes log_z as an input. With z = x - log_z and p = exp(z), before the rounding to the logits' dtype

    |gradient - exact| <= (2 |z| + 6) u |factor| p + u |exact| + 2**-126 |factor|
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.launch import launch_kernel

COLS: Final = 4096
WARPS: Final = 8


@triton.jit
def cross_entropy_kernel(x_ptr, x_row, x_col, cols, targets_ptr, losses_ptr, log_z_ptr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lowest = float("-inf")
    top = tl.full((COLS,), lowest, tl.float32)
    total = tl.zeros((COLS,), tl.float32)
    for begin in range(0, cols, COLS):
        j = begin + tl.arange(0, COLS)
        x = ql.widen(tl.load(x_ptr + row * x_row + j.to(tl.int64) * x_col, mask=j < cols, other=lowest))
        higher = tl.maximum(top, x)  # ignores NaN, which reaches the sum instead
        base = tl.where(higher > lowest, higher, 0.0)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    highest = tl.max(top, 0)
    base = tl.where(highest > lowest, highest, 0.0)
    log_sum = tl.log(tl.sum(total * tl.exp(top - base), 0))
    target_logit = ql.widen(tl.load(x_ptr + row * x_row + tl.load(targets_ptr + row) * x_col))
    tl.store(losses_ptr + row, (base - target_logit) + log_sum)
    tl.store(log_z_ptr + row, base + log_sum)


@triton.jit
def logits_gradient_kernel(
    x_ptr, x_row, x_col, cols, targets_ptr, log_z_ptr, factors_ptr, of_entropy_ptr, out_ptr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = j < cols
    x = ql.widen(tl.load(x_ptr + row * x_row + j.to(tl.int64) * x_col, mask=inside, other=0.0))
    gradient = tl.exp(x - tl.load(log_z_ptr + row)) * tl.load(factors_ptr + row)
    gradient = tl.where(j == tl.load(targets_ptr + row), gradient - tl.load(of_entropy_ptr + row), gradient)
    tl.store(out_ptr + row * cols + j, ql.narrow(gradient, out_ptr.dtype.element_ty), mask=inside)


def cross_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `numerics.cross_entropy.cross_entropies` for float32, bfloat16 or float16 logits with any strides."""
    losses, log_z = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) > 0:
        launch_kernel(
            cross_entropy_kernel, (len(logits),), logits.device,
            logits, *logits.stride(), logits.shape[1], targets.contiguous(), losses, log_z,
            COLS=COLS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return losses, log_z


def logits_gradient(
    logits: Tensor, targets: Tensor, log_z: Tensor, factors: Tensor, of_entropy: Tensor, out: Tensor | None = None
) -> Tensor:
    """Compute `numerics.cross_entropy.logits_gradient` for float32, bfloat16 or float16 logits with any strides."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if out is None else out
    if logits.numel() > 0:
        rows, cols = logits.shape
        launch_kernel(
            logits_gradient_kernel, (rows, triton.cdiv(cols, COLS)), logits.device,
            logits, *logits.stride(), cols, targets.contiguous(), log_z, factors.contiguous(), of_entropy.contiguous(),
            result, COLS=COLS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return result
