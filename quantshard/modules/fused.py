"""A normalization, the linear layers behind it and an activation between them as one step of autograd, by kernels.

    [x, residual] -> z = x + residual -> normalization -> fc1 -> activation -> fc2

What one of them hands to the next is quantized by the kernel that computes it, forward and backward, and is never
written in high precision. For backward z, the outputs of fc1 and the codes that wgrad of fc2 reads are kept; those that
wgrad of fc1 reads are made again from z, unless that took two reads. If recomputation is asked for, all codes are made
again. The bits are those of the steps one by one, but for the gradient of fc1's bias, whose float32 sum another kernel
takes in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import compute, kernels, limits, private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.modules import functional
from quantshard.modules.base import QuantizedModule
from quantshard.modules.functional import Needed, Ready, Saved
from quantshard.modules.linear_operands import Asked, Ways, WgradOperand, cells
from quantshard.modules.norm import Normalization, Rule, parameters_of
from quantshard.recipe import TensorRole

if kernels.USABLE:
    from quantshard import sources
    from quantshard.kernels import activation as activation_kernels
    from quantshard.kernels import norm as norm_kernels
    from quantshard.kernels import results
    from quantshard.sources import Activated, Given, Normalized, Way


class Front(NamedTuple):
    """What a normalization works on: x [..., size], what is added to it before, and its parameters."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    normalization: Normalization

    def normalized(self) -> tuple[Tensor, Tensor | None]:
        """The normalized rows, and x + residual, if that is there, in steps of their own."""
        if self.residual is None:
            return self.normalization(self.x, self.weight, self.bias), None
        return self.normalization.with_residual(self.x, self.weight, self.bias, self.residual)


def front(module: QuantizedModule, normalization: Normalization, x: Tensor, residual: Tensor | None = None) -> Front:
    """That of a module with a normalization in front, whose parameters begin with "layer_norm_"."""
    normalization.check(x)
    weight, bias = (module._whole_on_rows(f"layer_norm_{name}") for name in ("weight", "bias"))
    return Front(x, residual, weight, bias, normalization)


def fits(front: Front, *layers: Ready) -> bool:
    """True if `norm_linear` and `mlp` work on these."""
    x, residual, weight, bias, _ = front
    if not compute.has_float_kernels(x, residual, weight, bias):
        return False
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        return False
    return all(_fits(layer, x.dtype) for layer in layers)


def _fits(layer: Ready, dtype: torch.dtype) -> bool:
    recipe, state = layer.call.recipe, layer.state
    roles = (TensorRole.INPUT, TensorRole.GRAD_OUTPUT)
    covered = all(sources.covers(dtype, *cells(recipe, role)) for role in roles)
    return bool(recipe.table) and covered and all(state.split(role) is None for role in roles)


def norm_linear(front: Front, layer: Ready) -> tuple[list[Tensor], Tensor | None]:
    """The outputs of a linear layer [..., out_features] behind a normalization; and x + residual, if that is there."""
    *outputs, total = _NormLinear.apply(*front, layer, _keeps(layer, not _made_by_one_read(layer)), *layer.tensors)
    return outputs, total


