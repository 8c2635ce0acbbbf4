"""The sum of several tensors, accumulated in float32 in their order and rounded once."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.graph_launch import writes
from quantshard.kernels.launch import launch_kernel

SIZE = 4096


@triton.jit
def sum_kernel(parts, out_ptr, numel, PARTS: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = offsets < numel
    total = ql.widen(tl.load(parts[0] + offsets, mask=inside, other=0.0))
    for part in tl.static_range(1, PARTS):
        total += ql.widen(tl.load(parts[part] + offsets, mask=inside, other=0.0))
    tl.store(out_ptr + offsets, ql.narrow(total, out_ptr.dtype.element_ty), mask=inside)


writes(sum_kernel, "out_ptr")


def rounded_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of tensors of one shape, float32, bfloat16 or float16, rounded to one of these dtypes."""
    tensors: tuple[Any, ...] = tuple([part.contiguous() for part in parts])
    out = torch.empty(tensors[0].shape, dtype=dtype, device=tensors[0].device)
    if out.numel() > 0:
        launch_kernel(
            sum_kernel, (-(out.numel() // -SIZE),), out.device,
            tensors, out, out.numel(), PARTS=len(tensors), SIZE=SIZE, num_warps=8,
        )  # fmt: skip
    return out
