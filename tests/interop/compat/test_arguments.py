"""TransformerEngine's arguments: each is known, its default is accepted, other values are refused by name."""

import inspect

import pytest
import torch

import quantshard.compat.transformer_engine.pytorch as te
from quantshard import modules
from quantshard.compat.transformer_engine import arguments
from quantshard.compat.transformer_engine.common import recipe
from quantshard.errors import ConfigurationError
from quantshard.modules import DotProductAttention as CoreAttention

SHAPE = (7, 2, 96)
APART = {*recipe.__all__, "make_graphed_callables"}  # tested in test_transformer_engine.py and test_graphs.py
ARGUMENTS = {owner: table for owner, table in arguments.ARGUMENTS.items() if owner not in APART}


def target_of(name):
    """TransformerEngine's class or function."""
    return getattr(te, name, None) or getattr(te.attention, name)


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
    target = target_of(name)
    if name == "checkpoint":
        return lambda **more: target(modules.RMSNorm(3), torch.ones(2, 3), use_reentrant=False, **more)
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
    core = getattr(modules, name)
    own = set(inspect.signature(getattr(core, method) if method else core).parameters)
    adapted = {"hidden_size", "dtype"}
    # modules that contain attention pass other arguments to its core
    if "core" in own:
        own |= set(inspect.signature(CoreAttention.forward if method else CoreAttention).parameters)
    assert set(TRANSFORMER_ENGINE[owner].split()) <= own | adapted | set(ARGUMENTS.get(owner, {}))
    assert not own & set(ARGUMENTS.get(owner, {}))


@pytest.mark.parametrize("owner", ARGUMENTS)
def test_defaults_are_accepted(owner):
    table = ARGUMENTS[owner]
    called(owner)(**{name: argument.default for name, argument in table.items()})
    called(owner)(**dict.fromkeys(table))


CASES = [(o, n, argument.hint) for o, table in ARGUMENTS.items() for n, argument in table.items()]


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, n, hint in CASES if hint])
def test_hints_are_accepted(owner, name):
    for value in (7, "other", True, False, None):
        called(owner)(**{name: value})


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, n, hint in CASES if not hint])
def test_other_values_are_refused_by_name(owner, name):
    for value in (7, "other", torch.ones(2)):
        with pytest.raises(ConfigurationError) as caught:
            called(owner)(**{name: value})
        assert f"{owner}({name}=" in str(caught.value)
        assert ARGUMENTS[owner][name].instead in str(caught.value)
    default = ARGUMENTS[owner][name].default
    if default not in (True, 1):
        with pytest.raises(ConfigurationError):
            called(owner)(**{name: True})


@pytest.mark.parametrize("name", REQUIRED)
def test_a_subclass_hands_on_what_it_does_not_name(name):
    class Own(target_of(name)):
        def __init__(self, own, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.own = own

    assert Own(7, *REQUIRED[name], tp_size=1, tp_mesh=None).own == 7


@pytest.mark.parametrize("owner", ARGUMENTS)
def test_unknown_names_are_type_errors(owner):
    with pytest.raises(TypeError, match=r"unexpected keyword argument"):
        called(owner)(no_such=None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: te.DotProductAttention(3, 32, attn_mask_type="no_mask", window_size=(-1, 0)), "use sizes >= 0"),
        (lambda: te.DotProductAttention(3, 32, cp_group=object()), "cp_group is of type object; pass a ProcessGroup"),
        (lambda: te.MultiheadAttention(64, 2).set_context_parallel_group(object(), [0], None), "pass a ProcessGroup"),
        (lambda: te.DotProductAttention(3, 32, cp_comm_type="a2a"), "use one of: p2p, all_gather"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_no_window_and_no_groups_are_accepted():
    q = torch.randn(7, 2, 3, 32)
    for window in (None, (-1, -1), (-1, 0)):
        core = te.DotProductAttention(3, 32, window_size=window)
        assert torch.equal(core(q, q, q, window_size=window), CoreAttention(3, 32)(q, q, q))
    with pytest.raises(ConfigurationError, match="use sizes >= 0"):
        core(q, q, q, attn_mask_type="no_mask", window_size=(-1, 0))
    core.set_context_parallel_group(None)
    core.set_tensor_parallel_group(None)


@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
def test_old_names_of_norms(kind):
    assert kind(hidden_size=96, sequence_parallel=None).weight.shape == (96,)
    assert kind(96, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
