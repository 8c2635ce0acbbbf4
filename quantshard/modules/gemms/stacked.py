"""Linear layers of stacked experts: their weights are the matrices of one parameter [experts, rows, columns].

Rows of the input are ordered by expert. Each expert computes as `functional.linear` does for a layer of its own. The
experts run in a few kernels (`grouped`) if these support the recipe, otherwise one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernel_dispatch, limits, private_torch
from quantshard.collectives.process_groups import Groups
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import ALL, Orientation
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.functional import PreparedLinear, forward_gemms, needs_wgrad
from quantshard.modules.gemms.linear_operands import GemmOperands, WgradOperand
from quantshard.modules.gemms.linear_state import LayerPlans, LinearState
from quantshard.modules.gemms.row_exchange import NO_EXCHANGE, ExpertCodes, RowExchange
from quantshard.recipe import TensorRole
from quantshard.sharding import whole
from quantshard.tensor.observation import STACK_KEY
from quantshard.tensor.parameter_state import RNG_DRAWS, RNG_KEY, next_draw
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage


class StackedLayer(NamedTuple):
    """The linear layers of a stack of experts, ready to be called; see `grouped.ExpertsLayer` and `LinearState`.
    `bias`: [experts, out_features] or None."""

    weight: QuantizedTensor
    bias: Tensor | None
    counts: Sequence[int]
    is_transposed: bool
    call: LinearContext
    data_group: Groups
    plans: LayerPlans
    record: bool
    exchange: RowExchange = NO_EXCHANGE

    def experts(self, role: TensorRole) -> Iterator[PreparedLinear]:
        """Yield the layer of each expert, for the pass that quantizes activations of this role."""
        storage = self.weight.quantized_storage
        copies = tuple(storage.spec.format.copies)
        storage = storage.with_copy(copies[0 if role is TensorRole.INPUT else -1])  # once for all experts
        copy = storage.spec.of_matrix.format.copies[Orientation.ROWWISE]
        if copy.block == (ALL, ALL):
            scales = {copy.scale.name: _aligned(storage.components[copy.scale.name])}
            storage = replace(storage, components=storage.components | scales)
        specs = self.call.recipe.activations[role]
        stochastic = any(spec is not None and spec.scaling.stochastic_rounding for spec in specs)
        # a key for each expert, and one draw for all, so that the number of draws is equal on all ranks
        draws = storage.state[RNG_DRAWS].clone()
        if stochastic:
            next_draw(storage.state)
        for index in range(self.weight.shape[0]):
            matrix = storage.matrix(index)
            matrix = _transposed(matrix) if self.is_transposed else matrix
            matrix.state[RNG_DRAWS] = draws.clone()
            matrix.state[STACK_KEY] = storage.state[RNG_KEY]
            state = LinearState([matrix.state], None, None, self.record, data_group=self.data_group, plans=self.plans)
            bias = None if self.bias is None else self.bias[index]
            yield PreparedLinear([QuantizedTensor(matrix, self.weight.dtype)], [bias], self.call, state)


def _aligned(scales: Tensor) -> Tensor:
    """Copy a column of float32 scales, so that each starts at a multiple of 16 bytes, as cuBLAS requires."""
    return F.pad(scales, (0, 3))[:, :1]


def _transposed(matrix: QuantizedStorage) -> QuantizedStorage:
    """Return the storage of the transpose, for formats with square blocks."""
    rows, cols = matrix.shard.shape
    copy = matrix.spec.format.copies[Orientation.ROWWISE]
    parts = {name: part.t().contiguous() for name, part in matrix.components.items()}
    codes = kernel_dispatch.transpose_codes(matrix.components[copy.codes.name], copy.codes.encoding, cols)
    parts[copy.codes.name] = codes.contiguous()
    return replace(matrix, shard=whole((cols, rows)), components=parts)


def stacked_linear(x: Tensor, layer: StackedLayer) -> Tensor:
    """Compute x @ w^T + b with each row's expert, one expert after the other: rows x [tokens, in_features]."""
    stage = private_torch.running_stage()
    record = layer.record and not (stage is not None and stage.infers)
    arguments = layer._replace(bias=None, record=record), needs_wgrad([layer.weight])
    out: Tensor = _StackFunction.apply(x, arguments, layer.weight, layer.bias)
    return out


