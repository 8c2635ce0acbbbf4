"""The observer that layers report their operands to: at most one, and only in sampled steps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

from torch import Tensor

from quantshard.recipe import TensorRole
from quantshard.tensor.storage import QuantizedStorage


class Observer(ABC):
    """Receives the operands of GEMMs while it is `active`. It must not change them."""

    @abstractmethod
    def see_operand(
        self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Tensor | QuantizedStorage
    ) -> None:
        """Receive this rank's piece [R, C] of one operand of a layer, and what it was quantized to, if it was.
        `key`: of the layer's weight. `for_wgrad`: whether it was quantized separately for wgrad, along tokens."""

    @abstractmethod
    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Receive the tensors of a training layer in high precision, with one key and output per weight."""


active: Observer | None = None

STACK_KEY: Final = "stack_key"
"""Entry in the state of a matrix of a stack: the key of the stack, under which operands are reported."""


class OperandWatch(NamedTuple):
    """Observer of one tensor of a layer. `key`: RNG key of the layer's weight. `role`: role of the tensor."""

    observer: Observer
    key: Tensor
    role: TensorRole

    def see(self, values: Tensor, operand: Tensor | QuantizedStorage, for_wgrad: bool = False) -> None:
        """Report values [R, C] and their quantization. An operand for wgrad is reported only if it is quantized."""
        if not for_wgrad or isinstance(operand, QuantizedStorage):
            self.observer.see_operand(self.key, self.role, for_wgrad, values, operand)

    def see_both(
        self, values: Tensor, first: Tensor | QuantizedStorage, second: Tensor | QuantizedStorage, transposed: bool
    ) -> None:
        """Report values [R, C] and the operands that kernels made of them; an operand that is not needed is empty.
        `transposed`: whether `second` is quantized from the transpose."""
        if isinstance(first, QuantizedStorage) or first.shape == values.shape:
            self.see(values, first)
        if isinstance(second, QuantizedStorage):
            if isinstance(first, QuantizedStorage) and first.spec == second.spec and first.spec.format.transposable:
                return  # the same codes
            self.see(values.t() if transposed else values, second, for_wgrad=True)
