"""The linear layer's three GEMMs, each operand quantized as the recipe's table says.

A layer has one weight, or several that read the same input (queries, keys and values; the halves of a gated MLP): it is
quantized once for all of them.

    fprop   y  = x  @ w^T + b     x quantized along in_features, w as stored
    dgrad   dx = dy @ w           dy quantized along out_features
    wgrad   dw = dy^T @ x         dy^T and x^T quantized along tokens

Of the input only what wgrad reads is kept for backward: its quantized form, 8 bits or fewer per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import backend, compute, limits
from quantshard.amax import Groups, history_amax, including
from quantshard.backend import Operand, Split
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import ALL
from quantshard.modules import context, parallel
from quantshard.modules.parallel import TensorParallel
from quantshard.modules.recompute import Call
from quantshard.numerics import Words
from quantshard.recipe import Cell, Gemm, TensorRole
from quantshard.sharding import Shard
from quantshard.storage import (
    AMAX_HISTORY,
    DGRAD_STREAM,
    DRAWS,
    KEY,
    STREAMS_PER_RANK,
    WGRAD_STREAM,
    QuantizedStorage,
)
from quantshard.tensor import QuantizedTensor


@dataclass
class LinearState:
    """What one linear layer carries between steps: state of its weights, and delayed-scaling histories.

    `weights`: for each of its weights the key, draws and, under delayed scaling, amax history. `record`: whether amaxes
    seen now are recorded (in training). `tp`: how its weights are cut by tensor parallelism. `amax_group`: whom
    delayed scaling reduces amaxes over; None: whom autocast says. `data_group`: the ranks that together work on one
    batch, if not those of `tp`, by which random streams are told apart.
    """

    weights: Sequence[dict[str, Tensor]]
    input_history: Tensor | None
    grad_output_history: Tensor | None
    record: bool
    tp: TensorParallel = parallel.NONE
    amax_group: Groups = None
    data_group: Groups = None

    def split(self, role: TensorRole) -> Split | None:
        """How an input, or the gradient of an output, [tokens, features] is cut over the ranks.

        Along features, it stays so. Along tokens (under sequence parallelism) the GEMMs need it gathered.
        """
        if self.tp.size == 1 or self.tp.mode is None:
            return None
        if (role is TensorRole.INPUT) == (self.tp.mode == "row"):
            return self.tp.split(1)
        return self.tp.split(0) if self.tp.sequence_parallel else None

    @property
    def weight_split(self) -> Split | None:
        """How a weight [out_features, in_features] is cut over the ranks."""
        if self.tp.size == 1 or self.tp.mode is None:
            return None
        return self.tp.split(0 if self.tp.mode == "column" else 1)


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


def shaped_as(y: Tensor, x: Tensor, split: Split | None = None) -> Tensor:
    """y [tokens, features] with the leading dims of x, of which `split` says how it was cut.

    Not by view(): FSDP2 hooks the outputs of modules, and warns that a view could lose its hook in place.
    """
    out: Tensor = torch.ops.aten._unsafe_view(y, [*_leading(x.shape, split), y.shape[-1]])
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
        outputs, x_wgrad = forward(x, weights, biases, call, state, keeps_input)
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


def forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    call: Call,
    state: LinearState,
    keeps_input: bool,
) -> tuple[list[Tensor], WgradOperand]:
    """fprop: the outputs [..., out_features], and the input as wgrad reads it, which is empty unless `keeps_input`."""
    if call.repeated:
        context.flush_after_backward()
    split = state.split(TensorRole.INPUT)
    partial = split is not None and split.dim == 1  # each rank has a part of every sum
    tokens = x.reshape(-1, x.shape[-1])
    x_fprop, x_wgrad = _both_ways(tokens, TensorRole.INPUT, call, state, need_second=keeps_input)
    outputs = []
    for part, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        w = _weight_operand(weight, part, call, state)
        y = backend.matmul(x_fprop, w, x.dtype, transpose_b=True, bias=None if partial else bias)
        y = shaped_as(y, x, split)
        if partial:
            y = _summed(y, state.tp) if bias is None else _summed(y, state.tp) + bias.to(y.dtype)
        outputs.append(y)
    return outputs, x_wgrad


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

    `grads`: those of the outputs. What several weights add to the gradient of the input is summed in float32.
    """
    dxs: list[Tensor] = []
    dws: list[Tensor | None] = []
    dbs: list[Tensor | None] = []
    x_dtype, split = grads[0].dtype, state.split(TensorRole.GRAD_OUTPUT)
    if any(needed.weights):
        x_wgrad = x_wgrad.whole()
    for part, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        need_w = needed.weights[part]
        dy = grad.reshape(-1, weight.shape[0])
        dy_dgrad, dy_wgrad = _both_ways(
            dy, TensorRole.GRAD_OUTPUT, call, state, part, need_first=needed.x, need_second=need_w
        )
        # codes saturate, so an infinite gradient would come out finite, and the optimizer would not skip the step
        poison = torch.where(torch.isfinite(dy).all(), 0.0, torch.nan).to(dy.dtype)
        if needed.x:
            w = _weight_operand(weight, part, call, state)
            dxs.append(backend.matmul(dy_dgrad, w, x_dtype if len(grads) == 1 else torch.float32) + poison)
        dw = db = None
        if need_w:
            dw = backend.matmul(
                dy_wgrad.operand, x_wgrad.operand, weight.dtype,
                transpose_a=not dy_wgrad.transposed, transpose_b=x_wgrad.transposed,
            ) + poison.to(weight.dtype)  # fmt: skip
        bias_dtype = bias_dtypes[part]
        if needed.biases[part] and bias_dtype is not None:
            db = dy.float().sum(0)
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


