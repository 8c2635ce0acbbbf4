"""Values of a wrong type in the place of arguments of public functions: an error that names the argument."""

import inspect
import warnings

import pytest
import torch
from torch import nn

import quantshard
from quantshard import checkpoints, layouts, optimizers, statistics, transformer_engine
from quantshard.argument_kinds import WHOLE_NUMBER, check_arguments, shown_argument
from quantshard.errors import ConfigurationError


def layers():
    with quantshard.quantized_model_init(recipe="current"):
        return nn.Sequential(quantshard.Linear(32, 32))


def named():
    return list(layers().named_parameters())


CALLS = {
    "autocast": (quantshard.autocast, {}, "recipe amax_reduction_group"),
    "broadcast_": (quantshard.broadcast_, {"model": layers}, "model process_group"),
    "check_replicas": (quantshard.check_replicas, {"model": layers}, "model process_group"),
    "capturable_": (quantshard.capturable_, {}, "model"),
    "checkpoint": (lambda function: quantshard.checkpoint(function, torch.ones(2)), {}, "function"),
    "convert": (
        quantshard.convert,
        {"model": lambda: nn.Sequential(nn.Linear(32, 32)), "recipe": lambda: "mxfp8"},
        "model recipe filter activation_storage",
    ),
    "revert": (quantshard.revert, {}, "model"),
    "dispatch_tokens": (
        quantshard.dispatch_tokens,
        {"tokens": lambda: torch.ones(2, 2), "experts": lambda: torch.zeros(2, dtype=torch.int64),
         "num_experts": lambda: 1},
        "tokens experts ep_mesh",
    ),
    "explain": (quantshard.explain, {"model": layers}, "model optimizer recipe"),
    "make_graphed_callables": (
        quantshard.make_graphed_callables, {"modules": layers, "sample_args": tuple}, "modules num_warmup_iters",
    ),
    "plan": (
        quantshard.plan, {"model": layers, "mesh": lambda: {"dp_shard": 1}},
        "model mesh layers rank tensor_parallel preset master_weight_dtype",
    ),
    "quantized_model_init": (quantshard.quantized_model_init, {}, "enabled recipe"),
    "Statistics": (quantshard.Statistics, {"model": layers}, "model optimizer every saturation loss_spike on_alarm"),
    "first_nonfinite": (statistics.first_nonfinite, {"model": layers, "run": lambda: layers}, "model run"),
    "Linear": (
        quantshard.Linear, {"in_features": lambda: 32, "out_features": lambda: 32},
        "in_features init_method parameters_split tp_group tp_mesh weight_mesh parallel_mode",
    ),
    "GroupedLinear": (
        quantshard.GroupedLinear, {name: lambda: 32 for name in ("num_gemms", "in_features", "out_features")},
        "num_gemms ep_mesh tp_mesh",
    ),
    "RMSNorm": (quantshard.RMSNorm, {"normalized_shape": lambda: 32}, "eps"),
    "LayerNormMLP": (
        quantshard.LayerNormMLP, {"hidden_size": lambda: 32, "ffn_hidden_size": lambda: 32},
        "hidden_size normalization activation activation_storage",
    ),
    "MultiheadAttention": (
        quantshard.MultiheadAttention, {"hidden_size": lambda: 32, "num_attention_heads": lambda: 2},
        "hidden_size num_attention_heads kv_channels num_gqa_groups window_size qk_norm_type",
    ),
    "RotaryPositionEmbedding": (quantshard.RotaryPositionEmbedding, {"dim": lambda: 16}, "dim rotary_percent"),
    "save": (
        checkpoints.save, {"path": lambda: "new", "model": layers, "optimizer": lambda: None},
        "path model optimizer extra",
    ),
    "load": (checkpoints.load, {"path": lambda: "none", "model": layers}, "path model optimizer"),
    "Manager": (checkpoints.Manager, {"directory": lambda: "run"}, "directory keep_last keep_every async_ state"),
    "compare": (checkpoints.compare, {"path_a": lambda: "none", "path_b": lambda: "none"}, "path_a path_b"),
    "verify": (checkpoints.verify, {}, "path"),
    "is_complete": (checkpoints.is_complete, {}, "path"),
    "load_from_rank0": (checkpoints.load_from_rank0, {"model": layers, "state_dict": dict}, "model"),
    "load_high_precision": (checkpoints.load_high_precision, {"model": layers, "state_dict": dict}, "model state_dict"),
    "high_precision_state_dict": (checkpoints.high_precision_state_dict, {"model": layers}, "model optimizer"),
    "FusedAdam": (optimizers.FusedAdam, {"params": named}, "lr betas preset exp_avg_dtype"),
    "Lion": (optimizers.Lion, {"params": named}, "lr betas preset exp_avg_dtype"),
    "Muon": (
        optimizers.Muon,
        {"params": lambda: [("a", nn.Parameter(torch.ones(2, 2)))]},
        "momentum adjust_lr_fn momentum_buffer_dtype preset",
    ),
    "muon_groups": (optimizers.muon_groups, {"model": layers, "head": tuple}, "model head adamw"),
    "averaged_weights": (
        lambda **given: optimizers.averaged_weights(**given).__enter__(),
        {"model": layers, "optimizer": lambda: optimizers.FusedAdam(named(), ema_decay=0.9)},
        "model optimizer",
    ),
    "clip_grad_norm_": (optimizers.clip_grad_norm_, {"model": layers, "max_norm": float}, "model max_norm norm_type"),
    "export": (
        layouts.export, {"checkpoint": lambda: "none", "layout": lambda: "hf-fp8", "out": lambda: "out"},
        "checkpoint out config max_shard_bytes",
    ),
    "inspect": (layouts.inspect, {}, "path"),
    "layouts.load": (layouts.load, {"path": lambda: "none", "model": layers}, "path model"),
    "transformer_engine.convert": (
        transformer_engine.convert, {name: lambda: "none" for name in ("source", "like", "out")}, "source like out",
    ),
}  # fmt: skip
"""By name: a function, arguments that it takes, and names of those that are tried."""

