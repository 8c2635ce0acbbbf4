"""The amax of a layer's input, kept so that a backward that quantizes the input again uses the scale of forward."""

from __future__ import annotations

from torch import Tensor

from quantshard.gemm import operands
from quantshard.gemm.operands import OperandSplit, OperandUsage
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.recipe import TensorRole


def input_amax(
    values: Tensor, role: TensorRole, call: LinearContext, split: OperandSplit | None, wanted: OperandUsage
) -> Tensor | None:
    """The amax of a whole input; None if the recipe scales otherwise. Backward gets the amax that forward measured."""
    pair = call.recipe.activations[role]
    if role is not TensorRole.INPUT or not operands.scales_by_one_amax(pair) or not operands.needs_amax(*pair):
        return None
    if wanted.first:
        call.amaxes[role, 0] = operands.whole_amax(values, split)
    return call.amaxes.get((role, 0))
