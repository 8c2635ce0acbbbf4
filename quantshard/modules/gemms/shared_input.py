"""An input that several layers read, each in a call of its own: quantized by the first, and read by the others.

What makes it certain is the tensor: the others read what was quantized only if they get that very tensor, unchanged,
and quantize by the same cells. So a hook that exchanges it, or a wrapper between, costs the sharing and no more.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantshard import private_torch
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import GemmOperands, LinearState, OperandUsage, cells, gemm_operands
from quantshard.recipe import Cell, Recipe, TensorRole


@dataclass(frozen=True)
class _QuantizedInput:
    """An input [..., in_features] and its operands, made with those of wgrad (`keeps`) or without."""

    x: weakref.ReferenceType[Tensor]
    changes: int
    cells: tuple[Cell | None, Cell | None]
    keeps: bool
    operands: GemmOperands


class SharedInput:
    """What some layers have in common: the last input of one of them, quantized, for as long as the tensor lives."""

    def __init__(self) -> None:
        self._last: _QuantizedInput | None = None

    def operands(self, x: Tensor, call: LinearContext, state: LinearState, keeps: bool) -> GemmOperands:
        """The input of a layer for fprop and, if it `keeps` it, for wgrad; its own where it cannot be another's.

        Under delayed scaling each layer has its own: a history of its own says how it is scaled.
        """
        asked = cells(call.recipe, TensorRole.INPUT)
        if x.is_inference() or not is_shareable(call.recipe):
            return _made(x, call, state, keeps)
        last, changes = self._last, private_torch.in_place_changes(x)
        if last is None or last.x() is not x or (last.changes, last.cells, last.keeps) != (changes, asked, keeps):
            found = _made(x, call, state, keeps)
            self._last = last = _QuantizedInput(weakref.ref(x, self._forget), changes, asked, keeps, found)
        return last.operands

    def _forget(self, x: weakref.ReferenceType[Tensor]) -> None:
        if self._last is not None and self._last.x is x:
            self._last = None

    def __reduce__(self) -> Any:
        return SharedInput, ()  # copies of the layers share what they read, and not with these


def is_shareable(recipe: Recipe) -> bool:
    """True if what one layer makes of an input is what any other would: quantized, and by nothing of its own."""
    read = cells(recipe, TensorRole.INPUT)
    return all(cell and not cell.scaling.history and not cell.scaling.stochastic_rounding for cell in read)


def _made(x: Tensor, call: LinearContext, state: LinearState, keeps: bool) -> GemmOperands:
    rows = x.reshape(-1, x.shape[-1])
    return gemm_operands(rows, TensorRole.INPUT, call, state, OperandUsage(True, keeps))
