"""TransformerEngine's `pytorch.attention`."""

from quantshard.modules import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)

__all__ = ["DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding", "apply_rotary_pos_emb"]
