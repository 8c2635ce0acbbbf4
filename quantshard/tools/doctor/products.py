"""PyTorch's GEMMs on random operands, in each format that tensor cores multiply, as a reference for speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard.formats import ALL
from quantshard.gemm import hardware

CHECKED_ROWS = 128
"""Number of rows of a GEMM to compare with the expected result."""


class ReferenceProduct(NamedTuple):
    """A GEMM x @ y^T: the call, and the expected first rows."""

    call: Callable[[], Tensor]
    expected: Tensor


def codes(shape: tuple[int, int], device: str) -> Tensor:
    """Random FP8 values."""
    return torch.randn(shape, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)


def grid(rows: int, cols: int, device: str) -> Tensor:
    """Random power-of-two scales, different enough to reveal a wrong layout."""
    return torch.randint(-3, 4, (rows, cols), device=device).float().exp2()


def spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Expand scales of blocks to scales of elements."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def bf16(m: int, n: int, k: int, device: str) -> ReferenceProduct:
    """GEMM of two operands without scales."""
    x, y = (torch.randn(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))
    return ReferenceProduct(lambda: x @ y.t(), x[:CHECKED_ROWS].float() @ y.float().t())


class ProductScaling(NamedTuple):
    """Scaling of an operand: name in PyTorch, block shape, and layout of the scale grid."""

    kind: str
    block: tuple[int, int]
    layout: Callable[[Tensor], Tensor]


SCALAR = ProductScaling("TensorWise", (ALL, ALL), lambda scales: scales.view(()))
ROW = ProductScaling("RowWise", (1, ALL), lambda scales: scales)
ROW_RIGHT = ProductScaling("RowWise", (1, ALL), lambda scales: scales.t())
VECTOR = ProductScaling("BlockWise1x128", (1, 128), hardware.by_columns)
SQUARE = ProductScaling("BlockWise128x128", (128, 128), hardware.by_four)


def fp8_product(
    m: int, n: int, k: int, device: str, *, left: ProductScaling, right: ProductScaling, fast: bool = False
) -> ReferenceProduct:
    """GEMM of FP8 operands with scales. `fast`: accumulate in fewer bits."""
    types = F.ScalingType
    operands, scales, values = [], [], []
    for rows, side, checked in ((m, left, CHECKED_ROWS), (n, right, n)):
        x = codes((rows, k), device)
        block = (side.block[0] if side.block[0] != ALL else rows, side.block[1] if side.block[1] != ALL else k)
        scale_grid = grid(-(rows // -block[0]), -(k // -block[1]), device)
        operands.append(x)
        scales.append(side.layout(scale_grid))
        values.append(x[:checked].float() * spread(scale_grid, block, (rows, k))[:checked])
    kinds = [getattr(types, side.kind) for side in (left, right)]
    call = lambda: F.scaled_mm(  # noqa: E731
        operands[0], operands[1].t(), scales[0], kinds[0], scales[1], kinds[1], use_fast_accum=fast
    )
    return ReferenceProduct(call, values[0] @ values[1].t())


KINDS: dict[str, Callable[[int, int, int, str], ReferenceProduct]] = {
    "BF16": bf16,
    "FP8 per tensor": partial(fp8_product, left=SCALAR, right=SCALAR),
    "FP8 per tensor, fast accumulation": partial(fp8_product, left=SCALAR, right=SCALAR, fast=True),
    "FP8 by rows": partial(fp8_product, left=ROW, right=ROW_RIGHT),
    "FP8 1x128 by 128x128": partial(fp8_product, left=VECTOR, right=SQUARE),
    "FP8 1x128 by 1x128": partial(fp8_product, left=VECTOR, right=VECTOR),
}
"""Kind -> factory of a GEMM of [m, k] by [n, k] on a device."""
