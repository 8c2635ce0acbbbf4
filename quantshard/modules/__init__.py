"""Drop-in layers that can store their weights in low precision, and the contexts and graphs around them."""

from quantshard.distributed.experts import Dispatch, dispatch_tokens
from quantshard.modules.attention import MultiheadAttention
from quantshard.modules.attention_core import DotProductAttention
from quantshard.modules.chunked_loss import linear_cross_entropy
from quantshard.modules.contexts.context import autocast, quantized_model_init
from quantshard.modules.contexts.recompute import checkpoint
from quantshard.modules.graphs.callables import make_graphed_callables
from quantshard.modules.graphs.recorder import capturable_
from quantshard.modules.graphs.step_graph import StepGraph
from quantshard.modules.grouped_linear import GroupedLinear
from quantshard.modules.layernorm_mlp import LayerNormLinear, LayerNormMLP
from quantshard.modules.linear import Linear
from quantshard.modules.norm import LayerNorm, RMSNorm
from quantshard.modules.quantize import quantize_
from quantshard.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from quantshard.modules.stacked_experts import distribute_experts
from quantshard.modules.transformer_layer import TransformerLayer

__all__ = [
    "Dispatch", "DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear",
    "MultiheadAttention", "RMSNorm", "RotaryPositionEmbedding", "StepGraph", "TransformerLayer",
    "apply_rotary_pos_emb", "autocast", "capturable_", "checkpoint", "dispatch_tokens", "distribute_experts",
    "linear_cross_entropy", "make_graphed_callables", "quantize_", "quantized_model_init",
]  # fmt: skip
