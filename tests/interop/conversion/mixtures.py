"""Small mixtures of experts of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {**HEADS, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {**HEADS, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "Mixtral": (
        "MixtralConfig", {**HEADS, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "OLMoE": (
        "OlmoeConfig",
        {"num_key_value_heads": 2, "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "GLM-4.5": (
        "Glm4MoeConfig",
        {**HEADS, **ROUTED, "intermediate_size": 96, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {**MLA, **ROUTED, "intermediate_size": 96, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {
            **HEADS, **LINEAR_ATTENTION, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4,
            "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
        },
    ),
}  # fmt: skip


def mixture(name: str, seed: int = 0, **options: Any) -> Any:
    """A bfloat16 model with random weights, larger than usual so that experts and routers matter."""
    kind, own = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**{**COMMON, **own, **options})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tokens(step: int = 0, rows: int = 2) -> torch.Tensor:
    return torch.randint(3, 256, (rows, 32), generator=torch.Generator().manual_seed(step))


def stacks(model: Any) -> dict[str, Any]:
    """The stacked weights of a model's experts, by name."""
    return {name: param for name, param in model.named_parameters() if param.ndim == 3 and ".experts." in name}
