"""Quantize activations as vLLM does: a program for vLLM's virtual environment, which has no quantshard.

    python tests/interop/vllm_quantizers.py inputs.pt outputs.pt

Reads BF16 matrices and writes for each of vLLM's quantizers their (codes or decoded codes, scales). These are vLLM's
reference functions in PyTorch; its CUDA kernels implement the same formulas.
"""

import sys

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

with set_current_vllm_config(VllmConfig()):
    QUANTIZERS = {
        "per tensor": QuantFP8(False, GroupShape.PER_TENSOR).forward_native,
        "per token": QuantFP8(False, GroupShape.PER_TOKEN).forward_native,
        "1x128": QuantFP8(False, GroupShape(1, 128), use_ue8m0=False).forward_native,
        "1x128, E8M0": QuantFP8(False, GroupShape(1, 128), use_ue8m0=True).forward_native,
        "MXFP8": _mxfp8_e4m3_quantize_torch,
        "NVFP4": lambda x: ref_nvfp4_quant(x.clone(), 448 * 6 / x.abs().max().float(), 16),
    }
    inputs = torch.load(sys.argv[1])
    torch.save({name: [quantize(x) for x in inputs] for name, quantize in QUANTIZERS.items()}, sys.argv[2])
