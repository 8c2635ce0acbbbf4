"""TransformerEngine's `pytorch.attention`."""

from typing import Any

from torch import Tensor

from quantshard import modules
from quantshard.compat.transformer_engine.arguments import ModuleAdapter, adapted, supported
from quantshard.modules import RotaryPositionEmbedding

__all__ = ["DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding", "apply_rotary_pos_emb"]


DotProductAttention = adapted(modules.DotProductAttention, ModuleAdapter, __name__)
MultiheadAttention = adapted(modules.MultiheadAttention, ModuleAdapter, __name__)


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", **arguments: Any) -> Tensor:
    """`quantshard.apply_rotary_pos_emb`."""
    return modules.apply_rotary_pos_emb(t, freqs, tensor_format, **supported("apply_rotary_pos_emb", arguments))
