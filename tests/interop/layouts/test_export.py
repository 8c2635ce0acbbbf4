"""What an export writes, read by the safetensors library alone; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantshard import checkpoints, numerics
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.formats import ALL, E8M0, FP32, Orientation
from quantshard.interop.layouts import LAYOUTS, LLAMA, Layout, export, load, names
from quantshard.interop.layouts.table import EXACT, LOSSY, UNDEFINED, verdict
from quantshard.modules import RMSNorm, TransformerLayer
from quantshard.tensor import components
from tests.covering import exhaustive
from tests.interop.layouts import models

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def read(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(map(len, files.values())) == len(found)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


def decoded(layout: Layout, tensors: dict[str, Tensor], stem: str) -> Tensor:
    """A weight by the words of its ecosystem's specification, float64."""
    codes = tensors[stem + layout.codes_key]
    if codes.dtype == torch.uint8:
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
        values = E2M1[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    else:
        values = codes.float()
    scale = tensors[stem + layout.scale_key]
    grid = 2.0 ** (scale.double() - 127) if layout.scale == E8M0 else scale.double()
    grid = grid.reshape(-1, 1) if grid.ndim < 2 else grid
    for dim in (0, 1):
        size = layout.block[dim] if layout.block[dim] != ALL else values.shape[dim]
        grid = grid.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    if layout.second is not None:
        second = tensors[stem + layout.second.key].double()
        grid = grid / second if layout.second.divides else grid * second
    return values.double() * grid


CASES = [
    (recipe, layout)
    for recipe in models.RECIPES
    for layout in LAYOUTS.values()
    if not layout.is_plain and verdict(models.RECIPES[recipe].weight, layout).kind == EXACT
]


def some(cases):
    """Every recipe and every layout, each as often as the other's number asks for."""
    chosen, recipes, layouts = [], set(), set()
    for wanted in (2, 1):  # first those that are new in both
        for recipe, layout in cases:
            if (recipe not in recipes) + (layout.name not in layouts) >= wanted:
                chosen.append((recipe, layout))
                recipes.add(recipe)
                layouts.add(layout.name)
    return chosen


def test_there_are_exact_cases_of_every_layout():
    assert {layout.name for _, layout in CASES} == {name for name, row in LAYOUTS.items() if not row.is_plain}


@pytest.mark.parametrize(("recipe", "layout"), exhaustive(CASES, some(CASES)), ids=lambda x: getattr(x, "name", x))
def test_values_are_ours(saved, tmp_path, recipe, layout):
    model, checkpoint = saved(recipe)
    done = export(checkpoint, layout.name, tmp_path / "out", config=models.CONFIG, max_shard_bytes=300_000)
    assert len(done.exact) == 14 and not done.requantized
    tensors, own = read(tmp_path / "out"), models.values(model)
    assert len(set(tmp_path.glob("out/*.safetensors"))) > 2
    for ours, value in own.items():
        (theirs,) = LLAMA.theirs(ours, len(value), None)
        if theirs not in done.exact:
            assert torch.equal(tensors[theirs], value)
            continue
        found = decoded(layout, tensors, theirs.removesuffix("weight"))
        if layout.second is None:
            assert torch.equal(found.float(), value)
        else:  # float32 rounds four times in our formula, and once the second scale
            assert ((found - value.double()).abs() <= 5 * 2**-24 * value.abs()).all()
    config = json.loads((tmp_path / "out/config.json").read_text())
    text = json.dumps(config["quantization_config"])
    assert '"lm_head"' in text and "model.embed_tokens" in text and "norm" not in text
    assert config["num_attention_heads"] == 4
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "others can read the weights as well as the configuration"


def test_codes_are_ours_bit_for_bit(saved, tmp_path):
    model, checkpoint = saved("nvfp4")
    export(checkpoint, "modelopt", tmp_path / "out", config=models.CONFIG)
    tensors = read(tmp_path / "out")
    storage = components.storage_of(model.get_parameter("layers.1.layernorm_mlp.fc2_weight"))
    stem = "model.layers.1.mlp.down_proj."
    assert torch.equal(tensors[stem + "weight"], storage.components["codes"])
    scale = storage.components["scale_inv"].repeat_interleave(16, 0)
    assert torch.equal(tensors[stem + "weight_scale"].view(torch.uint8), scale)
    amax = storage.components["amax"].double().item()
    assert tensors[stem + "weight_scale_2"].item() == pytest.approx(amax / 2688, rel=2**-24)
    producer = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert producer["quant_algo"] == "W4A16_NVFP4"
    assert producer["exclude_modules"] == ["lm_head", "model.embed_tokens"]


@pytest.mark.parametrize("layout", ["plain-fp32", "plain-bf16"])
def test_plain_has_the_masters_or_the_weights(saved, tmp_path, layout):
    model, checkpoint = saved("mxfp8")
    own = export(checkpoint, layout, tmp_path / "own", config=models.CONFIG, values="weights")
    assert not own.masters and "dequantized" in own.notes[0]
    done = export(checkpoint, layout, tmp_path / "out", config=models.CONFIG)
    assert done.masters == 14 and len(done.high_precision) == 21  # float32 parameters are their own masters
    weights, masters = read(tmp_path / "own"), read(tmp_path / "out")
    for ours, value in models.values(model).items():
        (theirs,) = LLAMA.theirs(ours, len(value), None)
        assert torch.equal(weights[theirs], value.to(LAYOUTS[layout].dtype))
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(masters[name], weights[name])


MASTERS = {
    "float32": {},
    "float16": {"master_weight_dtype": torch.float16},
    "remainders": {"store_param_remainders": True},
    "split": {"store_param_remainders": True, "master_weight_dtype": torch.float16},
}


@pytest.mark.parametrize("kind", MASTERS)
def test_masters_are_those_of_the_optimizer(tmp_path, kind):
    model, checkpoint = models.save(tmp_path, "mxfp8", MASTERS[kind], params_dtype="bfloat16")
    done = export(checkpoint, "plain-fp32", tmp_path / "out", config=models.CONFIG)
    assert done.masters == len(done.high_precision) == 21
    tensors, rounded = read(tmp_path / "out"), 0
    for ours, value in models.values(model).items():
        (theirs,) = LLAMA.theirs(ours, len(value), None)
        master = tensors[theirs]
        if components.quantized_local(model.get_parameter(ours)) is None:
            # to the nearest bfloat16, or a step away where a master of 16 bits was rounded itself
            assert ((master - value).abs() <= 2**-8 * value.abs() + 1e-30).all()
        else:
            assert (master - value).abs().max() <= value.abs().max() / 16
        rounded += int((master != value).sum())
    assert rounded > 100_000


def test_averages(saved, tmp_path):
    """In plain layouts bit for bit, also of what is not quantized; in others their nearest quantization."""
    model, checkpoint = models.build("mxfp8"), tmp_path / "averaged"
    optimizer = models.trained(model, ema_decay=0.9)
    for param in model.parameters():
        optimizer.state[param]["ema_param"] *= 0.7  # after one step it would be the master
    checkpoints.save(checkpoint, model, optimizer)
    done = export(checkpoint, "plain-fp32", tmp_path / "plain", config=models.CONFIG, values="ema")
    assert done.averages == 21 and not done.masters and "averages of the weights" in done.lines()[1]
    plain = read(tmp_path / "plain")
    for ours, param in model.named_parameters():
        (theirs,) = LLAMA.theirs(ours, len(param), None)
        assert torch.equal(plain[theirs], optimizer.state[param]["ema_param"])
    done = export(checkpoint, "hf-fp8-block", tmp_path / "out", config=models.CONFIG, values="ema")
    assert len(done.requantized) == 14 and not done.exact and done.averages == 21
    fmt, tensors = LAYOUTS["hf-fp8-block"].row(), read(tmp_path / "out")
    for name in done.requantized:
        found = decoded(LAYOUTS["hf-fp8-block"], tensors, name.removesuffix("weight"))
        copy = fmt.copies[Orientation.ROWWISE]
        wanted = numerics.dequantize(copy, numerics.quantize(plain[name], fmt), tuple(plain[name].shape))
        assert torch.equal(found.float(), wanted)
    with pytest.raises(ConfigurationError, match=r"holds no averages of its weights.*--ema"):
        export(saved("mxfp8")[1], "plain-fp32", tmp_path / "none", config=models.CONFIG, values="ema")
    with pytest.raises(ConfigurationError, match="use 'masters', 'weights' or 'ema'"):
        export(checkpoint, "plain-fp32", tmp_path / "none", values="emma")


def test_lossy_only_if_asked_and_from_masters(saved, tmp_path):
    _, checkpoint = saved("mxfp8")
    with pytest.raises(ConfigurationError, match=r"query_weight \[256, 256\], mxfp8_32x32.*32x32.*128x128.*--lossy"):
        export(checkpoint, "hf-fp8-block", tmp_path / "out", config=models.CONFIG)
    assert not list(tmp_path.iterdir())
    done = export(checkpoint, "hf-fp8-block", tmp_path / "out", config=models.CONFIG, lossy=True)
    assert len(done.requantized) == 14 and any("LOSSY" in line for line in done.lines())
    export(checkpoint, "plain-fp32", tmp_path / "plain", config=models.CONFIG)
    masters, tensors = read(tmp_path / "plain"), read(tmp_path / "out")
    for name in done.requantized:
        found = decoded(LAYOUTS["hf-fp8-block"], tensors, name.removesuffix("weight"))
        # half a step of E4M3 is at most 2**-4 of a value, or 2**-10 of the step of the smallest normal number
        bound = masters[name].abs() * 2**-4 + masters[name].abs().max() / 448 * 2**-10
        assert ((found - masters[name]).abs() <= bound).all()


def test_high_precision_needs_lossy(saved, tmp_path):
    _, checkpoint = saved("bf16")
    with pytest.raises(ConfigurationError, match="in high precision"):
        export(checkpoint, "hf-fp8", tmp_path / "out", config=models.CONFIG)
    done = export(checkpoint, "hf-fp8", tmp_path / "out", config=models.CONFIG, lossy=True)
    assert len(done.requantized) == 14
    assert "lm_head.weight" in done.high_precision


def test_scales_that_are_no_powers_of_two_are_refused_by_value(saved, tmp_path):
    _, checkpoint = saved("block-f32")
    with pytest.raises(ConfigurationError, match="not powers of two"):
        export(checkpoint, "sglang-mxfp8", tmp_path / "out", config=models.CONFIG)


def test_delayed_scaling_gives_the_activation_scale(saved, tmp_path):
    model, checkpoint = saved("delayed")
    export(checkpoint, "modelopt-fp8", tmp_path / "out", config=models.CONFIG)
    tensors = read(tmp_path / "out")
    history = model.layers[0].layernorm_mlp.fc2_input_amax_history.max()
    assert tensors["model.layers.0.mlp.down_proj.input_scale"] == history / 448
    _, other = saved("current")
    with pytest.raises(ConfigurationError, match="scale of the activations"):
        export(other, "modelopt-fp8", tmp_path / "no", config=models.CONFIG)


def test_tied_weights_are_written_once(tmp_path):
    _, checkpoint = models.save(tmp_path, "mxfp8", tied=True)
    export(checkpoint, "plain", tmp_path / "out", config={**models.CONFIG, "tie_word_embeddings": True})
    assert "lm_head.weight" not in read(tmp_path / "out")


def test_tied_in_the_configuration_alone_is_refused(saved, tmp_path):
    with pytest.raises(ConfigurationError, match=r"head.weight and embedding.weight differ; set tie_word_embeddings"):
        export(saved("mxfp8")[1], "plain", tmp_path / "out", config={**models.CONFIG, "tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layout": "gguf"}, "unknown layout 'gguf'"),
        ({"config": None}, "has no model configuration; .*--config"),
        ({"config": None, "layout": "plain"}, "has no model configuration; .*--config"),
        ({"layout": "modelopt", "recipe": "bf16"}, "no layout of 'modelopt' is exact for high precision"),
        ({"names": names.Names({})}, "embedding.weight has no external name"),
        (
            {"names": replace(names.LLAMA, plain={**names.LLAMA.plain, "norm.weight": "lm_head.weight"})},
            r"two weights would be named lm_head\.weight",
        ),
        ({"values": "moments"}, "values='moments'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_mistakes(saved, tmp_path, change, match):
    arguments = {"layout": "sglang-mxfp8", "config": models.CONFIG, **change}
    checkpoint = saved(arguments.pop("recipe", "mxfp8"))[1]
    with pytest.raises(ConfigurationError, match=match):
        export(checkpoint, arguments.pop("layout"), tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_not_touched(saved, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        export(saved("mxfp8")[1], "plain", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_fails_leaves_nothing(saved, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    _, checkpoint = saved("mxfp8")
    monkeypatch.setattr("quantshard.interop.layouts.files.save_file", full)
    with pytest.raises(CheckpointError, match=r"out cannot be written: .*No space left on device"):
        export(checkpoint, "plain", tmp_path / "out", config={})
    assert not list(tmp_path.iterdir())


def test_verdicts_are_of_three_kinds():
    kinds = {verdict(models.RECIPES[r].weight, layout).kind for r in models.RECIPES for layout in LAYOUTS.values()}
    assert kinds == {EXACT, LOSSY, UNDEFINED}
    assert all(layout.scale == FP32 for layout in LAYOUTS.values() if layout.scale_dtype == torch.float32)


def test_what_readers_do_with_it_is_said(saved, tmp_path):
    done = export(saved("nvfp4")[1], "modelopt", tmp_path / "nvfp4", config=models.CONFIG)
    assert any("weight-only" in note for note in done.notes)
    _, checkpoint = models.save(tmp_path / "checkpoints", "block", hidden=160, ffn=384)
    config = {**models.CONFIG, "hidden_size": 160}
    done = export(checkpoint, "hf-fp8-block", tmp_path / "block", config=config)
    assert any(note.startswith("14 weights end inside a block of 128x128 (first: model.la") for note in done.notes)
    assert not any(
        "inside a block" in note
        for note in export(saved("block")[1], "hf-fp8-block", tmp_path / "b", config=models.CONFIG).notes
    )


# Norms that multiply by 1 + weight


def centered(dtype: torch.dtype, seed: int = 0) -> torch.nn.ModuleDict:
    """A layer and a norm with zero_centered_gamma, with gammas - 1 of a few bits, so that sums are exact."""
    torch.manual_seed(seed)
    options: dict = {"zero_centered_gamma": True, "normalization": "RMSNorm", "bias": False, "params_dtype": dtype}
    layer = TransformerLayer(
        64, 128, 4, num_gqa_groups=2, activation="swiglu", fuse_qkv_params=False, hidden_dropout=0.0,
        attention_dropout=0.0, **options,
    )  # fmt: skip
    norm = RMSNorm(64, params_dtype=dtype, zero_centered_gamma=True)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer]), "norm": norm})
    for name, param in model.named_parameters():
        if "norm_weight" in name or name == "norm.weight":
            param.detach().copy_(torch.randint(-32, 33, param.shape) / 64)
    return model


GAMMAS = {
    "layers.0.self_attention.layernorm_qkv.layer_norm_weight": "model.layers.0.input_layernorm.weight",
    "layers.0.layernorm_mlp.layer_norm_weight": "model.layers.0.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
}
SIZES = {key: value for key, value in models.CONFIG.items() if key not in ("vocab_size", "hidden_size")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centered_gammas_go_over_and_come_back(tmp_path, dtype):
    model = centered(dtype)
    checkpoints.save(tmp_path / "ckpt", model, None)
    done = export(tmp_path / "ckpt", "plain-fp32", tmp_path / "out", config=SIZES)
    assert "3 norm weights, stored as gamma - 1, are written as gamma" in done.lines() and not done.rounded
    tensors, own = read(tmp_path / "out"), dict(model.named_parameters())
    for ours, theirs in GAMMAS.items():
        assert torch.equal(tensors[theirs], own[ours].float() + 1)
    new = centered(dtype, seed=1)
    report = load(tmp_path / "out", new)
    assert all(torch.equal(value, own[name]) for name, value in new.named_parameters())
    gammas = [*GAMMAS] if dtype == torch.float32 else []
    assert set(gammas) <= set(report.copied)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_rounded_gammas_are_reported(tmp_path):
    model = centered(torch.bfloat16)
    model["norm"].weight.detach().fill_(2.0**-12)
    checkpoints.save(tmp_path / "ckpt", model, None)
    done = export(tmp_path / "ckpt", "plain-bf16", tmp_path / "out", config=SIZES)
    assert done.rounded == ["model.norm.weight"]
    assert "not exact: 1 + weight was rounded for 1 norms (first: model.norm.weight)" in done.lines()
    tensors = {**read(tmp_path / "out"), "model.norm.weight": torch.full((64,), 1.25 + 2.0**-20)}
    save_file(tensors, tmp_path / "out/model.safetensors")
    for part in tmp_path.glob("out/model-*"):
        part.unlink()
    (tmp_path / "out/model.safetensors.index.json").unlink(missing_ok=True)
    report = load(tmp_path / "out", centered(torch.float32, seed=1))
    assert "norm.weight" not in report.rounded
    assert "norm.weight" in load(tmp_path / "out", centered(torch.float16, seed=1)).rounded


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_gammas_of_families_that_store_them_less_1_stay(tmp_path):
    model = centered(torch.float32)
    checkpoints.save(tmp_path / "ckpt", model, None)
    config = {**SIZES, "model_type": "gemma2"}
    export(tmp_path / "ckpt", "plain-fp32", tmp_path / "out", config=config)
    assert torch.equal(read(tmp_path / "out")["model.norm.weight"], model["norm"].weight)
    load(tmp_path / "out", new := centered(torch.float32, seed=1))
    assert torch.equal(new["norm"].weight, model["norm"].weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_does_not_record_zero_centered_gamma(tmp_path):
    model = centered(torch.float32)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    with pytest.raises(ConfigurationError, match=r"does not record zero_centered_gamma.*--no-zero-centered"):
        export(tmp_path / "ckpt", "plain-fp32", tmp_path / "out", config=SIZES)
    gamma, theirs = model["norm"].weight.detach(), "model.norm.weight"
    for is_centered in (False, True):
        out = tmp_path / str(is_centered)
        export(tmp_path / "ckpt", "plain-fp32", out, config=SIZES, zero_centered_gamma=is_centered)
        assert torch.equal(read(out)[theirs], gamma + is_centered)
