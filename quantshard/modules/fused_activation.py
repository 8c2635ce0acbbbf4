"""An activation between two linear layers, by kernels: its result, and in backward the gradients of its inputs, are
quantized by the kernel that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import kernels
from quantshard.modules.gemms.functional import LinearBackward, LinearGradMask
from quantshard.modules.gemms.linear_operands import GemmOperands, OperandRequest
from quantshard.recipe import TensorRole

if kernels.USABLE:
    from quantshard.gemm import producers
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
            TensorRole.GRAD_OUTPUT, fc1.call, fc1.state, needed.of_gradient(part, fc1.bias_dtypes[part]), part
        )
        for part in range(parts)
    ]
    rows, device = epilogue.matrix(dh), gate.device
    if any(each.reads_values for each in asked):
        given = [TensorProducer(torch.empty_like(gate), producers.zero(device).view(1, 1)) for _ in asked]
        wanted = [epilogue.EpilogueRequest(high=each.values, amax=each.amax) for each in given]
        _activation_backward(rows, gate, up, activation, wanted)
        return [each.of(values) for each, values in zip(asked, given, strict=True)]
    ready = [each.both(gate.shape[1], device).prepared(TensorProducer(gate)) for each in asked]  # of the shape of gate
    targets = _activation_backward(rows, gate, up, activation, [each.outputs for each in ready])
    return [each.taken(told, found) for each, told, found in zip(asked, ready, targets, strict=False)]


def _activation_backward(
    dh: Tensor, gate: Tensor, up: Tensor | None, activation: str, wanted: Sequence[epilogue.EpilogueRequest]
) -> tuple[epilogue.Targets, epilogue.Targets]:
    of_up = wanted[1] if up is not None else None
    return activation_kernels.activate_backward_and_quantize(dh, gate, activation, up, wanted[0], of_up)
