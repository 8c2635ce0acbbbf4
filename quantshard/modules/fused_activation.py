"""An activation between two linear layers, by kernels: its result, and in backward the gradients of its inputs, are
quantized by the kernel that computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import kernels
from quantshard.gemm import operands
from quantshard.gemm.weight_operands import WeightOperands
from quantshard.modules.activation_storage import AS_IS, ActivationStorage
from quantshard.modules.gemms.functional import LinearBackward, LinearGradMask
from quantshard.modules.gemms.linear_operands import GemmOperands, OperandRequest, operands_together
from quantshard.recipe import TensorRole

if kernels.USABLE:
    from quantshard.gemm.producers import (
        ActivationProducer,
        GatedGradientProducer,
        OperandProducer,
        TensorSource,
    )
    from quantshard.kernels.fused import activation as activation_kernels
    from quantshard.kernels.fused import epilogue


class ActivationInputs(NamedTuple):
    """The inputs [tokens, features] of an activation, `up` if it is gated: outputs of the layer in front of it."""

    gate: Tensor
    up: Tensor | None = None

    def activated(self, activation: str) -> ActivationProducer:
        """Its result as a source."""
        return ActivationProducer(self.gate, activation, self.up)


@dataclass
class StoredInputs:
    """What forward kept of them by a `storage`, in backward; `dtype`: of the values that this is read as.

    Codes that were read go for the values. `tensors`: a list that the caller may empty.
    """

    tensors: list[Tensor]
    storage: ActivationStorage
    dtype: torch.dtype

    def read(self) -> ActivationInputs:
        """The inputs."""
        if self.storage.cell is not None:
            self.tensors[:] = self.storage.values(self.tensors, self.dtype)
            self.storage = AS_IS
        return ActivationInputs(*self.tensors)


def through_activation(
    dh: Tensor | None,
    between: ActivationInputs,
    activation: str,
    fc1: LinearBackward,
    needed: LinearGradMask,
    apart: bool = False,
    weight_operands: WeightOperands | None = None,
) -> Iterator[GemmOperands]:
    """Gradients of the outputs of fc1 as its GEMMs read them, from that of the activation's result; `rights`: its
    weights, as of `gemm_operands`.

    `apart`: of a gated activation each in a pass of its own, once it is asked for, if no bias needs a sum: a third of
    the memory less, for reading dh and the gate twice.

    Large gradients that emulated products read as values are written once, and quantized one after the other: in both
    directions they are twice the bytes of codes, for which there is room once the inputs of the activation are gone.
    """
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
    if apart and up is not None and not any(each.wanted.sums for each in asked):
        return _one_at_a_time(asked, [GatedGradientProducer(rows, gate, activation, up)], [rows, gate], activation)
    is_large = operands.is_large(gate)
    if any(each.plan.reads_values or (is_large and each.plan.decodes) for each in asked):
        is_alike = all(each.wanted == asked[0].wanted for each in asked)  # not if one weight or bias is frozen
        given = [TensorSource.empty(gate, each.plan if is_alike else None) for each in asked]
        _activation_backward(rows, gate, up, activation, [each.wanted for each in given])
        if is_alike and not is_large:
            return iter(operands_together(asked, given, weight_operands))
        return _quantized(asked, given)
    outputs = [each.outputs() for each in asked]
    targets = _activation_backward(rows, gate, up, activation, outputs)
    taken = [each.taken(told, found) for each, told, found in zip(asked, outputs, targets, strict=False)]
    if asked[0].watching is not None:  # as of all parts
        given = [TensorSource.empty(gate) for _ in asked]
        _activation_backward(rows, gate, up, activation, [each.wanted for each in given])
        for each, values, made in zip(asked, given, taken, strict=True):
            if each.watching is not None:
                each.watching.see_both(values.values, made.first, made.second.operand, made.second.transposed)
    return iter(taken)


def _quantized(asked: list[OperandRequest], given: list[TensorSource]) -> Iterator[GemmOperands]:
    """Each when it is asked for, when the inputs of the activation are gone; its values go with it."""
    while given:
        yield asked.pop(0).of(given.pop(0))


def _one_at_a_time(
    asked: list[OperandRequest], of_gate: list[OperandProducer], others: list[Tensor], activation: str
) -> Iterator[GemmOperands]:
    """First the gate's, from a list that is emptied: behind it `up` is let go of; then that of `up`, from dh and the
    gate, which go with it: it is dh times the activation of the gate."""
    yield _emptying(asked[0], of_gate)
    rows, gate = others
    of_up: list[OperandProducer] = [ActivationProducer(gate, activation, rows)]
    del rows, gate
    others.clear()
    yield _emptying(asked[1], of_up)


def _emptying(asked: OperandRequest, sources: list[OperandProducer]) -> GemmOperands:
    """What is asked of the one source of a list. If its values must be there first, the source goes before they are
    quantized."""
    return asked.of(sources.pop().measured(asked.plan) if asked.plan.reads_values else sources.pop())


def _activation_backward(
    dh: Tensor, gate: Tensor, up: Tensor | None, activation: str, wanted: Sequence[epilogue.KernelOutputs]
) -> tuple[epilogue.Targets, epilogue.Targets]:
    of_up = wanted[1] if up is not None else None
    return activation_kernels.activate_backward_and_quantize(dh, gate, activation, up, wanted[0], of_up)
