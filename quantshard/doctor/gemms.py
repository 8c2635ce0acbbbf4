"""Native matrix products of every pair of formats that some hardware multiplies, against float64.

The operands are dequantized by the oracle and multiplied in float64. FP8 tensor cores of Hopper align 32 products to
the largest of them and keep 14 bits (DeepSeek-V3's report, 3.3.2), so a sum is off by at most 2**-8 of the sum of the
magnitudes; then it is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantshard import backend, numerics, operands
from quantshard.formats import FORMATS, Copy, Format
from quantshard.recipe import Cell
from quantshard.storage import QuantizedStorage

Sizes = tuple[int, int, int]

SUMS = 2.0**-8


def pairs() -> Iterator[tuple[Format, Format, backend.Native]]:
    """Formats of the left and right operand, of one copy each, and their scaled product."""
    once = [fmt for fmt in FORMATS.values() if len(fmt.copies) == 1]
    for left in once:
        for right in once:
            native = backend.scaled_product(left, right)
            if native is not None:
                yield left, right, native


def product(sizes: Sizes, device: torch.device, left: Format, right: Format) -> bool:
    """Forward, and where one copy serves both directions the gradients' products too: within the bound."""
    m, n, k = sizes
    right_ones = []
    for dtype in (torch.bfloat16, torch.float32):
        (a, x), (b, y) = _operand((m, k), left, device, 0), _operand((n, k), right, device, 1)
        right_ones.append(_close(backend.matmul(a, b, dtype, transpose_b=True), x, y.t()))
        if right.transposable:
            b, y = _operand((k, n), right, device, 1)
            right_ones.append(_close(backend.matmul(a, b, dtype), x, y))
            if left.transposable:
                a, x = _operand((k, m), left, device, 0)
                right_ones.append(_close(backend.matmul(a, b, dtype, transpose_a=True), x.t(), y))
    return all(right_ones)


def _operand(shape: tuple[int, int], fmt: Format, device: torch.device, seed: int) -> tuple[QuantizedStorage, Tensor]:
    """Rows of different magnitudes, quantized; and in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float32, generator=generator)
    x *= torch.rand(shape[0], 1, dtype=torch.float32, generator=generator).exp()
    storage = operands.quantize(x.bfloat16().to(device), Cell(fmt))
    return storage, numerics.dequantize(fmt.copies[Copy.ROWWISE], storage.components, shape).double()


def _close(found: Tensor, a: Tensor, b: Tensor) -> bool:
    exact = a @ b
    room = SUMS * (a.abs() @ b.abs()) + torch.finfo(found.dtype).eps * exact.abs() + 1e-30
    return found.shape == exact.shape and bool(((found.double() - exact).abs() <= room).all())
