"""Random weights of transformers' models, compared with those that transformers draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantshard import QuantizedTensor
from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.settings.values import LayerRecipes
from tests.distributed.test_train_models import ANY, SIZED

SMALL: dict[str, Any] = {
    **dict.fromkeys("d_model dim emb_dim embed_dim embedding_size hidden_dim hidden_size lru_width".split(), 64),
    **dict.fromkeys("encoder_hidden_size decoder_hidden_size n_embd word_embed_proj_dim".split(), 64),
    **dict.fromkeys("d_ff decoder_ffn_dim encoder_ffn_dim expert_ffn_hidden_size feed_forward_size".split(), 96),
    **dict.fromkeys("ffn_dim ffn_hidden_size intermediate_size moe_intermediate_size n_inner".split(), 96),
    "shared_expert_intermediate_size": 96,
    **dict.fromkeys("decoder_layers encoder_layers n_layer n_layers num_decoder_layers num_encoder_layers".split(), 2),
    **dict.fromkeys("num_experts_per_tok num_hidden_layers num_layers".split(), 2),
    **dict.fromkeys("decoder_attention_heads encoder_attention_heads n_head n_heads num_attention_heads".split(), 4),
    **dict.fromkeys("moe_num_experts n_routed_experts num_experts num_heads num_key_value_heads".split(), 4),
    **dict.fromkeys("num_kv_heads num_local_experts".split(), 4),
    **dict.fromkeys("max_position_embeddings n_positions".split(), 64),
    "head_dim": 16, "pad_token_id": 3, "vocab_size": 512,
}  # fmt: skip
"""Sizes of a small model, by the names that configurations have for them."""

FULL, ANGLES = "full_attention", {"rope_type": "default", "rope_theta": 1e4}
HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
EXPERTS = {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "rope_theta": 1e4}
ALSO: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 512},
    "cohere_compass_text": {"rope_parameters": {FULL: ANGLES, "sliding_attention": ANGLES}, "layer_types": [FULL] * 2},
    "dbrx": {"ffn_config": EXPERTS, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 0, "layer_types": [FULL, "sliding_attention"] * 2,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4, "vocab_size_per_layer_input": 512,
    },
    "gemma4": {"text_config": {"model_type": "gemma4_text", "num_hidden_layers": 2, "hidden_size": 64,
                               "vocab_size": 512, "vocab_size_per_layer_input": 512}},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 2,
                                         "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0, "vocab_size": 512}},
    "gemma4_text": {"vocab_size_per_layer_input": 512},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": [FULL, "conv"]},
    "mamba2": {"num_heads": 8, "n_groups": 2, "time_step_rank": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 4},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48]},
    "zamba": {**HYBRID, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 8},
    "zamba2": HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Fields without which `SMALL` makes no model of a type."""

NOT_BUILT = {
    "dots3_note": "its configuration has no small sizes",
    "gemma3n": "timm is not installed",
    "musicgen": "transformers cannot build it for generation alone",
    "musicgen_melody": "transformers cannot build it for generation alone",
}
WITHOUT_RULE = {"apertus", "apertus1p5_text", "data2vec-text", "openai-gpt", "reformer"}
"""Types with parameters that constructors set and transformers' rules do not."""

FEW = {"camembert", "cohere", "falcon_h1", "gemma3", "gpt2", "mamba", "mamba2", "mixtral", "openai-gpt", "xlstm"}
"""Tied weights, in camembert with the head first; rules for children and deeper modules; nested models; experts."""


def types() -> list[Any]:
    kinds = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [pytest.param(kind, marks=() if kind in FEW else pytest.mark.exhaustive) for kind in kinds]


def small(kind: str) -> dict[str, Any]:
    """Return a configuration with few parameters."""
    default = {} if kind == "gemma4_assistant" else CONFIG_MAPPING[kind]().to_dict()  # that one has no defaults
    return {"model_type": kind, "dtype": "float32", **sizes(default), **ALSO.get(kind, {})}


def sizes(default: dict[str, Any]) -> dict[str, Any]:
    fields = {name: size for name, size in SMALL.items() if type(default.get(name, size)) is int and name in default}
    if default.get("pad_token_id", 0) is None:
        fields["pad_token_id"] = SMALL["pad_token_id"]
    parts = {name: value for name, value in default.items() if isinstance(value, dict) and "model_type" in value}
    return fields | {name: {"model_type": part["model_type"], **sizes(part)} for name, part in parts.items()}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def differs(value: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether a tensor is not drawn as two others were: other constants, mean or standard deviation."""
    if not first.is_floating_point():
        return not torch.equal(value, first)
    fixed = first == second
    if fixed.sum() < fixed.numel() / 2000:
        fixed = torch.zeros_like(fixed)  # equal by chance
    if not torch.equal(value[fixed], first[fixed]):
        return True
    value, drawn = value[~fixed].double(), torch.cat([first[~fixed], second[~fixed]]).double()
    if value.numel() < 2:
        return False
    std = drawn.std()
    kurtosis = ((drawn - drawn.mean()) / std).pow(4).mean()
    # six standard errors of the difference between n elements and 2n
    unit = 6 * std * (1.5 / value.numel()) ** 0.5
    mean_error, std_error = (value.mean() - drawn.mean()).abs(), (value.std() - std).abs()
    return bool(mean_error > unit or std_error > unit * ((kurtosis - 1) / 4).clamp(min=0.2).sqrt())


@pytest.mark.parametrize("kind", types())
def test_initial_values_are_drawn_as_transformers_draws_them(kind):
    """Every parameter and buffer of every type, against two models that transformers fills."""
    if kind in NOT_BUILT:
        pytest.skip(NOT_BUILT[kind])
    model = huggingface.described(small(kind), ANY)
    if kind in WITHOUT_RULE:
        with pytest.raises(ConfigurationError, match=r"transformers has no initial value for"):
            fill(model)
        return
    torch.manual_seed(1)
    first, second = (dict(named_tensors(type(model)(model.config))) for _ in range(2))
    fill(model)
    values = dict(named_tensors(model))
    assert values.keys() == first.keys()
    assert [name for name, value in values.items() if differs(value.detach(), first[name], second[name])] == []


@torch.no_grad()
def fill(model: nn.Module) -> None:
    huggingface.leave_meta(model, torch.device("cpu"))
    huggingface.initialize(model, 0)


def test_values_are_those_of_transformers():
    """Their spread, ones in norms, zeros in biases; angles in float32 under weights in BF16."""
    content = SIZED | {"model_type": "llama", "attention_bias": True, "initializer_range": 0.05}
    model, _ = huggingface.converted(content, ANY, LayerRecipes.parse("mxfp8"))
    fill(model)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, QuantizedTensor)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"):
        param = model.get_parameter(name)
        value = param.dequantize() if isinstance(param, QuantizedTensor) else param
        assert value.float().std().item() == pytest.approx(0.05, rel=0.05)
    assert model.model.norm.weight.eq(1).all() and model.model.layers[1].self_attn.q_proj.bias.eq(0).all()
    plain = LlamaForCausalLM(LlamaConfig(**{**SIZED, "dtype": "float32"}))
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_what_transformers_gives_no_value_is_an_error(monkeypatch):
    model, _ = huggingface.converted(SIZED | {"model_type": "llama"}, ANY, LayerRecipes.parse("mxfp8"))
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ConfigurationError, match=r"no initial value for model\.rotary_emb\.inv_freq"):
        huggingface.leave_meta(model, torch.device("cpu"))
