"""Whom layers show what they work on: at most one observer, which is there in sampled steps alone.

Whoever has something to show looks whether `active` is None, which is all that it costs in other steps. An observer
changes nothing that it is shown.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from quantshard.recipe import TensorRole
from quantshard.tensor.storage import QuantizedStorage


class Observer(ABC):
    """Who is shown the operands of GEMMs, while it is `active`."""

    @abstractmethod
    def see_operand(
        self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Tensor | QuantizedStorage
    ) -> None:
        """Be shown an operand of a layer.

        Args:
            key: of the layer's weight, int64 [1] on the CPU.
            role: what it is.
            for_wgrad: it was quantized for that GEMM, along tokens, apart from what the first GEMM reads.
            values: [R, C], this rank's piece.
            operand: what they were quantized to, of the same rectangle; or values, if they were not.
        """

    @abstractmethod
    def see_plain(
        self, keys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Be shown a layer in training that is computed in high precision, none of whose operands is quantized.

        Args:
            keys: of its weights.
            x: [..., in_features], that all of them read.
            weights: [out_features, in_features].
            outputs: [..., out_features], one for each weight; a hook of theirs sees their gradients.
        """


active: Observer | None = None
"""Who observes now."""
