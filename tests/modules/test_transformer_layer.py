"""Whole layers: against plain PyTorch, how they are born, and which of TransformerEngine's arguments they take."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from quantshard import numerics
from quantshard.errors import ConfigurationError
from quantshard.modules import (
    LayerNormMLP,
    Linear,
    RotaryPositionEmbedding,
    TransformerLayer,
    autocast,
    quantized_model_init,
)
from quantshard.modules.base.initialization import WeightSpec
from quantshard.numerics import distributions
from tests.covering import exhaustive, in_turns

U = 2.0**-24
NAMES = ["delayed", "current", "block", "rowwise", "mxfp8", "nvfp4", "bf16"]
SHAPE = (7, 2, 96)  # [s, b, h]
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 1}
GPT = {"normalization": "LayerNorm", "activation": "gelu", "bias": True}
STYLES = {"llama": LLAMA, "gpt": GPT}


def layer(recipe="bf16", seed=0, perturbed=False, **arguments):
    torch.manual_seed(seed)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    with quantized_model_init(recipe=recipe):
        module = TransformerLayer(96, 200, 3, **{**dropout, **arguments})
    if perturbed:  # norms and biases off their initial constants
        for name, param in module.named_parameters():
            if param.ndim == 1:
                torch.manual_seed(len(name))
                param.data.add_(torch.randn_like(param) / 4)
    return module


# Against plain PyTorch


def llama(p, x, freqs):
    """A Llama block written by hand; `p` are the layer's parameters by name, x is [s, b, h]."""
    attention, mlp = "self_attention.", "layernorm_mlp."
    cos, sin = freqs.to(x.dtype).cos(), freqs.to(x.dtype).sin()

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    h = norm(x, p[attention + "layernorm_qkv.layer_norm_weight"])
    q, k, v = (h @ p[f"{attention}layernorm_qkv.{part}_weight"].t() for part in ("query", "key", "value"))
    q, k, v = rotate(q.unflatten(-1, (3, 32))), rotate(k.unsqueeze(-2)), v.unsqueeze(-2)
    scores = torch.einsum("qbhd,kbgd->bhqk", q, k) / 32**0.5
    hidden = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    context = torch.einsum("bhqk,kbgd->qbhd", weights, v).flatten(-2)
    x = x + context @ p[attention + "proj.weight"].t()
    h = norm(x, p[mlp + "layer_norm_weight"])
    gate, up = h @ p[mlp + "fc1_gate_weight"].t(), h @ p[mlp + "fc1_up_weight"].t()
    return x + (F.silu(gate) * up) @ p[mlp + "fc2_weight"].t()


def gpt(p, x, freqs):
    """A GPT block from PyTorch's own functions."""
    a, m = "self_attention.", "layernorm_mlp."
    fused = a + "layernorm_qkv."
    h = F.layer_norm(x, (96,), p[fused + "layer_norm_weight"], p[fused + "layer_norm_bias"])
    parts = [(p[f"{fused}{part}_weight"], p[f"{fused}{part}_bias"]) for part in ("query", "key", "value")]
    q, k, v = (F.linear(h, *part).unflatten(-1, (3, 32)).permute(1, 2, 0, 3) for part in parts)
    context = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(-2)
    x = x + F.linear(context, p[a + "proj.weight"], p[a + "proj.bias"])
    h = F.layer_norm(x, (96,), p[m + "layer_norm_weight"], p[m + "layer_norm_bias"])
    h = F.gelu(F.linear(h, p[m + "fc1_weight"], p[m + "fc1_bias"]), approximate="tanh")
    return x + F.linear(h, p[m + "fc2_weight"], p[m + "fc2_bias"])


def results(forward, parameters, x, dy):
    """Output and the gradients of input and parameters, in float64."""
    y = forward(x)
    return [t.double() for t in (y.detach(), *torch.autograd.grad(y, (x, *parameters), dy))]


@pytest.mark.parametrize("style", STYLES)
def test_layer_is_the_block_written_by_hand(style):
    """In float32 it is about as near to float64 as the same block from plain PyTorch in float32 is."""
    module, by_hand = layer(perturbed=True, **STYLES[style]), {"llama": llama, "gpt": gpt}[style]
    x, dy = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    freqs = RotaryPositionEmbedding(32)(7)
    parameters = dict(module.named_parameters())
    rotary = freqs if style == "llama" else None
    ours = results(lambda x: module(x, rotary_pos_emb=rotary), parameters.values(), x, dy)
    theirs = results(lambda x: by_hand(parameters, x, freqs), parameters.values(), x, dy)
    exact = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
    x64 = x.detach().double().requires_grad_()
    want = results(lambda x: by_hand(exact, x, freqs), exact.values(), x64, dy.double())
    for i, (mine, other, right) in enumerate(zip(ours, theirs, want, strict=True)):
        floor = 4 * U * right.abs().max()
        assert (mine - right).abs().max() <= 4 * (other - right).abs().max() + floor, f"result {i}"


