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
from quantshard.compat.transformer_engine.pytorch.attention import *  # noqa: F403
from quantshard.compat.transformer_engine.pytorch.distributed import *  # noqa: F403
from quantshard.compat.transformer_engine.pytorch.graph import *  # noqa: F403
from quantshard.compat.transformer_engine.pytorch.module import *  # noqa: F403
from quantshard.compat.transformer_engine.pytorch.quantization import *  # noqa: F403
from quantshard.compat.transformer_engine.pytorch.tensor import *  # noqa: F403

__all__ = ["attention", "distributed", "fp8", "get_device_compute_capability", "graph", "module", "optimizers"]
__all__ += ["quantization", "recipe", "tensor"]
__all__ += [*attention.__all__, *distributed.__all__, *graph.__all__, *module.__all__]
__all__ += [*quantization.__all__, *tensor.__all__]

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
