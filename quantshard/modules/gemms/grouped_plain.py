"""Experts in high precision, with PyTorch's grouped product. Each expert's weight is a separate tensor.

    y[i]  = x[i] @ w[e]^T + b[e]             for rows i of expert e
    dx[i] = dy[i] @ w[e]
    dw[e] = sum of dy[i]^T x[i],  db[e] = sum of dy[i]    over the rows i of e

Row counts stay on the device; a loop over experts would have to copy them to the host.
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
"""Alignment in bytes: row sizes must be multiples of it for the grouped product."""


def multiplies(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether the grouped product supports x [tokens, in_features] and these weights.

    All must be plain bfloat16 tensors on one device, with aligned rows.
    """
    operands = (x, *weights)
    if {operand.dtype for operand in operands} != {torch.bfloat16} or len({matrix.device for matrix in operands}) > 1:
        return False
    if any(isinstance(weight, QuantizedTensor) for weight in weights):
        return False
    return not any(size * x.itemsize % ALIGNMENT for size in weights[0].shape)


def grouped_linear(x: Tensor, counts: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Compute x @ w^T + b with each row's expert: rows x [tokens, in_features], weights [out_features, in_features].

    `counts`: number of rows of each expert, integer [experts] on the device of x.
    """
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
        param_grads: list[Tensor | None] = [None] * len(needs)
        if any(needs[:experts]):
            param_grads[:experts] = F.grouped_mm(dy.mT, x, offs=ends).unbind()
        if any(needs[experts:]):
            param_grads[experts:] = grouped_kernel.expert_sums(dy, ctx.segments).to(ctx.bias_dtype).unbind()
        return (
            dx,
            None,
            None,
            *(grad if is_needed else None for grad, is_needed in zip(param_grads, needs, strict=True)),
        )


def _ends(segments: ExpertSegments) -> Tensor:
    """End offsets of the experts' rows for `grouped_mm`, int32 [experts]."""
    return segments.spans[:, 2].to(torch.int32)


def _experts_of(ends: Tensor, x: Tensor) -> Tensor:
    """The expert of each row of x, int64 [tokens]."""
    return torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
