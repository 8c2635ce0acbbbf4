"""The three GEMMs of a linear layer, with operands quantized by the recipe.

A layer has one weight, or several that read the same input, such as queries, keys and values or the halves of a gated
MLP. The input is quantized once for all of them.

    fprop   y  = x  @ w^T + b     x quantized along in_features, w as stored
    dgrad   dx = dy @ w           dy quantized along out_features
    wgrad   dw = dy^T @ x         dy^T and x^T quantized along tokens

Backward keeps only wgrad's operand of the input: quantized, 8 bits or fewer per element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, limits, private_torch
from quantshard.distributed import tensor_parallel
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.errors import UnsupportedOperationError
from quantshard.gemm import backend, emulated, operands
from quantshard.gemm.backend import ReadOperand, WeightOperands
from quantshard.gemm.operands import Operand, OperandSplit, OperandUsage
from quantshard.modules.contexts import pending_amaxes
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
from quantshard.modules.gemms.weight_gradients import RUNNING_PASS, PlainLinear, in_two_passes, weight_gradients
from quantshard.recipe import Gemm, TensorRole
from quantshard.tensor import observation
from quantshard.tensor.parameter_state import RNG_KEY
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage

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
        self, x_wgrad: WgradOperand, x_shape: Sequence[int], dtype: torch.dtype, requantizes: bool
    ) -> tuple[LinearBackward, list[Tensor]]:
        """Return the `LinearBackward` of this forward and the tensors to save. `requantizes`: `x_wgrad` is not kept."""
        operand_metadata, x_tensors = _to_saved(x_wgrad)
        bias_dtypes = [None if bias is None else bias.dtype for bias in self.biases]
        backward = LinearBackward(
            self.call, self.state, operand_metadata, len(self.weights), bias_dtypes, tuple(x_shape), dtype,
            requantizes, tensors=[], needed=LinearGradMask(False, (), ()),
        )  # fmt: skip
        return backward, [*self.weights, *x_tensors]


class RecomputedInput(NamedTuple):
    """An input that backward recomputes as `function(*tensors)`, where other operations keep `tensors` anyway."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]


def linear(
    x: Tensor, layer: PreparedLinear, recompute: RecomputedInput | None = None, shared: InputReader | None = None
) -> tuple[Tensor, ...]:
    """Compute x [..., in_features] @ weight^T [in_features, out_features] + bias for each weight, in x's dtype.

    `recompute`: recomputes x in backward, so that x need not be kept. A large x that the operation before keeps for its
    own backward, as attention does, is quantized again in backward. `shared`: operands of x that other layers have
    quantized.
    """
    weights, biases, call, state = layer
    if not call.recipe.table and not any(isinstance(weight, QuantizedTensor) for weight in weights):
        plain = _plain_linears(x, weights, biases, state)
        if observation.active is not None and state.record:
            observation.active.see_plain([weight_state[RNG_KEY] for weight_state in state.weights], x, weights, plain)
        return plain
    keeps = needs_wgrad(weights)
    alone = recompute is None and keeps and state.tp.size == 1
    if alone and x.numel() >= operands.LARGE and private_torch.is_kept_output(x):
        recompute = RecomputedInput(lambda input: input, (x,))
    if call.recipe.input_draws:  # a second quantization would draw other random bits
        recompute = None
    outputs: tuple[Tensor, ...] = _LinearFunction.apply(x, (layer, keeps, recompute, shared), *layer.tensors)
    return outputs


def needs_wgrad(weights: Sequence[Tensor]) -> bool:
    """Return whether backward will need the input of these weights, for wgrad."""
    return torch.is_grad_enabled() and any([weight.requires_grad for weight in weights])


_Backward = Callable[..., tuple[Tensor | None, ...]]

BETWEEN_GRAPHS: Final = "between graphs"
"""`tracing.step` while a compiled function runs a layer between two graphs."""


