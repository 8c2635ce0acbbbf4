"""Whole layers: against plain PyTorch, how they are born, and which of TransformerEngine's arguments they take."""

import copy
import inspect
import itertools
from dataclasses import fields

import pytest
import torch
from torch.nn import functional as F

from quantshard import modules, numerics
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.errors import ConfigurationError
from quantshard.modules import (
    LayerNormMLP,
    Linear,
    RotaryPositionEmbedding,
    TransformerLayer,
    autocast,
    quantized_model_init,
)
from quantshard.modules.base.module import WeightSpec
from quantshard.modules.contexts import unsupported
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
        with pytest.raises(
            ConfigurationError, match=rf"TransformerLayer\.{method}: the Linear inside has no such method"
        ):
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

TRANSFORMER_ENGINE = {
    "LayerNorm": "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size device dtype",
    "RMSNorm": "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size device dtype",
    "Linear": """in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size
        get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split
        device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute
        symmetric_ar_type save_original_input name""",
    "Linear.forward": "inp is_first_microbatch fp8_output fp8_grad",
    "LayerNormLinear": """in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group tp_size
        get_rng_state_tracker init_method bias normalization return_bias params_dtype parallel_mode
        return_layernorm_output return_layernorm_output_gathered parameters_split zero_centered_gamma device
        ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute
        symmetric_ar_type name""",
    "LayerNormMLP": """hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker tp_group
        tp_size init_method bias normalization activation activation_params output_layer_init_method
        fuse_wgrad_accumulation params_dtype return_layernorm_output return_layernorm_output_gathered seq_length
        micro_batch_size set_parallel_mode zero_centered_gamma device ub_overlap_ag name ub_overlap_rs
        ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute symmetric_ar_type checkpoint""",
    "DotProductAttention": """num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type
        window_size bottom_right_diagonal sequence_parallel tp_size get_rng_state_tracker tp_group layer_number
        attention_type cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit
        name""",
    "MultiheadAttention": """hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon init_method
        output_layer_init_method layer_number attn_mask_type window_size bottom_right_diagonal tp_group tp_size
        num_gqa_groups fuse_wgrad_accumulation get_rng_state_tracker sequence_parallel params_dtype return_bias
        return_layernorm_output input_layernorm attention_type set_parallel_mode fuse_qkv_params zero_centered_gamma
        qkv_weight_interleaved rotary_pos_interleaved ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad
        ub_bulk_wgrad bias normalization device qkv_format name qk_norm_type qk_norm_eps qk_norm_before_rope seq_length
        micro_batch_size softmax_type""",
    "TransformerLayer": """hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon
        hidden_dropout attention_dropout init_method output_layer_init_method layer_number kv_channels
        self_attn_mask_type window_size bottom_right_diagonal enc_dec_attn_mask_type enc_dec_bottom_right_diagonal
        enc_dec_window_size tp_group tp_size params_dtype get_rng_state_tracker fuse_wgrad_accumulation seq_length
        micro_batch_size sequence_parallel apply_residual_connection_post_layernorm output_layernorm
        parallel_attention_mlp layer_type drop_path_rate set_parallel_mode fuse_qkv_params rotary_pos_interleaved
        zero_centered_gamma qkv_weight_interleaved ub_tp_comm_overlap ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad
        ub_bulk_dgrad ub_bulk_wgrad bias activation activation_params normalization device attn_input_format name
        qk_norm_type qk_norm_eps qk_norm_before_rope softmax_type""",
    "TransformerLayer.forward": """hidden_states attention_mask self_attn_mask_type window_size bottom_right_diagonal
        encoder_output enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_window_size is_first_microbatch
        checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type core_attention_bias
        alibi_slopes cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv
        fast_zero_fill pad_between_seqs""",
    "GroupedLinear": """num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size
        get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode device
        ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute save_original_input single_grouped_weight
        single_grouped_bias name use_grouped_tensor""",
    "GroupedLinear.forward": "inp m_splits is_first_microbatch out dgrad_out",
    "RotaryPositionEmbedding": """dim rotary_percent seq_len_interpolation_factor pretrained_max_position_embeddings
        rotary_base interleaved""",
    "checkpoint": "function use_reentrant distribute_saved_activations tp_group get_rng_state_tracker",
    "apply_rotary_pos_emb": "t freqs tensor_format start_positions interleaved fused cu_seqlens cp_size cp_rank",
}
REQUIRED = {
    "LayerNorm": (96,),
    "RMSNorm": (96,),
    "Linear": (96, 57),
    "LayerNormLinear": (96, 57),
    "LayerNormMLP": (96, 200),
    "GroupedLinear": (2, 96, 57),
    "DotProductAttention": (3, 32),
    "MultiheadAttention": (96, 3),
    "TransformerLayer": (96, 200, 3),
}


