"""Packed sequences, windows, sinks, softcap and biases of the core attention, against a definition in float64."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from quantshard.errors import ConfigurationError
from quantshard.modules import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
    attention_backends as backends,
)

HEADS, GROUPS, SIZE = 4, 2, 16
LENGTHS = (5, 1, 0, 7)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
"""Sums of at most 16 float32 products, in another order; values and gradients are of order 1 to 10."""


def boundaries(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def tokens(count, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, SIZE, generator=generator).requires_grad_()


def packed(of_queries=LENGTHS, of_keys=LENGTHS):
    return tokens(sum(of_queries), HEADS, 0), tokens(sum(of_keys), GROUPS, 1), tokens(sum(of_keys), GROUPS, 2)


def defined(q, k, v, *, causal=True, window=(-1, -1), bottom_right=False, sinks=None, softcap=0.0, bias=None):
    """Attention of one sequence [tokens, heads, features] in float64, from its definition."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = q @ k.mT / math.sqrt(SIZE)
    scores = scores if not softcap else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.double()
    shift = scores.shape[-1] - scores.shape[-2] if bottom_right else 0
    for i, j in itertools.product(*(range(size) for size in scores.shape[-2:])):
        at, (left, right) = i + shift, window
        if (causal and j > at) or (left >= 0 and j < at - left) or (right >= 0 and j > at + right):
            scores = scores.index_put(
                (torch.arange(HEADS), torch.tensor(i), torch.tensor(j)), torch.tensor(-math.inf).double()
            )
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    return (weights / total.clamp(min=1e-300) @ v).transpose(0, 1).flatten(-2)


def by_sequence(qkv, of_queries, of_keys, **options):
    parts = zip(*(x.split(list(n)) for x, n in zip(qkv, (of_queries, of_keys, of_keys), strict=True)), strict=True)
    return torch.cat([defined(*part, **options) for part in parts])


def run(backend, core, inputs, **options):
    """The output; of flex_attention without gradients, which PyTorch lacks on the CPU."""
    if backend != "flex":
        return core(*inputs, **options)
    with torch.no_grad():
        return core(*(x.detach() for x in inputs), **options)


def assert_same(out, want, inputs):
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(out.double(), want, **TOLERANCE)
    if not out.requires_grad:
        return
    got = torch.autograd.grad(out, inputs, dy)
    for a, b in zip(got, torch.autograd.grad(want, inputs, dy.double()), strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


CASES = {
    "causal": ({}, {}),
    "all keys": ({"attn_mask_type": "padding"}, {"causal": False}),
    "window": ({"window_size": (2, 0)}, {"window": (2, 0)}),
    "both sides": ({"attn_mask_type": "padding", "window_size": (1, 2)}, {"causal": False, "window": (1, 2)}),
    "softcap": ({"softcap": 0.5}, {"softcap": 0.5}),
    "sinks and window": ({"softmax_type": "learnable", "window_size": (3, 0)}, {"window": (3, 0), "sinks": True}),
    "zero sink": ({"softmax_type": "off-by-one"}, {"sinks": torch.zeros(HEADS)}),
}
backends._load(backends._FLEX)
EAGER_FLEX = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@EAGER_FLEX
@pytest.mark.parametrize("backend", ["auto", "unfused", "flex"])
@pytest.mark.parametrize("case", CASES)
def test_sequences_do_not_see_each_other(case, backend, monkeypatch):
    """Packed tokens give the outputs and gradients of the sequences one by one, by each backend that a CPU can run."""
    monkeypatch.setattr(backends, "TABLE", {**backends.TABLE, "flex": backends.TABLE["flex"]._replace(module="")})
    if backend == "auto":
        monkeypatch.delitem(backends.TABLE, "flex")
    options, definition = CASES[case]
    core = DotProductAttention(
        HEADS,
        SIZE,
        GROUPS,
        qkv_format="thd",
        attention_backend=backend,
        **{"attn_mask_type": "padding_causal", **options},
    )
    inputs = packed()
    if definition.get("sinks") is True:
        torch.nn.init.normal_(core.softmax_offset)
        definition, inputs = {**definition, "sinks": core.softmax_offset}, (*inputs, core.softmax_offset)
    out = run(backend, core, inputs[:3], cu_seqlens_q=boundaries(LENGTHS), max_seqlen_q=9)
    assert_same(out, by_sequence(inputs[:3], LENGTHS, LENGTHS, **definition), inputs)


@EAGER_FLEX
@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("kind", ["padding_causal", "padding_causal_bottom_right", "padding"])
def test_other_sequences_as_keys(kind, backend, monkeypatch):
    if backend == "flex":
        monkeypatch.setitem(backends.TABLE, "flex", backends.TABLE["flex"]._replace(module=""))
    of_queries, of_keys = (3, 2, 4), (5, 2, 6)
    inputs = packed(of_queries, of_keys)
    core = DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type=kind, attention_backend=backend)
    out = run(
        backend, core, inputs, window_size=(2, 0 if kind != "padding" else 1),
        cu_seqlens_q=boundaries(of_queries), cu_seqlens_kv=boundaries(of_keys),
    )  # fmt: skip
    options = {"causal": kind != "padding", "bottom_right": kind != "padding_causal"}
    window = (2, -1 if kind != "padding" else 1)
    assert_same(out, by_sequence(inputs, of_queries, of_keys, window=window, **options), inputs)