def in_step_of_forward(backward: _Backward) -> _Backward:
    """Decorate the backward of a quantized layer, which has no derivative.

    If its forward was traced into a graph, backward is traced by the same `graph_state.GraphStep`, `ctx.step`. If it
    ran between two graphs, Dynamo, which traces functions that run in backward, is kept out.
    """
    eager = in_two_passes(backward)
    outside = private_torch.without_dynamo(eager)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(limits.refusal("second derivative", "a linear layer"))
        if ctx.step is None:
            try:
                for node, _ in ctx.next_functions:
                    if node is not None and not private_torch.will_execute(node):
                        return eager(ctx, *grads)
            except RuntimeError:  # of a leaf
                return eager(ctx, *grads)
            return backward(ctx, *grads)
        if ctx.step is BETWEEN_GRAPHS:
            return outside(ctx, *grads)
        with ctx.step.traced(grads):
            return backward(ctx, *grads)

    return run


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        others: tuple[PreparedLinear, bool, RecomputedInput | None, InputReader | None],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        layer, has_wgrad, recompute, shared = others
        keeps = has_wgrad and recompute is None
        x_operands = None if shared is None else shared.operands(x, layer.call, layer.state, keeps)
        source = x if x_operands is not None or x.ndim == 2 else x.reshape(-1, x.shape[-1])
        outputs, x_wgrad = forward_gemms(source, x.shape, layer, keeps, x_operands)
        ctx.layer, saved_tensors = layer.saved(x_wgrad, x.shape, x.dtype, has_wgrad and recompute is not None)
        ctx.recompute = None if recompute is None else recompute.function
        ctx.save_for_backward(*saved_tensors, *(() if recompute is None else recompute.tensors))
        ctx.num_layer_tensors, ctx.step = len(saved_tensors), kernels.tracing.step
        return tuple(outputs)

    @staticmethod
    @in_step_of_forward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: in a checkpointed region a second read raises
        saved: LinearBackward = ctx.layer
        layer_tensors, input_tensors = tensors[: ctx.num_layer_tensors], tensors[ctx.num_layer_tensors :]
        layer = saved.with_saved(layer_tensors, ctx.needs_input_grad[0], ctx.needs_input_grad[2:])
        x_wgrad = None
        if layer.requantizes:
            x_wgrad = layer.requantize_input(lambda: ctx.recompute(*input_tensors).reshape(-1, layer.x_shape[-1]))
        dx, tensor_grads = layer.backward(grads, x_wgrad)
        return dx, None, *tensor_grads


def forward_gemms(
    source: Tensor | OperandProducer,
    x_shape: Sequence[int] | None,
    layer: PreparedLinear,
    has_wgrad: bool,
    x_operands: GemmOperands | None = None,
) -> tuple[list[Tensor], WgradOperand]:
    """Run fprop; return the outputs [..., out_features] and wgrad's operand of the input, empty unless `has_wgrad`.

    `source`: the input [tokens, in_features] or its producer; any shape if `x_operands` is given. `x_shape`: shape of
    the input, whose leading dims the outputs get; None leaves them [tokens, out_features]. `x_operands`: quantized
    operands of the input, if they exist.
    """
    weights, biases, call, state = layer
    if call.repeated:
        pending_amaxes.flush_after_backward()
    split = state.split(TensorRole.INPUT)
    partial = split is not None and split.dim == 1  # each rank has a partial sum of every output
    outputs, dtype, fast = [], source.dtype, Gemm.FPROP in call.recipe.fast_gemms
    w_operands = []
    for index, weight in enumerate(weights):
        w_operands.append(weight_operand(weight, index, call, state))
    weight_operands = WeightOperands(w_operands, dtype, transpose_b=True)
    if x_operands is None:
        usage = OperandUsage(True, has_wgrad, num_transient=1)
        x_operands = gemm_operands(source, TensorRole.INPUT, call, state, usage, weight_operands=weight_operands)
    x = x_operands.for_first_gemm
    prepared_weights: Sequence[ReadOperand | None] = [None] * len(w_operands)
    if weight_operands.reads_together:
        prepared_weights, _ = weight_operands.read([x] * len(w_operands))
    for w, prepared, bias in zip(w_operands, prepared_weights, biases, strict=True):
        y = backend.matmul(x, w, dtype, transpose_b=True, bias=None if partial else bias, fast=fast, read=prepared)
        y = y if x_shape is None else shaped_as(y, x_shape, split)
        if partial:
            y = _summed(y, state.tp) if bias is None else _summed(y, state.tp) + bias.to(y.dtype)
        outputs.append(y)
    return outputs, x_operands.for_wgrad


