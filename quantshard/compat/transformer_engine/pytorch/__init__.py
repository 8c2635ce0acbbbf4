"""TransformerEngine's `pytorch`: `import quantshard.compat.transformer_engine.pytorch as te`."""

from typing import NoReturn

import torch

from quantshard.compat.transformer_engine.common import recipe
from quantshard.compat.transformer_engine.pytorch import (
    attention,
    distributed,
    fp8,
    graph,
    module,
    optimizers,
    quantization,
    tensor,
)
from quantshard.compat.transformer_engine.pytorch.attention import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from quantshard.compat.transformer_engine.pytorch.distributed import checkpoint
from quantshard.compat.transformer_engine.pytorch.graph import make_graphed_callables
from quantshard.compat.transformer_engine.pytorch.module import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    TransformerLayer,
)
from quantshard.compat.transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from quantshard.compat.transformer_engine.pytorch.tensor import QuantizedTensor

__all__ = [
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
    "TransformerLayer",
    "attention",
    "autocast",
    "checkpoint",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_device_compute_capability",
    "graph",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "module",
    "optimizers",
    "quantization",
    "quantized_model_init",
    "recipe",
    "tensor",
]

NOT_HERE = {
    "parallel_cross_entropy": "use torch.nn.functional.cross_entropy; of DTensors under loss_parallel()",
    "CudaRNGStatesTracker": "dropout draws from torch's generator",
    "get_cpu_offload_context": "use FSDP2's CPUOffloadPolicy, or torch.autograd.graph.save_on_cpu",
    "mark_not_offload": "use torch.autograd.graph.save_on_cpu",
    "initialize_ub": "collectives of tensor parallelism are not overlapped with GEMMs",
    "destroy_ub": "collectives of tensor parallelism are not overlapped with GEMMs",
    "moe_permute": "use quantshard.dispatch_tokens",
    "moe_unpermute": "use quantshard.dispatch_tokens",
    "Fp8Padding": "GroupedLinear takes any number of tokens",
    "Fp8Unpadding": "GroupedLinear takes any number of tokens",
    "InferenceParams": "there is no cache of keys and values for generation",
    "ops": "use the modules",
    "Quantizer": "use quantshard.QuantizedTensor.quantize_ and quantshard.requantize_",
    "Float8Tensor": "use QuantizedTensor, the class of all formats",
    "MXFP8Tensor": "use QuantizedTensor, the class of all formats",
    "NVFP4Tensor": "use QuantizedTensor, the class of all formats",
    "Float8BlockwiseQTensor": "use QuantizedTensor, the class of all formats",
}
"""TransformerEngine names that do not exist here, and their replacements."""


def get_device_compute_capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU, or (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def __getattr__(name: str) -> NoReturn:
    instead = f": {NOT_HERE[name]}" if name in NOT_HERE else ""
    raise AttributeError(f"quantshard has no {name} of transformer_engine.pytorch{instead}")
