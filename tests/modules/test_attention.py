"""Attention against its definition in float64, its masks and layouts, and rotary position embedding.

Bounds: a dot product of n float32 terms is off by at most (n + 2) u times the sum of their magnitudes, u = 2**-24. An
error e of the scores changes each softmax weight by a factor of at most exp(2 e).
"""

import math

import pytest
import torch

from quantshard.errors import ConfigurationError
from quantshard.modules import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
    quantized_model_init,
)

U = 2.0**-24
SIZE, QUERIES, BATCH = 32, 7, 2


def qkv(heads=3, groups=3, keys=QUERIES, layout="sbhd", seed=0):
    torch.manual_seed(seed)
    shapes = [(QUERIES, heads), (keys, groups), (keys, groups)]
    made = [torch.randn(BATCH, length, h, SIZE) for length, h in shapes]
    if layout == "sbhd":
        made = [x.transpose(0, 1).contiguous() for x in made]
    return [x.requires_grad_() for x in made]


def defined(q, k, v, visible, scale=None):
    """softmax(q k^T scale) v of "bshd" tensors in float64, [b, s, h * d], and the bound of its float32 result."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scale = scale or 1 / math.sqrt(q.shape[-1])
    scores = (q @ k.mT * scale).masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    off = U * (q.shape[-1] + 4) * scale * (q.abs() @ k.abs().mT).amax(-1, keepdim=True)
    bound = (weights @ v.abs()) * (torch.expm1(2 * off) + U * (2 * k.shape[-2] + 16))
    return (weights @ v).transpose(1, 2).flatten(-2), bound.transpose(1, 2).flatten(-2)


def assert_within(got, want, bound):
    excess = (got.double() - want).abs() - bound
    assert excess.max() <= 0, f"off by {(got.double() - want).abs().max():.3g}, {excess.max():.3g} over the bound"


def masks(keys):
    """Each mask type with the mask that is given and what a query then sees, [b, h, queries, keys]."""
    every = torch.ones(QUERIES, keys, dtype=torch.bool)
    padding = torch.zeros(BATCH, 1, 1, keys, dtype=torch.bool)
    padding[1, ..., -2:] = True
    torch.manual_seed(5)
    hidden = torch.rand(BATCH, 1, QUERIES, keys) < 0.4
    return {
        "no_mask": (None, every),
        "causal": (None, every.tril()),
        "causal_bottom_right": (None, every.tril(keys - QUERIES)),
        "padding": (padding, ~padding.expand(-1, -1, QUERIES, -1)),
        "padding_causal": (padding, ~padding & every.tril()),
        "arbitrary": (hidden, ~hidden),
    }


@pytest.mark.parametrize("groups", [3, 1])
@pytest.mark.parametrize("keys", [QUERIES, QUERIES + 4])
@pytest.mark.parametrize("kind", masks(QUERIES))
def test_core_is_its_definition(kind, keys, groups):
    given, visible = masks(keys)[kind]
    q, k, v = qkv(groups=groups, keys=keys, layout="bshd")
    out = DotProductAttention(3, SIZE, groups, qkv_format="bshd", attn_mask_type=kind)(q, k, v, given)
    assert out.shape == (BATCH, QUERIES, 3 * SIZE)
    assert_within(out, *defined(q.detach(), k.detach(), v.detach(), visible))


def test_softmax_scale():
    q, k, v = (x.detach() for x in qkv(layout="bshd"))
    visible = torch.ones(QUERIES, QUERIES, dtype=torch.bool)
    core = DotProductAttention(3, SIZE, qkv_format="bshd", attn_mask_type="no_mask", softmax_scale=0.5)
    assert_within(core(q, k, v), *defined(q, k, v, visible, 0.5))


def test_layouts_agree():
    core = DotProductAttention(3, SIZE)
    q, k, v = qkv()
    first = core(q, k, v)
    swapped = core(*(x.transpose(0, 1) for x in (q, k, v)), qkv_format="bshd")
    assert first.shape == (QUERIES, BATCH, 3 * SIZE)
    assert torch.equal(first, swapped.transpose(0, 1))


def test_a_query_that_sees_nothing_gets_zeros():
    q, k, v = qkv(layout="bshd")
    hidden = torch.zeros(1, 1, QUERIES, QUERIES, dtype=torch.bool)
    hidden[..., 2, :] = True
    out = DotProductAttention(3, SIZE, qkv_format="bshd", attn_mask_type="arbitrary")(q, k, v, hidden)
    out.sum().backward()
    assert torch.equal(out[:, 2], torch.zeros(BATCH, 3 * SIZE))
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert torch.equal(q.grad[:, 2], torch.zeros(BATCH, 3, SIZE))


def test_mask_type_of_the_call_wins():
    q, k, v = (x.detach() for x in qkv())
    core = DotProductAttention(3, SIZE, attn_mask_type="causal")
    assert torch.equal(
        core(q, k, v, attn_mask_type="no_mask"), DotProductAttention(3, SIZE, attn_mask_type="no_mask")(q, k, v)
    )
    assert not torch.equal(core(q, k, v), core(q, k, v, attn_mask_type="no_mask"))


def test_dropout_is_torchs_and_stops_in_eval():
    q, k, v = (x.detach() for x in qkv())
    core, plain = DotProductAttention(3, SIZE, attention_dropout=0.5), DotProductAttention(3, SIZE)
    torch.manual_seed(1)
    first, second = core(q, k, v), core(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(core(q, k, v), first)
    assert not torch.equal(first, second)
    assert torch.equal(core.eval()(q, k, v), plain(q, k, v))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_core_gives_the_same_bits(dropout):
    core = DotProductAttention(3, SIZE, attention_dropout=dropout)
    results = []
    for again in (False, True):
        q, k, v = qkv()
        torch.manual_seed(2)
        out = core(q, k, v, checkpoint_core_attention=again)
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpointed_core_keeps_less():
    kept: dict[bool, int] = {}
    for again in (False, True):
        packed: list[torch.Tensor] = []

        def keep(tensor, to=packed):
            to.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            DotProductAttention(3, SIZE)(*qkv(), checkpoint_core_attention=again)
        kept[again] = sum(tensor.numel() for tensor in packed)
    assert kept[True] == sum(tensor.numel() for tensor in qkv()) < kept[False]


# Multi-head attention


def multihead(**arguments):
    torch.manual_seed(3)
    module = MultiheadAttention(96, 3, attention_dropout=0.0, **arguments)
    for name, param in module.named_parameters():
        if param.ndim == 1:
            torch.manual_seed(len(name))
            param.data.add_(torch.randn_like(param) / 4)
    return module


@pytest.mark.parametrize("groups", [3, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", ["apart", "fused", "interleaved"])
def test_multihead_is_its_parts(order, bias, groups):
    """Queries, keys and values have a weight each, or one whose rows are all q, k and v or each group's q, k and v."""
    fused = order != "apart"
    options = {"num_gqa_groups": groups, "bias": bias}
    module = multihead(**options, fuse_qkv_params=fused, qkv_weight_interleaved=order == "interleaved")
    x = torch.randn(QUERIES, BATCH, 96)
    per = 3 // groups
    if not fused:
        layer = module.qkv
        weights = [(layer.query_weight, layer.query_bias), (layer.key_weight, layer.key_bias)]
        weights.append((layer.value_weight, layer.value_bias))
        assert [weight.shape[0] for weight, _ in weights] == [96, groups * SIZE, groups * SIZE]
        q, k, v = (torch.nn.functional.linear(x, *each).unflatten(-1, (-1, SIZE)) for each in weights)
    else:
        projected = torch.nn.functional.linear(x, module.qkv.weight, module.qkv.bias)
        if order == "interleaved":
            blocks = projected.view(QUERIES, BATCH, groups, per + 2, SIZE)
            q, k, v = blocks[..., :per, :].flatten(2, 3), blocks[..., per, :], blocks[..., per + 1, :]
        else:
            cut = (96, groups * SIZE, groups * SIZE)
            q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in projected.split(cut, dim=-1))
    context = DotProductAttention(3, SIZE, groups)(q, k, v)
    want = torch.nn.functional.linear(context, module.proj.weight, module.proj.bias)
    assert torch.equal(module(x), want)


