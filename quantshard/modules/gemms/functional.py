"""The linear layer's three GEMMs, each operand quantized as the recipe's table says.

A layer has one weight, or several that read the same input (queries, keys and values; the halves of a gated MLP): it is
quantized once for all of them.

    fprop   y  = x  @ w^T + b     x quantized along in_features, w as stored
    dgrad   dx = dy @ w           dy quantized along out_features
    wgrad   dw = dy^T @ x         dy^T and x^T quantized along tokens

Of the input only what wgrad reads is kept for backward: its quantized form, 8 bits or fewer per element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, limits, private_torch
from quantshard.distributed import tensor_parallel
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.errors import UnsupportedOperationError
from quantshard.gemm import backend, operands
from quantshard.gemm.operand_reader import ReadOperand
from quantshard.gemm.operands import Operand, OperandSplit, OperandUsage, operand_usage
from quantshard.gemm.weight_operands import WeightOperands
from quantshard.modules.contexts import context
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import (
    GemmOperands,
    WgradOperand,
    gemm_operands,
    gradient_operands,
    weight_operand,
)
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.modules.gemms.shared_input import InputReader
from quantshard.recipe import Gemm, Recipe, TensorRole
from quantshard.tensor import observation
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import KEY, QuantizedStorage

if kernels.USABLE:
    from quantshard.gemm.producers import OperandProducer


class PreparedLinear(NamedTuple):
    """A linear layer that is about to be called: its weights and biases, how it is computed, and what it carries."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    call: LinearContext
    state: LinearState

    @staticmethod
    def joined(layers: Sequence[PreparedLinear]) -> PreparedLinear:
        """Several layers, of one weight each, that read the same input: as one."""
        weights, biases = [layer.weights[0] for layer in layers], [layer.biases[0] for layer in layers]
        return PreparedLinear(weights, biases, layers[0].call, LinearState.joined([layer.state for layer in layers]))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weights and biases, whose gradients `LinearBackward.backward` gives in this order."""
        return (*self.weights, *self.biases)

    def saved(
        self, kept: WgradOperand, x_shape: Sequence[int], dtype: torch.dtype, rereads: bool
    ) -> tuple[LinearBackward, list[Tensor]]:
        """What backward needs of a forward that has kept this of its input: besides tensors, and these.

        `rereads`: backward needs more of it than was kept.
        """
        rebuild, x_tensors = to_saved(kept)
        bias_dtypes = [None if bias is None else bias.dtype for bias in self.biases]
        saved = LinearBackward(
            self.call, self.state, rebuild, len(self.weights), bias_dtypes, tuple(x_shape), dtype, rereads
        )  # fmt: skip
        return saved, [*self.weights, *x_tensors]


class LinearBackward(NamedTuple):
    """A linear layer in backward, without its tensors. `rereads`: what wgrad reads of its input was not kept."""

    call: LinearContext
    state: LinearState
    rebuild: tuple[Any, ...]
    parts: int
    bias_dtypes: Sequence[torch.dtype | None]
    x_shape: tuple[int, ...]
    dtype: torch.dtype
    rereads: bool = False

    @property
    def tensors(self) -> int:
        """How many gradients `backward` gives besides that of the input: of weights and biases."""
        return 2 * self.parts

    def needed(self, x: bool, tensors: Sequence[bool]) -> LinearGradMask:
        """From whether each of `PreparedLinear.tensors` needs a gradient."""
        return LinearGradMask(x, tensors[: self.parts], tensors[self.parts : 2 * self.parts])

    def reread(self, make: Callable[[], Tensor | OperandProducer], needed: LinearGradMask) -> WgradOperand | None:
        """The input as wgrad reads it, from the input itself, which `make` gives; None if forward has kept it."""
        if not self.rereads or not any(needed.weights):
            return None
        return gemm_operands(make(), TensorRole.INPUT, self.call, self.state, OperandUsage(False, True)).second

    def backward(
        self,
        grads: Sequence[Tensor],
        tensors: Sequence[Tensor],
        needed: LinearGradMask,
        x_wgrad: WgradOperand | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the input, and of weights and biases, from those of the outputs.

        `x_wgrad`: the input as wgrad reads it, if forward has not kept it.
        """
        rows = [grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        wanted = [needed.of_gradient(part, bias) for part, bias in enumerate(self.bias_dtypes)]
        weight_operands = self.weight_operands(tensors) if needed.x else None
        out_grads = gradient_operands(rows, self.call, self.state, wanted, weight_operands)
        return self.gradients(out_grads, tensors, needed, x_wgrad, weight_operands)

    def weight_operands(self, tensors: Sequence[Tensor]) -> WeightOperands:
        """The weights for dgrad; of several it is in float32, or in the dtype of the input where that is wider."""
        held: list[Operand] = []
        for part in range(self.parts):
            held.append(weight_operand(tensors[part], part, self.call, self.state))
        summed = self.parts > 1 and self.dtype.itemsize <= 4
        return WeightOperands(held, torch.float32 if summed else self.dtype)

    def gradients(
        self,
        out_grads: Iterable[GemmOperands],
        tensors: Sequence[Tensor],
        needed: LinearGradMask,
        x_wgrad: WgradOperand | None = None,
        weight_operands: WeightOperands | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The same from the gradients of the outputs as the GEMMs read them; `rights`: of `self.rights`, if they were
        asked for before."""
        weights, x_wgrad = tensors[: self.parts], x_wgrad or _from_saved(self.rebuild, tensors[self.parts :])
        if weight_operands is None and needed.x:
            weight_operands = self.weight_operands(weights)
        dx, dws, dbs = backward_gemms(
            out_grads,
            weights,
            weight_operands,
            x_wgrad,
            self.call,
            self.state,
            self.x_shape,
            self.dtype,
            self.bias_dtypes,
            needed,
        )
        return dx, [*dws, *dbs]


class RecomputedInput(NamedTuple):
    """An input that backward computes again: by `function` of `tensors`, which are kept for something else anyway."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]


def linear(
    x: Tensor, layer: PreparedLinear, again: RecomputedInput | None = None, shared: InputReader | None = None
) -> tuple[Tensor, ...]:
    """x [..., in_features] times each weight [out_features, in_features] transposed, plus its bias, in x's dtype.

    `again`: gives x in backward, which so need not keep it; an output of attention, which keeps it itself, is quantized
    a second time there. `shared`: what other layers that read x have made of it.
    """
    weights, biases, call, state = layer
    if not call.recipe.table and not any(isinstance(weight, QuantizedTensor) for weight in weights):
        plain = _plain_linears(x, weights, biases, state.tp)
        if observation.active is not None and state.record:
            observation.active.see_plain([each[KEY] for each in state.weights], x, weights, plain)
        return plain
    keeps = keeps_input(weights)
    alone = again is None and keeps and state.tp.size == 1
    if alone and operands.is_large(x) and private_torch.is_kept_output(x):
        again = RecomputedInput(_as_it_is, (x,))
    if again is not None and not can_reread(call.recipe):
        again = None
    outputs: tuple[Tensor, ...] = _LinearFunction.apply(x, (layer, keeps, again, shared), *layer.tensors)
    return outputs


def _as_it_is(x: Tensor) -> Tensor:
    return x


def keeps_input(weights: Sequence[Tensor]) -> bool:
    """True if a backward to come reads the input that these are multiplied with."""
    return torch.is_grad_enabled() and any([weight.requires_grad for weight in weights])


def can_reread(recipe: Recipe) -> bool:
    """True if quantizing an input a second time gives the same codes: random words are drawn once."""
    return not recipe.input_draws


def _plain_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tp: TensorParallel
) -> tuple[Tensor, ...]:
    if tp.mode == "column":
        x = tensor_parallel.gather_rows(x, tp) if tp.sequence_parallel else tensor_parallel.copy_to_group(x, tp)
    if tp.mode != "row" or tp.size == 1:
        return tuple(plain_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        y = _summed(plain_linear(x, weight, None), tp)
        if bias is not None:
            y = tensor_parallel.add_bias(
                y, tensor_parallel.all_reduce_gradient(bias, tp) if tp.sequence_parallel else bias
            )
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


def _with_leading(y: Tensor, shape: Sequence[int], split: OperandSplit | None = None) -> Tensor:
    """y [tokens, features] with the dims before the last of an activation of which each rank has a piece of `shape`,
    once rows are gathered."""
    if len(shape) == 2:
        return y
    first = shape[0] if split is None or split.dim != 0 else shape[0] * split.size
    out: Tensor = torch.ops.aten._unsafe_view.default(y, [*(first, *shape[1:])[:-1], y.shape[-1]])
    return out


def _summed(y: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of y [sequence, ..., features] over the ranks; under sequence parallelism this rank's part of it."""
    return tensor_parallel.scatter_rows(y, tp) if tp.sequence_parallel else tensor_parallel.reduce_from_group(y, tp)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        others: tuple[PreparedLinear, bool, RecomputedInput | None, InputReader | None],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        layer, keeps_input, again, shared = others
        keeps = keeps_input and again is None
        read = None if shared is None else shared.operands(x, layer.call, layer.state, keeps)
        source = x if read is not None or x.ndim == 2 else x.reshape(-1, x.shape[-1])
        outputs, x_wgrad = forward_gemms(source, x.shape, *layer, keeps, read)
        ctx.layer, saved = layer.saved(x_wgrad, x.shape, x.dtype, keeps_input and again is not None)
        ctx.again = None if again is None else again.function
        ctx.save_for_backward(*saved, *(() if again is None else again.tensors))
        ctx.saved = len(saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(limits.refusal("second derivative", "a linear layer"))
        layer: LinearBackward = ctx.layer
        needed = layer.needed(ctx.needs_input_grad[0], ctx.needs_input_grad[2:])
        tensors = ctx.saved_tensors  # once: a checkpointed region allows no second look
        saved, others = tensors[: ctx.saved], tensors[ctx.saved :]
        x_wgrad = layer.reread(lambda: ctx.again(*others).reshape(-1, layer.x_shape[-1]), needed)
        dx, of_tensors = layer.backward(grads, saved, needed, x_wgrad)
        return dx, None, *of_tensors


class LinearGradMask(NamedTuple):
    """Which gradients are needed: of the input, of each weight, of each bias."""

    x: bool
    weights: Sequence[bool]
    biases: Sequence[bool]

    def of_gradient(self, part: int, bias_dtype: torch.dtype | None) -> OperandUsage:
        """What is wanted of the gradient of one weight's output."""
        return operand_usage(self.x, self.weights[part], self.biases[part] and bias_dtype is not None, True, 2)


def filled(grads: Sequence[Tensor | None], out_features: Sequence[int]) -> list[Tensor]:
    """Gradients of several outputs [..., out_features], zeros for one that was not used; none if none was."""
    first = next((grad for grad in grads if grad is not None), None)
    if first is None:
        return []
    return [
        first.new_zeros((*first.shape[:-1], size)) if grad is None else grad
        for grad, size in zip(grads, out_features, strict=True)
    ]


class SavedLinear(NamedTuple):
    """A layer in backward with the tensors that were saved for it, and which gradients it needs."""

    saved: LinearBackward
    tensors: list[Tensor]
    needed: LinearGradMask


def forward_gemms(
    source: Tensor | OperandProducer,
    x_shape: Sequence[int] | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    call: LinearContext,
    state: LinearState,
    keeps_input: bool,
    read: GemmOperands | None = None,
) -> tuple[list[Tensor], WgradOperand]:
    """fprop: the outputs [..., out_features], and the input as wgrad reads it, which is empty unless `keeps_input`.

    `source`: the input as [tokens, in_features], or what makes it; `x_shape`: its own shape, None if the outputs are to
    be [tokens, out_features]; `read`: its operands, if they are there, for which the shape of `source` is no matter.
    """
    if call.repeated:
        context.flush_after_backward()
    split = state.split(TensorRole.INPUT)
    partial = split is not None and split.dim == 1  # each rank has a part of every sum
    outputs, dtype, fast = [], source.dtype, Gemm.FPROP in call.recipe.fast_gemms
    held = [weight_operand(weight, part, call, state) for part, weight in enumerate(weights)]
    weight_operands = WeightOperands(held, dtype, transpose_b=True)
    if read is None:
        usage = operand_usage(True, keeps_input, passing=1)
        read = gemm_operands(source, TensorRole.INPUT, call, state, usage, weight_operands=weight_operands)
    seen: Sequence[ReadOperand | None] = [None] * len(held)
    if weight_operands.reads_together:
        seen, _ = weight_operands.read([read.first] * len(held))
    for w, of_weight, bias in zip(held, seen, biases, strict=True):
        y = backend.matmul(
            read.first, w, dtype, transpose_b=True, bias=None if partial else bias,
            fast=fast, read=of_weight,
        )  # fmt: skip
        y = y if x_shape is None else _with_leading(y, x_shape, split)
        if partial:
            y = _summed(y, state.tp) if bias is None else _summed(y, state.tp) + bias.to(y.dtype)
        outputs.append(y)
    return outputs, read.second


def backward_gemms(
    out_grads: Iterable[GemmOperands],
    weights: Sequence[Tensor],
    weight_operands: WeightOperands | None,
    x_wgrad: WgradOperand,
    call: LinearContext,
    state: LinearState,
    x_shape: Sequence[int],
    x_dtype: torch.dtype,
    bias_dtypes: Sequence[torch.dtype | None],
    needed: LinearGradMask,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """dgrad and wgrad: the gradients that are `needed`, of the input, each weight and each bias.

    `ways`: the gradients of the outputs, one for each weight, as the GEMMs read them. `rights`: the weights for dgrad,
    if it is needed. What several weights add to the gradient of the input is summed in their dtype and rounded once.
    """
    summands: list[Tensor] = []
    dws: list[Tensor | None] = []
    dbs: list[Tensor | None] = []
    split = state.split(TensorRole.GRAD_OUTPUT)
    if any(needed.weights):
        x_wgrad = x_wgrad.whole()
    held: Sequence[Operand] = []
    read: Sequence[ReadOperand | None] = [None] * len(weights)
    has_nan = False
    if weight_operands is not None:
        held = weight_operands.operands
        left = iter(out_grads)
        first = next(left)
        if isinstance(first.first, QuantizedStorage):
            out_grads = [first, *left]
            if weight_operands.reads_together:
                nan_flags, others = [each.nan_flag for each in out_grads], [each.second.operand for each in out_grads]
                read, has_nan = weight_operands.read([each.first for each in out_grads], nan_flags, others)
        else:  # each goes when it was multiplied, before the next is made
            held = backend.values_together(first.first, held, x_dtype)
            out_grads = _all([first], left)
        del first
    each = iter(out_grads)
    for part, weight in enumerate(weights):
        found, bias_dtype = next(each), bias_dtypes[part]  # not by zip, which holds on to the one before
        if weight_operands is not None:
            dx = backend.matmul(
                found.first, held[part], weight_operands.out_dtype, nan_flag=found.nan_flag, precision=x_dtype,
                fast=Gemm.DGRAD in call.recipe.fast_gemms, read=read[part],
            )  # fmt: skip
            summands.append(dx)
            del dx  # the list alone holds it
            _add_up(summands, part == len(weights) - 1, x_dtype)  # before wgrad: it needs the memory
        dw = db = None
        if needed.weights[part]:
            dw = backend.matmul(
                found.second.operand, x_wgrad.operand, weight.dtype, nan_flag=None if has_nan else found.nan_flag,
                precision=x_dtype,
                transpose_a=not found.second.transposed, transpose_b=x_wgrad.transposed,
                fast=Gemm.WGRAD in call.recipe.fast_gemms,
            )  # fmt: skip
        if found.sums is not None and bias_dtype is not None:
            db = found.sums
            db = (db if split is None or split.dim == 1 else tensor_parallel.reduce_from_group(db, state.tp)).to(
                bias_dtype
            )
        dws.append(dw)
        dbs.append(db)
        del found
    if not summands:
        return None, dws, dbs
    dx = _with_leading(summands[0], x_shape, state.split(TensorRole.INPUT))
    return (_summed(dx, state.tp) if split is not None and split.dim == 1 else dx), dws, dbs


def _all(first: list[GemmOperands], left: Iterator[GemmOperands]) -> Iterator[GemmOperands]:
    """The first, which is taken from its list, and those that are left: itertools.chain would hold on to it."""
    yield first.pop()
    yield from left


def _add_up(summands: list[Tensor], is_last: bool, dtype: torch.dtype) -> None:
    """Leave at most two of them, or behind the last one their sum, rounded to `dtype`.

    Two, where one would do with another pass over both: those of queries, keys and values are summed in one.
    """
    if is_last and len(summands) > 1:
        summands[:] = [kernel_dispatch.rounded_sum(summands, dtype)]
    elif len(summands) > 2:
        summands[:2] = [summands[0].add_(summands[1])]


def to_saved(operand: WgradOperand) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Split an operand into what is needed to put it together again in backward, and the tensors that are saved."""
    others = (operand.transposed, operand.split, operand.cell, operand.words)
    if isinstance(operand.operand, Tensor):
        return (None, others), (operand.operand,)
    storage = operand.operand
    described = (storage.cell, storage.shard, tuple(storage.components), storage.layout)
    return (described, others), tuple(storage.components.values())


def _from_saved(rebuild: tuple[Any, ...], tensors: Sequence[Tensor]) -> WgradOperand:
    described, others = rebuild
    if described is None:
        return WgradOperand(tensors[0], *others)
    cell, shard, names, layout = described
    return WgradOperand(QuantizedStorage(cell, shard, dict(zip(names, tensors, strict=True)), layout=layout), *others)
