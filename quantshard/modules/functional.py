"""The linear layer's three GEMMs, each operand quantized as the recipe's table says.

    fprop   y  = x  @ w^T + b     x quantized along in_features, w as stored
    dgrad   dx = dy @ w           dy quantized along out_features
    wgrad   dw = dy^T @ x         dy^T and x^T quantized along tokens

Of the input only what wgrad reads is kept for backward: its quantized form, 8 bits or fewer per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import backend, limits, numerics
from quantshard.amax import history_amax
from quantshard.backend import Operand
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import ALL
from quantshard.modules import context
from quantshard.modules.recompute import Call
from quantshard.recipe import Cell, Gemm, TensorRole
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
    """What one linear layer carries between steps: state of its weight, and delayed-scaling histories.

    `weight`: the weight's key, draws and, under delayed scaling, amax history. `record`: whether amaxes seen now are
    recorded (in training).
    """

    weight: dict[str, Tensor]
    input_history: Tensor | None
    grad_output_history: Tensor | None
    record: bool


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, state: LinearState) -> Tensor:
    """x [..., in_features] times weight [out_features, in_features] transposed, plus bias; the dtype is that of x."""
    if not call.recipe.table and not isinstance(weight, QuantizedTensor):
        return plain_linear(x, weight, bias)
    keeps_input = torch.is_grad_enabled() and weight.requires_grad
    out: Tensor = _Linear.apply(x, weight, bias, call, state, keeps_input)
    return out


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same in high precision."""
    tokens = x.reshape(-1, x.shape[-1])
    y = torch.nn.functional.linear(tokens, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return _shaped_as(y, x)


def _shaped_as(y: Tensor, x: Tensor) -> Tensor:
    """y [tokens, features] with the leading dims of x.

    Not by view(): FSDP2 hooks the outputs of modules, and warns that a view could lose its hook in place.
    """
    out: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        state: LinearState,
        keeps_input: bool,
    ) -> Tensor:
        y, x_wgrad = forward(x, weight, bias, call, state, keeps_input)
        ctx.call, ctx.state, ctx.x_shape = call, state, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_rebuild, x_tensors = _to_saved(x_wgrad)
        ctx.save_for_backward(weight, *x_tensors)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(limits.refusal("second derivative", "a linear layer"))
        weight, *x_tensors = ctx.saved_tensors
        x_wgrad = _from_saved(ctx.x_rebuild, x_tensors)
        dx, dw, db = backward(
            grads[0], weight, x_wgrad, ctx.call, ctx.state, ctx.x_shape, ctx.bias_dtype, ctx.needs_input_grad[:3]
        )
        return dx, dw, db, None, None, None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, state: LinearState, keeps_input: bool
) -> tuple[Tensor, WgradOperand]:
    """fprop: the output [..., out_features], and the input as wgrad reads it, which is empty unless `keeps_input`."""
    if call.repeated:
        context.flush_after_backward()
    tokens = x.reshape(-1, x.shape[-1])
    x_fprop, x_wgrad = _both_ways(tokens, TensorRole.INPUT, call, state, need_second=keeps_input)
    w = _weight_operand(weight, call, state)
    y = backend.matmul(x_fprop, w, x.dtype, transpose_b=True, bias=bias)
    return _shaped_as(y, x), x_wgrad


