"""Native matrix products of every pair of formats that some hardware multiplies, against float64.

The operands are dequantized by the oracle and multiplied in float64. FP8 tensor cores of Hopper align 32 products to
the largest of them and keep 14 bits (DeepSeek-V3's report, 3.3.2), so a sum is off by at most 2**-8 of the sum of the
magnitudes; then it is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantshard import kernel_dispatch, numerics
from quantshard.formats import FORMATS, Format, Orientation
from quantshard.gemm import backend, operands, scaled_products
from quantshard.gemm.scaled_products import ScaledProduct
from quantshard.recipe import QuantSpec
from quantshard.tensor.storage import QuantizedStorage

Sizes = tuple[int, int, int]
Layout = Callable[[QuantizedStorage, QuantizedStorage], tuple[QuantizedStorage, QuantizedStorage]]
"""Gives the same operands, with scales that lie otherwise."""

SUMS = 2.0**-8

SIZES = (1, 16, 17, 127, 128, 129, 256)
SMALL: tuple[Sizes, ...] = tuple(
    (m, n, SIZES[(i + j) % len(SIZES)]) for i, m in enumerate(SIZES) for j, n in enumerate(SIZES)
)
"""Small products: every two sizes of two dims, with one element, with what fills no tile, and with a single block."""


def with_column_scales(storage: QuantizedStorage) -> QuantizedStorage:
    """The same with its scales column by column, as kernels store those that products read so (`producers`)."""
    name = storage.cell.format.copies[Orientation.ROWWISE].scale.name
    transposed = storage.components[name].t().contiguous().t()
    return replace(storage, components=storage.components | {name: transposed})


def pairs() -> Iterator[tuple[Format, Format, ScaledProduct]]:
    """Formats of the left and right operand, of one copy each, and their scaled product."""
    once = [fmt for fmt in FORMATS.values() if len(fmt.copies) == 1]
    for left in once:
        for right in once:
            native = scaled_products.product_of_formats(left, right)
            if native is not None:
                yield left, right, native


def is_right_product(sizes: Sizes, device: torch.device, left: Format, right: Format) -> bool:
    """Forward, and where one copy serves both directions the gradients' products too: within the bound.

    Operands of small ones come from the oracle, since kernels would be compiled for many of their shapes; their scales
    lie once by rows, and once by columns.
    """
    if max(sizes) > max(SIZES):
        return _product(sizes, device, left, right, lambda a, b: (a, b))
    with kernel_dispatch.kernels_only_on():
        return _product(sizes, device, left, right, lambda a, b: (with_column_scales(a), b)) and _product(
            sizes, device, left, right, lambda a, b: (a, with_column_scales(b))
        )


def _product(sizes: Sizes, device: torch.device, left: Format, right: Format, gemm_key: Layout) -> bool:
    m, n, k = sizes
    right_ones = []
    for dtype in (torch.bfloat16, torch.float32):
        (a, x), (b, y) = _operand((m, k), left, device, 0), _operand((n, k), right, device, 1)
        right_ones.append(_close(backend.matmul(*gemm_key(a, b), dtype, transpose_b=True), x, y.t()))
        if right.transposable:
            b, y = _operand((k, n), right, device, 1)
            right_ones.append(_close(backend.matmul(*gemm_key(a, b), dtype), x, y))
            if left.transposable:
                a, x = _operand((k, m), left, device, 0)
                right_ones.append(_close(backend.matmul(*gemm_key(a, b), dtype, transpose_a=True), x.t(), y))
    return bool(torch.stack(right_ones).all())


def _operand(shape: tuple[int, int], fmt: Format, device: torch.device, seed: int) -> tuple[QuantizedStorage, Tensor]:
    """Rows of different magnitudes, quantized; and in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu")
    x *= torch.rand(shape[0], 1, dtype=torch.float32, generator=generator, device="cpu").exp()
    storage = operands.quantize_operand(x.bfloat16().to(device), QuantSpec(fmt))
    return storage, numerics.dequantize(fmt.copies[Orientation.ROWWISE], storage.components, shape).double()


def _close(found: Tensor, a: Tensor, b: Tensor) -> Tensor:
    assert found.shape == (a.shape[0], b.shape[1])
    exact = a @ b
    room = SUMS * (a.abs() @ b.abs()) + torch.finfo(found.dtype).eps * exact.abs() + 1e-30
    return ((found.double() - exact).abs() <= room).all()