def called(owner):
    """The class, function or method `owner`, ready to be called with keyword arguments more."""
    name, _, method = owner.partition(".")
    target = getattr(modules, name)
    if name == "checkpoint":
        return lambda **more: target(modules.RMSNorm(3), torch.ones(2, 3), **more)
    if name == "apply_rotary_pos_emb":
        return lambda **more: target(torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1, 4), **more)
    if not method:
        return lambda **more: target(*REQUIRED[name], **more)
    inputs: tuple[object, ...] = (torch.randn(SHAPE),)
    if name == "DotProductAttention":
        inputs = (torch.randn(7, 2, 3, 32),) * 3
    if name == "GroupedLinear":
        inputs = (torch.randn(5, 96), [2, 3])
    return lambda **more: target(*REQUIRED[name])(*inputs, **more)


@pytest.mark.parametrize("owner", TRANSFORMER_ENGINE)
def test_every_argument_of_transformer_engine_is_known(owner):
    name, _, method = owner.partition(".")
    target = getattr(modules, name)
    own = set(inspect.signature(getattr(target, method) if method else target).parameters)
    known = own | set(unsupported.ARGUMENTS.get(owner, {}))
    assert set(TRANSFORMER_ENGINE[owner].split()) <= known
    if owner not in ("LayerNorm", "RMSNorm"):  # refuse it by name in the signature
        assert not own & set(unsupported.ARGUMENTS.get(owner, {}))


@pytest.mark.parametrize("owner", unsupported.ARGUMENTS)
def test_defaults_are_accepted(owner):
    table = unsupported.ARGUMENTS[owner]
    called(owner)(**{name: argument.default for name, argument in table.items()})
    called(owner)(**dict.fromkeys(table))


ARGUMENTS = [(o, n, argument.hint) for o, table in unsupported.ARGUMENTS.items() for n, argument in table.items()]


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, n, hint in ARGUMENTS if hint])
def test_hints_are_accepted(owner, name):
    for value in (7, "other", True, False, None):
        called(owner)(**{name: value})


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, n, hint in ARGUMENTS if not hint])
def test_other_values_are_refused_by_name(owner, name):
    for value in (7, "other", torch.ones(2)):
        with pytest.raises(ConfigurationError) as caught:
            called(owner)(**{name: value})
        assert f"{owner}({name}=" in str(caught.value)
        assert unsupported.ARGUMENTS[owner][name].reason in str(caught.value)
    default = unsupported.ARGUMENTS[owner][name].default
    if default not in (True, 1):
        with pytest.raises(ConfigurationError):
            called(owner)(**{name: True})


@pytest.mark.parametrize("name", REQUIRED)
def test_signatures_show_tensor_parallelism(name):
    """As they show what each module names itself."""
    shown = inspect.signature(getattr(modules, name)).parameters
    refused = unsupported.ARGUMENTS.get(name, {})
    for field in fields(TensorParallelConfig):
        assert (field.name in shown) is (field.name not in refused)
        own = name in ("LayerNorm", "RMSNorm") and field.name == "sequence_parallel"
        if field.name in shown and not own:
            argument = shown[field.name]
            assert argument.kind is inspect.Parameter.KEYWORD_ONLY
            assert (argument.default, argument.annotation) == (field.default, field.type)
    assert ("others" in shown) is (name in unsupported.ARGUMENTS)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_subclass_hands_on_what_it_does_not_name(name):
    class Own(getattr(modules, name)):
        def __init__(self, own, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.own = own

    assert copy.deepcopy(Own(7, *REQUIRED[name], tp_size=1, tp_mesh=None)).own == 7
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'tp_sise'"):
        Own(7, *REQUIRED[name], tp_sise=1)


@pytest.mark.parametrize("owner", unsupported.ARGUMENTS)
def test_unknown_names_are_type_errors(owner):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'no_such'"):
        called(owner)(no_such=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_type": "decoder"}, "no cross-attention.*decoder-only model use 'encoder'"),
        ({"apply_residual_connection_post_layernorm": True}, "return_layernorm_output=True"),
        ({"tp_size": 2, "set_parallel_mode": True}, "num_attention_heads 3 is not a multiple of tp_size 2"),
        ({"drop_path_rate": 0.1}, "no stochastic depth"),
        ({"window_size": (128, 0)}, "no sliding window"),
        ({"activation": "tanh"}, "'tanh'"),
        ({"normalization": "BatchNorm"}, "'BatchNorm'"),
        ({"attn_input_format": "thd"}, "'thd'"),
        ({"self_attn_mask_type": "padding_causal_bottom_right"}, "use one of: no_mask"),
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
