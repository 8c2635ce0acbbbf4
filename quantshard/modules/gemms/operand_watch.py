"""One operand of a layer, on its way to who observes (`tensor.observation`)."""

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
    """Who observes an input, an output gradient or a weight, whose layer's weight has this key."""

    observer: Observer
    key: Tensor
    role: TensorRole

    def see(self, values: Tensor, operand: Operand, for_wgrad: bool = False) -> None:
        """Show values [R, C] and what they were quantized to; of wgrad's only what is quantized."""
        if not for_wgrad or isinstance(operand, QuantizedStorage):
            self.observer.see_operand(self.key, self.role, for_wgrad, values, operand)

    def see_both(self, values: Tensor, first: Operand, second: Operand, transposed: bool) -> None:
        """Show values [R, C] and what kernels made of them for both GEMMs, or for one: the other is then empty.

        `transposed`: the second is of the transpose.
        """
        if isinstance(first, QuantizedStorage) or first.shape == values.shape:
            self.see(values, first)
        if isinstance(second, QuantizedStorage):
            if isinstance(first, QuantizedStorage) and serves_both(first.cell, second.cell):
                return  # the same codes
            self.see(values.t() if transposed else values, second, for_wgrad=True)


def watch(role: TensorRole, call: LinearContext, record: bool, state: Mapping[str, Tensor]) -> OperandWatch | None:
    """None if nobody observes, or this pass is no step of training: an evaluation, a second forward, a rehearsal.

    `record`: of the layer's `LinearState`; `state`: that of its weight.
    """
    observer = observation.active
    is_second = call.repeated and role is not TensorRole.GRAD_OUTPUT
    if observer is None or not record or is_second or context.is_rehearsed():
        return None
    return OperandWatch(observer, state[KEY], role)
