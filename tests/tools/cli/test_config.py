"""Settings: where they come from, what is refused, and that a file says exactly what was set."""

from dataclasses import asdict, fields, replace

import pytest

from quantshard.errors import ConfigurationError
from quantshard.state_storage import PRESETS
from quantshard.tools.trainer.restarts import overrides
from quantshard.tools.trainer.run_dir import RunDir, to_toml
from quantshard.tools.trainer.settings.config import (
    TrainSettings,
    from_mapping,
    merged_values,
    read_settings_file,
)
from quantshard.tools.trainer.settings.values import as_settings


def read(config):
    return from_mapping(read_settings_file(config, follow=True), str(config))


def merge(flags, config):
    return TrainSettings(**merged_values(flags, read(config)))


def test_defaults_are_consistent():
    TrainSettings().check()
    TrainSettings().resolved().check()
    assert all(type(f.default) in (str, int, float, bool, tuple) for f in fields(TrainSettings))
    assert all(f.metadata["help"] and f.metadata["panel"] for f in fields(TrainSettings))


def test_flags_go_before_file_before_defaults(tmp_path):
    file = tmp_path / "some.toml"
    file.write_text("hidden = 96\nlr = 1\n")
    settings = merge({"hidden": 64, "tied": False}, file)
    assert (settings.hidden, settings.lr, settings.heads) == (64, 1.0, TrainSettings().heads)
    assert merge({}, file).hidden == 96


def test_recipes_of_a_file_may_be_a_table(tmp_path):
    """In its order; written back, it is text."""
    file = tmp_path / "some.toml"
    file.write_text('recipe = { "layers.0" = "bf16", "*" = "mxfp8" }\n')
    settings = merge({}, file)
    settings.check()
    assert settings.recipe == "layers.0=bf16,*=mxfp8"
    file.write_text('[recipe]\n"*.down_proj" = "block"\n"*" = "mxfp8"\n')
    assert merge({}, file).recipe == "*.down_proj=block,*=mxfp8"


def test_toml_round_trip(tmp_path):
    settings = replace(TrainSettings(), lr=1 / 3, eps=1e-12, data=("/a b", "/c"), tied=True, seed=2**62)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(settings, {"launch": {"processes": 2}, "corpus": {"files": ["x 1 /a b"]}}))
    content = read_settings_file(file)
    assert (
        TrainSettings(**from_mapping(content, "it"))
        == TrainSettings(**from_mapping(asdict(settings), "it"))
        == settings
    )
    assert content["launch"] == {"processes": 2} and content["corpus"] == {"files": ["x 1 /a b"]}


