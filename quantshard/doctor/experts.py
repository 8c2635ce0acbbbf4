"""Kernels of many experts at once: codes and scales beside the oracle's for each expert, products beside float64.

Products of codes are exact, and tensor cores lose at most 2**-13 of each in a sum; then it is rounded once. Imported
only where `kernels.USABLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard import recipe as recipes
from quantshard.doctor.cases import same_bits
from quantshard.gemm import backend, operands
from quantshard.kernels.experts import grouped_matmul
from quantshard.kernels.experts.grouped import ExpertSegments
from quantshard.kernels.experts.grouped_matmul import EncodedRows
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.grouped import ExpertsLayer
from quantshard.modules.gemms.linear_operands import cells
from quantshard.recipe import TensorRole
from quantshard.tensor.quantized_tensor import quantize_weight
from quantshard.tensor.storage import QuantizedStorage

Shape = tuple[int, int]
Pairs = Sequence[tuple[Tensor, Tensor]]

SUMS = 2.0**-13
PAST = 3.0
"""The amax that delayed scaling remembers."""


def are_right(name: str, shape: Shape, device: torch.device) -> bool:
    """Three experts, one of them without rows, by a recipe: of `shape`, how many rows and in_features there are."""
    rows, features = shape
    counts, outputs = (rows // 3, 0, rows - rows // 3), features // 2 + 3
    generator = torch.Generator().manual_seed(0)
    sizes = ((rows, features), (rows, outputs))
    x, dy = (torch.randn(size, dtype=torch.float32, generator=generator).bfloat16().to(device) for size in sizes)
    layer = _layer(recipes.resolve(name), counts, (outputs, features), device)
    segments, values = layer.segments(device), [weight.dequantize(dtype=torch.float64) for weight in layer.weights]
    (a, a_transposed), (b, b_transposed) = (
        layer.quantized(of, role, segments, True) for of, role in ((x, TensorRole.INPUT), (dy, TensorRole.GRAD_OUTPUT))
    )
    ones, others = (_oracle(layer, of, role) for of, role in ((x, TensorRole.INPUT), (dy, TensorRole.GRAD_OUTPUT)))
    right = [_same(found, segments, of) for found, of in ((a, ones), (b, others))]
    held, dtype = layer.operands(layer.weights), torch.bfloat16
    y = grouped_matmul.rows_times_weights(a, held, segments, dtype, transposed=True)
    dx = grouped_matmul.rows_times_weights(b, held, segments, dtype, transposed=False)
    dw = grouped_matmul.weight_gradients(b_transposed, a_transposed, segments, dtype)
    right.append(_close(y, [(p, w.t()) for (p, _), w in zip(_values(ones), values, strict=True)], torch.cat))
    right.append(_close(dx, [(p, w) for (p, _), w in zip(_values(others), values, strict=True)], torch.cat))
    pairs = zip(_values(others), _values(ones), strict=True)
    right.append(_close(dw, [(transposed, other.t()) for (_, transposed), (_, other) in pairs], torch.stack))
    return all(right)


def _layer(recipe: recipes.Recipe, counts: Sequence[int], shape: Shape, device: torch.device) -> ExpertsLayer:
    """With weights of random numbers, and histories that remember one amax."""
    cell, block = recipe.weight, backend.block_together(recipe)
    assert cell is not None and block is not None
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, dtype=torch.float32, generator=generator).to(device) for _ in counts]
    weights = [quantize_weight(value, cell, dtype=torch.bfloat16) for value in values]
    past = [torch.full((2,), PAST, dtype=torch.float32, device=device) for _ in counts]
    return ExpertsLayer(
        weights, (), counts, block, LinearContext(recipe, None, False), dict.fromkeys(TensorRole, past), False, None
    )  # fmt: skip


Oracles = Sequence[tuple[QuantizedStorage, QuantizedStorage]]


def _oracle(layer: ExpertsLayer, values: Tensor, role: TensorRole) -> Oracles:
    """Of each expert's rows and their transpose."""
    first, second = cells(layer.call.recipe, role)
    assert first is not None and second is not None
    past = torch.full((), PAST, dtype=torch.float32, device=values.device) if first.scaling.history else None
    with kernel_dispatch.kernels_only_on():
        return [
            (operands.quantize_operand(part, first, amax=past), operands.quantize_operand(part.t(), second, amax=past))
            for part in values.split(list(layer.counts))
        ]


def _same(found: EncodedRows, segments: ExpertSegments, expected: Oracles) -> bool:
    """Codes and scales of the rows."""
    right = True
    for (expert, first, end, _), (wanted, _) in zip(segments.spans.tolist(), expected, strict=True):
        codes, scales = wanted.components.values()
        here = found.scales[first:end] if found.block else found.scales[expert].view(1, 1)
        right &= same_bits(found.codes[first:end], codes) and same_bits(here, scales)
    return right


def _values(expected: Oracles) -> list[tuple[Tensor, Tensor]]:
    return [(one.dequantize().double(), other.dequantize().double()) for one, other in expected]


def _close(found: Tensor, pairs: Pairs, join: Callable[[list[Tensor]], Tensor]) -> bool:
    exact = join([a @ b for a, b in pairs])
    room = SUMS * join([a.abs() @ b.abs() for a, b in pairs]) + torch.finfo(found.dtype).eps * exact.abs() + 1e-30
    return found.shape == exact.shape and bool(((found.double() - exact).abs() <= room).all())