@dataclass
class WgradOperand:
    """An operand of wgrad: [tokens, features], or its transpose where it had to be quantized along tokens.

    `split`: this rank has a piece, cut along tokens, which `whole` gathers; only that is kept for backward. `cell`,
    `words`: the piece is in high precision still, since it can be quantized as a part of the whole only.
    """

    operand: Operand
    transposed: bool
    split: Split | None = None
    cell: Cell | None = None
    words: backend.WordsOf | None = None

    def whole(self) -> WgradOperand:
        """This operand with the pieces of all ranks: a collective call if it is split."""
        if self.split is None:
            return self
        if isinstance(self.operand, QuantizedStorage):
            return WgradOperand(backend.gather(self.operand, self.split), self.transposed)
        if self.cell is None:
            return WgradOperand(backend.gather_values(self.operand, self.split), self.transposed)
        whole = backend.quantize_and_gather(self.operand, self.cell, self.split, words=self.words)
        return WgradOperand(whole, self.transposed)


def _both_ways(
    values: Tensor,
    role: TensorRole,
    call: Call,
    state: LinearState,
    part: int = 0,
    *,
    need_first: bool = True,
    need_second: bool = True,
) -> tuple[Operand, WgradOperand]:
    """An input or output gradient [tokens, features] for its two GEMMs: as it stands, and for wgrad.

    `part`: of which weight. Where one quantization serves both (square blocks, plain rounding), it is made once. An
    input whose tokens are spread over ranks is not gathered for wgrad yet.
    """
    first = call.recipe.cell(role, Gemm.FPROP if role is TensorRole.INPUT else Gemm.DGRAD)
    second = call.recipe.cell(role, Gemm.WGRAD)
    amax = _delayed_amax(values, role, first or second, call, state)
    words = _Words(state.weights[part], state.tp.group if state.data_group is None else state.data_group)
    shared, split = serves_both(first, second), state.split(role)
    spread = split if split is not None and split.dim == 0 else None
    piece: Operand = values
    if first is not None and (need_first or shared):
        piece = _quantized(values, first, split, amax, words.of(DGRAD_STREAM))
    as_is = piece
    if spread is not None and (need_first or (shared and role is not TensorRole.INPUT)):
        as_is = _gathered(piece, spread)
    if not need_second:
        return as_is, WgradOperand(values.new_empty(0), False)  # not values[:0]: a view keeps all of them alive
    if second is None or shared:
        kept = WgradOperand(piece if shared else values, False, spread)
    else:
        kept = _turned(values.t(), second, split, amax, words.of(WGRAD_STREAM))
    return as_is, kept if role is TensorRole.INPUT else kept.whole()


def _quantized(
    values: Tensor, cell: Cell, split: Split | None, amax: Tensor | None, words: backend.WordsOf
) -> QuantizedStorage:
    """This rank's piece of an operand."""
    shape = (values.shape[0], values.shape[1])
    drawn = words(backend.shard_of(shape, cell, split)) if cell.scaling.stochastic_rounding else None
    return backend.quantize(values, cell, amax=amax, words=drawn, split=split)


