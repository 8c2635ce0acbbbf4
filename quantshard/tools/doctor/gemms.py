"""Native GEMMs of every pair of formats that some hardware multiplies, checked against float64.

Operands are dequantized by the oracle and multiplied in float64. Hopper's FP8 tensor cores align 32 products to the
largest one and keep 14 bits (DeepSeek-V3 report, 3.3.2), so the error of a sum is at most 2**-8 of the sum of
magnitudes, before one final rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantshard import kernel_dispatch, numerics
from quantshard.formats import FORMATS, Format, Orientation
from quantshard.gemm import backend, hardware, operands
from quantshard.gemm.hardware import ScaledProduct
from quantshard.recipe import QuantSpec
from quantshard.tensor.storage import QuantizedStorage

Sizes = tuple[int, int, int]
Layout = Callable[[QuantizedStorage, QuantizedStorage], tuple[QuantizedStorage, QuantizedStorage]]
"""Changes the memory layout of the scales of two operands."""

SUMS = 2.0**-8

SIZES = (1, 16, 17, 127, 128, 129, 256)
SMALL: tuple[Sizes, ...] = tuple(
    (m, n, SIZES[(i + j) % len(SIZES)]) for i, m in enumerate(SIZES) for j, n in enumerate(SIZES)
)
"""Small GEMMs: all pairs of m and n, including a single element, partial tiles and a single block."""


def with_column_scales(storage: QuantizedStorage) -> QuantizedStorage:
    """Make the scales column-major, as kernels store scales for GEMMs that read them so (`producers`)."""
    name = storage.cell.format.copies[Orientation.ROWWISE].scale.name
    transposed = storage.components[name].t().contiguous().t()
    return replace(storage, components=storage.components | {name: transposed})


def pairs() -> Iterator[tuple[Format, Format, ScaledProduct]]:
    """Iterate over left formats, right formats (of one copy each) and their scaled GEMMs."""
    single_copy = [fmt for fmt in FORMATS.values() if len(fmt.copies) == 1]
    for left in single_copy:
        for right in single_copy:
            product = hardware.product_of_formats(left, right)
            if product is not None:
                yield left, right, product


def is_right_product(sizes: Sizes, device: torch.device, left: Format, right: Format) -> bool:
    """Check a GEMM (if one copy serves both orientations, also the gradients' GEMMs) against its bound.

    Operands of small GEMMs come from the oracle, because kernels would be compiled for each of the many shapes. Small
    GEMMs are checked with row-major and with column-major scales.
    """
    if max(sizes) > max(SIZES):
        return _product(sizes, device, left, right, lambda a, b: (a, b))
    with kernel_dispatch.kernels_only_on():
        return _product(sizes, device, left, right, lambda a, b: (with_column_scales(a), b)) and _product(
            sizes, device, left, right, lambda a, b: (a, with_column_scales(b))
        )


def _product(sizes: Sizes, device: torch.device, left: Format, right: Format, gemm_key: Layout) -> bool:
    m, n, k = sizes
    is_close = []
    for dtype in (torch.bfloat16, torch.float32):
        (a, x), (b, y) = _operand((m, k), left, device, 0), _operand((n, k), right, device, 1)
        is_close.append(_close(backend.matmul(*gemm_key(a, b), dtype, transpose_b=True), x, y.t()))
        if right.transposable:
            b, y = _operand((k, n), right, device, 1)
            is_close.append(_close(backend.matmul(*gemm_key(a, b), dtype), x, y))
            if left.transposable:
                a, x = _operand((k, m), left, device, 0)
                is_close.append(_close(backend.matmul(*gemm_key(a, b), dtype, transpose_a=True), x.t(), y))
    return bool(torch.stack(is_close).all())


def _operand(shape: tuple[int, int], fmt: Format, device: torch.device, seed: int) -> tuple[QuantizedStorage, Tensor]:
    """Rows of different magnitudes, quantized, and the dequantized values in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu")
    x *= torch.rand(shape[0], 1, dtype=torch.float32, generator=generator, device="cpu").exp()
    storage = operands.quantize_operand(x.bfloat16().to(device), QuantSpec(fmt))
    return storage, numerics.dequantize(fmt.copies[Orientation.ROWWISE], storage.components, shape).double()


def _close(found: Tensor, a: Tensor, b: Tensor) -> Tensor:
    assert found.shape == (a.shape[0], b.shape[1])
    exact = a @ b
    tolerance = SUMS * (a.abs() @ b.abs()) + torch.finfo(found.dtype).eps * exact.abs() + 1e-30
    return ((found.double() - exact).abs() <= tolerance).all()
