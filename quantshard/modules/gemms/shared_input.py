"""An input that several layers read in separate calls: the first layer quantizes it, and the others reuse the result.

Sharing is detected by tensor identity: a layer reuses the operands only if it gets the same tensor, unchanged, and
quantizes it in the same way. A hook or wrapper that replaces the tensor only disables sharing. Each layer reuses an
input once: the next forward with the same tensor, which a CUDA graph can capture, quantizes again.
"""

import itertools
import weakref
from typing import Any, NamedTuple

from torch import Tensor

from quantshard import private_torch
from quantshard.gemm.operands import OperandUsage
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import GemmOperands, gemm_operands
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import TensorRole
from quantshard.recipe_table import SpecPair


class _QuantizedInput(NamedTuple):
    """An input [..., in_features] and its operands; `number`: serial number of the entry. `key`: version counter of the
    input, its quantization, and whether wgrad's operand was made."""

    x: weakref.ReferenceType[Tensor]
    number: int
    key: tuple[int, SpecPair, bool]
    operands: GemmOperands


class SharedInput:
    """Cache shared by several layers: the last quantized input, as long as the input tensor is alive."""

    def __init__(self) -> None:
        self.last: _QuantizedInput | None = None
        self.numbers = itertools.count(1)

    def forget(self, x: weakref.ReferenceType[Tensor]) -> None:
        """Drop the entry of an input that was freed."""
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
        """Operands of a layer's input for fprop and, if `keeps`, for wgrad; from the cache if possible."""
        recipe, last = call.recipe, self.shared.last
        key: tuple[int, SpecPair, bool] | None = None
        pair = recipe.activations[TensorRole.INPUT]
        # histories or random bits of its own give a layer other codes
        is_own = None in pair or TensorRole.INPUT in recipe.histories or recipe.input_draws
        if not (is_own or x.is_inference()):
            key = private_torch.in_place_changes(x), pair, keeps
        if last is not None and last.number != self._read and last.x() is x and last.key == key:
            self._read = last.number
            return last.operands
        rows, usage = x.reshape(-1, x.shape[-1]), OperandUsage(True, keeps)
        x_operands = gemm_operands(rows, TensorRole.INPUT, call, state, usage)
        if key is not None:
            self._read = next(self.shared.numbers)
            self.shared.last = _QuantizedInput(weakref.ref(x, self.shared.forget), self._read, key, x_operands)
        return x_operands
