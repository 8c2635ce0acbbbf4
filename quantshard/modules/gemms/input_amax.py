"""The amax of a layer's input, where a backward that makes operands again must scale by that of the forward."""

from __future__ import annotations

from torch import Tensor

from quantshard.gemm import operands
from quantshard.gemm.operands import OperandSplit, OperandUsage
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.recipe import TensorRole


def input_amax(
    values: Tensor, role: TensorRole, call: LinearContext, split: OperandSplit | None, wanted: OperandUsage
) -> Tensor | None:
    """The amax of a whole input, if that is what it is scaled by; backward has that of the forward, as with kernels."""
    read = call.recipe.activations[role]
    if role is not TensorRole.INPUT or not operands.scales_by_one_amax(read) or not operands.needs_amax(*read):
        return None
    if wanted.first:
        call.amaxes[role, 0] = operands.whole_amax(values, split)
    return call.amaxes.get((role, 0))
