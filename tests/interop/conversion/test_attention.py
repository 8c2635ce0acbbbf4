"""Attention of transformers models by quantshard's backends: the results of dense masks, without building them."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion import attention
from quantshard.modules.attention_backends import AttentionCall
from quantshard.modules.context_parallel import ContextParallel
from quantshard.tools.trainer.data.packing import Documents
from quantshard.tools.trainer.models import huggingface

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 4, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
SHARED, WINDOW = {"num_key_value_heads": 2}, {"sliding_window": 6}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "first_k_dense_replace": 2,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "sdpa"),
    "mistral": (WINDOW, "sdpa"),
    "qwen3": (SHARED, "sdpa"),
    "gemma2": (WINDOW | SHARED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}, "eager"),
    "deepseek_v3": (LATENT, "sdpa"),
    "llama4_text": (SHARED | {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 48}, "sdpa"),
    "gpt_oss": (WINDOW | SHARED | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None}, "eager"),
}
"""Fields of configurations, and transformers' own implementation: plain, with windows, heads that share keys, softcap,
values with fewer features, chunks, and sinks."""
BITWISE = ("llama", "mistral")

POSITIONS = torch.tensor([[*range(5), *range(9), *range(3), 0, *range(14)], [*range(32)]])
BOUNDARIES = torch.tensor([[0, 5, 14, 17, 18, 32, 32], [0, *[32] * 6]], dtype=torch.int32)
TOKENS = torch.randint(2, 61, (2, 32), generator=torch.Generator().manual_seed(0))


def made(name: str, implementation: str | None = None) -> Any:
    attention.register()
    torch.manual_seed(0)
    fields, own = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **SIZES | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_attn_implementation(own if implementation is None else implementation)
    return model


def results(model: Any, **arguments: Any) -> dict[str, Tensor]:
    """Logits and gradients."""
    model.zero_grad()
    logits = model(input_ids=TOKENS, use_cache=False, **arguments).logits
    (logits * torch.linspace(-1, 1, 61)).square().sum().backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], bitwise: bool) -> None:
    """Up to the rounding of attention: float32 sums of at most 32 terms, through two layers and back."""
    assert one.keys() == other.keys()
    for name, value in other.items():
        bound = 0.0 if bitwise else 64 * torch.finfo(torch.float32).eps * float(value.abs().max())
        assert float((one[name] - value).abs().max()) <= bound, name


def without_masks() -> Any:
    return mock.patch.object(masking_utils, "sdpa_mask", side_effect=AssertionError("a dense mask"))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama4_text", "gpt_oss")])
def test_packed_rows_are_those_of_a_dense_mask(name: str) -> None:
    """Documents from positions and from boundaries, and rows of one document; no dense mask is built."""
    expected = [results(made(name), position_ids=positions) for positions in (POSITIONS, POSITIONS[1:])]
    model = made(name, attention.NAME)
    with without_masks():
        found = results(model, position_ids=POSITIONS)
        rows = results(model, position_ids=POSITIONS[1:])
        with mock.patch.object(attention, "boundaries", BOUNDARIES):
            by_boundaries = results(model, position_ids=POSITIONS)
    assert_same(found, expected[0], name in BITWISE)
    assert_same(rows, expected[1], name in BITWISE)
    assert_same(by_boundaries, found, bitwise=True)
    assert float((rows["logits"] - found["logits"]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_other_masks_are_those_of_transformers(name: str) -> None:
    """Padding, chunks, a mask of the caller, and a cache."""
    model, own = made(name, attention.NAME), made(name)
    padding = torch.ones_like(TOKENS)
    # fewer than the window, so that each query sees a key
    padding[0, 28:] = 0
    visible = torch.ones(32, 32, dtype=torch.bool).tril().expand(2, 1, 32, 32)
    cases: list[dict[str, Any]] = [{"attention_mask": padding}, {"position_ids": POSITIONS}, {}]
    if name != "gpt_oss":
        cases += [{"attention_mask": visible}, {"attention_mask": torch.where(visible, 0.0, -torch.inf)}]
    for arguments in cases:
        # eager attention takes the mask that is added
        if own.config._attn_implementation == "sdpa" or arguments.get("attention_mask") is not visible:
            assert_same(results(model, **arguments), results(own, **arguments), bitwise=False)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": padding.flip(1)}
    assert torch.equal(model.generate(TOKENS, **options), own.generate(TOKENS, **options))


def test_sinks_windows_and_documents() -> None:
    """gpt-oss, whose mask transformers makes without positions: documents on their own are the same."""
    model, rows = made("gpt_oss", attention.NAME), BOUNDARIES[0, :-1].tolist()
    documents = Documents(POSITIONS[:1], BOUNDARIES[:1])
    with without_masks():
        packed = huggingface.run_model(model, TOKENS[:1], documents).logits[0]
        alone = [model(input_ids=TOKENS[:1, a:b], use_cache=False).logits[0] for a, b in itertools.pairwise(rows)]
        # as the collator of transformers passes boundaries
        by_argument = model(input_ids=TOKENS[:1], position_ids=POSITIONS[:1], cu_seq_lens_q=BOUNDARIES[0]).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_argument, packed, atol=1e-5, rtol=1e-5)


def test_boundaries_of_a_mask() -> None:
    """Rows have the same number of documents, at least 32 together; none if a token sees a later one, or in a graph."""
    document = POSITIONS.eq(0).cumsum(-1)

    def sees(row: Any, _: Any, query: Tensor, key: Tensor) -> Tensor:
        return (document[row, query] == document[row, key]) & (key <= query)

    options = {"batch_size": 2, "q_length": 32, "kv_length": 32, "device": torch.device("cpu"), "mask_function": sees}
    options |= {"allow_is_causal_skip": False, "config": None}
    call = attention.layer_mask(**options)
    assert isinstance(call, AttentionCall) and call.packings is not None and call.packings[0] is call.packings[1]
    packing = call.packings[0]
    assert packing.starts.view(2, 16)[:, :6].tolist() == [[0, 5, 14, 17, 18, 32], [32, *[64] * 5]]
    assert packing.lengths.view(2, 16)[:, :6].tolist() == [[5, 9, 3, 1, 14, 0], [32, *[0] * 5]]
    seen_later = options | {"mask_function": lambda row, head, query, key: sees(row, head, query, key) | (key == 7)}
    whole = options | {"mask_function": lambda row, head, query, key: (key <= query) & (row >= 0)}
    for other in (seen_later, whole, options | {"use_vmap": True}):
        assert attention.layer_mask(**other).shape == (2, 1, 32, 32)
    with mock.patch.object(kernel_dispatch, "is_capturing", return_value=True):
        assert attention.layer_mask(**options).shape == (2, 1, 32, 32)
        with mock.patch.object(attention, "boundaries", BOUNDARIES):
            assert isinstance(attention.layer_mask(**options), AttentionCall)


def test_values_with_fewer_features_are_padded() -> None:
    """Kernels need the same number of features; scores have the scale of queries, and outputs the values' features."""
    q, v = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 6)
    kernel = mock.Mock(side_effect=lambda call, q, k, v, *_: v)
    with mock.patch.object(attention, "prepare", return_value=kernel):
        out, weights = attention.attend(torch.nn.Identity(), q, q, v, None, scaling=0.5)
    call, *tensors = kernel.call_args.args[:4]
    assert call.scale == 0.5 and [x.shape for x in tensors] == [(1, 3, 2, 8)] * 3
    assert weights is None and torch.equal(out, v.transpose(1, 2))


def test_unsupported_arguments_raise() -> None:
    model, x = made("llama", attention.NAME), torch.ones(1, 2, 3, 4)
    with pytest.raises(ConfigurationError, match="'quantshard' does not support position_bias; use 'sdpa'"):
        attention.attend(model, x, x, x, None, position_bias=x)
    with mock.patch.object(ContextParallel, "running"), pytest.raises(ConfigurationError, match="context parallelism"):
        model(input_ids=TOKENS)
