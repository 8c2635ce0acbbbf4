"""An activation between two linear layers, by kernels that also quantize its result and, in backward, the gradients of
its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import kernels
from quantshard.gemm import operands
from quantshard.gemm.backend import WeightOperands
from quantshard.modules.activation_storage import AS_IS, ActivationStorage
from quantshard.modules.gemms.functional import LinearBackward
from quantshard.modules.gemms.linear_operands import GemmOperands, OperandRequest, operands_together, requests_of
from quantshard.recipe import TensorRole

if kernels.USABLE:
    from quantshard.gemm.producers import (
        OperandProducer,
        TensorSource,
    )
    from quantshard.kernels.fused import activation as activation_kernels
    from quantshard.kernels.fused import epilogue


class ActivationInputs(NamedTuple):
    """Inputs [tokens, features] of an activation, which are outputs of fc1; `up` is None unless the activation is
    gated."""

    gate: Tensor
    up: Tensor | None = None

    def activated(self, activation: str) -> OperandProducer:
        """Return the activation's result as an operand source."""
        launch = partial(activation_kernels.activate_and_quantize, self.gate, activation, self.up)
        return OperandProducer(self.gate, launch)


@dataclass
class StoredInputs:
    """The inputs of an activation as forward kept them. `read` decodes them in backward.

    `tensors`: the kept tensors, in a list that the caller can empty; codes are replaced by values once read. `storage`:
    format of `tensors`. `dtype`: dtype of the decoded values.
    """

    tensors: list[Tensor]
    storage: ActivationStorage
    dtype: torch.dtype

    def read(self) -> ActivationInputs:
        """Return the inputs, decoding them if needed."""
        if self.storage.cell is not None:
            self.tensors[:] = self.storage.values(self.tensors, self.dtype)
            self.storage = AS_IS
        return ActivationInputs(*self.tensors)


def through_activation(
    dh: Tensor,
    between: ActivationInputs,
    activation: str,
    fc1: LinearBackward,
    apart: bool = False,
    weight_operands: WeightOperands | None = None,
) -> Iterator[GemmOperands]:
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
        sources = [TensorSource.empty(gate, item.plan if same_usage else None) for item in requests]
        _activation_backward(rows, gate, up, activation, [item.wanted for item in sources])
        if same_usage and not is_large:
            return iter(operands_together(requests, sources, weight_operands))
        return _quantized(requests, sources)
    outputs = [item.outputs() for item in requests]
    targets = _activation_backward(rows, gate, up, activation, outputs)
    results = [item.operands(output, target) for item, output, target in zip(requests, outputs, targets, strict=False)]
    if requests[0].watching is not None:
        # all parts are observed, not only the first
        sources = [TensorSource.empty(gate) for _ in requests]
        _activation_backward(rows, gate, up, activation, [item.wanted for item in sources])
        for item, source, result in zip(requests, sources, results, strict=True):
            item.show(source, result)
    return iter(results)


def _quantized(requests: list[OperandRequest], sources: list[TensorSource]) -> Iterator[GemmOperands]:
    """Yield each operand on demand, after the inputs of the activation are released; its values are freed with it."""
    while sources:
        yield requests.pop(0).run(sources.pop(0))


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
    """Pop the only source of a list and quantize it. If its values are needed first, the source is released before they
    are quantized."""
    return request.run(sources.pop().measured(request.plan) if request.plan.reads_values else sources.pop())


def _activation_backward(
    dh: Tensor, gate: Tensor, up: Tensor | None, activation: str, wanted: Sequence[epilogue.KernelOutputs]
) -> tuple[epilogue.Targets, epilogue.Targets]:
    of_up = wanted[1] if up is not None else None
    return activation_kernels.activate_backward_and_quantize(dh, gate, activation, up, wanted[0], of_up)
