"""The linear layer's three GEMMs, each operand quantized as the recipe's table says.

A layer has one weight, or several that read the same input (queries, keys and values; the halves of a gated MLP): it is
quantized once for all of them.

    fprop   y  = x  @ w^T + b     x quantized along in_features, w as stored
    dgrad   dx = dy @ w           dy quantized along out_features
    wgrad   dw = dy^T @ x         dy^T and x^T quantized along tokens

Of the input only what wgrad reads is kept for backward: its quantized form, 8 bits or fewer per element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import backend, kernels, limits
from quantshard.errors import UnsupportedOperationError
from quantshard.modules import context, parallel
from quantshard.modules.linear_operands import LinearState, Wanted, Ways, WgradOperand, both_ways, weight_operand
from quantshard.modules.parallel import TensorParallel
from quantshard.modules.recompute import Call
from quantshard.operands import Split
from quantshard.recipe import TensorRole
from quantshard.storage import QuantizedStorage
from quantshard.tensor import QuantizedTensor

if kernels.USABLE:
    from quantshard.sources import Source


def linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: Call, state: LinearState
) -> tuple[Tensor, ...]:
    """x [..., in_features] times each weight [out_features, in_features] transposed, plus its bias, in x's dtype."""
    if not call.recipe.table and not any(isinstance(weight, QuantizedTensor) for weight in weights):
        return _plain_linears(x, weights, biases, state.tp)
    keeps_input = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    outputs: tuple[Tensor, ...] = _Linear.apply(x, call, state, keeps_input, *weights, *biases)
    return outputs


