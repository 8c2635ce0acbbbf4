"""Experts in high precision at once: PyTorch's grouped product, of weights that are a tensor each.

    y[i]  = x[i] @ w[e]^T + b[e]             for rows i of expert e
    dx[i] = dy[i] @ w[e]
    dw[e] = sum of dy[i]^T x[i],  db[e] = sum of dy[i]    over the rows i of e

For counts of rows that lie where kernels read them: one by one, the host would have to know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernels, private_torch
from quantshard.tensor.quantized_tensor import QuantizedTensor

if kernels.USABLE:
    from quantshard.kernels.experts import grouped as grouped_kernel
    from quantshard.kernels.experts.segments import ExpertSegments

ALIGNMENT = 16
"""Bytes that a row of an operand is a multiple of."""


def multiplies(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether there is a product of x [tokens, in_features] with these weights: bfloat16, rows aligned, on one device,
    not quantized."""
    operands = (x, *weights)
    if {operand.dtype for operand in operands} != {torch.bfloat16} or len({each.device for each in operands}) > 1:
        return False
    if any(isinstance(weight, QuantizedTensor) for weight in weights):
        return False
    return not any(size * x.itemsize % ALIGNMENT for size in weights[0].shape)


def grouped_linear(x: Tensor, counts: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Rows x [tokens, in_features] times the weight [out_features, in_features] of their expert transposed, plus its
    bias; `counts`: integer [experts], where x is."""
    out: Tensor = _PlainExpertsFunction.apply(x, counts, len(weights), *weights, *biases)
    return out


class _PlainExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, experts: int, *tensors: Tensor) -> Tensor:
        x, weights, biases = private_torch.plain(x), tensors[:experts], tensors[experts:]
        segments = ExpertSegments.of_tensor(counts, x.shape[0])
        ctx.segments, ctx.bias_dtype = segments, biases[0].dtype if biases else None
        ctx.save_for_backward(x, *weights)
        ends = _ends(segments)
        y = F.grouped_mm(x, torch.stack(weights).mT, offs=ends)
        return y + torch.stack(biases)[_experts_of(ends, x)].to(y.dtype) if biases else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        ends = _ends(ctx.segments)
        dy, needs, experts = private_torch.plain(grads[0]).contiguous(), ctx.needs_input_grad[3:], len(weights)
        dx = F.grouped_mm(dy, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = [None] * len(needs)
        if any(needs[:experts]):
            found[:experts] = F.grouped_mm(dy.mT, x, offs=ends).unbind()
        if any(needs[experts:]):
            found[experts:] = grouped_kernel.expert_sums(dy, ctx.segments).to(ctx.bias_dtype).unbind()
        return dx, None, None, *(value if needed else None for value, needed in zip(found, needs, strict=True))


def _ends(segments: ExpertSegments) -> Tensor:
    """The row after each expert's last, as PyTorch's product takes it: int32 [experts]."""
    return segments.spans[:, 2].to(torch.int32)


def _experts_of(ends: Tensor, x: Tensor) -> Tensor:
    """Whose each row of x is: int64 [tokens]."""
    return torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
