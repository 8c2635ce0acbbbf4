"""Registry rows for `kernels/experts/`: kernels that process many experts in one launch.

For each expert, codes and scales have the oracle's bits. GEMMs are compared with float64: products of codes are exact,
and tensor cores lose at most 2**-13 of each summand, before one final rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, numerics, recipe as recipes
from quantshard.formats import ALL, E4M3
from quantshard.gemm import operands
from quantshard.modules import grouped_linear
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.grouped import ExpertsLayer, ExpertsReader
from quantshard.recipe import TensorRole
from quantshard.tensor.storage import QuantizedStorage
from quantshard.tools.cli.doctor import recipe_names
from tests.kernels.cases.base import (
    OTHER_BITS,
    TOO_FAR,
    Bound,
    Expected,
    KernelCase,
    KernelRow,
    Shape,
    U,
    bytes_of,
    random_like,
)
from tests.weights import quantize_weight

if kernels.USABLE:
    from quantshard.kernels.experts import grouped, grouped_matmul
    from quantshard.kernels.experts.grouped_matmul import EncodedRows
    from quantshard.kernels.experts.segments import ExpertSegments

SUMS = 2.0**-13
PAST = 3.0
"""Amax in the histories of delayed scaling."""


def experts_case(x: Tensor, recipe: str, native: bool = False) -> KernelCase:
    """Three experts, one of them without rows. The shape of x gives the number of rows and in_features.

    `native`: multiply the codes themselves, with sizes rounded up to multiples of 16.
    """
    rows, features = x.shape
    counts, outputs = (rows // 3, 0, rows - rows // 3), features // 2 + features % 16
    if native:
        features, outputs = (size + -size % 16 for size in (features, outputs))
    x, dy = random_like(x, 0, (rows, features)), random_like(x, 1, (rows, outputs))
    layer = _layer(recipes.resolve(recipe), counts, (outputs, features), x.device)._replace(is_native=native)
    segments, dtype = layer.segments(x), x.dtype
    numbers = torch.tensor(counts, dtype=torch.int64, device=x.device)
    spans = (ExpertSegments.of(counts, x.device) if native else segments).spans.tolist()

    def launch() -> list[Tensor]:
        a, a_transposed = layer.quantized(x, TensorRole.INPUT, segments, True)
        b, b_transposed = layer.quantized(dy, TensorRole.GRAD_OUTPUT, segments, True)
        weight_operands = layer.operands()
        return [
            *_by_expert(a, spans), *_by_expert(b, spans),
            grouped_matmul.rows_times_weights(a, weight_operands, segments, dtype, transposed=True),
            grouped_matmul.rows_times_weights(b, weight_operands, segments, dtype, transposed=False),
            grouped_matmul.weight_gradients(b_transposed, a_transposed, segments, dtype, turned=native),
            *([a_transposed.codes, b_transposed.codes] if native else []),
            grouped.expert_sums(dy, segments), *_tables(layer._replace(counts=numbers).segments(x), segments),
        ]  # fmt: skip

    def oracle() -> list[Expected]:
        inputs, gradients = (_oracle(layer, *of) for of in ((x, TensorRole.INPUT), (dy, TensorRole.GRAD_OUTPUT)))
        parts = (part for of in (inputs, gradients) for rowwise, _ in of for part in rowwise.components.values())
        products = _products(layer, _values(inputs), _values(gradients))
        turned = [_turned(of, segments) for of in (inputs, gradients)] if native else []
        return [*parts, *products, *turned, _sums(dy, counts), *_tables(segments, segments)]

    moved = bytes_of(x, x, dy, dy, *(p for w in layer.weights for p in w.quantized_storage.components.values()))
    turned = 2 * (features + outputs) * segments.total if native else 0
    return KernelCase(launch, oracle, 2 * moved + turned)


def _layer(recipe: recipes.Recipe, counts: Sequence[int], shape: Shape, device: torch.device) -> ExpertsLayer:
    """A layer with random weights, and with histories that contain one amax."""
    cell, block = recipe.weight, grouped_linear.block_together(recipe)
    assert cell is not None and block is not None
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu").to(device) for _ in counts]
    weights = [quantize_weight(value, cell, dtype=torch.bfloat16) for value in values]
    past = [torch.full((2,), PAST, dtype=torch.float32, device=device) for _ in counts]
    return ExpertsLayer(
        weights, (), counts, block, LinearContext(recipe, None, False), dict.fromkeys(TensorRole, past), False, None,
        ExpertsReader(),
    )  # fmt: skip


Oracles = Sequence[tuple[QuantizedStorage, QuantizedStorage]]


def _oracle(layer: ExpertsLayer, values: Tensor, role: TensorRole) -> Oracles:
    """Quantize each expert's rows and their transpose by the oracle."""
    first, second = layer.call.recipe.activations[role]
    assert first is not None and second is not None
    past = torch.full((), PAST, dtype=torch.float32, device=values.device) if first.scaling.history else None
    with kernel_dispatch.kernels_only_on():
        return [
            (operands.quantize_operand(part, first, amax=past), operands.quantize_operand(part.t(), second, amax=past))
            for part in values.split(_known(layer))
        ]


