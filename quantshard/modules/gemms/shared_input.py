"""An input that several layers read, each in a call of its own: quantized by the first, and read by the others.

What makes it certain is the tensor: the others read what was quantized only if they get that very tensor, unchanged,
and quantize by the same cells. So a hook that exchanges it, or a wrapper between, costs the sharing and no more. And
each layer reads it once: the next forward of the same tensor, of which a CUDA graph may be captured, quantizes it anew.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantshard import private_torch
from quantshard.gemm.operands import OperandUsage
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import GemmOperands, cells, gemm_operands
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import QuantSpec, Recipe, TensorRole

Wanted = tuple[int, tuple[QuantSpec | None, QuantSpec | None], bool]
"""How often an input was changed in place when its operands were made, by which cells, and if those of wgrad too."""


@dataclass(frozen=True)
class _QuantizedInput:
    """An input [..., in_features] and its operands."""

    x: weakref.ReferenceType[Tensor]
    number: int
    wanted: Wanted
    operands: GemmOperands


class SharedInput:
    """What some layers have in common: the last input of one of them, quantized, for as long as the tensor lives."""

    def __init__(self) -> None:
        self.last: _QuantizedInput | None = None
        self._made = 0

    def keep(self, x: Tensor, wanted: Wanted, made: GemmOperands) -> int:
        """Keep what was made of an input for the other layers, under a new number."""
        self._made += 1
        self.last = _QuantizedInput(weakref.ref(x, self._forget), self._made, wanted, made)
        return self._made

    def _forget(self, x: weakref.ReferenceType[Tensor]) -> None:
        if self.last is not None and self.last.x is x:
            self.last = None

    def __reduce__(self) -> Any:
        return SharedInput, ()  # copies of the layers share what they read, and not with these


class InputReader:
    """One of the layers that have a `SharedInput`."""

    def __init__(self, shared: SharedInput) -> None:
        self.shared = shared
        self._read = 0

    def operands(self, x: Tensor, call: LinearContext, state: LinearState, keeps: bool) -> GemmOperands:
        """The input of a layer for fprop and, if it `keeps` it, for wgrad; its own where it cannot be another's.

        Under delayed scaling each layer has its own: a history of its own says how it is scaled.
        """
        asked = cells(call.recipe, TensorRole.INPUT)
        if x.is_inference() or not is_shareable(call.recipe):
            return _made(x, call, state, keeps)
        last, wanted = self.shared.last, (private_torch.in_place_changes(x), asked, keeps)
        is_new = last is not None and last.number != self._read
        if last is not None and is_new and last.x() is x and last.wanted == wanted:
            self._read = last.number
            return last.operands
        found = _made(x, call, state, keeps)
        self._read = self.shared.keep(x, wanted, found)
        return found


def is_shareable(recipe: Recipe) -> bool:
    """True if what one layer makes of an input is what any other would: quantized, and by nothing of its own."""
    first, second = cells(recipe, TensorRole.INPUT)
    quantized = first is not None and second is not None
    return quantized and TensorRole.INPUT not in recipe.histories and not recipe.input_draws


def _made(x: Tensor, call: LinearContext, state: LinearState, keeps: bool) -> GemmOperands:
    rows = x.reshape(-1, x.shape[-1])
    return gemm_operands(rows, TensorRole.INPUT, call, state, OperandUsage(True, keeps))