def _gathered(piece: Operand, split: Split) -> Operand:
    return backend.gather_values(piece, split) if isinstance(piece, Tensor) else backend.gather(piece, split)


def _turned(
    values: Tensor, cell: Cell, split: Split | None, amax: Tensor | None, words: backend.WordsOf
) -> WgradOperand:
    """An operand of wgrad from the transposed values [features, tokens], of which `split` says how they were cut."""
    if split is None or split.dim == 1:  # features stay apart
        return WgradOperand(_quantized(values, cell, split and split.transposed, amax, words), True)
    tokens = split.transposed
    if not backend.gathers_codes(cell, (values.shape[0], values.shape[1]), tokens):
        return WgradOperand(values, True, tokens, cell, words)
    return WgradOperand(_quantized(values, cell, tokens, amax, words), True, tokens)


def serves_both(first: Cell | None, second: Cell | None) -> bool:
    """True if one quantization can be read in both GEMMs: by the same cell, of square blocks."""
    return first == second and first is not None and first.format.transposable


class _Words:
    """Random words for the stochastic rounding of one gradient: one draw of the weight's counter, taken if needed.

    Ranks that work on different data have streams of their own; those of one group, a tensor-parallel one, share the
    words of the tensor that they hold pieces of, by global index.
    """

    def __init__(self, weight: dict[str, Tensor], group: Groups) -> None:
        self.weight, self.group, self.draw = weight, group, -1

    def of(self, stream: int) -> backend.WordsOf:
        """Words of one of the uses of a gradient, for any rectangle of it."""

        def words(shard: Shard) -> Words:
            if self.draw < 0:
                draws = self.weight[DRAWS]
                self.draw = int(draws)
                draws.add_(1)
            base = parallel.stream_base(self.group) * STREAMS_PER_RANK
            key = int(self.weight[KEY])
            return Words(key, self.draw, base + stream, shard.global_shape, shard.origin, shard.shape)

        return words


def _identity(state: LinearState, role: TensorRole, part: int) -> int:
    """A number for one history that is equal on all ranks: they agree on the weights' keys."""
    return int(state.weights[part][KEY]) * len(TensorRole) + list(TensorRole).index(role)


def _delayed_amax(
    values: Tensor, role: TensorRole, cell: Cell | None, call: Call, state: LinearState, part: int = 0
) -> Tensor | None:
    """Under delayed scaling: the amax of the history to scale by; the tensor's own is noted for later.

    Of an input or a weight both are done once for a call: its backward and its recomputation scale by the same amax.
    All output gradients of a layer share one history, as one GEMM's would.
    """
    if cell is None or not cell.scaling.history:
        return None
    if (role, part) in call.amaxes:
        return call.amaxes[role, part]
    history = {
        TensorRole.INPUT: state.input_history,
        TensorRole.GRAD_OUTPUT: state.grad_output_history,
        TensorRole.WEIGHT: state.weights[part].get(AMAX_HISTORY),
    }[role]
    assert history is not None
    if state.record:
        backward = role is TensorRole.GRAD_OUTPUT
        pending = context.backward_amaxes if backward else context.forward_amaxes
        if backward:
            context.flush_after_backward()
        amax = compute.block_amax(values, (ALL, ALL)).view(())
        group = call.group if state.amax_group is None else state.amax_group
        if state.tp.mode is not None:  # what is cut has one scale, whomever autocast was told
            group = including(group, state.tp.group)
        pending.note(_identity(state, role, part), history, amax, group)
    amax = history_amax(history, cell.scaling.most_recent)
    if role is not TensorRole.GRAD_OUTPUT:
        call.amaxes[role, part] = amax
    return amax


def _weight_operand(weight: Tensor, part: int, call: Call, state: LinearState) -> Operand:
    """A weight for the GEMM: as it is stored, or quantized now from high precision."""
    if isinstance(weight, QuantizedTensor):
        return weight._storage
    cell = call.recipe.weight
    if cell is None:
        return weight
    amax = _delayed_amax(weight.detach(), TensorRole.WEIGHT, cell, call, state, part)
    return backend.quantize(weight, cell, amax=amax, split=state.weight_split)


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
