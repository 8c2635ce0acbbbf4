"""Loading what was exported, on one rank; tests/distributed/test_layouts.py does it on several."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantshard.errors import CheckpointError
from quantshard.interop.layouts import LAYOUTS, export, load
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from tests.covering import exhaustive
from tests.interop.layouts import models
from tests.interop.layouts.test_export import CASES, some

ROUND_TRIPS = [(r, layout) for r, layout in CASES if len(models.RECIPES[r].weight.format.copies) == 1]


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that a weight's values are."""
    found = {}
    for name, param in model.named_parameters():
        storage = components.quantized_storage(param)
        parts = {"": param.detach()} if storage is None else storage.components
        found.update({f"{name}:{part}": value for part, value in parts.items()})
    return found


def assert_equal(a: torch.nn.Module, b: torch.nn.Module) -> None:
    one, two = bits(a), bits(b)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize(
    ("recipe", "layout"), exhaustive(ROUND_TRIPS, some(ROUND_TRIPS[::-1])), ids=lambda x: getattr(x, "name", x)
)
def test_round_trip_is_exact(saved, tmp_path, recipe, layout):
    model, checkpoint = saved(recipe)
    export(checkpoint, layout.name, tmp_path / "out", config=models.CONFIG, max_shard_bytes=400_000)
    other = models.build(recipe, seed=1)
    done = load(tmp_path / "out", other)
    assert len(done.copied) == 21 and not done.requantized and not done.quantized
    assert_equal(model, other)


def test_high_precision_is_quantized_and_seeds_masters(saved, tmp_path):
    model, checkpoint = saved("bf16")
    export(checkpoint, "plain", tmp_path / "out", config=models.CONFIG)
    other = models.build("mxfp8", seed=1)
    done = load(tmp_path / "out", other)
    assert len(done.quantized) == 14 and len(done.copied) == 7
    name = "layers.1.layernorm_mlp.fc2_weight"
    param, value = other.get_parameter(name), model.get_parameter(name)
    assert (models.values(other)[name] - value).abs().max() <= value.abs().max() / 16
    optimizer = models.trained(other)
    master = optimizer.state[param]["master_param"]
    assert (master - value).abs().max() <= 1.1e-3  # one step of lr 1e-3 away from the file's values
    assert (models.values(other)[name] - value).abs().max() > 1.1e-3


def test_masters_begin_with_the_values_of_the_file(saved, tmp_path):
    model, checkpoint = saved("bf16")
    export(checkpoint, "plain", tmp_path / "out", config=models.CONFIG)
    other = models.build("mxfp8", seed=1)
    done = load(tmp_path / "out", other)
    optimizer = FusedAdam(other.named_parameters())
    for name in done.quantized:
        param = other.get_parameter(name)
        optimizer.initialize_state(param)
        assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), model.get_parameter(name).float()), name


def test_values_that_are_not_finite_are_not_quantized(saved, tmp_path):
    _, checkpoint = saved("bf16")
    export(checkpoint, "plain", tmp_path / "out", config=models.CONFIG)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][5, 3] = float("nan")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"fc1_up_weight: 1 of \d+ values.*first, nan, at \[5, 3\]"):
        load(tmp_path / "out", models.build("mxfp8"))


def test_other_blocks_need_lossy(saved, tmp_path):
    model, checkpoint = saved("nvfp4")
    export(checkpoint, "modelopt", tmp_path / "out", config=models.CONFIG)
    other = models.build("block", seed=1)
    before = {name: value.clone() for name, value in bits(other).items()}
    with pytest.raises(CheckpointError, match=r"14 weights cannot be copied .first: .*codes are E2M1.*lossy=True"):
        load(tmp_path / "out", other)
    assert all(torch.equal(before[name], value) for name, value in bits(other).items())
    done = load(tmp_path / "out", other, lossy=True)
    assert len(done.requantized) == 14 and "LOSSY" in done.lines()[1]
    own = models.values(other)
    for name, value in models.values(model).items():
        assert (own[name] - value).abs().max() <= value.abs().max() / 16


def test_the_error_names_the_recipe_of_the_blocks(saved, tmp_path):
    """Files of MXFP8 have scales of 1x32, of which a model of that recipe has one for 32."""
    _, checkpoint = saved("nvfp4")
    export(checkpoint, "compressed-tensors-mxfp8", tmp_path / "out", config=models.CONFIG, lossy=True)
    for recipe in ("mxfp8", "nvfp4"):
        with pytest.raises(CheckpointError, match=r"; use recipe 'mxfp8-weights', or pass lossy=True \(--lossy\)$"):
            load(tmp_path / "out", models.build(recipe))


def test_quantized_into_high_precision_is_dequantized(saved, tmp_path):
    model, checkpoint = saved("mxfp8")
    export(checkpoint, "modelopt", tmp_path / "out", config=models.CONFIG)
    other = models.build("bf16", seed=1)
    load(tmp_path / "out", other, lossy=True)
    own = models.values(other)
    assert all(torch.equal(own[name], value) for name, value in models.values(model).items())


def test_scales_that_differ_within_a_block_are_seen(saved, tmp_path):
    _, checkpoint = saved("mxfp8")
    export(checkpoint, "modelopt", tmp_path / "out", config=models.CONFIG)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight_scale"][5, 3] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"1 weights .*fc1_up_weight.: blocks of 1x32 have different scales"):
        load(tmp_path / "out", models.build("mxfp8"))


def test_foreign_second_scale(saved, tmp_path):
    """Without the note of our export the amax is the nearest one to the second scale."""
    model, checkpoint = saved("nvfp4")
    export(checkpoint, "modelopt", tmp_path / "out", config=models.CONFIG)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    save_file(load_file(file), file)
    other = models.build("nvfp4", seed=1)
    assert len(load(tmp_path / "out", other).copied) == 21
    for name, value in bits(model).items():
        found = bits(other)[name]
        assert torch.equal(found, value) or (name.endswith(":amax") and abs(found / value - 1) < 2**-22)


def test_tied(tmp_path):
    model, checkpoint = models.save(tmp_path, "mxfp8", tied=True)
    config = {**models.CONFIG, "tie_word_embeddings": True}
    export(checkpoint, "modelopt", tmp_path / "out", config=config)
    untied = models.build("mxfp8", seed=1)
    load(tmp_path / "out", untied)
    assert torch.equal(untied.head.weight, model.embedding.weight)
    tied = models.build("mxfp8", seed=1, tied=True)
    load(tmp_path / "out", tied)
    assert_equal(tied, model)


def edited(folder, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_mistakes(saved, tmp_path):
    _, checkpoint = saved("mxfp8")
    out = tmp_path / "out"
    export(checkpoint, "modelopt", out, config=models.CONFIG)
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight is float8_e4m3fn \[384, 256\], but .*\[512, 2"):
        load(out, models.build("mxfp8", ffn=512))
    with pytest.raises(CheckpointError, match=r"the model lacks .* tensors .first: model.layers.1"):
        load(out, models.build("mxfp8", layers=1))
    with pytest.raises(CheckpointError, match=r"has no model.layers.2.input_layernorm.weight"):
        load(out, models.build("mxfp8", layers=3))
    edited(out, quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match=r"unknown quantization_config .*awq"):
        load(out, models.build("mxfp8"))
    assert "modelopt-mxfp8" in LAYOUTS
