"""TransformerEngine's `pytorch.module`: quantshard's modules with TransformerEngine's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quantshard import modules
from quantshard.compat.transformer_engine.arguments import Adapted, AdaptedAttention

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm", "TransformerLayer"]


class Linear(Adapted, modules.Linear):
    """`quantshard.Linear`."""


class LayerNormLinear(Adapted, modules.LayerNormLinear):
    """`quantshard.LayerNormLinear`."""


class LayerNormMLP(Adapted, modules.LayerNormMLP):
    """`quantshard.LayerNormMLP`."""


class GroupedLinear(Adapted, modules.GroupedLinear):
    """`quantshard.GroupedLinear`."""


class TransformerLayer(AdaptedAttention, modules.TransformerLayer):
    """`quantshard.TransformerLayer`."""


class _Norm:
    """Mixin for TransformerEngine's arguments; the old names of two are `hidden_size` and `dtype`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        shape = hidden_size if normalized_shape is None else normalized_shape
        init: Any = super().__init__
        init(shape, eps, bool(sequence_parallel), params_dtype or dtype, zero_centered_gamma, **kwargs)


class LayerNorm(_Norm, modules.LayerNorm):
    """`quantshard.LayerNorm`."""


class RMSNorm(_Norm, modules.RMSNorm):
    """`quantshard.RMSNorm`."""
