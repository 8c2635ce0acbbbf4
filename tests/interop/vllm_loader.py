"""Loads exports into vLLM's models without an engine, which layouts that only GPUs compute need; prints hashes.

In vLLM's virtual environment: `python vllm_loader.py FOLDER ...` prints {folder: {parameter: hash of its bytes}}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update({
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
})  # fmt: skip
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import load_file

# block-scaled kernels ask for AMX when a layer is built; nothing is computed here
torch.cpu._is_amx_tile_supported = lambda: True

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402

from tests.interop.hashes import sha  # noqa: E402

LAYERS = "vllm.model_executor.layers.quantization"
KERNELS = {
    f"{LAYERS}.modelopt": ["init_mxfp8_linear_kernel", "init_nvfp4_linear_kernel"],
    f"{LAYERS}.compressed_tensors.schemes.compressed_tensors_w8a8_mxfp8": ["init_mxfp8_linear_kernel"],
    f"{LAYERS}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4": ["init_nvfp4_linear_kernel"],
}
"""Functions that choose a kernel when a layer is built. A CPU has none for these formats."""


def parameters(folder: str) -> dict[str, str]:
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16"
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model: Any = initialize_model(vllm_config=config)
        torch.set_default_dtype(torch.float32)
        (file,) = Path(folder).glob("*.safetensors")
        model.load_weights(load_file(file).items())
    return {name: sha(value.data) for name, value in model.named_parameters()}


for path, names in KERNELS.items():
    for name in names:
        assert hasattr(importlib.import_module(path), name)
        setattr(importlib.import_module(path), name, mock.MagicMock())
print(json.dumps({folder: parameters(folder) for folder in sys.argv[1:]}))