def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """PyTorch's `varlen_attn`, which runs on CUDA only. Long gaps stay uninitialized, as in the kernel."""
    parts = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        assert max_q >= 1 and max_k >= 1
        out = defined(q[a:b], k[c:d], v[c:d], causal=False, window=window_size, bottom_right=True)
        parts.append(torch.full_like(out, torch.nan) if b - a > max_q else out)
    return torch.cat(parts).to(q.dtype).unflatten(-1, (HEADS, SIZE))


@pytest.mark.parametrize("takes_gqa", [True, False])
@pytest.mark.parametrize("layout", ["thd", "sbhd", "bshd"])
def test_varlen_kernel_gets_all_boundaries(layout, takes_gqa, monkeypatch):
    """Unused tokens are sequences of their own for the kernel, and get zeros, also as gradients."""
    function = varlen_attn if takes_gqa else lambda *a, scale, window_size: varlen_attn(*a, window_size=window_size)
    monkeypatch.setattr(
        backends, "_LOADED", {backends._VARLEN: SimpleNamespace(varlen_attn=function), "enable_gqa": takes_gqa}
    )
    monkeypatch.setitem(backends.TABLE, "varlen", backends.TABLE["varlen"]._replace(module=""))
    lengths, size = (5, 1, 4), 7
    inputs = packed([size] * 3, [size] * 3)
    core = DotProductAttention(HEADS, SIZE, GROUPS, attn_mask_type="padding_causal", attention_backend="varlen")
    options = {"cu_seqlens_q": boundaries(lengths), "window_size": (2, 0), "qkv_format": layout}
    if layout == "thd":
        options |= {"cu_seqlens_q_padded": boundaries([size] * 3), "max_seqlen_q": 5}
        out = core(*inputs, **options)
    else:
        batch = [x.unflatten(0, (3, size)) for x in inputs]
        out = core(*(x.transpose(0, 1) if layout == "sbhd" else x for x in batch), **options)
        out = (out.transpose(0, 1) if layout == "sbhd" else out).flatten(0, 1)
    cut = [x.unflatten(0, (3, size)) for x in inputs]
    want = torch.zeros(3, size, HEADS * SIZE, dtype=torch.float64)
    for i, n in enumerate(lengths):
        want[i, :n] = defined(*(x[i, :n] for x in cut), window=(2, 0))
    assert_same(out, want.flatten(0, 1), inputs)


