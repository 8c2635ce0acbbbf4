"""quantshard: train PyTorch models whose weights are low-precision numbers, sharded, and resume them bit for bit."""

from quantshard import checkpoints, errors, layouts, optimizers, recipe, serving, statistics, transformer_engine
from quantshard.determinism import deterministic
from quantshard.distributed.replicas import broadcast_, check_replicas
from quantshard.interop.conversion.convert import convert, revert
from quantshard.modules import (
    Dispatch,
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryPositionEmbedding,
    StepGraph,
    TransformerLayer,
    autocast,
    capturable_,
    checkpoint,
    dispatch_tokens,
    distribute_experts,
    linear_cross_entropy,
    make_graphed_callables,
    quantize_,
    quantized_model_init,
)
from quantshard.private_torch import lookup as _lookup
from quantshard.tensor import arithmetic as _arithmetic, aten_rules as _aten_rules, copy_rules as _copy_rules
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.requantize import requantize_
from quantshard.tools.observe import explain
from quantshard.tools.planning import TrainingStep, plan
from quantshard.tools.statistics.recorder import Statistics
from quantshard.version import __version__

__all__ = [
    "Dispatch",
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "QuantizedTensor",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "Statistics",
    "StepGraph",
    "TrainingStep",
    "TransformerLayer",
    "__version__",
    "autocast",
    "broadcast_",
    "capturable_",
    "check_replicas",
    "checkpoint",
    "checkpoints",
    "convert",
    "deterministic",
    "dispatch_tokens",
    "distribute_experts",
    "errors",
    "explain",
    "layouts",
    "linear_cross_entropy",
    "make_graphed_callables",
    "optimizers",
    "plan",
    "quantize_",
    "quantized_model_init",
    "recipe",
    "requantize_",
    "revert",
    "serving",
    "statistics",
    "transformer_engine",
]

_lookup.warn_of_untested_torch()

del _arithmetic, _aten_rules, _copy_rules, _lookup
