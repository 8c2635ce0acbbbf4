"""Reports the operands of a layer to the observer (`tensor.observation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from quantshard.gemm.operands import Operand, serves_both
from quantshard.modules.contexts import context
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.recipe import TensorRole
from quantshard.tensor import observation
from quantshard.tensor.observation import Observer
from quantshard.tensor.storage import KEY, QuantizedStorage


class OperandWatch(NamedTuple):
    """Observer of one tensor of a layer. `key`: RNG key of the layer's weight. `role`: role of the tensor."""

    observer: Observer
    key: Tensor
    role: TensorRole

    def see(self, values: Tensor, operand: Operand, for_wgrad: bool = False) -> None:
        """Report values [R, C] and their quantization. An operand for wgrad is reported only if it is quantized."""
        if not for_wgrad or isinstance(operand, QuantizedStorage):
            self.observer.see_operand(self.key, self.role, for_wgrad, values, operand)

    def see_both(self, values: Tensor, first: Operand, second: Operand, transposed: bool) -> None:
        """Report values [R, C] and the operands that kernels made of them; an operand that is not needed is empty.

        `transposed`: whether `second` is quantized from the transpose.
        """
        if isinstance(first, QuantizedStorage) or first.shape == values.shape:
            self.see(values, first)
        if isinstance(second, QuantizedStorage):
            if isinstance(first, QuantizedStorage) and serves_both(first.cell, second.cell):
                return  # the same codes
            self.see(values.t() if transposed else values, second, for_wgrad=True)


def watch(role: TensorRole, call: LinearContext, record: bool, state: Mapping[str, Tensor]) -> OperandWatch | None:
    """Return a watch, or None without an observer and outside of a training step: evaluation, recomputation, rehearsal.

    `record`: `LinearState.record`. `state`: RNG state of the weight.
    """
    observer = observation.active
    is_second = call.repeated and role is not TensorRole.GRAD_OUTPUT
    if observer is None or not record or is_second or context.is_rehearsed():
        return None
    return OperandWatch(observer, state[KEY], role)
