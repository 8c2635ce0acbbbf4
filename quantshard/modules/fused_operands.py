"""The normalization and the activation of fused layers: their inputs, and their results as operands of GEMMs.

The kernels also quantize the results and, in backward, the gradients of the activation's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from quantshard import kernels, private_torch
from quantshard.formats import ALL
from quantshard.gemm import operands
from quantshard.gemm.backend import WeightOperands
from quantshard.kernels import workspace
from quantshard.modules.gemms.functional import LinearBackward
from quantshard.modules.gemms.linear_operands import (
    GemmOperands,
    OperandRequest,
    WgradOperand,
    operands_together,
    requests_of,
)
from quantshard.modules.norm import Gradients, Normalization, kernel_gradients, parameters_of
from quantshard.recipe import Recipe, TensorRole

if kernels.USABLE:
    from quantshard.gemm import producers
    from quantshard.gemm.producers import OperandProducer
    from quantshard.kernels.fused import activation as activation_kernels, epilogue, norm as norm_kernels
    from quantshard.kernels.quantize import amax as amax_kernels
    from quantshard.kernels.quantize.targets import BlockAmaxes

# Normalization --------------------------------------------------------------------------------------------------------


class NormInput(NamedTuple):
    """Inputs of a normalization: x [..., size], the residual that is added to x first, and the parameters.
    With x alone there is no normalization, which `mlp` supports."""

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    normalization: Normalization | None = None

    @staticmethod
    def of(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *norm: Any) -> NormInput:
        """Build the inputs from `constituents`."""
        if not norm:
            return NormInput(x, residual, weight, bias)
        kind, size, eps, zero_centered_gamma = norm
        return NormInput(x, residual, weight, bias, Normalization(kind, size, float(eps), zero_centered_gamma))

    def constituents(self) -> tuple[Any, ...]:
        """The tensors, and the fields of the normalization if there is one."""
        norm = self.normalization
        fields = () if norm is None else (norm.kind, norm.size, norm.eps, norm.zero_centered_gamma)
        return (self.x, self.residual, self.weight, self.bias, *fields)

    def normalized(self) -> tuple[Tensor, Tensor | None]:
        """Return the normalized rows and x + residual (None without residual), computed without fusion."""
        if self.normalization is None or self.weight is None:
            return self.x, None
        if self.residual is None:
            return self.normalization(self.x, self.weight, self.bias), None
        return self.normalization.with_residual(self.x, self.weight, self.bias, self.residual)


class NormBackward(NamedTuple):
    """A normalization in backward: z = x + residual, the parameters, and the statistics of the rows of z.
    Without a normalization all fields are None, and fc1 keeps the operand that wgrad reads."""

    normalization: Normalization
    z: Tensor
    weight: Tensor
    bias: Tensor | None
    rstd: Tensor
    mean: Tensor | None

    def normalized(self) -> OperandProducer:
        """Return the normalized rows as an operand source."""
        rows, parameters = epilogue.matrix(self.z), parameters_of(self.weight, self.bias, self.normalization)
        statistics = norm_kernels.NormStatistics(self.rstd, self.mean)
        return OperandProducer(rows, partial(norm_kernels.normalize_and_quantize, rows, statistics, parameters))

    def requantized(self, layer: LinearBackward) -> WgradOperand | None:
        """Return the operand of a layer's wgrad, or None if forward kept it."""
        return None if self is NO_NORM else layer.requantize_input(self.normalized)

    def gradients(self, dy: Tensor | None, of_total: Tensor | None, needs: Sequence[bool]) -> Gradients:
        """Return the needed gradients of z, weight and bias from the gradients `dy` of rows and `of_total` of z."""
        if self is NO_NORM:
            return dy if needs[0] else None, None, None
        if dy is None:
            return of_total if needs[0] else None, None, None
        statistics = norm_kernels.NormStatistics(self.rstd, self.mean)
        return kernel_gradients(dy, self.z, self.weight, self.bias, statistics, self.normalization, of_total, needs)


NO_NORM: Any = NormBackward(*[None] * len(NormBackward._fields))  # type: ignore[arg-type]
"""The value without a normalization."""


def enter(front: NormInput, recipe: Recipe, keeps: bool) -> tuple[NormBackward, OperandProducer]:
    """Start a normalization; returns its state for backward and the operand source of the next layer (x without
    normalization).

    The kernel that computes the statistics also takes the amaxes that quantizing needs: of all results, or of each row
    and, if wgrad's operand is kept (`keeps`), of each column.
    """
    norm, weight, x = front.normalization, front.weight, private_torch.plain(front.x)
    if norm is None or weight is None:
        return NO_NORM, OperandProducer(epilogue.matrix(x))
    specs = recipe.activations[TensorRole.INPUT]
    amax = workspace.zero(x.device) if producers.scale_by_blocks((ALL, ALL), specs) else None
    row_col_amaxes: producers.BothAmaxes = None, None
    if producers.scale_by_blocks((1, ALL), specs):
        rows = BlockAmaxes((1, ALL))
        plan = amax_kernels.plan_amaxes(epilogue.matrix(x).shape, rows, rows if keeps else None)
        (row_col_amaxes,) = plan.grids(x, 1)
    is_measured = amax is not None or row_col_amaxes[0] is not None
    statistics, total = norm_kernels.norm_statistics(
        x, norm.eps, norm.centered, residual=None if front.residual is None else private_torch.plain(front.residual),
        parameters=parameters_of(weight, front.bias, norm) if is_measured else None,
        amax=amax, of_rows=row_col_amaxes,
    )  # fmt: skip
    state = NormBackward(norm, total, weight, front.bias, *statistics)
    source = state.normalized()
    source.amax, source.row_col_amaxes = amax, row_col_amaxes
    return state, source