NONE_MEANS_SOMETHING = set(
    "recipe amax_reduction_group process_group filter ep_mesh optimizer tensor_parallel on_alarm init_method preset "
    "parameters_split tp_group tp_mesh weight_mesh parallel_mode kv_channels num_gqa_groups window_size qk_norm_type "
    "extra keep_last async_ state state_dict exp_avg_dtype momentum_buffer_dtype master_weights master_weight_dtype "
    "adjust_lr_fn head adamw config".split()
)
"""The default, or nothing."""

CALLED_OTHERWISE = {"in_features", "hidden_size", "modules"}
"""By the name of a weight or a group; or there is no other argument."""


def test_a_text_is_no_flag():
    """As a file of settings that was read without types has it; "False" would be true."""
    layers = {"Linear": (32, 32), "LayerNormLinear": (32, 32), "LayerNormMLP": (32, 64), "GroupedLinear": (2, 32, 32)}
    for name, sizes in layers.items():
        with pytest.raises(ConfigurationError, match=r"\(bias='False'\): it must be True or False"):
            getattr(quantshard, name)(*sizes, bias="False")
    assert quantshard.Linear(32, 32, bias=None).bias is None


@pytest.mark.parametrize("name", CALLS)
def test_values_of_a_wrong_type_are_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, given, tried = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for argument in tried.split():
            for wrong in (object(), [3], *(() if argument in NONE_MEANS_SOMETHING else (None,))):
                arguments = {key: make() for key, make in given.items()} | {argument: wrong}
                with pytest.raises(ConfigurationError) as caught:
                    call(**arguments)
                said = str(caught.value)
                assert argument in said or argument in CALLED_OTHERWISE, (argument, wrong, said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "name", "meant"),
    [
        (quantshard.Linear, "param_dtype", "params_dtype"),
        (quantshard.Linear, "tp_sise", "tp_size"),
        (quantshard.quantized_model_init, "recpie", "recipe"),
        (quantshard.convert, "filtre", "filter"),
        (checkpoints.save, "extr", "extra"),
        (checkpoints.Manager, "keep_lst", "keep_last"),
        (quantshard.Linear, "zzz", ""),
    ],
)
def test_a_misspelled_name_is_corrected(call, name, meant):
    with pytest.raises(TypeError) as caught:
        call(4, 4, **{name: 1})
    hint = f"; did you mean {meant!r}?" if meant else ""
    assert str(caught.value) == f"{call.__name__}() got an unexpected keyword argument {name!r}{hint}"