def _known(layer: ExpertsLayer) -> list[int]:
    assert not isinstance(layer.counts, Tensor)
    return list(layer.counts)


def _turned(rows: Oracles, segments: ExpertSegments) -> Tensor:
    """The transpose of all codes, with zeros between experts."""
    codes = [rowwise.components["codes"] for rowwise, _ in rows]
    turned = torch.zeros((codes[0].shape[1], segments.total), dtype=torch.uint8, device=codes[0].device)
    for part, (_, first, end, _) in zip(codes, segments.spans.tolist(), strict=True):
        turned[:, first:end] = part.t()
    return turned


def _by_expert(found: EncodedRows, spans: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Iterate over the codes and scales of each expert's rows."""
    for expert, first, end, _ in spans:
        yield found.codes[first:end]
        yield found.scales[first:end] if found.block else found.scales[expert].view(1, 1)


def _tables(segments: ExpertSegments, known: ExpertSegments) -> tuple[Tensor, Tensor]:
    """Spans, and the first `len(known.tiles)` tiles."""
    return segments.spans, segments.tiles[: len(known.tiles)]


Values = Sequence[tuple[Tensor, Tensor]]
"""For each expert: rows as quantized for the first GEMM and for wgrad, dequantized to float64."""


def _values(expected: Oracles) -> Values:
    return [(for_first.dequantize().double(), for_wgrad.dequantize().double()) for for_first, for_wgrad in expected]


def _products(layer: ExpertsLayer, inputs: Values, gradients: Values) -> list[Bound]:
    """Bounds of fprop, dgrad and wgrad."""
    weights = [weight.dequantize(dtype=torch.float64) for weight in layer.weights]
    y = [(p, w.t()) for (p, _), w in zip(inputs, weights, strict=True)]
    dx = [(p, w) for (p, _), w in zip(gradients, weights, strict=True)]
    dw = [(dy, x.t()) for (_, dy), (_, x) in zip(gradients, inputs, strict=True)]
    return [product_bound(y, torch.cat), product_bound(dx, torch.cat), product_bound(dw, torch.stack)]


def product_bound(pairs: Sequence[tuple[Tensor, Tensor]], join: Callable[[list[Tensor]], Tensor]) -> Bound:
    """Bound of the GEMMs of float64 pairs, joined by `join`."""
    return Bound(join([a @ b for a, b in pairs]), SUMS * join([a.abs() @ b.abs() for a, b in pairs]))


def _sums(dy: Tensor, counts: Sequence[int]) -> Bound:
    """Bound of the sums over each expert's rows."""
    parts = [part.double() for part in dy.split(list(counts))]
    error = max(counts) * U * torch.stack([part.abs().sum(0) for part in parts])
    return Bound(torch.stack([part.sum(0) for part in parts]), error)


def dispatch_case(x: Tensor) -> KernelCase:
    """Rows of tokens, each for two of three experts, quantized without a copy in the order of experts."""
    rows = 2 * len(x)
    counts, x = (rows // 3, 0, rows - rows // 3), random_like(x, 0)
    index = torch.arange(rows - 1, -1, -1, device=x.device) // 2
    multipliers = torch.arange(1.0, 4.0, dtype=torch.float32, device=x.device)

    def launch() -> list[Tensor]:
        segments = ExpertSegments.of(counts, x.device)
        codes = grouped.quantize_expert_rows(x, segments, E4M3, multipliers, index=index)
        return [grouped.expert_amaxes(x, segments, index), codes]

    def oracle() -> list[Expected]:
        parts = x[index].float().split(counts)
        amaxes = [numerics.block_amax(part, (ALL, ALL)).view(1) for part in parts]
        codes = [numerics.encode(part * multiplier, E4M3) for part, multiplier in zip(parts, multipliers, strict=True)]
        return [torch.cat(amaxes), torch.cat(codes)]

    return KernelCase(launch, oracle, 5 * bytes_of(x))


EXPERTS = {
    f"experts at once, {name}": {"recipe": name}
    for name in recipe_names()
    if grouped_linear.block_together(recipes.resolve(name)) is not None
}

CODES = {f"codes of experts, {name}": {"recipe": name, "native": True} for name in ("current", "delayed")}

ROWS = (
    KernelRow(
        {
            "expert_amax_kernel", "expert_quantize_kernel", "quantize_blocks_kernel", "rows_kernel", "weights_kernel",
            "weights_by_blocks_kernel", "sums_kernel", "segments_kernel",
        },
        experts_case, EXPERTS, list(EXPERTS), (35, 290), f"{OTHER_BITS}, or {TOO_FAR}",
    ),
    KernelRow(
        {"rows_of_codes_kernel", "weights_of_codes_kernel", "turn_kernel"},
        experts_case, CODES, list(CODES), (35, 290), f"{OTHER_BITS}, or {TOO_FAR}",
    ),
    KernelRow(
        {"expert_amax_kernel", "expert_quantize_kernel"}, dispatch_case, {"experts' rows of tokens": {}},
        ["experts' rows of tokens"], (35, 290),
    ),
)  # fmt: skip
