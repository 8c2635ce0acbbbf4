"""The three GEMMs of a linear layer, with operands quantized by the recipe.

A layer has one weight, or several that read the same input, such as queries, keys and values or the halves of a gated
MLP. The input is quantized once for all of them.

    fprop   y  = x  @ w^T + b     x quantized along in_features, w as stored
    dgrad   dx = dy @ w           dy quantized along out_features
    wgrad   dw = dy^T @ x         dy^T and x^T quantized along tokens

Backward keeps only wgrad's operand of the input: quantized, 8 bits or fewer per element.
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
    """A linear layer ready to be called: weights, biases, context of this call, and state that outlives the step."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    call: LinearContext
    state: LinearState

    @staticmethod
    def joined(layers: Sequence[PreparedLinear]) -> PreparedLinear:
        """Merge layers with one weight each that read the same input into one layer."""
        weights, biases = [layer.weights[0] for layer in layers], [layer.biases[0] for layer in layers]
        return PreparedLinear(weights, biases, layers[0].call, LinearState.joined([layer.state for layer in layers]))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weights and biases, in the order of the gradients that `LinearBackward.backward` returns."""
        return (*self.weights, *self.biases)

    def saved(
        self, kept: WgradOperand, x_shape: Sequence[int], dtype: torch.dtype, rereads: bool
    ) -> tuple[LinearBackward, list[Tensor]]:
        """Return the `LinearBackward` of this forward and the tensors to save for it.

        `kept`: wgrad's operand of the input. `rereads`: the operand was not kept, and backward recomputes it.
        """
        rebuild, x_tensors = to_saved(kept)
        bias_dtypes = [None if bias is None else bias.dtype for bias in self.biases]
        backward = LinearBackward(
            self.call, self.state, rebuild, len(self.weights), bias_dtypes, tuple(x_shape), dtype, rereads
        )  # fmt: skip
        return backward, [*self.weights, *x_tensors]


class LinearBackward(NamedTuple):
    """A linear layer in backward, without its tensors. `rereads`: backward recomputes wgrad's operand of the input."""

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
        """Number of weights and biases, which is the number of their gradients that `backward` returns."""
        return 2 * self.parts

    def needed(self, x: bool, tensors: Sequence[bool]) -> LinearGradMask:
        """Build the mask. `x`, `tensors`: whether the input and each of `PreparedLinear.tensors` need a gradient."""
        return LinearGradMask(x, tensors[: self.parts], tensors[self.parts : 2 * self.parts])

    def reread(self, make: Callable[[], Tensor | OperandProducer], needed: LinearGradMask) -> WgradOperand | None:
        """Quantize the input that `make` returns for wgrad. None if forward kept the operand or no weight needs it."""
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
        """Return the gradients of the input, and of weights and biases, given the output gradients.

        `x_wgrad`: wgrad's operand of the input, if forward has not kept it.
        """
        rows = [grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        usages = [needed.of_gradient(part, bias) for part, bias in enumerate(self.bias_dtypes)]
        weight_operands = self.weight_operands(tensors) if needed.x else None
        out_grads = gradient_operands(rows, self.call, self.state, usages, weight_operands)
        return self.gradients(out_grads, tensors, needed, x_wgrad, weight_operands)

    def weight_operands(self, tensors: Sequence[Tensor]) -> WeightOperands:
        """Weights for dgrad. Outputs that are summed over several weights are in float32, or in a wider input dtype."""
        w_operands: list[Operand] = []
        for part in range(self.parts):
            w_operands.append(weight_operand(tensors[part], part, self.call, self.state))
        summed = self.parts > 1 and self.dtype.itemsize <= 4
        return WeightOperands(w_operands, torch.float32 if summed else self.dtype)

    def gradients(
        self,
        out_grads: Iterable[GemmOperands],
        tensors: Sequence[Tensor],
        needed: LinearGradMask,
        x_wgrad: WgradOperand | None = None,
        weight_operands: WeightOperands | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run `backward` on quantized output gradients; `weight_operands`: result of `self.weight_operands`, if any."""
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
    """An input that backward recomputes as `function(*tensors)`, where other operations keep `tensors` anyway."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]


def linear(
    x: Tensor, layer: PreparedLinear, again: RecomputedInput | None = None, shared: InputReader | None = None
) -> tuple[Tensor, ...]:
    """Compute x [..., in_features] @ weight^T [in_features, out_features] + bias for each weight, in x's dtype.

    `again`: recomputes x in backward, so that x need not be kept. A large x that the operation before keeps for its own
    backward, as attention does, is quantized again in backward. `shared`: operands of x that other layers have
    quantized.
    """
    weights, biases, call, state = layer
    if not call.recipe.table and not any(isinstance(weight, QuantizedTensor) for weight in weights):
        plain = _plain_linears(x, weights, biases, state.tp)
        if observation.active is not None and state.record:
            observation.active.see_plain([weight_state[KEY] for weight_state in state.weights], x, weights, plain)
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
    """Return whether backward will need the input of these weights, for wgrad."""
    return torch.is_grad_enabled() and any([weight.requires_grad for weight in weights])


def can_reread(recipe: Recipe) -> bool:
    """Return whether quantizing an input twice gives the same codes; false if input rounding draws random bits."""
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
    """Compute `linear` in high precision for one weight."""
    tokens = x.reshape(-1, x.shape[-1])
    y = torch.nn.functional.linear(tokens, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return shaped_as(y, x)


def shaped_as(y: Tensor, x: Tensor) -> Tensor:
    """Reshape y [tokens, features] to the leading dims of x.

    view() is not used because FSDP2 hooks the outputs of modules, and warns that an in-place operation could drop the
    hook of a view.
    """
    return _with_leading(y, x.shape)


def _with_leading(y: Tensor, shape: Sequence[int], split: OperandSplit | None = None) -> Tensor:
    """Reshape y [tokens, features] to the leading dims of `shape`; dim 0 is multiplied if `split` gathers rows."""
    if len(shape) == 2:
        return y
    first = shape[0] if split is None or split.dim != 0 else shape[0] * split.size
    out: Tensor = torch.ops.aten._unsafe_view.default(y, [*(first, *shape[1:])[:-1], y.shape[-1]])
    return out


def _summed(y: Tensor, tp: TensorParallel) -> Tensor:
    """Sum y [sequence, ..., features] over the ranks; under sequence parallelism, reduce-scatter along the sequence."""
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
        x_operands = None if shared is None else shared.operands(x, layer.call, layer.state, keeps)
        source = x if x_operands is not None or x.ndim == 2 else x.reshape(-1, x.shape[-1])
        outputs, x_wgrad = forward_gemms(source, x.shape, *layer, keeps, x_operands)
        ctx.layer, saved_tensors = layer.saved(x_wgrad, x.shape, x.dtype, keeps_input and again is not None)
        ctx.again = None if again is None else again.function
        ctx.save_for_backward(*saved_tensors, *(() if again is None else again.tensors))
        ctx.saved = len(saved_tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(limits.refusal("second derivative", "a linear layer"))
        layer: LinearBackward = ctx.layer
        grad_mask = layer.needed(ctx.needs_input_grad[0], ctx.needs_input_grad[2:])
        tensors = ctx.saved_tensors  # once: in a checkpointed region a second read raises
        layer_tensors, recompute_tensors = tensors[: ctx.saved], tensors[ctx.saved :]
        x_wgrad = layer.reread(lambda: ctx.again(*recompute_tensors).reshape(-1, layer.x_shape[-1]), grad_mask)
        dx, tensor_grads = layer.backward(grads, layer_tensors, grad_mask, x_wgrad)
        return dx, None, *tensor_grads


class LinearGradMask(NamedTuple):
    """Whether the input, each weight and each bias need a gradient."""

    x: bool
    weights: Sequence[bool]
    biases: Sequence[bool]

    def of_gradient(self, part: int, bias_dtype: torch.dtype | None) -> OperandUsage:
        """Operands and sums that are needed of the output gradient of one weight."""
        return operand_usage(self.x, self.weights[part], self.biases[part] and bias_dtype is not None, True, 2)


def filled(grads: Sequence[Tensor | None], out_features: Sequence[int]) -> list[Tensor]:
    """Replace missing gradients of outputs [..., out_features] by zeros; return [] if all are missing."""
    first = next((grad for grad in grads if grad is not None), None)
    if first is None:
        return []
    return [
        first.new_zeros((*first.shape[:-1], size)) if grad is None else grad
        for grad, size in zip(grads, out_features, strict=True)
    ]


class SavedLinear(NamedTuple):
    """A layer in backward with its saved tensors and the gradients that are needed."""

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
    """Run fprop; return the outputs [..., out_features] and wgrad's operand of the input, empty unless `keeps_input`.

    `source`: the input [tokens, in_features] or its producer; any shape if `read` is given. `x_shape`: shape of the
    input, whose leading dims the outputs get; None leaves them [tokens, out_features]. `read`: quantized operands of
    the input, if they exist.
    """
    if call.repeated:
        context.flush_after_backward()
    split = state.split(TensorRole.INPUT)
    partial = split is not None and split.dim == 1  # each rank has a partial sum of every output
    outputs, dtype, fast = [], source.dtype, Gemm.FPROP in call.recipe.fast_gemms
    w_operands = [weight_operand(weight, part, call, state) for part, weight in enumerate(weights)]
    weight_operands = WeightOperands(w_operands, dtype, transpose_b=True)
    if read is None:
        usage = operand_usage(True, keeps_input, passing=1)
        read = gemm_operands(source, TensorRole.INPUT, call, state, usage, weight_operands=weight_operands)
    read_operands: Sequence[ReadOperand | None] = [None] * len(w_operands)
    if weight_operands.reads_together:
        read_operands, _ = weight_operands.read([read.first] * len(w_operands))
    for w, read_weight, bias in zip(w_operands, read_operands, biases, strict=True):
        y = backend.matmul(
            read.first, w, dtype, transpose_b=True, bias=None if partial else bias,
            fast=fast, read=read_weight,
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
    """Run dgrad and wgrad; return the `needed` gradients of the input, each weight and each bias.

    `out_grads`: quantized output gradients, one for each weight. `weight_operands`: the weights for dgrad, if it is
    needed. The contributions of several weights to the input gradient are summed in `weight_operands.out_dtype` and
    rounded once.
    """
    summands: list[Tensor] = []
    dws: list[Tensor | None] = []
    dbs: list[Tensor | None] = []
    split = state.split(TensorRole.GRAD_OUTPUT)
    if any(needed.weights):
        x_wgrad = x_wgrad.whole()
    w_operands: Sequence[Operand] = []
    read_operands: Sequence[ReadOperand | None] = [None] * len(weights)
    has_nan = False
    if weight_operands is not None:
        w_operands = weight_operands.operands
        remaining = iter(out_grads)
        first = next(remaining)
        if isinstance(first.first, QuantizedStorage):
            out_grads = [first, *remaining]
            if weight_operands.reads_together:
                nan_flags, seconds = (
                    [grads.nan_flag for grads in out_grads],
                    [grads.second.operand for grads in out_grads],
                )
                read_operands, has_nan = weight_operands.read([grads.first for grads in out_grads], nan_flags, seconds)
        else:  # each gradient is freed after its GEMMs, before the next is quantized
            w_operands = backend.values_together(first.first, w_operands, x_dtype)
            out_grads = _all([first], remaining)
        del first
    grads = iter(out_grads)
    for part, weight in enumerate(weights):
        grad, bias_dtype = next(grads), bias_dtypes[part]  # zip would keep the previous gradient alive
        if weight_operands is not None:
            dx = backend.matmul(
                grad.first, w_operands[part], weight_operands.out_dtype, nan_flag=grad.nan_flag, precision=x_dtype,
                fast=Gemm.DGRAD in call.recipe.fast_gemms, read=read_operands[part],
            )  # fmt: skip
            summands.append(dx)
            del dx  # so that `summands` has the only reference
            _add_up(summands, part == len(weights) - 1, x_dtype)  # before wgrad, to free memory for it
        dw = db = None
        if needed.weights[part]:
            dw = backend.matmul(
                grad.second.operand, x_wgrad.operand, weight.dtype, nan_flag=None if has_nan else grad.nan_flag,
                precision=x_dtype,
                transpose_a=not grad.second.transposed, transpose_b=x_wgrad.transposed,
                fast=Gemm.WGRAD in call.recipe.fast_gemms,
            )  # fmt: skip
        if grad.sums is not None and bias_dtype is not None:
            db = grad.sums
            db = (db if split is None or split.dim == 1 else tensor_parallel.reduce_from_group(db, state.tp)).to(
                bias_dtype
            )
        dws.append(dw)
        dbs.append(db)
        del grad
    if not summands:
        return None, dws, dbs
    dx = _with_leading(summands[0], x_shape, state.split(TensorRole.INPUT))
    return (_summed(dx, state.tp) if split is not None and split.dim == 1 else dx), dws, dbs


def _all(first: list[GemmOperands], left: Iterator[GemmOperands]) -> Iterator[GemmOperands]:
    """Yield the only element of `first`, removing it, then `left`. itertools.chain would keep the element alive."""
    yield first.pop()
    yield from left


def _add_up(summands: list[Tensor], is_last: bool, dtype: torch.dtype) -> None:
    """Reduce `summands` in place to at most two or, after the last one, to their sum rounded to `dtype`.

    Two are kept so that the three summands of queries, keys and values need only one pass for the sum.
    """
    if is_last and len(summands) > 1:
        summands[:] = [kernel_dispatch.rounded_sum(summands, dtype)]
    elif len(summands) > 2:
        summands[:2] = [summands[0].add_(summands[1])]


def to_saved(operand: WgradOperand) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Split an operand into metadata, from which backward rebuilds it, and tensors to save."""
    rest = (operand.transposed, operand.split, operand.cell, operand.words)
    if isinstance(operand.operand, Tensor):
        return (None, rest), (operand.operand,)
    storage = operand.operand
    metadata = (storage.cell, storage.shard, tuple(storage.components), storage.layout)
    return (metadata, rest), tuple(storage.components.values())


def _from_saved(rebuild: tuple[Any, ...], tensors: Sequence[Tensor]) -> WgradOperand:
    metadata, rest = rebuild
    if metadata is None:
        return WgradOperand(tensors[0], *rest)
    cell, shard, names, layout = metadata
    return WgradOperand(QuantizedStorage(cell, shard, dict(zip(names, tensors, strict=True)), layout=layout), *rest)
