"""An activation between two linear layers, by kernels: its result, and in backward the gradients of its inputs, are
quantized by the kernel that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from quantshard import kernels
from quantshard.modules.gemms.functional import LinearBackward, LinearGradMask
from quantshard.modules.gemms.linear_operands import GemmOperands, OperandRequest, operands_together
from quantshard.recipe import TensorRole

if kernels.USABLE:
    from quantshard.gemm.producers import ActivationProducer, TensorProducer
    from quantshard.kernels.fused import activation as activation_kernels
    from quantshard.kernels.fused import epilogue


class ActivationInputs(NamedTuple):
    """The inputs [tokens, features] of an activation, `up` if it is gated: outputs of the layer in front of it."""

    gate: Tensor
    up: Tensor | None = None

    def activated(self, activation: str) -> ActivationProducer:
        """Its result as a source."""
        return ActivationProducer(self.gate, activation, self.up)


def through_activation(
    dh: Tensor | None, between: ActivationInputs, activation: str, fc1: LinearBackward, needed: LinearGradMask
) -> list[GemmOperands]:
    """Gradients of the outputs of fc1 as its GEMMs read them, from that of the activation's result."""
    assert dh is not None
    gate, up = between
    parts = 1 if up is None else 2
    asked = [
        OperandRequest(
            TensorRole.GRAD_OUTPUT, fc1.call, fc1.state, needed.of_gradient(part, fc1.bias_dtypes[part]), part, gate
        )
        for part in range(parts)
    ]
    rows = epilogue.matrix(dh)
    if any(each.plan.reads_values for each in asked):
        given = [TensorProducer.empty(gate) for _ in asked]
        _activation_backward(rows, gate, up, activation, [each.wanted for each in given])
        return operands_together(asked, given)
    outputs = [each.outputs() for each in asked]
    targets = _activation_backward(rows, gate, up, activation, outputs)
    return [each.taken(told, found) for each, told, found in zip(asked, outputs, targets, strict=False)]


def _activation_backward(
    dh: Tensor, gate: Tensor, up: Tensor | None, activation: str, wanted: Sequence[epilogue.EpilogueRequest]
) -> tuple[epilogue.Targets, epilogue.Targets]:
    of_up = wanted[1] if up is not None else None
    return activation_kernels.activate_backward_and_quantize(dh, gate, activation, up, wanted[0], of_up)