def test_multihead_with_norm_rotary_and_tuple():
    module = multihead(input_layernorm=True, normalization="RMSNorm", return_bias=True, return_layernorm_output=True)
    x, freqs = torch.randn(QUERIES, BATCH, 96), RotaryPositionEmbedding(SIZE)(QUERIES + 3)
    out, bias, normed = module(x, rotary_pos_emb=freqs)
    fused = module.layernorm_qkv
    wanted = torch.nn.functional.rms_norm(x.double(), (96,), fused.layer_norm_weight.double(), 1e-5)
    torch.testing.assert_close(normed.double(), wanted, rtol=1e-5, atol=1e-5)
    parts = [(getattr(fused, f"{name}_weight"), getattr(fused, f"{name}_bias")) for name in ("query", "key", "value")]
    q, k, v = (torch.nn.functional.linear(normed, *part).unflatten(-1, (-1, SIZE)) for part in parts)
    context = DotProductAttention(3, SIZE)(apply_rotary_pos_emb(q, freqs), apply_rotary_pos_emb(k, freqs), v)
    assert torch.equal(out, torch.nn.functional.linear(context, module.proj.weight))
    assert bias is module.proj.bias
    other, _, _ = module(x, rotary_pos_emb=(freqs, freqs[1:]))
    assert not torch.equal(other, out)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_queries_and_keys_are_normalized_by_head(kind, before, fused):
    module = multihead(
        qk_norm_type=kind, qk_norm_eps=1e-3, qk_norm_before_rope=before, fuse_qkv_params=fused,
        qkv_weight_interleaved=False, num_gqa_groups=1,
    )  # fmt: skip
    x, freqs = torch.randn(QUERIES, BATCH, 96, requires_grad=True), RotaryPositionEmbedding(SIZE)(QUERIES)

    def normalized(x, norm):
        x = x.double()
        if kind == "L2Normalization":
            return x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt()
        if kind == "RMSNorm":
            return torch.nn.functional.rms_norm(x, (SIZE,), norm.weight.double(), 1e-3)
        return torch.nn.functional.layer_norm(x, (SIZE,), norm.weight.double(), norm.bias.double(), 1e-3)

    if fused:
        projected = torch.nn.functional.linear(x, module.qkv.weight, module.qkv.bias)
        q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in projected.split((96, SIZE, SIZE), dim=-1))
    else:
        q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in module.qkv(x))
    if before:
        q, k = normalized(q, module.q_norm), normalized(k, module.k_norm)
    q, k = (apply_rotary_pos_emb(part.float(), freqs) for part in (q, k))
    if not before:
        q, k = normalized(q, module.q_norm), normalized(k, module.k_norm)
    context = DotProductAttention(3, SIZE, 1)(q.float(), k.float(), v)
    want = torch.nn.functional.linear(context, module.proj.weight, module.proj.bias)
    got = module(x, rotary_pos_emb=freqs)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # 96 products of at most 1, each off by a few 2**-24
    got.square().sum().backward()
    found, x.grad = [param.grad for param in module.parameters()] + [x.grad], None
    for param in module.parameters():
        param.grad = None
    want.square().sum().backward()
    for mine, theirs in zip(found, [param.grad for param in module.parameters()] + [x.grad], strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm() + 1e-6  # a bias of all keys changes no softmax


def test_multihead_layouts_agree():
    first, second = multihead(qkv_format="sbhd"), multihead(qkv_format="bshd")
    x, freqs = torch.randn(QUERIES, BATCH, 96), RotaryPositionEmbedding(SIZE)(QUERIES)
    a = first(x, rotary_pos_emb=freqs)
    b = second(x.transpose(0, 1), rotary_pos_emb=freqs).transpose(0, 1)
    torch.testing.assert_close(a, b, rtol=0, atol=96 * U)  # the order of sums may differ, outputs are below 1


def test_projections_are_quantized_and_names_handed_down():
    with quantized_model_init(recipe="mxfp8"):
        module = MultiheadAttention(96, 3, input_layernorm=True, name="attn")
    quantized = [n for n, p in module.named_parameters() if type(p).__name__ != "Parameter"]
    parts = [f"layernorm_qkv.{part}_weight" for part in ("query", "key", "value")]
    assert quantized == [*parts, "proj.weight"]
    assert (module.layernorm_qkv.name, module.proj.name) == ("attn.layernorm_qkv", "attn.proj")


# Rotary position embedding


def rotated(x, positions, base, interleaved, rotary):
    """Each plane as a complex number times exp(i * position * frequency), in float64; x is [s, b, h, d]."""
    x = x.double()
    head, rest = x[..., :rotary], x[..., rotary:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    angles = positions.double()[:, None] * base ** (-torch.arange(0, rotary, 2).double() / rotary)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    parts = (turned.real, turned.imag)
    out = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((out, rest), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("offset", [0, 5])
def test_rotary_is_a_rotation(interleaved, percent, offset):
    x = qkv()[0].detach()
    rotary = int(SIZE * percent)
    embedding = RotaryPositionEmbedding(SIZE, percent, rotary_base=500.0, interleaved=interleaved)
    freqs = embedding(QUERIES + 2, offset)
    assert freqs.shape == (QUERIES + 2, 1, 1, rotary)
    assert freqs.dtype == torch.float32
    want = rotated(x, torch.arange(QUERIES) + offset, 500.0, interleaved, rotary)
    # an angle p f is off by a few u (p + 1); cos, sin and the two products add a few u
    bound = 16 * U * (QUERIES + offset + 1) * x.abs().amax()
    got = apply_rotary_pos_emb(x, freqs, interleaved=interleaved)
    assert_within(got, want, bound)
    batch_first = apply_rotary_pos_emb(x.transpose(0, 1), freqs, "bshd", interleaved=interleaved)
    assert torch.equal(batch_first.transpose(0, 1), got)
    assert torch.equal(
        apply_rotary_pos_emb(x.bfloat16(), freqs, interleaved=interleaved),
        apply_rotary_pos_emb(x.bfloat16().float(), freqs, interleaved=interleaved).bfloat16(),
    )


@pytest.mark.parametrize(("length", "stretch"), [(8, 2.0), (32, 2.0), (48, 3.0)])
def test_rotary_interpolation(length, stretch):
    plain, stretched = RotaryPositionEmbedding(8), RotaryPositionEmbedding(8, 1.0, 2, 16)
    torch.testing.assert_close(stretched(length) * stretch, plain(length))


def test_rotary_survives_meta():
    want = RotaryPositionEmbedding(SIZE)(9)
    with torch.device("meta"):
        module = RotaryPositionEmbedding(SIZE)
    assert torch.equal(module.to_empty(device="cpu")(9, device="cpu"), want)
    assert not list(module.state_dict())


# Refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DotProductAttention(3, SIZE, attn_mask_type="alibi"), "'alibi'.*no_mask, causal"),
        (lambda: DotProductAttention(3, SIZE, qkv_format="hds"), "'hds'.*sbhd, bshd, thd"),
        (lambda: DotProductAttention(3, SIZE, 2), "num_gqa_groups 2 must divide num_attention_heads 3"),
        (
            lambda: DotProductAttention(4, SIZE, 2, tp_size=4),
            "tp_size 4 must divide num_attention_heads and num_gqa_groups; choose a divisor of 2",
        ),
        (
            lambda: DotProductAttention(3, SIZE, tp_size=2),
            "tp_size 2 must divide num_attention_heads and num_gqa_groups; choose a divisor of 3",
        ),
        (
            lambda: MultiheadAttention(
                96, 6, fuse_qkv_params=True, qkv_weight_interleaved=False, set_parallel_mode=True, tp_size=2
            ),
            "needs qkv_weight_interleaved=True",
        ),
        (lambda: MultiheadAttention(96, 3, qk_norm_type="GroupNorm"), "L2Normalization, RMSNorm, LayerNorm, or None"),
        (lambda: MultiheadAttention(97, 3), "97 / 3 is no integer; give kv_channels"),
        (lambda: MultiheadAttention(96, 3, num_gqa_groups=0), "num_gqa_groups 0"),
        (lambda: MultiheadAttention(96, 3, qkv_format="hds"), "'hds'"),
        (lambda: MultiheadAttention(96, 3, attention_type="both"), "'both'.*self, cross"),
        (lambda: RotaryPositionEmbedding(8, 1.0, 2), "give both or neither"),
        (lambda: apply_rotary_pos_emb(torch.ones(3, 1, 1, 4), torch.ones(2, 1, 1, 4)), "2 positions and 4"),
        (lambda: apply_rotary_pos_emb(torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1, 6)), "and 6 features"),
        (lambda: apply_rotary_pos_emb(torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1, 4), "hds"), "'hds'"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "mask", "message"),
    [
        ("padding", None, "'padding' needs an attention_mask"),
        ("arbitrary", torch.zeros(1, 1, 1, QUERIES), "attention_mask is torch.float32; use bool"),
    ],
)
def test_refused_masks(kind, mask, message):
    with pytest.raises(ConfigurationError, match=message):
        DotProductAttention(3, SIZE)(*qkv(), mask, attn_mask_type=kind)


def test_refused_shapes():
    q, k, v = qkv()
    for bad in ((q[..., :16], k, v), (q, k[:, :, :1], v), (q, k, v[:-1]), (q[:, 0], k[:, 0], v[:, 0])):
        with pytest.raises(ConfigurationError, match=r"'sbhd' the last dims must be \(3, 32\)"):
            DotProductAttention(3, SIZE)(*bad)
