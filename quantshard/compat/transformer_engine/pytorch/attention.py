"""TransformerEngine's `pytorch.attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantshard import modules
from quantshard.compat.transformer_engine.arguments import AdaptedAttention, supported
from quantshard.modules import RotaryPositionEmbedding

__all__ = ["DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding", "apply_rotary_pos_emb"]


class DotProductAttention(AdaptedAttention, modules.DotProductAttention):
    """`quantshard.DotProductAttention`."""


class MultiheadAttention(AdaptedAttention, modules.MultiheadAttention):
    """`quantshard.MultiheadAttention`."""


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", **arguments: Any) -> Tensor:
    """`quantshard.apply_rotary_pos_emb`."""
    return modules.apply_rotary_pos_emb(t, freqs, tensor_format, **supported("apply_rotary_pos_emb", arguments))