def mlp(
    front: Front, fc1: Ready, activation: str, fc2: Ready, recomputes: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same of a normalization, two linear layers and an activation between them.

    `recomputes`: what wgrads read of the normalized rows and of the activation is made again in backward.
    """
    keeps = (_keeps(fc1, not recomputes and not _made_by_one_read(fc1)), _keeps(fc2, not recomputes))
    out, total = _MLP.apply(*front, fc1, activation, fc2, keeps, *fc1.tensors, *fc2.tensors)
    return out, total


class Keeps(NamedTuple):
    """Of what wgrad reads of an input: whether forward keeps the codes, or backward makes them again."""

    codes: bool
    rereads: bool


def _keeps(layer: Ready, codes: bool) -> Keeps:
    needed = functional.keeps_input(layer)
    codes = codes or not functional.can_reread(layer)
    return Keeps(needed and codes, needed and not codes)


def _made_by_one_read(layer: Ready) -> bool:
    """True if one read of the normalized rows makes these codes: that costs less than the memory until then."""
    return all(cell is not None and Way(cell).is_local for cell in cells(layer.call.recipe, TensorRole.INPUT))


def _again(layer: Saved, saved: Sequence[Any], rule: Rule, needed: Needed) -> WgradOperand | None:
    """Those codes, if backward is to make them."""
    z, weight, bias, *statistics = saved
    rows, parameters = results.matrix(z), parameters_of(weight, bias, rule)
    return layer.reread(lambda: Normalized(rows, norm_kernels.Statistics(*statistics), parameters), needed)


def _enter(front: Front) -> tuple[Normalized, Tensor]:
    """The normalized rows as a source, and z of the shape of x."""
    weight, bias, rule = front.weight, front.bias, front.normalization.rule
    x, residual = private_torch.plain(front.x), front.residual
    other = None if residual is None else results.matrix(private_torch.plain(residual))
    statistics, total = norm_kernels.norm_statistics(results.matrix(x), rule.eps, rule.centered, residual=other)
    z = x if residual is None else total.view(x.shape)
    return Normalized(total, statistics, parameters_of(weight, bias, rule)), z


def _leave(ctx: Any, dy: Tensor | None, of_total: Tensor | None, saved: Sequence[Any]) -> list[Tensor | None]:
    """Gradients of x, residual, weight, bias from that of the normalized rows and of z."""
    z, weight, bias, *statistics = saved
    needs = ctx.needs_input_grad
    if dy is None:
        return [of_total if needs[0] else None, of_total if needs[1] else None, None, None]
    dx, dweight, dbias = norm_kernels.norm_backward(
        results.matrix(dy), results.matrix(z), norm_kernels.Statistics(*statistics),
        parameters_of(weight, bias, ctx.rule),
        residual_gradient=None if of_total is None else results.matrix(private_torch.plain(of_total)),
        for_parameters=needs[2] or needs[3],
    )  # fmt: skip
    dx = dx.view(z.shape)
    return [
        dx if needs[0] else None,
        dx if needs[1] else None,
        None if dweight is None or not needs[2] else dweight.to(weight.dtype),
        None if dbias is None or bias is None or not needs[3] else dbias.to(bias.dtype),
    ]


_FRONT = 4  # tensors of it that may need a gradient
_FRONT_SAVED = 5  # z, weight, bias and two statistics


def _no_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedOperationError(limits.refusal("second derivative", "a linear layer"))


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        normalization: Normalization,
        layer: Ready,
        keeps: Keeps,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        source, z = _enter(Front(x, residual, weight, bias, normalization))
        outputs, kept = functional.forward(source, x.shape, *layer, keeps.codes)
        ctx.rule = normalization.rule
        ctx.layer, saved = layer.saved(kept, x.shape, x.dtype, keeps.rereads)
        ctx.save_for_backward(z, weight, bias, *source.statistics, *saved)
        return (*outputs, None if residual is None else z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        *of_outputs, of_total = grads
        saved = ctx.saved_tensors
        layer: Saved = ctx.layer
        given = layer.filled(of_outputs, saved[_FRONT_SAVED:])
        dy: Tensor | None = None
        dtensors: list[Tensor | None] = [None] * layer.tensors
        if given:
            needed = layer.needed(True, ctx.needs_input_grad[_FRONT + 3 :])
            x_wgrad = _again(layer, saved[:_FRONT_SAVED], ctx.rule, needed)
            dy, dtensors = layer.backward(given, saved[_FRONT_SAVED:], needed, x_wgrad)
        return (*_leave(ctx, dy, of_total, saved[:_FRONT_SAVED]), None, None, None, *dtensors)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        normalization: Normalization,
        fc1: Ready,
        activation: str,
        fc2: Ready,
        keeps: tuple[Keeps, Keeps],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        source, z = _enter(Front(x, residual, weight, bias, normalization))
        inner, kept1 = functional.forward(source, x.shape, *fc1, keeps[0].codes)
        gate, *up = [results.matrix(each) for each in inner]
        hidden = Activated(gate, activation, up[0] if up else None)
        (out,), kept2 = functional.forward(hidden, inner[0].shape, *fc2, keeps[1].codes)
        ctx.rule, ctx.activation = normalization.rule, activation
        ctx.fc1, saved1 = fc1.saved(kept1, x.shape, x.dtype, keeps[0].rereads)
        ctx.fc2, saved2 = fc2.saved(kept2, inner[0].shape, x.dtype, keeps[1].rereads)
        ctx.inner = len(saved1)
        ctx.save_for_backward(z, weight, bias, *source.statistics, gate, hidden.up, *saved1, *saved2)
        return out, None if residual is None else z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        dout, of_total = grads
        fc1: Saved = ctx.fc1
        fc2: Saved = ctx.fc2
        # what is kept for an MLP is most of a block's memory, so each part is let go of behind its last use
        front, (gate, up), saved1, saved2 = _split(private_torch.take_saved(ctx), _FRONT_SAVED, 2, ctx.inner)
        needs = ctx.needs_input_grad[_FRONT + 5 :]
        dy: Tensor | None = None
        of_fc1: list[Tensor | None] = [None] * fc1.tensors
        of_fc2: list[Tensor | None] = [None] * fc2.tensors
        if dout is not None:
            needed = fc2.needed(True, needs[fc1.tensors :])
            hidden = fc2.reread(lambda: Activated(gate, ctx.activation, up), needed)
            dh, of_fc2 = fc2.backward([dout], saved2, needed, hidden)
            del hidden, saved2
            needed = fc1.needed(True, needs[: fc1.tensors])
            ways = _through_activation(dh, gate, up, ctx.activation, fc1, needed)
            del dh, gate, up
            x_wgrad = _again(fc1, front, ctx.rule, needed)
            dy, of_fc1 = fc1.gradients(ways, saved1, needed, x_wgrad)
        return (*_leave(ctx, dy, of_total, front), *[None] * 5, *of_fc1, *of_fc2)


def _split(tensors: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    parts, start = [], 0
    for size in (*sizes, len(tensors)):
        parts.append(tensors[start : start + size])
        start += size
    return parts


def _through_activation(
    dh: Tensor | None, gate: Tensor, up: Tensor | None, activation: str, fc1: Saved, needed: Needed
) -> list[Ways]:
    """Gradients of the outputs of fc1 as its GEMMs read them, from that of the activation's result."""
    assert dh is not None
    parts = 1 if up is None else 2
    asked = [
        Asked(TensorRole.GRAD_OUTPUT, fc1.call, fc1.state, needed.of_gradient(part, fc1.bias_dtypes[part]), part)
        for part in range(parts)
    ]
    rows, device = results.matrix(dh), gate.device
    if any(each.reads_values for each in asked):
        given = [Given(torch.empty_like(gate), sources.zero(device).view(1, 1)) for _ in asked]
        wanted = [results.Outputs(high=each.values, amax=each.amax) for each in given]
        _activation_backward(rows, gate, up, activation, wanted)
        return [each.of(values) for each, values in zip(asked, given, strict=True)]
    ready = [each.both(gate.shape[1], device).prepared(Given(gate)) for each in asked]  # of the shape of gate
    targets = _activation_backward(rows, gate, up, activation, [each.outputs for each in ready])
    return [each.taken(told, found) for each, told, found in zip(asked, ready, targets, strict=False)]


def _activation_backward(
    dh: Tensor, gate: Tensor, up: Tensor | None, activation: str, wanted: Sequence[results.Outputs]
) -> tuple[results.Targets, results.Targets]:
    of_up = wanted[1] if up is not None else None
    return activation_kernels.activate_backward_and_quantize(dh, gate, activation, up, wanted[0], of_up)
