"""Sizes of models that the built-in decoder knows by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_LLAMA_3: Final = {"architecture": "llama", "rope_theta": 500000.0, "norm_eps": 1e-5}

SIZES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama3-8b": {**_LLAMA_3, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336},
        "llama3.2-1b": {
            **_LLAMA_3, "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "tied": True,
        },
        "qwen3-8b": {
            "architecture": "llama", "hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128,
            "ffn": 12288, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True,
        },
        "qwen3-0.6b": {
            "architecture": "llama", "hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128,
            "ffn": 3072, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "tied": True,
        },
        "smollm2-135m": {
            "architecture": "llama", "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "ffn": 1536,
            "rope_theta": 100000.0, "norm_eps": 1e-5, "tied": True,
        },
        "moe-small": {
            "architecture": "llama", "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 768, "experts": 16,
            "experts_per_token": 2, "seq_length": 512, "tied": True,
        },
        "gpt2-small": {
            "architecture": "gpt", "hidden": 768, "layers": 12, "heads": 12, "ffn": 3072, "tied": True,
            "seq_length": 1024, "norm_eps": 1e-5,
        },
    }
)  # fmt: skip
"""Sizes of models, by the name in `--model NAME`, for the built-in decoder. Flags take precedence.

Sources: config.json of meta-llama/Meta-Llama-3-8B, meta-llama/Llama-3.2-1B (without its rotary scaling, which is for
more than 8192 tokens), Qwen/Qwen3-8B, Qwen/Qwen3-0.6B, HuggingFaceTB/SmolLM2-135M and openai-community/gpt2.
"""
