"""An input that several layers read in separate calls: the first layer quantizes it, and the others reuse the result.

Sharing is detected by tensor identity: a layer reuses the operands only if it gets the same tensor, unchanged, and
quantizes it in the same way. A hook or wrapper that replaces the tensor only disables sharing. Each layer reuses an
input once: the next forward with the same tensor, which a CUDA graph can capture, quantizes again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantshard import private_torch
from quantshard.gemm.operands import OperandUsage
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import GemmOperands, gemm_operands
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import QuantSpec, Recipe, TensorRole

Wanted = tuple[int, tuple[QuantSpec | None, QuantSpec | None], bool]
"""Cache key: version counter of the input, its quantization, and whether wgrad's operand was made."""


@dataclass(frozen=True)
class _QuantizedInput:
    """An input [..., in_features] and its operands; `number`: serial number of the entry."""

    x: weakref.ReferenceType[Tensor]
    number: int
    wanted: Wanted
    operands: GemmOperands


class SharedInput:
    """Cache shared by several layers: the last quantized input, as long as the input tensor is alive."""

    def __init__(self) -> None:
        self.last: _QuantizedInput | None = None
        self._made = 0

    def keep(self, x: Tensor, wanted: Wanted, operands: GemmOperands) -> int:
        """Cache the operands of an input for the other layers and return the new serial number."""
        self._made += 1
        self.last = _QuantizedInput(weakref.ref(x, self._forget), self._made, wanted, operands)
        return self._made

    def _forget(self, x: weakref.ReferenceType[Tensor]) -> None:
        if self.last is not None and self.last.x is x:
            self.last = None

    def __reduce__(self) -> Any:
        return SharedInput, ()  # copied layers share a cache among themselves, not with the originals


class InputReader:
    """One of the layers that have a `SharedInput`."""

    def __init__(self, shared: SharedInput) -> None:
        self.shared = shared
        self._read = 0

    def operands(self, x: Tensor, call: LinearContext, state: LinearState, keeps: bool) -> GemmOperands:
        """Operands of a layer's input for fprop and, if `keeps`, for wgrad; from the cache if possible.

        Under delayed scaling nothing is shared, because every layer scales by its own history.
        """
        pair = call.recipe.activations[TensorRole.INPUT]
        if x.is_inference() or not is_shareable(call.recipe):
            return _made(x, call, state, keeps)
        last, key = self.shared.last, (private_torch.in_place_changes(x), pair, keeps)
        is_new = last is not None and last.number != self._read
        if last is not None and is_new and last.x() is x and last.wanted == key:
            self._read = last.number
            return last.operands
        x_operands = _made(x, call, state, keeps)
        self._read = self.shared.keep(x, key, x_operands)
        return x_operands


def is_shareable(recipe: Recipe) -> bool:
    """Return whether all layers quantize an input to the same codes: no histories and no random bits of their own."""
    first, second = recipe.activations[TensorRole.INPUT]
    quantized = first is not None and second is not None
    return quantized and TensorRole.INPUT not in recipe.histories and not recipe.input_draws


def _made(x: Tensor, call: LinearContext, state: LinearState, keeps: bool) -> GemmOperands:
    rows = x.reshape(-1, x.shape[-1])
    return gemm_operands(rows, TensorRole.INPUT, call, state, OperandUsage(True, keeps))
