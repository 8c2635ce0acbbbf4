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
        """Receive one operand of a layer.

        Args:
            key: key of the layer's weight, int64 [1] on the CPU.
            for_wgrad: whether the operand was quantized separately for wgrad, along tokens.
            values: [R, C], this rank's piece.
            operand: the quantized `values`, or in high precision `values` themselves.
        """

    @abstractmethod
    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Receive the tensors of a training layer in high precision. Hooks on the outputs receive their gradients.

        Args:
            keys: keys of the layer's weights.
            x: [..., in_features].
            weights, outputs: [out_features, in_features] and [..., out_features], one each per weight.
        """


active: Observer | None = None
"""The current observer; None outside of sampled steps."""