def test_resolved_fills_in_what_follows():
    settings = replace(TrainSettings(), hidden=96, heads=3, steps=7).resolved()
    assert (settings.kv_heads, settings.ffn, settings.decay_steps) == (3, 256, 7)
    assert replace(TrainSettings(), hidden=96, architecture="gpt").resolved().ffn == 384
    assert replace(settings, steps=20).resolved().decay_steps == 7  # a longer run keeps its schedule
    assert replace(TrainSettings(), data=("a",)).resolved().data[0].startswith("/")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recipe": "fp7"}, "unknown recipe 'fp7'; choose one of: auto, delayed"),
        ({"hidden": 97}, "hidden = 97 over heads = 4"),
        ({"hidden": 12}, "same even number"),
        ({"micro_batch": 2, "micro_batches": 4}, "give micro_batch or micro_batches, not both"),
        ({"heldout": 0.3, "heldout_data": ("a",)}, "give heldout or heldout_data, not both"),
        ({"steps": 0}, "steps = 0: must be 1 or more"),
        ({"seq_length": 1}, "seq_length = 1"),
        ({"lr": 0.0}, "lr = 0.0"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"beta2": 1.0}, "beta2 = 1.0"),
        ({"warmup": -1}, "warmup = -1"),
        ({"weight_decay": float("nan")}, "weight_decay = nan"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd': choose one of: adamw, lion, muon"),
        (
            {"schedule": "line"},
            "schedule = 'line': did you mean 'linear'? choose one of: cosine, linear, wsd, constant",
        ),
        ({"params_dtype": "float16"}, "params_dtype = 'float16'"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype = 'bf16'"),
        (
            {"preset": "laen6"},
            "preset = 'laen6': there is no such preset; did you mean 'lean6'? choose one of lean8, lean6",
        ),
        (
            {"preset": "lean8", "exp_avg_sq_dtype": "bfloat16"},
            "preset = 'lean8' has exp_avg_sq_dtype = 'fp8', but exp_avg_sq_dtype = 'bfloat16' is given",
        ),
        (
            {"preset": "lean6", "master_weights": False},
            "preset = 'lean6' has master_weights = True, but master_weights =",
        ),
        ({"master_dtype": "fp8"}, "master_dtype = 'fp8': choose one of: auto, float32, float16, bfloat16"),
        ({"activation_storage": "bf16"}, "activation_storage = 'bf16': choose one of: high_precision, fp8"),
        ({"activation_storage": "fp8", "experts": 4}, "experts cannot be combined with activation_storage = 'fp8'"),
        ({"mesh": "ep=2"}, "experts = 0 cannot be divided over ep = 2; take a multiple of 2"),
        ({"experts": 4, "mesh": "ep=3"}, "experts = 4 cannot be divided over ep = 3"),
        (
            {"experts": 4, "recipe": "nvfp4", "cuda_graphs": True},
            "cuda_graphs cannot be combined with experts by 'nvfp4', which run one at a time",
        ),
        ({"experts": 4, "mesh": "ep=2", "cuda_graphs": True}, "cuda_graphs cannot be combined with ep in the mesh"),
        ({"compile": True, "mesh": "tp=2"}, "compile with quantized layers cannot be combined with tp in the mesh"),
        (
            {"activation_storage": "fp8", "model": "/a"},
            "a transformers model cannot be combined with activation_storage",
        ),
    ],
)
def test_refused_in_one_line(change, says):
    with pytest.raises(ConfigurationError) as caught:
        replace(TrainSettings(), **change).check()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_presets_go_before_a_file_and_are_recorded_as_what_they_are(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(to_toml(TrainSettings().resolved(), {}))
    in_file = read(file)
    assert in_file["exp_avg_dtype"] == "float32" and merged_values({"lr": 1.0}, in_file) == in_file | {"lr": 1.0}
    settings = merge({"preset": "lean8"}, file).resolved()
    assert as_settings(settings.state_options) == LEAN8
    assert (settings.master_dtype, settings.exp_avg_dtype) == ("float16", "fp8") and settings.resolved() == settings
    settings.check()
    with pytest.raises(ConfigurationError, match=r"preset = 'lean8' .*master_dtype = 'float32' is given"):
        TrainSettings(**in_file | {"preset": "lean8"}).check()


LEAN8 = {"master_weights": True, "master_dtype": "float16", "master_remainders": "on", "exp_avg_dtype": "fp8",
         "exp_avg_sq_dtype": "fp8", "momentum_dtype": "bfloat16"}  # fmt: skip
FLOAT32 = LEAN8 | dict.fromkeys(("master_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "momentum_dtype"), "float32")
FLOAT32 |= {"master_remainders": "off"}


@pytest.mark.parametrize(
    ("flags", "preset", "states"),
    [
        ({"lr": 1.0}, "lean8", {}),
        ({"exp_avg_dtype": "fp8"}, "lean8", {}),
        ({"exp_avg_dtype": "auto", "master_weights": True}, "lean8", {}),
        ({"preset": "lean6"}, "lean6", {"exp_avg_sq_dtype": "bfloat16"}),
        ({"preset": "none"}, "", FLOAT32),
        ({"preset": "none", "exp_avg_dtype": "fp8"}, "", FLOAT32 | {"exp_avg_dtype": "fp8"}),
    ],
)
@pytest.mark.parametrize("said", ["by name", "by a run"])
def test_a_preset_flag_replaces_the_states_of_a_file(tmp_path, said, flags, preset, states):
    """A run's file has them spelled out, too."""
    file = tmp_path / "some.toml"
    file.write_text(
        'preset = "lean8"\n' if said == "by name" else to_toml(TrainSettings(preset="lean8").resolved(), {})
    )
    settings = merge(flags, file)
    settings.check()
    settings = settings.resolved()
    assert settings.preset == preset and as_settings(settings.state_options) == LEAN8 | states
    with pytest.raises(
        ConfigurationError, match="'float32' is given; leave one of the two out, or give preset = 'none'"
    ):
        merge({"exp_avg_dtype": "float32"}, file).check()


def test_float32_states_are_refused_where_a_run_has_others(tmp_path):
    """Asked for by `none`, whether the run's are those of a preset, or of settings of their own, or there are no
    masters; a run that has them goes on, and what stands in its file may be either word."""
    given = ("preset", "steps", *as_settings(TrainSettings().state_options))
    now = TrainSettings(preset="none").resolved()
    assert now.preset == "" and overrides("run", TrainSettings().resolved(), now, given, 1)["device"] == now.device
    for other, says in (
        ({"exp_avg_dtype": "fp8"}, "exp_avg_dtype = 'fp8', .* exp_avg_dtype = 'float32' is given"),
        ({"master_weights": False}, "master_weights = False, .* master_weights = True is given"),
        ({"preset": "lean8"}, "exp_avg_dtype = 'fp8', .* exp_avg_dtype = 'float32' is given"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            overrides("run", TrainSettings(**other).resolved(), now, given, 1)
    lean = TrainSettings(preset="lean8").resolved()
    with pytest.raises(ConfigurationError, match=r"with preset = 'none', .* preset = 'lean8' is given"):
        overrides("run", now, lean, ["preset"], 1)
    tables = {"launch": {"processes": 1}, "corpus": {"sha256": "0" * 64, "bytes": 1, "files": ["0" * 64 + " 1 /a"]}}
    (tmp_path / "config.toml").write_text(to_toml(now, tables).replace('preset = ""', 'preset = "none"'))
    found = RunDir(tmp_path).read_config()[0]
    assert found.preset == "none"


@pytest.mark.parametrize("name", PRESETS)
def test_settings_spelled_out_are_the_preset(name):
    spelled = as_settings(PRESETS[name])
    assert TrainSettings(**spelled).state_options == TrainSettings(preset=name).state_options == PRESETS[name]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hiden = 3", "there is no setting 'hiden'"),
        ("hidden = 'x'", "hidden = 'x' must be int"),
        ("hidden = true", "hidden = True must be int"),
        ("data = 'x'", "must be a list of paths"),
        ("hidden =", "is not TOML"),
        ("recipe = { 'layers.0' = 3 }", "recipe has 'layers.0' = 3; write PATTERN = RECIPE"),
        ("recipe = { 'a,b' = 'mxfp8' }", "recipe has 'a,b' = 'mxfp8'; write PATTERN = RECIPE"),
        ("recipe = {}", "recipe has '' = ''; write PATTERN = RECIPE"),
    ],
)
def test_refused_file(tmp_path, text, says):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        merge({}, file)
    assert says in str(caught.value) and "bad.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read .*none\.toml: No such file"):
        merge({}, tmp_path / "none.toml")


def test_ranks_must_fit():
    settings = replace(TrainSettings(), global_batch=6)
    for ranks in (1, 2, 3, 6):
        settings.check_ranks(ranks)
    with pytest.raises(ConfigurationError, match="multiple of 4"):
        settings.check_ranks(4)
    with pytest.raises(ConfigurationError, match="multiple of 4"):
        replace(settings, micro_batches=2).check_ranks(2)


def test_a_run_records_the_recipe_that_auto_stands_for():
    assert TrainSettings().recipe == "auto"
    assert TrainSettings().resolved().recipe == "current"
    assert TrainSettings(recipe="layers.0=bf16, *=auto/wgrad:bf16").resolved().recipe == (
        "layers.0=bf16,*=current/wgrad:bf16"
    )