def backward(
    grad: Tensor,
    weight: Tensor,
    x_wgrad: WgradOperand,
    call: Call,
    state: LinearState,
    x_shape: Sequence[int],
    bias_dtype: torch.dtype | None,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dgrad and wgrad: of the gradients of input, weight and bias those that are `needed`, from that of the output."""
    dy = grad.reshape(-1, weight.shape[0])
    need_x, need_w, need_bias = needed
    dy_dgrad, dy_wgrad = _both_ways(dy, TensorRole.GRAD_OUTPUT, call, state, need_first=need_x, need_second=need_w)
    dx = dw = db = None
    # codes saturate, so an infinite gradient would come out finite, and the optimizer would not skip the step
    poison = torch.where(torch.isfinite(dy).all(), 0.0, torch.nan).to(dy.dtype)
    if need_x:
        w = _weight_operand(weight, call, state)
        dx = (backend.matmul(dy_dgrad, w, grad.dtype) + poison).view(*x_shape)
    if need_w:
        dw = backend.matmul(
            dy_wgrad.operand, x_wgrad.operand, weight.dtype,
            transpose_a=not dy_wgrad.transposed, transpose_b=x_wgrad.transposed,
        ) + poison.to(weight.dtype)  # fmt: skip
    if need_bias and bias_dtype is not None:
        db = dy.float().sum(0).to(bias_dtype)
    return dx, dw, db


@dataclass
class WgradOperand:
    """An operand of wgrad: [tokens, features], or its transpose where it had to be quantized along tokens."""

    operand: Operand
    transposed: bool


def _both_ways(
    values: Tensor,
    role: TensorRole,
    call: Call,
    state: LinearState,
    *,
    need_first: bool = True,
    need_second: bool = True,
) -> tuple[Operand, WgradOperand]:
    """An input or output gradient [tokens, features] for its two GEMMs: as it stands, and for wgrad.

    Where one quantization serves both (square blocks, plain rounding), it is made once.
    """
    first = call.recipe.cell(role, Gemm.FPROP if role is TensorRole.INPUT else Gemm.DGRAD)
    second = call.recipe.cell(role, Gemm.WGRAD)
    amax = _delayed_amax(values, role, first or second, call, state)
    words = _Words(state, values.device)
    shared = serves_both(first, second)
    as_is: Operand = values
    if first is not None and (need_first or shared):
        as_is = backend.quantize(values, first, amax=amax, words=words.of(values, first, DGRAD_STREAM))
    if not need_second:
        return as_is, WgradOperand(values.new_empty(0), False)  # not values[:0]: a view keeps all of them alive
    if second is None or shared:
        return as_is, WgradOperand(as_is if shared else values, False)
    turned = values.t()
    return as_is, WgradOperand(
        backend.quantize(turned, second, amax=amax, words=words.of(turned, second, WGRAD_STREAM)), True
    )


def serves_both(first: Cell | None, second: Cell | None) -> bool:
    """True if one quantization can be read in both GEMMs: by the same cell, of square blocks."""
    return first == second and first is not None and first.format.transposable


class _Words:
    """Random words for the stochastic rounding of one gradient: one draw of the weight's counter, taken if needed.

    Ranks hold different gradients, so each rank has streams of its own.
    """

    def __init__(self, state: LinearState, device: torch.device) -> None:
        self.state, self.device, self.draw = state, device, -1

    def of(self, values: Tensor, cell: Cell, stream: int) -> Tensor | None:
        """Words for `values` [R, C], C padded as the cell's transform pads it; None if it rounds to nearest."""
        if not cell.scaling.stochastic_rounding:
            return None
        if self.draw < 0:
            draws = self.state.weight[DRAWS]
            self.draw = int(draws)
            draws.add_(1)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        cols = values.shape[1] + (-values.shape[1] % 16 if cell.scaling.random_hadamard else 0)
        return numerics.random_words(
            int(self.state.weight[KEY]), self.draw, rank * STREAMS_PER_RANK + stream, (values.shape[0], cols),
            device=self.device,
        )  # fmt: skip


def _identity(state: LinearState, role: TensorRole) -> int:
    """A number for one history that is equal on all ranks: they agree on the weight's key."""
    return int(state.weight[KEY]) * len(TensorRole) + list(TensorRole).index(role)


def _delayed_amax(values: Tensor, role: TensorRole, cell: Cell | None, call: Call, state: LinearState) -> Tensor | None:
    """Under delayed scaling: the amax of the history to scale by; the tensor's own is noted for later.

    Of an input or a weight both are done once for a call: its backward and its recomputation scale by the same amax.
    """
    if cell is None or not cell.scaling.history:
        return None
    if role in call.amaxes:
        return call.amaxes[role]
    history = {
        TensorRole.INPUT: state.input_history,
        TensorRole.GRAD_OUTPUT: state.grad_output_history,
        TensorRole.WEIGHT: state.weight.get(AMAX_HISTORY),
    }[role]
    assert history is not None
    if state.record:
        backward = role is TensorRole.GRAD_OUTPUT
        pending = context.backward_amaxes if backward else context.forward_amaxes
        if backward:
            context.flush_after_backward()
        pending.note(_identity(state, role), history, numerics.block_amax(values, (ALL, ALL)).view(()), call.group)
    amax = history_amax(history, cell.scaling.most_recent)
    if role is not TensorRole.GRAD_OUTPUT:
        call.amaxes[role] = amax
    return amax


def _weight_operand(weight: Tensor, call: Call, state: LinearState) -> Operand:
    """The weight for a GEMM: as it is stored, or quantized now from high precision."""
    if isinstance(weight, QuantizedTensor):
        return weight._storage
    cell = call.recipe.weight
    if cell is None:
        return weight
    amax = _delayed_amax(weight.detach(), TensorRole.WEIGHT, cell, call, state)
    return backend.quantize(weight, cell, amax=amax)


def _to_saved(operand: WgradOperand) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Split an operand into what is saved as tensors for backward and what is needed to put it together again."""
    if isinstance(operand.operand, Tensor):
        return (operand.transposed, None), (operand.operand,)
    storage = operand.operand
    return (operand.transposed, (storage.cell, storage.shard, tuple(storage.components))), tuple(
        storage.components.values()
    )


def _from_saved(rebuild: tuple[Any, ...], tensors: list[Tensor]) -> WgradOperand:
    transposed, described = rebuild
    if described is None:
        return WgradOperand(tensors[0], transposed)
    cell, shard, names = described
    return WgradOperand(QuantizedStorage(cell, shard, dict(zip(names, tensors, strict=True))), transposed)
