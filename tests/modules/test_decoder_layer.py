"""Decoder layers, residual connections after a norm, stochastic depth, and activations with parameters."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from quantshard.errors import ConfigurationError
from quantshard.modules import (
    LayerNormMLP,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    autocast,
    quantized_model_init,
)
from quantshard.modules.layernorm_mlp import ClampedSwiGLU, activate

U = 2.0**-24
HIDDEN, HEADS, SIZE = 64, 4, 16
LENGTHS = (5, 1, 6)


def boundaries(lengths=LENGTHS):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def layer(recipe=None, **arguments):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_gqa_groups": 2, **arguments}
    with quantized_model_init(enabled=recipe is not None, recipe=recipe):
        module = TransformerLayer(HIDDEN, 96, HEADS, **options)
    for name, param in module.named_parameters():
        if param.ndim == 1:
            torch.manual_seed(len(name))
            param.data.add_(torch.randn_like(param) / 4)
    return module


def attention(p, prefix, x, source, causal):
    """Attention and its residual connection, by hand: x and source are [s, b, hidden]."""
    first = prefix + ("layernorm_qkv." if source is None else "layernorm_query.")
    h = F.layer_norm(x, (HIDDEN,), p[first + "layer_norm_weight"], p[first + "layer_norm_bias"])
    of_keys = first if source is None else prefix + "key_value."
    source = h if source is None else source
    q = F.linear(h, p[first + "query_weight"], p[first + "query_bias"])
    k, v = (F.linear(source, p[f"{of_keys}{part}_weight"], p[f"{of_keys}{part}_bias"]) for part in ("key", "value"))
    q, k, v = (part.unflatten(-1, (-1, SIZE)).permute(1, 2, 0, 3) for part in (q, k, v))
    k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
    scores = q @ k.mT / SIZE**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    context = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(-2)
    return F.linear(context, p[prefix + "proj.weight"], p[prefix + "proj.bias"]), h


def decoder(p, x, source, post_layernorm):
    for prefix, of in (("self_attention.", None), ("inter_attention.", source)):
        out, h = attention(p, prefix, x, of, causal=of is None)
        x = (h if post_layernorm else x) + out
    m = "layernorm_mlp."
    h = F.layer_norm(x, (HIDDEN,), p[m + "layer_norm_weight"], p[m + "layer_norm_bias"])
    out = F.linear(F.gelu(F.linear(h, p[m + "fc1_weight"], p[m + "fc1_bias"]), approximate="tanh"), p[m + "fc2_weight"])
    return (h if post_layernorm else x) + out + p[m + "fc2_bias"]


@pytest.mark.parametrize("post_layernorm", [False, True])
def test_decoder_is_the_block_written_by_hand(post_layernorm):
    """In float32 it is about as near to float64 as the block from plain PyTorch in float32 is."""
    module = layer(layer_type="decoder", apply_residual_connection_post_layernorm=post_layernorm)
    p = dict(module.named_parameters())
    x, source = torch.randn(7, 2, HIDDEN, requires_grad=True), torch.randn(9, 2, HIDDEN, requires_grad=True)
    dy = torch.randn(7, 2, HIDDEN)

    def results(run, x, source, params):
        y = run(x, source)
        return [t.double() for t in (y.detach(), *torch.autograd.grad(y, (x, source, *params), dy.to(y.dtype)))]

    ours = results(lambda x, source: module(x, encoder_output=source), x, source, p.values())
    plain = results(lambda x, source: decoder(p, x, source, post_layernorm), x, source, p.values())
    exact = {name: param.detach().double().requires_grad_() for name, param in p.items()}
    inputs = [t.detach().double().requires_grad_() for t in (x, source)]
    want = results(lambda x, source: decoder(exact, x, source, post_layernorm), *inputs, exact.values())
    for name, mine, other, right in zip(("y", "x", "source", *p), ours, plain, want, strict=True):
        assert (mine - right).abs().max() <= 4 * (other - right).abs().max() + 8 * U * right.abs().max() + 16 * U, name


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("input_layernorm", [False, True])
def test_fused_cross_attention_has_the_rows_of_its_order(input_layernorm, interleaved):
    options = {
        "num_gqa_groups": 2,
        "attention_type": "cross",
        "attention_dropout": 0.0,
        "input_layernorm": input_layernorm,
    }
    apart = MultiheadAttention(HIDDEN, HEADS, attn_mask_type="no_mask", **options)
    fused = MultiheadAttention(
        HIDDEN, HEADS, attn_mask_type="no_mask", fuse_qkv_params=True, qkv_weight_interleaved=interleaved, **options
    )
    key, value = (getattr(apart.key_value, f"{part}_weight").detach() for part in ("key", "value"))
    rows = (
        torch.stack((key.view(2, SIZE, -1), value.view(2, SIZE, -1)), 1).flatten(0, 2)
        if interleaved
        else torch.cat((key, value))
    )
    query = apart.layernorm_query.query_weight if input_layernorm else apart.query_layer.weight
    with torch.no_grad():
        fused.key_value.weight.copy_(rows)
        (fused.layernorm_query if input_layernorm else fused.query_layer).weight.copy_(query)
        fused.proj.weight.copy_(apart.proj.weight)
    x, source = torch.randn(5, 2, HIDDEN), torch.randn(6, 2, HIDDEN)
    torch.testing.assert_close(fused(x, encoder_output=source), apart(x, encoder_output=source), rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigurationError, match="'cross' needs encoder_output"):
        fused(x)


@pytest.mark.parametrize("recipe", ["bf16", "current", "mxfp8"])
def test_packed_decoder_equals_sequences_one_by_one(recipe):
    """Exactly in high precision up to the order of sums; by a recipe of tensor-wide scales, within its error."""
    of_source = (4, 2, 3)
    module = layer(recipe, layer_type="decoder", self_attn_mask_type="padding_causal", enc_dec_attn_mask_type="padding",
                   attn_input_format="thd", softmax_type="learnable", window_size=(3, 0))  # fmt: skip
    x, source = torch.randn(sum(LENGTHS), HIDDEN, requires_grad=True), torch.randn(sum(of_source), HIDDEN)
    freqs = RotaryPositionEmbedding(SIZE)(8)
    with autocast(recipe=recipe):
        out = module(
            x, encoder_output=source, cu_seqlens_q=boundaries(), cu_seqlens_kv=boundaries(of_source),
            max_seqlen_q=6, max_seqlen_kv=4, rotary_pos_emb=freqs,
        )  # fmt: skip
        grads = torch.autograd.grad(out.sum(), (x, *module.parameters()))
        assert module.self_attention.core_attention.softmax_offset.shape == (HEADS,)
        parts = [
            module(
                a,
                encoder_output=b,
                cu_seqlens_q=boundaries([len(a)]),
                cu_seqlens_kv=boundaries([len(b)]),
                rotary_pos_emb=freqs,
            )
            for a, b in zip(x.split(LENGTHS), source.split(of_source), strict=True)
        ]
        want = torch.cat(parts)
        wanted = torch.autograd.grad(want.sum(), (x, *module.parameters()))
    tolerance = 1e-5 if recipe == "bf16" else 0.1
    for a, b in zip((out, *grads), (want, *wanted), strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-5


def test_checkpointed_packed_layer_keeps_the_bits():
    module = layer("current", self_attn_mask_type="padding_causal", attn_input_format="thd", softmax_type="off-by-one")
    results = []
    for options in ({}, {"checkpoint_core_attention": True}):
        x = torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with autocast(recipe="current"):
            out = module(x, cu_seqlens_q=boundaries(), max_seqlen_q=6, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))])
    assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_packed_layer_compiles_into_one_graph():
    torch._dynamo.reset()
    module = layer(
        "bf16",
        self_attn_mask_type="padding_causal",
        attn_input_format="thd",
        softmax_type="learnable",
        window_size=(3, 0),
    )
    x, freqs = torch.randn(sum(LENGTHS), HIDDEN, requires_grad=True), RotaryPositionEmbedding(SIZE)(8)
    results = []
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        for lengths in (LENGTHS, (2, 4, 6)):
            out = run(x, cu_seqlens_q=boundaries(lengths), max_seqlen_q=7, rotary_pos_emb=freqs)
            results.append([out, *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))])
    for a, b in zip(results[0] + results[1], results[2] + results[3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Stochastic depth


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_drop_path_drops_blocks_of_batch_entries(layout):
    x = torch.randn(5, 64, HIDDEN) if layout == "sbhd" else torch.randn(64, 5, HIDDEN)
    module, plain = layer(drop_path_rate=0.5, attn_input_format=layout), layer(attn_input_format=layout)
    out, steady = module(x), module.eval()(x)
    assert torch.equal(steady, plain(x))
    axis = layout.index("b")
    changed = [(out.select(axis, i) - x.select(axis, i)).abs().max() > 0 for i in range(64)]
    assert 35 <= sum(changed) <= 60  # a quarter drops both blocks; 4 standard deviations of 64 draws
    with pytest.raises(ConfigurationError, match="needs batch entries"):
        layer(drop_path_rate=0.5, attn_input_format="thd", self_attn_mask_type="padding_causal")(
            torch.randn(12, HIDDEN), cu_seqlens_q=boundaries()
        )


# The MLP


@pytest.mark.parametrize("offset", [1.0, 0.0])
def test_clamped_swiglu(offset):
    gate, up = (
        (torch.randn(50, 8, dtype=torch.float64) * 4).requires_grad_(),
        (torch.randn(50, 8).double() * 4).requires_grad_(),
    )
    out = activate(gate.float(), ClampedSwiGLU(3.0, 1.5, offset), up.float())
    clamped = gate.clamp(max=3.0)
    want = clamped * torch.sigmoid(1.5 * clamped) * (up.clamp(-3.0, 3.0) + offset)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    dy = torch.randn(50, 8)
    for a, b in zip(
        torch.autograd.grad(out, (gate, up), dy), torch.autograd.grad(want, (gate, up), dy.double()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "params"), [("glu", None), ("clamped_swiglu", None), ("clamped_swiglu", {"limit": 0.5})]
)
def test_gated_activations_of_a_layer(activation, params):
    torch.manual_seed(0)
    module = LayerNormMLP(HIDDEN, 96, activation=activation, activation_params=params, bias=False)
    x = torch.randn(6, HIDDEN)
    h = F.layer_norm(x, (HIDDEN,), module.layer_norm_weight, module.layer_norm_bias)
    gate, up = h @ module.fc1_gate_weight.t(), h @ module.fc1_up_weight.t()
    if activation == "glu":
        hidden = torch.sigmoid(gate) * up
    else:
        limit = (params or {}).get("limit", 7.0)
        gate = gate.clamp(max=limit)
        hidden = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)
    torch.testing.assert_close(module(x), hidden @ module.fc2_weight.t(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_checkpointed_mlp_keeps_the_bits_and_less_memory(recipe):
    results, kept = [], []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        with quantized_model_init(recipe=recipe):
            module = LayerNormMLP(HIDDEN, 96, activation="swiglu", checkpoint=checkpoint)
        x, tensors = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_(), []
        with (
            autocast(recipe=recipe),
            torch.autograd.graph.saved_tensors_hooks(lambda t, to=tensors: to.append(t) or t, lambda t: t),
        ):
            out = module(x)
        out.square().sum().backward()
        results.append([out, x.grad, *(param.grad for param in module.parameters())])
        kept.append(sum(t.numel() for t in tensors))
    assert all(map(torch.equal, *results))
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_type": "both"}, "'both'.*encoder, decoder"),
        ({"layer_type": "decoder", "parallel_attention_mlp": True}, "layer_type='decoder' exclude each other"),
        ({"activation_params": {"limit": 1.0}}, "only 'clamped_swiglu' has activation_params"),
        ({"softmax_type": "sharp"}, "'sharp'.*learnable"),
        ({"softcap": -1.0}, "must be positive"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        layer(**arguments)


def test_an_encoder_takes_no_other_sequence():
    x = torch.randn(5, 2, HIDDEN)
    with pytest.raises(ConfigurationError, match="needs layer_type='decoder'"):
        layer()(x, encoder_output=x)