# Activation -----------------------------------------------------------------------------------------------------------


class ActivationInputs(NamedTuple):
    """Inputs [tokens, features] of an activation, outputs of fc1; `up` is None unless the activation is gated."""

    gate: Tensor
    up: Tensor | None = None

    def activated(self, activation: str) -> OperandProducer:
        """Return the activation's result as an operand source."""
        launch = partial(activation_kernels.activate_and_quantize, self.gate, activation, self.up)
        return OperandProducer(self.gate, launch)


def through_activation(
    dh: Tensor, between: ActivationInputs, activation: str, fc1: LinearBackward, apart: bool = False,
    weight_operands: WeightOperands | None = None,
) -> Iterator[GemmOperands]:  # fmt: skip
    """Yield the gradients of fc1's outputs as GEMM operands, computed from `dh`, the gradient of the activation's
    result.

    `apart`: compute the two gradients of a gated activation in separate passes, each on demand, unless a bias needs a
    sum. This takes a third less memory and reads dh and the gate twice. `weight_operands`: fc1's weights, see
    `gemm_operands`.

    Large gradients that emulated GEMMs read as values are written once and quantized one after the other. Codes in both
    directions take twice the bytes, which are free only once the inputs of the activation are released.
    """
    gate, up = between
    role, num_parts = TensorRole.GRAD_OUTPUT, 1 if up is None else 2
    usages = [(part, fc1.usage(part)) for part in range(num_parts)]
    requests = requests_of(role, fc1.call, fc1.state, usages, gate)
    rows = epilogue.matrix(dh)
    if apart and up is not None and not any(item.usage.sums for item in requests):
        return _one_at_a_time(requests, [gated_gradient(rows, gate, activation, up)], [rows, gate], activation)
    is_large = operands.is_large(gate)
    if any(item.plan.reads_values or (is_large and item.plan.decodes) for item in requests):
        # usages differ if one weight or bias is frozen
        same_usage = all(item.usage == requests[0].usage for item in requests)
        sources = [OperandProducer.empty(gate, item.plan if same_usage else None) for item in requests]
        _activation_backward(rows, gate, up, activation, [item.outputs for item in sources])
        if same_usage and not is_large:
            return iter(operands_together(requests, sources, weight_operands))
        # on demand, after the inputs of the activation are released; the values of each operand are freed with it
        return (requests.pop(0).run(sources.pop(0)) for _ in range(len(sources)))
    outputs = [item.outputs() for item in requests]
    targets = _activation_backward(rows, gate, up, activation, outputs)
    results = [item.operands(output, target) for item, output, target in zip(requests, outputs, targets, strict=False)]
    if requests[0].watching is not None:
        # all parts are observed, not only the first
        sources = [OperandProducer.empty(gate) for _ in requests]
        _activation_backward(rows, gate, up, activation, [item.outputs for item in sources])
        for item, source, result in zip(requests, sources, results, strict=True):
            item.show(source, result)
    return iter(results)


def gated_gradient(dh: Tensor, gate: Tensor, activation: str, up: Tensor) -> OperandProducer:
    """The gradient of `gate` [R, C] in a gated activation, from the gradient `dh` of its result; without `up`'s."""

    def launch(outputs: epilogue.KernelOutputs) -> epilogue.Targets:
        return _activation_backward(dh, gate, up, activation, [outputs, epilogue.KernelOutputs()])[0]

    return OperandProducer(gate, launch)


def _one_at_a_time(
    requests: list[OperandRequest], of_gate: list[OperandProducer], others: list[Tensor], activation: str
) -> Iterator[GemmOperands]:
    """Yield the operand of the gate's gradient, then the one of `up`'s gradient.

    The list `of_gate` is emptied, which releases `up`. The second gradient is dh times the activation of the gate, and
    releases both.
    """
    yield _emptying(requests[0], of_gate)
    rows, gate = others
    of_up = [ActivationInputs(gate, rows).activated(activation)]
    del rows, gate
    others.clear()
    yield _emptying(requests[1], of_up)


def _emptying(request: OperandRequest, sources: list[OperandProducer]) -> GemmOperands:
    """Pop the only source of a list and quantize it. Values that are needed first release it before."""
    return request.run(sources.pop().in_memory(request.plan) if request.plan.reads_values else sources.pop())


def _activation_backward(
    dh: Tensor, gate: Tensor, up: Tensor | None, activation: str, wanted: Sequence[epilogue.KernelOutputs]
) -> tuple[epilogue.Targets, epilogue.Targets]:
    of_up = wanted[1] if up is not None else None
    return activation_kernels.activate_backward_and_quantize(dh, gate, activation, up, wanted[0], of_up)
