"""The observer that layers report their operands to: at most one, and only in sampled steps.

Layers check `active`, which is None in other steps. An observer must not change its arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from quantshard.recipe import TensorRole
from quantshard.tensor.storage import QuantizedStorage


class Observer(ABC):
    """Receives the operands of GEMMs while it is `active`."""

    @abstractmethod
    def see_operand(
        self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Tensor | QuantizedStorage
    ) -> None:
        """Receive one operand of a layer.

        Args:
            key: key of the layer's weight, int64 [1] on the CPU.
            role: the role of the tensor.
            for_wgrad: whether the operand was quantized separately for wgrad, along tokens.
            values: [R, C], this rank's piece.
            operand: the quantized `values`, of the same rectangle; or `values` themselves in high precision.
        """

    @abstractmethod
    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Receive the tensors of a training layer that runs in high precision, without quantized operands.

        Args:
            keys: keys of the layer's weights.
            x: [..., in_features], the common input.
            weights: [out_features, in_features].
            outputs: [..., out_features], one per weight. Hooks on the outputs receive their gradients.
        """


active: Observer | None = None
"""The current observer."""