def test_output_layernorm_and_parallel_blocks():
    x = torch.randn(SHAPE)
    after = layer(output_layernorm=True, perturbed=True)
    h = x + after.self_attention(x)
    assert isinstance(after.self_attention.qkv, Linear)
    assert torch.equal(after(x), after.layernorm(h + after.layernorm_mlp(h)))
    parallel = layer(parallel_attention_mlp=True, perturbed=True)
    assert torch.equal(parallel(x), x + (parallel.self_attention(x) + parallel.layernorm_mlp(x)))
    usual = layer(perturbed=True)
    h = x + usual.self_attention(x)
    assert torch.equal(usual(x), h + usual.layernorm_mlp(h))
    with pytest.raises(ConfigurationError, match="exclude each other"):
        layer(output_layernorm=True, parallel_attention_mlp=True)


def test_dropout_is_torchs_and_stops_in_eval():
    x = torch.randn(SHAPE)
    module, plain = layer(hidden_dropout=0.5), layer()
    torch.manual_seed(1)
    first, second = module(x), module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
    assert not torch.equal(first, second)
    assert torch.equal(module.eval()(x), plain(x))
    torch.manual_seed(1)
    h = x + F.dropout(plain.self_attention(x), 0.5)
    assert torch.equal(first, h + F.dropout(plain.layernorm_mlp(h), 0.5))
    default = TransformerLayer(96, 200, 3)
    assert (default.hidden_dropout, default.self_attention.core_attention.attention_dropout) == (0.1, 0.1)


def test_another_module_in_the_place_of_the_mlp():
    """It trains, with dropout; and tensor parallelism asks how it is cut."""
    x, module = torch.randn(SHAPE), layer(hidden_dropout=0.5)
    module.layernorm_mlp = torch.nn.Linear(SHAPE[-1], SHAPE[-1])
    torch.manual_seed(1)
    out = module(x)
    torch.manual_seed(1)
    h = x + F.dropout(module.self_attention(x), 0.5)
    assert torch.equal(out, h + F.dropout(module.layernorm_mlp(h), 0.5))
    for method in ("set_device_mesh", "set_tensor_parallel_group"):
        with pytest.raises(AttributeError, match=rf"'Linear' object has no attribute '{method}'"):
            getattr(module, method)(None)
    module.self_attention = torch.nn.Identity()
    module.self_attention.forward = lambda x, *args, **kwargs: x
    assert module(x).shape == x.shape


def test_what_sees_the_mlp_does_not_see_the_residual():
    """A hook gets one tensor and gives one; what casts inputs in a hook, as FSDP2 does, leaves the residual alone."""
    plain, seen, cast = (layer("block", perturbed=True, **LLAMA) for _ in range(3))
    x, sizes = torch.randn(SHAPE), []
    mlp = seen.layernorm_mlp
    mlp.register_forward_pre_hook(lambda module, args, more: sizes.append(len(args) + len(more)), with_kwargs=True)
    mlp.register_forward_hook(lambda module, args, out: sizes.append(out.shape))
    cast.layernorm_mlp.register_forward_pre_hook(
        lambda module, args, more: (tuple(a.bfloat16() for a in args), {k: v.bfloat16() for k, v in more.items()}),
        with_kwargs=True,
    )
    with autocast(recipe="block"):
        assert torch.equal(seen(x), plain(x))
        out = cast(x)
    assert sizes == [1, x.shape]
    assert out.dtype == torch.float32


def test_masks_reach_the_core():
    x = torch.randn(SHAPE)
    mask = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    mask[..., -2:] = True
    padded, changed = layer(self_attn_mask_type="padding"), x.clone()
    changed[-2:] += 1
    assert torch.equal(padded(x, mask)[:5], padded(changed, mask)[:5])
    causal = layer()
    assert torch.equal(causal(x)[:5], causal(changed)[:5])
    assert not torch.equal(causal(x, self_attn_mask_type="no_mask")[:5], causal(changed, None, "no_mask")[:5])
    assert torch.equal(causal(x, mask, "padding"), padded(x, mask))
    assert torch.equal(causal(x, checkpoint_core_attention=True), causal(x))