def _plain_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tp: TensorParallel
) -> tuple[Tensor, ...]:
    if tp.mode == "column":
        x = parallel.gather_rows(x, tp) if tp.sequence_parallel else parallel.copy(x, tp)
    if tp.mode != "row" or tp.size == 1:
        return tuple(plain_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        y = _summed(plain_linear(x, weight, None), tp)
        if bias is not None:
            y = y + (parallel.all_reduce_gradient(bias, tp) if tp.sequence_parallel else bias).to(y.dtype)
        outputs.append(y)
    return tuple(outputs)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same in high precision, for one weight."""
    tokens = x.reshape(-1, x.shape[-1])
    y = torch.nn.functional.linear(tokens, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return shaped_as(y, x)


def shaped_as(y: Tensor, x: Tensor) -> Tensor:
    """y [tokens, features] with the leading dims of x.

    Not by view(): FSDP2 hooks the outputs of modules, and warns that a view could lose its hook in place.
    """
    return _with_leading(y, x.shape)


def _with_leading(y: Tensor, shape: Sequence[int], split: Split | None = None) -> Tensor:
    out: Tensor = torch.ops.aten._unsafe_view(y, [*_leading(shape, split), y.shape[-1]])
    return out


def _leading(shape: Sequence[int], split: Split | None) -> list[int]:
    """The dims before the last of an activation of which each rank has a piece of `shape`, once rows are gathered."""
    if split is None or split.dim != 0:
        return list(shape[:-1])
    return [shape[0] * split.size, *shape[1:-1]]


def _summed(y: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of y [sequence, ..., features] over the ranks; under sequence parallelism this rank's part of it."""
    return parallel.scatter_rows(y, tp) if tp.sequence_parallel else parallel.reduce(y, tp)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: Call, state: LinearState, keeps_input: bool, *weights_and_biases: Any
    ) -> tuple[Tensor, ...]:
        parts = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:parts], weights_and_biases[parts:]
        outputs, x_wgrad = forward(x.reshape(-1, x.shape[-1]), x.shape, weights, biases, call, state, keeps_input)
        ctx.call, ctx.state, ctx.x_shape = call, state, x.shape
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.x_rebuild, x_tensors = _to_saved(x_wgrad)
        ctx.save_for_backward(*weights, *x_tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(limits.refusal("second derivative", "a linear layer"))
        parts, saved = len(grads), ctx.saved_tensors
        weights, x_tensors = saved[:parts], saved[parts:]
        x_wgrad = _from_saved(ctx.x_rebuild, x_tensors)
        needs = ctx.needs_input_grad
        needed = Needed(needs[0], needs[4 : 4 + parts], needs[4 + parts :])
        dx, dws, dbs = backward(
            grads, weights, x_wgrad, ctx.call, ctx.state, ctx.x_shape, ctx.bias_dtypes, needed
        )  # fmt: skip
        return dx, None, None, None, *dws, *dbs


class Needed(NamedTuple):
    """Which gradients are needed: of the input, of each weight, of each bias."""

    x: bool
    weights: Sequence[bool]
    biases: Sequence[bool]

    def of_gradient(self, part: int, bias_dtype: torch.dtype | None) -> Wanted:
        """What is wanted of the gradient of one weight's output."""
        return Wanted(self.x, self.weights[part], self.biases[part] and bias_dtype is not None, True)


def forward(
    source: Tensor | Source,
    x_shape: Sequence[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    call: Call,
    state: LinearState,
    keeps_input: bool,
) -> tuple[list[Tensor], WgradOperand]:
    """fprop: the outputs [..., out_features], and the input as wgrad reads it, which is empty unless `keeps_input`.

    `source`: the input as [tokens, in_features], or what makes it; `x_shape`: its own shape.
    """
    if call.repeated:
        context.flush_after_backward()
    split = state.split(TensorRole.INPUT)
    partial = split is not None and split.dim == 1  # each rank has a part of every sum
    read = both_ways(source, TensorRole.INPUT, call, state, Wanted(True, keeps_input))
    outputs = []
    for part, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        w = weight_operand(weight, part, call, state)
        y = backend.matmul(read.first, w, source.dtype, transpose_b=True, bias=None if partial else bias)
        y = _with_leading(y, x_shape, split)
        if partial:
            y = _summed(y, state.tp) if bias is None else _summed(y, state.tp) + bias.to(y.dtype)
        outputs.append(y)
    return outputs, read.second


def backward(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    x_wgrad: WgradOperand,
    call: Call,
    state: LinearState,
    x_shape: Sequence[int],
    bias_dtypes: Sequence[torch.dtype | None],
    needed: Needed,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """dgrad and wgrad: the gradients that are `needed`, of the input, each weight and each bias.

    `grads`: those of the outputs.
    """
    ways = (
        both_ways(
            grad.reshape(-1, weight.shape[0]), TensorRole.GRAD_OUTPUT, call, state, needed.of_gradient(part, bias), part
        )
        for part, (grad, weight, bias) in enumerate(zip(grads, weights, bias_dtypes, strict=True))
    )
    return gradients(ways, weights, x_wgrad, call, state, x_shape, grads[0].dtype, bias_dtypes, needed)


def gradients(
    ways: Iterable[Ways],
    weights: Sequence[Tensor],
    x_wgrad: WgradOperand,
    call: Call,
    state: LinearState,
    x_shape: Sequence[int],
    x_dtype: torch.dtype,
    bias_dtypes: Sequence[torch.dtype | None],
    needed: Needed,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """The same from the gradients of the outputs as the GEMMs read them, one for each weight.

    What several weights add to the gradient of the input is summed in float32.
    """
    dxs: list[Tensor] = []
    dws: list[Tensor | None] = []
    dbs: list[Tensor | None] = []
    split = state.split(TensorRole.GRAD_OUTPUT)
    if any(needed.weights):
        x_wgrad = x_wgrad.whole()
    for part, (found, weight) in enumerate(zip(ways, weights, strict=True)):
        bias_dtype = bias_dtypes[part]
        if needed.x:
            w = weight_operand(weight, part, call, state)
            out_dtype = x_dtype if len(weights) == 1 else torch.float32
            dxs.append(backend.matmul(found.first, w, out_dtype, poison=found.poison, precision=x_dtype))
        dw = db = None
        if needed.weights[part]:
            dw = backend.matmul(
                found.second.operand, x_wgrad.operand, weight.dtype, poison=found.poison, precision=x_dtype,
                transpose_a=not found.second.transposed, transpose_b=x_wgrad.transposed,
            )  # fmt: skip
        if found.sums is not None and bias_dtype is not None:
            db = found.sums
            db = (db if split is None or split.dim == 1 else parallel.reduce(db, state.tp)).to(bias_dtype)
        dws.append(dw)
        dbs.append(db)
    if not dxs:
        return None, dws, dbs
    dx = _total(dxs).to(x_dtype).view(*_leading(x_shape, state.split(TensorRole.INPUT)), x_shape[-1])
    return (_summed(dx, state.tp) if split is not None and split.dim == 1 else dx), dws, dbs


def _total(terms: list[Tensor]) -> Tensor:
    total, *others = terms
    for term in others:
        total = total + term
    return total


def _to_saved(operand: WgradOperand) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Split an operand into what is saved as tensors for backward and what is needed to put it together again."""
    others = (operand.transposed, operand.split, operand.cell, operand.words)
    if isinstance(operand.operand, Tensor):
        return (None, others), (operand.operand,)
    storage = operand.operand
    described = (storage.cell, storage.shard, tuple(storage.components))
    return (described, others), tuple(storage.components.values())


def _from_saved(rebuild: tuple[Any, ...], tensors: Sequence[Tensor]) -> WgradOperand:
    described, others = rebuild
    if described is None:
        return WgradOperand(tensors[0], *others)
    cell, shard, names = described
    return WgradOperand(QuantizedStorage(cell, shard, dict(zip(names, tensors, strict=True))), *others)