def _split(
    rows: Tensor | ExpertCodes, counts: Sequence[int], for_wgrad: bool = True
) -> Iterator[Tensor | GemmOperands]:
    """Yield the rows of each expert, or operands of their codes, also for wgrad if `for_wgrad`."""
    if isinstance(rows, Tensor):
        yield from rows.split(list(counts))
        return
    copy = rows.spec.format.copies[Orientation.ROWWISE]
    scales = _aligned(rows.scales.view(-1, 1)).split(1)
    for codes, scale in zip(rows.codes.split(list(counts)), scales, strict=True):
        parts = {copy.codes.name: codes, copy.scale.name: scale}
        operand = QuantizedStorage(rows.spec, whole((codes.shape[0], codes.shape[1])), parts)
        yield GemmOperands(operand, WgradOperand(operand if for_wgrad else codes.new_empty(0), False))


class _StackFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, arguments: tuple[StackedLayer, bool], weight: QuantizedTensor, bias: Tensor | None
    ) -> Tensor:
        ctx.layer, has_wgrad = arguments
        layer = ctx.layer._replace(bias=bias)
        x, outputs, saved_tensors = private_torch.plain(x), [], []
        rows = layer.exchange.receive(x, TensorRole.INPUT, layer.call)
        ctx.experts = []  # the layer of each, and how many of the saved tensors belong to it
        parts, experts = _split(rows, layer.counts, has_wgrad), layer.experts(TensorRole.INPUT)
        del rows
        for part, count, expert in zip(parts, layer.counts, experts, strict=True):
            values, x_operands = (part, None) if isinstance(part, Tensor) else (x, part)
            shape = (count, x.shape[1])
            (y,), x_wgrad = forward_gemms(values, shape, expert, has_wgrad, x_operands)
            backward, (_, *tensors) = expert.saved(x_wgrad, shape, x.dtype, False)
            outputs.append(y)
            saved_tensors += tensors
            ctx.experts.append((backward, len(tensors)))
        ctx.layer = ctx.layer._replace(weight=None)
        ctx.save_for_backward(weight, *saved_tensors)
        return layer.exchange.send_back(torch.cat(outputs), TensorRole.INPUT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(limits.refusal("second derivative", "a linear layer"))
        weight, *tensors = ctx.saved_tensors
        layer: StackedLayer = ctx.layer._replace(weight=weight)
        needs_x, _, *needs = ctx.needs_input_grad
        dx, dweights, dbiases = [], [], []
        grad = layer.exchange.receive(private_torch.plain(grads[0]), TensorRole.GRAD_OUTPUT, layer.call, needs[1])
        parts, experts = _split(grad, layer.counts), layer.experts(TensorRole.GRAD_OUTPUT)
        for part, expert, (forward, count) in zip(parts, experts, ctx.experts, strict=True):
            saved, tensors = [*expert.weights, *tensors[:count]], tensors[count:]
            backward = forward._replace(state=expert.state).with_saved(saved, needs_x, needs)
            results = backward.backward([part]) if isinstance(part, Tensor) else backward.gradients(iter([part]))
            dx_part, (dweight, dbias) = results
            dx.append(dx_part)
            dweights.append(dweight)
            dbiases.append(dbias)
        if layer.is_transposed:
            dweights = [None if dweight is None else dweight.t() for dweight in dweights]
        return (
            layer.exchange.send_back(torch.cat(dx), TensorRole.GRAD_OUTPUT) if needs_x else None,
            None,
            torch.stack(dweights) if needs[0] else None,
            torch.stack(dbiases) if needs[1] else None,
        )