DTYPES = [torch.float32, torch.bfloat16]
CELLS = exhaustive(itertools.product(NAMES, STYLES, DTYPES), in_turns(NAMES, STYLES, DTYPES))
FEWER = exhaustive(
    itertools.product(NAMES, STYLES, DTYPES),
    [(name, list(STYLES)[turn % len(STYLES)], DTYPES[turn // 2 % 2]) for turn, name in enumerate(NAMES)],
)


@pytest.mark.parametrize(("recipe", "style", "dtype"), CELLS)
def test_every_recipe_trains_odd_shapes(recipe, style, dtype):
    """The layer's blocks, fused or not, are quantized: outputs differ from high precision, but not by much."""
    x = torch.randn(SHAPE).to(dtype).requires_grad_()
    freqs = RotaryPositionEmbedding(32)(7)
    stack = [layer(recipe, seed, params_dtype=dtype, init_method=None, **STYLES[style]) for seed in (0, 1)]
    high = [layer("bf16", seed, params_dtype=dtype, **STYLES[style]) for seed in (0, 1)]
    with autocast(recipe=recipe):
        y = stack[1](stack[0](x, rotary_pos_emb=freqs), rotary_pos_emb=freqs)
    want = high[1](high[0](x, rotary_pos_emb=freqs), rotary_pos_emb=freqs)
    y.backward(torch.randn(SHAPE).to(dtype))
    assert y.dtype == dtype
    for name, param in itertools.chain(*(m.named_parameters() for m in stack)):
        assert param.grad is not None and param.grad.isfinite().all() and param.grad.abs().max() > 0, name
        assert param.grad.dtype == dtype
    off = ((y - want).float().norm() / (want - x).float().norm()).item()  # of what the blocks add
    # rounding to E4M3 is off by 2**-4 at most and 0.026 rms, to E2M1 0.2 and 0.1; two operands and two GEMMs in a row
    # double that, to 0.05 and 0.2; the bounds leave a factor of 2 or more
    assert off == 0 if recipe == "bf16" else 0 < off < {"nvfp4": 0.5}.get(recipe, 0.125)


@pytest.mark.parametrize("recipe", NAMES[:-1])
def test_what_is_quantized(recipe):
    stored = {name for name, p in layer(recipe).named_parameters() if type(p) is not torch.nn.Parameter}
    assert stored == {
        *(f"self_attention.layernorm_qkv.{part}_weight" for part in ("query", "key", "value")),
        "self_attention.proj.weight",
        "layernorm_mlp.fc1_weight",
        "layernorm_mlp.fc2_weight",
    }


# Births


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert not a[name].is_meta
        assert torch.equal(a[name], b[name]), name
    return True


@pytest.mark.parametrize(("recipe", "style", "dtype"), FEWER)
def test_births(recipe, style, dtype):
    """Same seed, same model, whole or by way of the meta device; resetting changes nothing; another seed does."""
    first = layer(recipe, params_dtype=dtype, **STYLES[style])
    born = {name: value.clone() for name, value in first.state_dict().items()}
    same(born, layer(recipe, params_dtype=dtype, **STYLES[style]).state_dict())
    meta = layer(recipe, params_dtype=dtype, device="meta", **STYLES[style])
    assert all(p.is_meta for p in meta.parameters())
    meta.reset_parameters()
    same(born, meta.state_dict())
    meta.reset_parameters()
    same(born, meta.state_dict())
    emptied = layer(recipe, params_dtype=dtype, device="meta", **STYLES[style]).to_empty(device="cpu")
    emptied.reset_parameters()
    same(born, emptied.state_dict())
    other = layer(recipe, seed=1, params_dtype=dtype, **STYLES[style]).state_dict()
    assert not torch.equal(born["layernorm_mlp.fc2_weight"], other["layernorm_mlp.fc2_weight"])


@pytest.mark.parametrize("recipe", NAMES)
def test_reset_after_training_gives_the_birth_back(recipe):
    module = layer(recipe)
    born = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(2):
        with autocast(recipe=recipe):
            module(torch.randn(SHAPE)).sum().backward()
    with torch.no_grad():
        for param in module.parameters():
            if type(param) is torch.nn.Parameter:
                param.add_(1)
            else:
                param.quantize_(param.dequantize() + 1)
    assert any(not torch.equal(born[name], value) for name, value in module.state_dict().items())
    module.reset_parameters()
    same(born, module.state_dict())


@pytest.mark.parametrize("recipe", ["bf16", "current"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("init_method", [None, torch.nn.init.normal_])
def test_two_layers_of_one_shape_are_born_different(init_method, device, recipe):
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe):
        a, b = (Linear(96, 96, init_method=init_method, device=device) for _ in range(2))
        mlp = LayerNormMLP(96, 96, init_method=init_method, output_layer_init_method=init_method, device=device)
    for module in (a, b, mlp):
        module.reset_parameters()
    weights = [a.weight, b.weight, mlp.fc1_weight, mlp.fc2_weight]
    values = [w.detach() if recipe == "bf16" else w.dequantize() for w in weights]
    for one, other in itertools.combinations(values, 2):
        assert not torch.equal(one, other)


def test_default_initialization_is_normal():
    """Standard deviation 0.023 and mean 0, within 4 standard errors of 96 * 400 numbers."""
    weight = LayerNormMLP(96, 400).fc1_weight.double()
    count = weight.numel()
    assert abs(weight.mean()) <= 4 * 0.023 / count**0.5
    assert abs(weight.std() - 0.023) <= 4 * 0.023 / (2 * count) ** 0.5
    assert abs((weight.abs() < 0.023).double().mean() - 0.6827) <= 4 * (0.6827 * 0.3173 / count) ** 0.5


def test_init_methods_reach_their_weights():
    def fill(value):
        return lambda weight: weight.fill_(value)

    module = layer(init_method=fill(1.0), output_layer_init_method=fill(2.0))
    parameters = dict(module.named_parameters())
    for name, value in [
        ("self_attention.layernorm_qkv.query_weight", 1.0),
        ("self_attention.layernorm_qkv.key_weight", 1.0),
        ("self_attention.layernorm_qkv.value_weight", 1.0),
        ("self_attention.proj.weight", 2.0),
        ("layernorm_mlp.fc1_weight", 1.0),
        ("layernorm_mlp.fc2_weight", 2.0),
    ]:
        assert torch.equal(parameters[name], torch.full_like(parameters[name], value)), name


@pytest.mark.parametrize("init_method", [None, torch.nn.init.xavier_uniform_])
def test_initial_values_do_not_depend_on_the_cut(init_method):
    spec, cpu = WeightSpec((57, 33), init_method), torch.device("cpu")
    whole = spec.values(-5, (0, 0), (57, 33), cpu)
    for rows, cols in itertools.product([(0, 1), (10, 20), (56, 1), (57, 0)], [(0, 33), (3, 7), (32, 1)]):
        piece = spec.values(-5, (rows[0], cols[0]), (rows[1], cols[1]), cpu)
        assert torch.equal(piece, whole[rows[0] : sum(rows), cols[0] : sum(cols)])
    assert not torch.equal(whole, spec.values(-6, (0, 0), (57, 33), cpu))


def test_an_init_method_leaves_the_users_generator_alone():
    def after(init_method):
        torch.manual_seed(0)
        Linear(96, 96, init_method=init_method)
        return torch.rand(4)

    assert torch.equal(after(None), after(torch.nn.init.normal_))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("recipe", NAMES[:-1])
def test_high_precision_initial_values_are_kept_on_demand(recipe, device):
    torch.manual_seed(0)
    plain = Linear(96, 57)
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        kept = Linear(96, 57, device=device)
    kept.reset_parameters()
    assert torch.equal(kept.weight.get_high_precision_init_val(), plain.weight)
    kept.weight.clear_high_precision_init_val()
    assert kept.weight.get_high_precision_init_val() is None
    with quantized_model_init(recipe=recipe):
        assert Linear(96, 57).weight.get_high_precision_init_val() is None


def test_names_and_numbers_are_handed_down():
    module = layer(name="layers.3", layer_number=4)
    assert module.self_attention.proj.name == "layers.3.self_attention.proj"
    assert module.layernorm_mlp.name == "layers.3.layernorm_mlp"
    assert module.self_attention.core_attention.layer_number == 4
    assert "layer_number=4" in repr(module)


# Arguments: `TRANSFORMER_ENGINE` lists those of TransformerEngine, version 2.x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tp_size": 2, "set_parallel_mode": True},
            "tp_size 2 must divide num_attention_heads and num_gqa_groups; choose a divisor of 3",
        ),
        ({"activation": "tanh"}, "'tanh'"),
        ({"normalization": "BatchNorm"}, "'BatchNorm'"),
        ({"attn_input_format": "hds"}, "'hds'"),
        ({"self_attn_mask_type": "padding_bottom_right"}, "use one of: no_mask"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        layer(**arguments)


def test_random_words_of_the_initialization_are_the_keys():
    """The default initialization is the counter generator under the weight's own key, stream 0, draw 0."""
    linear = Linear(96, 57)
    words = numerics.random_words(int(linear.weight_state("weight")["key"]), 0, 0, (57, 96))
    assert torch.equal(linear.weight, distributions.normal(words) * 0.023)
