"""The observer that layers report their operands to: at most one, and only in sampled steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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

        `key`: of the layer's weight. `for_wgrad`: whether it was quantized separately for wgrad, along tokens.
        """

    @abstractmethod
    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Receive the tensors of a training layer in high precision, with one key and output per weight."""


active: Observer | None = None
"""The current observer; None outside of sampled steps."""