NOT_CORRECTED = {"autocast", "dispatch_tokens", "checkpoint", "FusedAdam", "Lion", "Muon"}
"""Called in compiled functions, which are traced through what is around them; and those that hand arguments on."""

ALSO_CORRECTED = {
    "TrainingStep": quantshard.TrainingStep, "StepGraph": quantshard.StepGraph, "requantize_": quantshard.requantize_,
    "deterministic": quantshard.deterministic, "LayerNorm": quantshard.LayerNorm,
    "averaged_weights": optimizers.averaged_weights,
    **{kind.__name__: kind for kind in (*set(quantshard.recipe.NAMES.values()) - {quantshard.recipe.HighPrecision},
                                        quantshard.recipe.MixedRecipe, quantshard.recipe.TableRecipe)},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*CALLS, *ALSO_CORRECTED} - NOT_CORRECTED))
def test_a_misspelled_name_is_corrected_by_every_public_function(name):
    """Python does so itself from 3.13 on."""
    call, given = (ALSO_CORRECTED[name], {}) if name in ALSO_CORRECTED else CALLS[name][:2]
    arguments = {key: make() for key, make in given.items()}
    for known, parameter in inspect.signature(call).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            with pytest.raises(TypeError, match=rf"^\w+\(\) got .* '{known}z'; did you mean '{known}'\?$"):
                call(**arguments, **{f"{known}z": 1})


def test_a_deprecated_argument_is_warned_of_at_the_line_of_the_call():
    with pytest.warns(DeprecationWarning, match="set_grad_none") as caught:
        optimizers.FusedAdam([nn.Parameter(torch.ones(2, 2))], set_grad_none=True)
    assert [each.filename for each in caught] == [__file__]


def test_what_was_given_and_what_is_wanted():
    with pytest.raises(ConfigurationError, match=r"^save\(model='m'\): it must be a torch\.nn\.Module$"):
        checkpoints.save("new", "m", None)
    for name, wrong, wanted in (("keep_last", 0, "1 or more"), ("keep_every", -1, "0 or more")):
        with pytest.raises(ConfigurationError, match=rf"^{name} = {wrong}: must be {wanted}, ") as caught:
            checkpoints.Manager("new", **{name: wrong})
        assert str(caught.value).count("keep_") == 1
    with pytest.raises(ConfigurationError, match=r"^explain\(optimizer=dict\): .* a torch\.optim\.Optimizer, or None$"):
        quantshard.explain(layers(), {"lr": 1})
    check_arguments("f", WHOLE_NUMBER, a=3, b=torch.tensor(3).numpy()[()])
    with pytest.raises(ConfigurationError, match=r"f\(b=True\): it must be a whole number"):
        check_arguments("f", WHOLE_NUMBER, a=3, b=True)
    assert shown_argument("x" * 100) == "str" and shown_argument(torch.ones(2)) == "Tensor"


def test_a_text_is_not_several_values_and_numbers_of_numpy_are_numbers():
    for call, said in (
        (lambda: quantshard.RMSNorm("32"), r"^RMSNorm\(normalized_shape='32'\): it must be a whole number"),
        (lambda: quantshard.RMSNorm(hidden_size="32"), r"^RMSNorm\(hidden_size='32'\): it must be a whole number"),
        (
            lambda: quantshard.Linear(4, 4, parameters_split="ab"),
            r"^Linear\(parameters_split='ab'\): it must be several",
        ),
    ):
        with pytest.raises(ConfigurationError, match=said):
            call()
    four = torch.tensor(4).numpy()[()]
    assert quantshard.MultiheadAttention(four * 8, four).kv_channels == 8
    assert quantshard.Statistics(layers(), every=four).every == 4
    assert quantshard.plan(layers(), {"dp_shard": four}).rows
    assert not quantshard.RMSNorm(8, zero_centered_gamma=1).weight.any()


def test_values_to_load_may_come_from_a_reader_that_is_no_mapping():
    class Reader:
        def __init__(self, values):
            self.values = values

        def keys(self):
            return self.values.keys()

        def __getitem__(self, name):
            return self.values[name]

    model = nn.Linear(2, 2)
    checkpoints.load_high_precision(model, Reader({"weight": torch.eye(2), "bias": torch.ones(2)}))
    assert torch.equal(model.weight, torch.eye(2))