# Backward ------------------------------------------------------------------------------------------------------------


class LinearGradMask(NamedTuple):
    """Whether the input, each weight and each bias need a gradient."""

    x: bool
    weights: Sequence[bool]
    biases: Sequence[bool]


class LinearBackward(NamedTuple):
    """A linear layer in backward.

    `requantizes`: backward recomputes wgrad's operand of the input. `tensors`: the weights, and the tensors of that
    operand unless it is recomputed. `needed`: the gradients to compute. Both are empty until `with_saved`, so that
    autograd alone keeps the tensors.
    """

    call: LinearContext
    state: LinearState
    operand_metadata: tuple[Any, ...]
    num_weights: int
    bias_dtypes: Sequence[torch.dtype | None]
    x_shape: tuple[int, ...]
    dtype: torch.dtype
    requantizes: bool
    tensors: list[Tensor]
    needed: LinearGradMask

    def with_saved(self, tensors: Sequence[Tensor], needs_x: bool, needs: Sequence[bool]) -> LinearBackward:
        """This layer with its saved tensors. `needs`: whether each of `PreparedLinear.tensors` needs a gradient."""
        needed = LinearGradMask(needs_x, needs[: self.num_weights], needs[self.num_weights : 2 * self.num_weights])
        return self._replace(tensors=list(tensors), needed=needed)

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases, which is the number of their gradients that `backward` returns."""
        return 2 * self.num_weights

    def usage(self, weight_index: int) -> OperandUsage:
        """The uses of the output gradient of one weight."""
        _, weights, biases = self.needed
        has_sums = biases[weight_index] and self.bias_dtypes[weight_index] is not None
        return OperandUsage(self.needed.x, weights[weight_index], has_sums, num_transient=2)

    def requantize_input(self, make: Callable[[], Tensor | OperandProducer]) -> WgradOperand | None:
        """Quantize the input that `make` returns for wgrad. None if forward kept the operand or no weight needs it."""
        if not self.requantizes or not any(self.needed.weights):
            return None
        return gemm_operands(make(), TensorRole.INPUT, self.call, self.state, OperandUsage(False, True)).for_wgrad

    def weight_operands(self) -> WeightOperands:
        """Weights for dgrad. Outputs that are summed over several weights are in float32, or in a wider input dtype."""
        w_operands = []
        for index in range(self.num_weights):
            w_operands.append(weight_operand(self.tensors[index], index, self.call, self.state))
        summed = self.num_weights > 1 and self.dtype.itemsize <= 4
        return WeightOperands(w_operands, torch.float32 if summed else self.dtype)

    def backward(
        self, grads: Sequence[Tensor], x_wgrad: WgradOperand | None = None
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of input, weights and biases. `x_wgrad`: wgrad's operand, if forward has not kept it."""
        rows, usages = [], []
        for index, grad in enumerate(grads):
            rows.append(grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1]))
            usages.append(self.usage(index))
        weight_operands = self.weight_operands() if self.needed.x else None
        out_grads = gradient_operands(rows, self.call, self.state, usages, weight_operands)
        return self.gradients(out_grads, x_wgrad, weight_operands)

    def gradients(
        self,
        out_grads: Iterator[GemmOperands],
        x_wgrad: WgradOperand | None = None,
        weight_operands: WeightOperands | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run `backward` on quantized output gradients; `weight_operands`: result of `self.weight_operands`, if any."""
        weights, (needs_x, need_weights, _) = self.tensors[: self.num_weights], self.needed
        x_wgrad = x_wgrad or _from_saved(self.operand_metadata, self.tensors[self.num_weights :])
        if needs_x and weight_operands is None:
            weight_operands = self.weight_operands()
        if any(need_weights):
            x_wgrad = x_wgrad.whole()
        out_grads, dgrad_weights, has_nan = self._dgrad_operands(out_grads, weight_operands)
        dx_terms: list[Tensor] = []
        dweights: list[Tensor | None] = []
        dbiases: list[Tensor | None] = []
        fast = self.call.recipe.fast_gemms
        for index, weight in enumerate(weights):
            grad, dweight = next(out_grads), None
            if weight_operands is not None:
                w, prepared = dgrad_weights[index]
                dx = backend.matmul(
                    grad.for_first_gemm, w, weight_operands.out_dtype, nan_flag=grad.nan_flag, precision=self.dtype,
                    fast=Gemm.DGRAD in fast, read=prepared,
                )  # fmt: skip
                dx_terms.append(dx)
                # only the list holds the term, which is freed before wgrad needs memory
                del dx
                _add_up(dx_terms, index == self.num_weights - 1, self.dtype)
            if need_weights[index]:
                compute = functools.partial(
                    backend.matmul, grad.for_wgrad.operand, x_wgrad.operand, precision=self.dtype,
                    fast=Gemm.WGRAD in fast, nan_flag=None if has_nan else grad.nan_flag,
                    transpose_a=not grad.for_wgrad.transposed, transpose_b=x_wgrad.transposed,
                )  # fmt: skip
                if self.state.wgrads is None and not RUNNING_PASS.for_inputs:
                    dweight = compute(weight.dtype)
                else:
                    (dweight,) = weight_gradients(compute, self.state.wgrads, [index], weight.dtype)
                del compute
            dweights.append(dweight)
            dbiases.append(None if grad.sums is None else self._bias_gradient(grad.sums, self.bias_dtypes[index]))
            # free this gradient before the next one is quantized
            del grad
        return self._input_gradient(dx_terms), [*dweights, *dbiases]

    def _dgrad_operands(
        self, out_grads: Iterator[GemmOperands], weight_operands: WeightOperands | None
    ) -> tuple[Iterator[GemmOperands], Sequence[tuple[Operand, ReadOperand | None]], bool]:
        """The output gradients, weights for dgrad as its products read them, and whether wgrad has its NaNs already."""
        if weight_operands is None:
            return out_grads, [], False
        prepared: Sequence[ReadOperand | None] = [None] * self.num_weights
        has_nan, first = False, next(out_grads)
        if not isinstance(first.for_first_gemm, QuantizedStorage):
            # each gradient is freed after its GEMMs, before the next is quantized
            values = emulated.values_together(first.for_first_gemm, weight_operands.operands, self.dtype)
            return _all([first], out_grads), list(zip(values, prepared, strict=True)), False
        grads = [first, *out_grads]
        if weight_operands.reads_together:
            nan_flags, wgrad_operands = [grad.nan_flag for grad in grads], [grad.for_wgrad.operand for grad in grads]
            prepared, has_nan = weight_operands.read([grad.for_first_gemm for grad in grads], nan_flags, wgrad_operands)
        return iter(grads), list(zip(weight_operands.operands, prepared, strict=True)), has_nan

    def _bias_gradient(self, sums: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The sum of an output gradient over all tokens, in the dtype of the bias."""
        split = self.state.split(TensorRole.GRAD_OUTPUT)
        if split is not None and split.dim == 0:
            sums = tensor_parallel.reduce_from_group(sums, self.state.tp)
        return sums if dtype is None else kernel_dispatch.rounded(sums, dtype)

    def _input_gradient(self, dx_terms: list[Tensor]) -> Tensor | None:
        if not dx_terms:
            return None
        if self.state.tp.size == 1:
            return shaped_as(dx_terms[0], self.x_shape)
        dx = shaped_as(dx_terms[0], self.x_shape, self.state.split(TensorRole.INPUT))
        split = self.state.split(TensorRole.GRAD_OUTPUT)
        return _summed(dx, self.state.tp) if split is not None and split.dim == 1 else dx


def _all(first: list[GemmOperands], left: Iterator[GemmOperands]) -> Iterator[GemmOperands]:
    """Yield the only element of `first`, removing it, then `left`. itertools.chain would keep the element alive."""
    yield first.pop()
    yield from left


def _add_up(summands: list[Tensor], is_last: bool, dtype: torch.dtype) -> None:
    """Reduce `summands` in place: to two, so that three need one pass, and after the last one to their rounded sum."""
    if is_last and len(summands) > 1:
        summands[:] = [kernel_dispatch.rounded_sum(summands, dtype)]
    elif len(summands) > 2:
        summands[:2] = [summands[0].add_(summands[1])]


def _to_saved(operand: WgradOperand) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Split an operand into metadata, from which backward rebuilds it, and tensors to save."""
    rest = (operand.transposed, operand.split, operand.spec, operand.words)
    if isinstance(operand.operand, Tensor):
        return (None, rest), (operand.operand,)
    storage = operand.operand
    metadata = (storage.spec, storage.shard, tuple(storage.components))
    return (metadata, rest), tuple(storage.components.values())


def _from_saved(operand_metadata: tuple[Any, ...], tensors: Sequence[Tensor]) -> WgradOperand:
    metadata, rest = operand_metadata
    if metadata is None:
        return WgradOperand(tensors[0], *rest)
    spec, shard, names = metadata
    return WgradOperand(QuantizedStorage(spec, shard, dict(zip(names, tensors, strict=True))), *rest)


# High precision and shapes --------------------------------------------------------------------------------------------


def _plain_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], state: LinearState
) -> tuple[Tensor, ...]:
    tp = state.tp
    if tp.mode == "column":
        x = tensor_parallel.gather_rows(x, tp) if tp.sequence_parallel else tensor_parallel.copy_to_group(x, tp)
    are_partial, outputs = tp.mode == "row" and tp.size > 1, []
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        y = plain_linear(x, weight, None if are_partial else bias, state, index)
        y = _summed(y, tp) if are_partial else y
        if are_partial and bias is not None:
            bias = tensor_parallel.all_reduce_gradient(bias, tp) if tp.sequence_parallel else bias
            y = tensor_parallel.add_bias(y, bias)
        outputs.append(y)
    return tuple(outputs)


def plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState | None = None, index: int = 0
) -> Tensor:
    """Compute `linear` in high precision for one weight, weight `index` of a layer."""
    tokens = x.reshape(-1, x.shape[-1])
    if state is not None and state.wgrads is not None:
        return shaped_as(PlainLinear.apply(tokens, (state.wgrads, index), weight, bias), x.shape)
    y = torch.nn.functional.linear(tokens, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return shaped_as(y, x.shape)


def shaped_as(y: Tensor, shape: Sequence[int], split: OperandSplit | None = None) -> Tensor:
    """Reshape y [tokens, features] to the leading dims of `shape`; dim 0 is multiplied if `split` gathers rows."""
    if len(shape) == 2:
        return y
    first = shape[0] if split is None or split.dim != 0 else shape[0] * split.size
    # not view(): FSDP2 hooks the outputs of modules, and warns that an in-place operation could drop a view's hook
    out: Tensor = torch.ops.aten._unsafe_view.default(y, [*(first, *shape[1:])[:-1], y.shape[-1]])
    return out


def _summed(y: Tensor, tp: TensorParallel) -> Tensor:
    """Sum y [sequence, ..., features] over the ranks; under sequence parallelism, reduce-scatter along the sequence."""
    return tensor_parallel.scatter_rows(y, tp) if tp.sequence_parallel else tensor_parallel.reduce_from_group(y, tp)
