"""Quantized checkpoints as others publish them, with random weights, written without quantshard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PreTrainedConfig

FILE = "model.safetensors"
_COMMON: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
    "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
DENSE = LlamaConfig(**_COMMON, intermediate_size=384, num_key_value_heads=2, head_dim=64)
MIXTURE = DeepseekV3Config(
    **_COMMON, intermediate_size=384, moe_intermediate_size=128, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, first_k_dense_replace=1, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=96, v_head_dim=64,
    qk_rope_head_dim=32, qk_nope_head_dim=64,
)  # fmt: skip
COMPRESSED = {
    **dict.fromkeys(("FP8", "FP8_DYNAMIC", "FP8_BLOCK"), "float-quantized"),
    **dict.fromkeys(("NVFP4A16", "NVFP4"), "nvfp4-pack-quantized"),
    "MXFP8": "mxfp8-quantized",
}
"""Schemes of compressed-tensors, and their formats."""


def deepseek(weight: Tensor) -> dict[str, Tensor]:
    """A weight as README_WEIGHTS.md of DeepSeek-V3 describes it, and as Qwen3's FP8 files have it."""
    rows, cols = weight.shape
    blocks = pad(weight.float(), (0, -cols % 128, 0, -rows % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :cols].to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}


def _ranges(weight: Tensor, scheme: Any) -> Tensor:
    """The largest magnitude of each group of elements."""
    rows, cols = weight.shape
    kind, size = scheme.weights.strategy, scheme.weights.group_size
    if kind == "block":
        return weight.view(rows // 128, 128, cols // 128, 128).abs().amax((1, 3))
    if kind == "tensor":
        return weight.abs().max()
    groups = weight.view(rows, -1, cols if kind == "channel" else size)
    return groups.abs().amax(-1)


def compressed(weight: Tensor, preset: str, together: Tensor) -> dict[str, Tensor]:
    """A weight as compressed-tensors writes it. `together`: the weights that share its second scale, joined."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    weight = weight.float()
    state = {"weight": weight}
    largest, second = _ranges(weight, scheme), None
    if COMPRESSED[preset].startswith("nvfp4"):
        second = state["weight_global_scale"] = generate_gparam(together.min(), together.max())
    state["weight_scale"], _ = calculate_qparams(-largest, largest, scheme.weights, second)
    result: dict[str, Tensor] = BaseCompressor.get_value_from_registry(COMPRESSED[preset]).compress(state, scheme)
    calibrated = {"NVFP4": "input_global_scale", "FP8": "input_scale"}
    if preset in calibrated:
        result[calibrated[preset]] = torch.tensor([300.0])
    return result


def config_of(style: str) -> dict[str, Any]:
    if style == "deepseek":
        return {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        }  # fmt: skip
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(style, ["Linear"])}, ignore=["lm_head"],
        quantization_status="compressed", format=COMPRESSED[style],
    )  # fmt: skip
    return json.loads(config.model_dump_json())


def publish(folder: Path, style: str, kind: PreTrainedConfig = DENSE) -> dict[str, Tensor]:
    """Write a checkpoint with random weights; return its tensors. `style`: "deepseek", or a scheme."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16).save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    values = load_file(folder / FILE)
    for name, value in values.items():
        if "_proj" not in name:
            tensors[name] = value
            continue
        # LLM Compressor gives layers that engines fuse one second scale
        fused = [of for of in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if name.split(".")[-2] in of]
        stem = name.rsplit(".", 2)[0]
        together = [values[f"{stem}.{part}.weight"] for part in (fused[0] if fused else [name.split(".")[-2]])]
        parts = deepseek(value) if style == "deepseek" else compressed(value, style, torch.cat(together).float())
        tensors |= {name.removesuffix("weight") + key: part.contiguous() for key, part in parts.items()}
    save_file(tensors, folder / FILE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": config_of(style)}))
    return tensors