@EAGER_FLEX
@pytest.mark.parametrize("backend", ["auto", "unfused", "flex", "varlen"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_rows_of_sequences(layout, backend, monkeypatch):
    """Several sequences in each row of a batch; on a CPU "auto" has the bits of a mask."""
    monkeypatch.setattr(
        backends, "_LOADED", {**backends._LOADED, backends._VARLEN: SimpleNamespace(varlen_attn=varlen_attn)}
    )
    monkeypatch.setitem(backends._LOADED, "enable_gqa", True)
    table = {name: row._replace(module="") if name == backend else row for name, row in backends.TABLE.items()}
    monkeypatch.setattr(backends, "TABLE", table)
    lengths, inputs = ((4, 0, 3, 0), (1, 4, 2, 0)), packed((14,), (14,))
    cumulative = torch.stack([boundaries(row) for row in lengths])
    batch = [x.unflatten(0, (2, 7)) for x in inputs]
    batch = [x.transpose(0, 1) if layout == "sbhd" else x for x in batch]
    core = DotProductAttention(HEADS, SIZE, GROUPS, qkv_format=layout, attn_mask_type="padding_causal",
                               attention_backend=backend)  # fmt: skip
    out = run(backend, core, batch, cu_seqlens_q=cumulative, window_size=(2, 0))
    rows = (out.transpose(0, 1) if layout == "sbhd" else out).flatten(0, 1)
    assert_same(rows, by_sequence(inputs, sum(lengths, ()), sum(lengths, ()), window=(2, 0)), inputs)
    if backend == "auto":
        documents = torch.tensor([[0] * 4 + [1] * 3, [0] + [1] * 4 + [2] * 2])[:, None]
        places = torch.arange(7)[:, None] - torch.arange(7)
        mask = (documents[..., None] != documents[:, :, None]) | (places < 0) | (places > 2)
        assert torch.equal(core(*batch, mask, attn_mask_type="arbitrary"), out)


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_unused_tokens_change_nothing(layout):
    lengths, size = (5, 1, 4), 7
    inputs = packed([size] * 3, [size] * 3)
    core = DotProductAttention(HEADS, SIZE, GROUPS, qkv_format=layout, attn_mask_type="padding_causal")
    options = {"cu_seqlens_q": boundaries(lengths)}
    if layout == "thd":
        options |= {"cu_seqlens_q_padded": boundaries([size] * 3), "pad_between_seqs": True}
    batch = [x.unflatten(0, (3, size)) for x in inputs]
    out = core(*(inputs if layout == "thd" else batch), **options).view(3, size, -1)
    want = torch.zeros(3, size, HEADS * SIZE, dtype=torch.float64)
    for i, n in enumerate(lengths):
        want[i, :n] = defined(*(x[i, :n] for x in batch))
    assert_same(out, want, inputs)


@pytest.mark.parametrize("kind", ["causal", "no_mask", "causal_bottom_right", "arbitrary", "padding"])
@pytest.mark.parametrize("keys", [6, 9])
def test_windows_of_batches(kind, keys):
    """`bottom_right_diagonal` moves the window of the types without a corner of their own; masks apply as well."""
    inputs = tokens(6, HEADS, 0), tokens(keys, GROUPS, 1), tokens(keys, GROUPS, 2)
    mask = torch.zeros(1, 1, 1 if kind == "padding" else 6, keys, dtype=torch.bool)
    window = (2, 0) if "causal" in kind else (2, 1)
    for corner in (None, False):
        out = DotProductAttention(HEADS, SIZE, GROUPS, attn_mask_type=kind, window_size=window)(
            *(x.unsqueeze(1) for x in inputs), mask if kind in ("padding", "arbitrary") else None,
            bottom_right_diagonal=corner,
        )  # fmt: skip
        bottom_right = kind == "causal_bottom_right" or (kind != "causal" and corner is None)
        want = defined(*inputs, causal="causal" in kind, window=window, bottom_right=bottom_right)
        assert_same(out.squeeze(1), want, inputs)


def test_biases():
    inputs = packed([6], [6])
    bias, batch = torch.randn(1, HEADS, 6, 6), [x.unsqueeze(1) for x in inputs]
    core = DotProductAttention(HEADS, SIZE, GROUPS)
    out = core(*batch, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    assert_same(out.squeeze(1), defined(*inputs, bias=bias[0]), inputs)
    out = core(*batch, core_attention_bias_type="pre_scale_bias", core_attention_bias=bias)
    assert_same(out.squeeze(1), defined(*inputs, bias=bias[0] / math.sqrt(SIZE)), inputs)
    places = torch.arange(6)
    slopes = torch.tensor([2.0 ** (-2 * i) for i in range(1, HEADS + 1)])
    alibi = -slopes[:, None, None] * (places[:, None] - places).abs()
    assert_same(core(*batch, core_attention_bias_type="alibi").squeeze(1), defined(*inputs, bias=alibi), inputs)
    out = core(*batch, core_attention_bias_type="alibi", alibi_slopes=slopes * 2)
    assert_same(out.squeeze(1), defined(*inputs, bias=2 * alibi), inputs)


def test_a_mask_of_a_causal_type_is_ignored():
    q, k, v = (x.unsqueeze(1) for x in packed([6], [6]))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    core = DotProductAttention(HEADS, SIZE, GROUPS)
    with pytest.warns(UserWarning, match="attention_mask is ignored: attn_mask_type='causal' uses none"):
        assert torch.equal(core(q, k, v, mask), core(q, k, v))


def test_a_pair_of_padding_masks():
    inputs = packed([4], [6])
    masked_q, masked_k = torch.zeros(1, 1, 1, 4, dtype=torch.bool), torch.zeros(1, 1, 1, 6, dtype=torch.bool)
    masked_q[..., 3:], masked_k[..., 4:] = True, True
    core = DotProductAttention(HEADS, SIZE, GROUPS, attn_mask_type="padding_causal_bottom_right")
    out = core(*(x.unsqueeze(1) for x in inputs), (masked_q, masked_k)).squeeze(1)
    q, k, v = inputs
    want = torch.cat((defined(q[:3], k[:4], v[:4], bottom_right=True), torch.zeros(1, HEADS * SIZE).double()))
    assert_same(out, want, inputs)


@pytest.mark.parametrize("again", [False, True])
def test_checkpointed_core_keeps_the_bits(again):
    core = DotProductAttention(
        HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding_causal", softmax_type="learnable"
    )
    results = []
    for checkpointed in (False, again):
        inputs = (*packed(), core.softmax_offset)
        out = core(*inputs[:3], cu_seqlens_q=boundaries(LENGTHS), checkpoint_core_attention=checkpointed)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(map(torch.equal, *results))


# Rotary positions


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_start_again(interleaved):
    x, freqs = packed()[0], RotaryPositionEmbedding(SIZE, interleaved=interleaved)(8)
    got = apply_rotary_pos_emb(x, freqs, "thd", cu_seqlens=boundaries(LENGTHS), interleaved=interleaved)
    parts = [apply_rotary_pos_emb(part[:, None], freqs, interleaved=interleaved)[:, 0] for part in x.split(LENGTHS)]
    assert torch.equal(got, torch.cat(parts))
    starts = torch.tensor([1, 0, 3, 1])
    got = apply_rotary_pos_emb(
        x, freqs, "thd", cu_seqlens=boundaries(LENGTHS), start_positions=starts, interleaved=interleaved
    )
    parts = [
        apply_rotary_pos_emb(part[:, None], freqs[start:], interleaved=interleaved)[:, 0]
        for part, start in zip(x.split(LENGTHS), starts.tolist(), strict=True)
    ]
    assert torch.equal(got, torch.cat(parts))


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_rotary_start_positions_by_batch(layout):
    x, freqs, starts = tokens(10, HEADS, 0).unflatten(0, (2, 5)), RotaryPositionEmbedding(SIZE)(8), torch.tensor([0, 3])
    want = torch.stack([apply_rotary_pos_emb(x[i][:, None], freqs[s:])[:, 0] for i, s in enumerate([0, 3])])
    x, want = (x.transpose(0, 1), want.transpose(0, 1)) if layout == "sbhd" else (x, want)
    assert torch.equal(apply_rotary_pos_emb(x, freqs, layout, start_positions=starts), want)


@pytest.mark.parametrize("order", ["apart", "fused"])
def test_multihead_attention_of_packed_sequences(order):
    """With projections and rotary positions: the results of the sequences one by one."""
    torch.manual_seed(0)
    module = MultiheadAttention(
        64, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal",
        fuse_qkv_params=order == "fused", qkv_weight_interleaved=False,
    )  # fmt: skip
    x, freqs = torch.randn(sum(LENGTHS), 64, requires_grad=True), RotaryPositionEmbedding(SIZE)(8)
    out = module(x, rotary_pos_emb=freqs, cu_seqlens_q=boundaries(LENGTHS), max_seqlen_q=8)
    module.qkv_format = module.core_attention.qkv_format = "sbhd"
    parts = [
        module(part[:, None], attn_mask_type="causal", rotary_pos_emb=freqs)[:, 0]
        for part in x.split(LENGTHS)
        if len(part)
    ]
    assert_same(out, torch.cat(parts).double(), (x, *module.parameters()))


# The choice of a backend


GPU, HALF = torch.device("cuda", 0), torch.bfloat16


@pytest.mark.parametrize(
    ("needs", "chosen"),
    [
        ((), "sdpa"), (("mask", "dropout"), "sdpa"), (("top left",), "sdpa"), (("bottom right",), "varlen"),
        (("packed",), "varlen"), (("window",), "varlen"), (("packed", "top left"), "flex"),
        (("packed", "dropout"), "masked sdpa"), (("window", "mask"), "masked sdpa"), (("sinks",), "flex"),
        (("packed", "softcap", "window"), "flex"), (("sinks", "dropout"), "unfused"), (("softcap", "mask"), "unfused"),
    ],
)  # fmt: skip
def test_choice_on_a_gpu(needs, chosen, monkeypatch):
    monkeypatch.setattr(backends, "_LOADED", {backends._VARLEN: varlen_attn})
    assert backends.choose("auto", needs, GPU, HALF, 128) == chosen
    elsewhere = (
        chosen if chosen in ("sdpa", "unfused") else "unfused" if {"sinks", "softcap"} & {*needs} else "masked sdpa"
    )
    assert backends.choose("auto", needs, torch.device("cpu"), HALF, 128) == elsewhere


def test_explain_names_the_choice():
    cpu = torch.device("cpu")
    core = DotProductAttention(HEADS, SIZE, qkv_format="thd", attn_mask_type="padding_causal", softmax_type="learnable")
    assert core.describe_backend(cpu, torch.float32) == "unfused"
    window = DotProductAttention(HEADS, SIZE, window_size=(3, 0))
    assert window.describe_backend(cpu, torch.float32) == "PyTorch's own choice with a mask"


# Refusals


def call(lengths=LENGTHS, **options):
    arguments = {
        "cu_seqlens_q": boundaries(lengths),
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        **options,
    }
    return DotProductAttention(HEADS, SIZE, GROUPS)(*packed(), **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (5, 1, 6)}, r"6 tokens from 6 must end at 13; give cu_seqlens_q_padded"),
        ({"lengths": (5, 1, 8)}, "8 tokens from 6 must end at 13"),
        ({"lengths": (5, 9, -1)}, "cu_seqlens_q must not decrease"),
        ({"max_seqlen_q": 6}, "max_seqlen_q=6, but a sequence has 7 tokens"),
        ({"cu_seqlens_q": None}, "'thd' needs cu_seqlens_q"),
        ({"attn_mask_type": "causal"}, "as 'padding_causal', not 'causal'"),
        ({"cu_seqlens_q": boundaries(LENGTHS)[None]}, r"must be int32 \[sequences"),
        ({"cu_seqlens_kv": boundaries((6, 7))}, "has 4 sequences, cu_seqlens_kv 2"),
        ({"pad_between_seqs": True}, "needs cu_seqlens_q_padded"),
        ({"window_size": (-2, 0)}, "use sizes >= 0"),
        ({"attn_mask_type": "padding", "window_size": (-1, 0)}, "or a causal type"),
        ({"core_attention_bias_type": "post_scale_bias"}, "needs core_attention_bias"),
        ({"core_attention_bias_type": "no_such"}, "'no_such'.*alibi"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        call(**options)


def test_refused_rows():
    core = DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="bshd", attn_mask_type="padding_causal")
    q, k, v = (x.unflatten(0, (2, 7)) for x in packed((14,), (14,)))
    rows = torch.stack([boundaries((4, 3)), boundaries((4, 3))])
    for options, message in (
        ({"cu_seqlens_q": rows[:1]}, r"must be int32 \[sequences \+ 1\], or for rows \[b, sequences \+ 1\]"),
        ({"cu_seqlens_q": rows[:, :2]}, "4 tokens from 0 must end at 7"),
        ({"cu_seqlens_q": rows, "cu_seqlens_kv": rows.clone()}, "rows of several sequences need the boundaries"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            core(q, k, v, **options)


def test_refused_rotary_positions():
    freqs = RotaryPositionEmbedding(SIZE)(6)
    with pytest.raises(ConfigurationError, match="a sequence ends at 7, but freqs are for 6 positions"):
        apply_rotary_pos_emb(packed()[0], freqs, "thd", cu_seqlens=boundaries(LENGTHS))
    with pytest.raises(ConfigurationError, match="give cu_seqlens with tensor_format='thd' only"):
        apply_rotary_pos_emb(packed()[0], freqs, "thd")
    with pytest.raises(ConfigurationError, match="attention_backend='flash' does not support packed sequences and att"):
        backends.choose("flash", ("packed", "sinks"), GPU, HALF, 64)


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_nan_in_unused_tokens_stays_there(layout: str) -> None:
    tokens = [torch.randn(15, 4, 8) if layout == "thd" else torch.randn(2, 8, 4, 8) for _ in range(3)]
    for x in tokens:
        (x if layout == "thd" else x[0])[5:8] = float("nan")
    core = DotProductAttention(4, 8, qkv_format=layout, attn_mask_type="padding_causal")
    padded = {"cu_seqlens_q_padded": torch.tensor([0, 8, 15])} if layout == "thd" else {}
    out = core(*tokens, cu_seqlens_q=torch.tensor([0, 5, 12]), **padded)
    unused = out[5:8] if layout == "thd" else out[0, 5:8]
    assert out.isfinite().all() and not unused.any()


@pytest.mark.parametrize("boundaries", [[2, 5, 12], [-1, 5, 12], [12]])
def test_boundaries_start_at_zero(boundaries: list[int]) -> None:
    core = DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding_causal")
    with pytest.raises(ConfigurationError, match="cu_seqlens_q must"):
        core(*[torch.randn(12, 4, 8)] * 3, cu_seqlens_q=torch.tensor(boundaries))


def test_ignored_lengths_warn() -> None:
    core = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="causal")
    with pytest.warns(UserWarning, match="cu_seqlens_q is ignored"):
        core(*[torch.randn(2, 6, 4, 8)] * 3, cu_seqlens_q=torch.tensor([0, 3, 9]))


def test_batches_of_queries_and_keys_are_equal() -> None:
    core = DotProductAttention(4, 8, qkv_format="bshd")
    with pytest.raises(ConfigurationError, match="batches equal"):
        core(torch.randn(2, 6, 4, 8), *[torch.randn(1, 6, 4, 8)] * 2)
