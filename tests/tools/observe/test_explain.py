"""`explain` on models in one process: what it says of storage, GEMMs and optimizer state."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard.errors import FallbackError
from quantshard.recipe import Float8CurrentScaling, Recipe
from quantshard.tools.observe import explain
from tests.interpreter import kernels_on

RECIPES = {"delayed": 1, "current": 1, "block": 1, "rowwise": 1, "mxfp8": 1, "nvfp4": 0.5}
"""Recipe -> bytes of codes an element."""


class Mixed(nn.Module):
    """Two quantized layers among modules that are not ours."""

    def __init__(self, recipe: str = "mxfp8", device: str = "cpu") -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 96, dtype=torch.bfloat16, device=device)
        with qs.quantized_model_init(recipe=recipe):
            self.up = qs.Linear(96, 200, params_dtype=torch.bfloat16, device=device)
            self.down = qs.Linear(200, 96, bias=False, params_dtype=torch.bfloat16, device=device)
        self.norm = nn.LayerNorm(96, dtype=torch.bfloat16, device=device)
        self.head = nn.Linear(96, 11, dtype=torch.bfloat16, device=device)
        self.scale = nn.Parameter(torch.ones((), device=device))


def row_of(report, name):
    return next(row for row in report.rows if row.name == name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_the_parameters(recipe):
    model = Mixed(recipe)
    report = explain(model)
    assert [(row.name, row.shape) for row in report.rows] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    up = row_of(report, "up.weight")
    storage = model.up.weight.quantized_storage
    assert up.format == storage.spec.tag
    assert up.code_bytes == 200 * 96 * RECIPES[recipe]
    assert up.bytes == sum(part.untyped_storage().nbytes() for part in storage.components.values())
    assert up.scale_bytes > 0
    assert up.bf16_bytes == 200 * 96 * 2
    assert (up.mesh, up.placements, up.local_rows) == ({}, (), (0, 200))
    assert (up.forward_gather_bytes, up.backward_gather_bytes, up.reduced_bytes) == (0, 0, 0)
    scale = row_of(report, "scale")
    assert (scale.format, scale.code_bytes, scale.scale_bytes, scale.local_rows) == ("float32", 4, 0, (0, 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_totals_are_sums(recipe):
    model = Mixed(recipe)
    totals = explain(model, torch.optim.SGD(model.parameters())).totals
    assert totals.parameters == sum(p.numel() for p in model.parameters())
    assert totals.bf16_bytes == 2 * totals.parameters
    assert totals.bf16_optimizer_bytes == 12 * totals.parameters
    plain = sum(p.nbytes for n, p in model.named_parameters() if n not in ("up.weight", "down.weight"))
    stored = [part for m in (model.up, model.down) for part in m.weight.quantized_storage.components.values()]
    assert totals.bytes == plain + sum(part.nbytes for part in stored)
    assert totals.optimizer_bytes == 0
    assert totals.gather_bytes == 0


def test_meta_device_gives_the_same_report():
    assert explain(Mixed(device="meta")).to_json() == explain(Mixed()).to_json()


def test_gemm_path_and_why():
    model = Mixed()
    report = explain(model)
    assert row_of(report, "up.weight").gemm == "emulated"
    assert "CPU has no E4M3" in row_of(report, "up.weight").gemm_reason
    assert row_of(report, "head.weight").gemm == "native"
    assert "Linear is not one of quantshard's modules" in row_of(report, "head.weight").gemm_reason
    assert {row.name for row in report.rows if not row.gemm} == {
        "embedding.weight", "up.bias", "norm.weight", "norm.bias", "head.bias", "scale",
    }  # fmt: skip


def test_plain_weights_are_quantized_by_the_recipe_of_autocast():
    model = qs.Linear(96, 200)
    (weight, bias) = explain(model).rows
    assert (weight.gemm, weight.gemm_reason, bias.gemm) == ("native", "high precision", "")
    paths: list[tuple[str | Recipe, str]] = [
        ("nvfp4", "emulated"), ("bf16", "native"), (Float8CurrentScaling(), "emulated")
    ]  # fmt: skip
    for recipe, path in paths:
        assert explain(model, recipe=recipe).rows[0].gemm == path
    assert "under autocast(recipe='nvfp4'): a CPU has no E2M1" in explain(model, recipe="nvfp4").rows[0].gemm_reason


def test_optimizer_formats_and_bytes():
    model = Mixed()
    optimizer = qs.optimizers.FusedAdam(model.parameters(), exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8)
    report = explain(model, optimizer)
    up = row_of(report, "up.weight")
    assert up.optimizer == {"exp_avg": "FP8", "exp_avg_sq": "FP8", "master_param": "fp32"}
    assert up.optimizer_bytes == 200 * 96 * (1 + 1 + 4) + 200 * (4 + 1)  # a scale for each row of 96
    assert up.fallbacks == ("emulated",)
    bias = row_of(report, "up.bias")
    assert bias.optimizer == {"exp_avg": "fp32", "exp_avg_sq": "fp32", "master_param": "fp32"}
    assert bias.fallbacks == ("float32 states",)
    assert row_of(report, "scale").optimizer == {"exp_avg": "fp32", "exp_avg_sq": "fp32"}  # it is its own master
    held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert report.totals.optimizer_bytes == sum(t.nbytes for t in held)


def test_fp32_moments_need_no_note():
    model = Mixed()
    optimizer = qs.optimizers.FusedAdam(model.parameters(), exp_avg_sq_dtype=torch.uint8)
    report = explain(model, optimizer)
    assert row_of(report, "up.weight").optimizer["exp_avg"] == "fp32"
    assert row_of(report, "up.bias").fallbacks == ("float32 states",)


def test_stock_optimizer_on_a_stock_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters())
    assert row_of(explain(model, optimizer), "0.weight").optimizer == {}  # none before the first step
    model[0](torch.randn(2, 8)).sum().backward()
    optimizer.step()
    report = explain(model, optimizer)
    assert row_of(report, "0.weight").optimizer == {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
    assert row_of(report, "1.weight").optimizer == {}
    assert report.totals.optimizer_bytes == 72 * 8
    assert report.totals.bf16_optimizer_bytes == 72 * 12
    assert report.totals.bytes == 72 * 4 + 72 * 2


def test_a_shared_parameter_is_one_row():
    model = Mixed()
    model.head.weight = model.embedding.weight
    assert [row.name for row in explain(model).rows] == [name for name, _ in model.named_parameters()]


def test_printed_table_has_a_line_for_each_parameter(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    model = Mixed()
    report = explain(model, qs.optimizers.FusedAdam(model.parameters(), exp_avg_dtype=torch.uint8))
    lines = str(report).splitlines()
    for name, _ in model.named_parameters():
        assert any(line.split()[:1] == [name] for line in lines), name
    (up,) = [line for line in lines if line.split()[:1] == ["up.weight"] and "mxfp8_32x32" in line]
    assert "18.8 KiB" in up
    assert "exp_avg FP8; exp_avg_sq, master fp32" in up
    ratio = f"{report.totals.bytes / report.totals.bf16_bytes:.2f}"
    assert any(line.split()[:1] == ["weights"] and line.endswith(ratio) for line in map(str.strip, lines))
    assert sum("emulated" in line and not line.startswith(("up.", "down.")) for line in lines) == 1
    assert sum("fallback: " in line for line in lines) == 1, "said once, of all its parameters"


def test_json_holds_rows_and_totals():
    report = explain(Mixed())
    content = json.loads(report.to_json())
    assert [row["name"] for row in content["rows"]] == [row.name for row in report.rows]
    assert content["rows"][1]["bytes"] == report.rows[1].bytes
    assert content["totals"]["bytes"] == report.totals.bytes
    assert math.isclose(content["totals"]["gather_bytes"], 0)


@pytest.mark.parametrize(
    ("options", "formats", "bytes_per_element"),
    [
        ({"exp_avg_dtype": torch.float16}, ("fp16", "fp32", "fp32"), 2 + 4 / 128 + 4 + 4),
        ({"exp_avg_sq_dtype": torch.bfloat16}, ("fp32", "bf16", "fp32"), 4 + 2 + 4),
        ({"master_weight_dtype": torch.bfloat16}, ("fp32", "fp32", "bf16"), 4 + 4 + 2),
        ({"master_weight_dtype": torch.float16}, ("fp32", "fp32", "fp16"), 4 + 4 + 2 + 4 / 128),
        ({"master_weights": False}, ("fp32", "fp32", None), 4 + 4),
    ],
    ids=str,
)
def test_states_of_every_format_are_told(options, formats, bytes_per_element):
    with qs.quantized_model_init(recipe="mxfp8"):
        model = nn.ModuleDict({"up": qs.Linear(256, 8, params_dtype=torch.bfloat16)})
    report = explain(model, qs.optimizers.FusedAdam(model.parameters(), **options))
    expected = dict(zip(("exp_avg", "exp_avg_sq", "master_param"), formats, strict=True))
    row = row_of(report, "up.weight")
    assert row.optimizer == {state: fmt for state, fmt in expected.items() if fmt is not None}
    assert row.optimizer_bytes == 256 * 8 * bytes_per_element
    assert ("float32 states" in row_of(report, "up.bias").fallbacks) == ("fp16" in expected.values())


def test_bytes_a_parameter(monkeypatch):
    """Of quantized weights alone, where there are some; and an average is told."""
    monkeypatch.setenv("COLUMNS", "240")
    with qs.quantized_model_init(recipe="mxfp8"):
        model = nn.ModuleDict({"up": qs.Linear(256, 64, params_dtype=torch.bfloat16), "norm": nn.LayerNorm(300)})
    assert explain(model).parameter == {}
    report = explain(model, qs.optimizers.FusedAdam(model.parameters(), preset="lean8", ema_decay=0.9))
    told = report.parameter
    assert (told["weights"], told["is_quantized"]) == (1, True)
    assert (told["weight"], told["master"], told["moments"]) == (1 + 1 / 1024, 1, 1 + 4 / 128 + 1 + 1 / 128)
    assert told["average"] == 4 and told["together"] == told["weight"] + told["master"] + told["moments"] + 4
    line = "bytes per quantized parameter: weight 1.00 + master 1.00 + moments 2.04 + average 4.00 = 8.04"
    assert line in str(report)
    assert json.loads(report.to_json())["parameter"] == told
    default = explain(model, qs.optimizers.FusedAdam(model.parameters()))
    assert "= 13.00\n" in str(default)
    plain = explain(nn.Linear(8, 4, dtype=torch.bfloat16))
    assert plain.parameter == {}


def test_bytes_a_parameter_of_plain_weights():
    model = nn.Linear(256, 4, bias=False, dtype=torch.bfloat16)
    told = explain(model, qs.optimizers.FusedAdam(model.parameters(), preset="lean8")).parameter
    assert (told["weight"], told["master"], told["is_quantized"]) == (2, 2, False)
    told = explain(model, torch.optim.AdamW(model.parameters())).parameter
    assert told == {}  # before a step, which makes its states


def test_a_remainder_and_its_parameter_are_a_master():
    model = nn.Linear(16, 8, dtype=torch.bfloat16)
    report = explain(model, qs.optimizers.FusedAdam(model.parameters(), store_param_remainders=True))
    row = row_of(report, "weight")
    assert row.optimizer == {"exp_avg": "fp32", "exp_avg_sq": "fp32", "master_param": "bf16+16"}
    assert row.optimizer_bytes == 16 * 8 * (4 + 4 + 2)
    with qs.quantized_model_init(recipe="current"):
        split = qs.Linear(16, 8, bias=False)
    row = row_of(explain(split, qs.optimizers.FusedAdam(split.parameters(), preset="lean6")), "weight")
    assert row.optimizer == {"exp_avg": "FP8", "exp_avg_sq": "bf16", "master_param": "FP8+8"}
    assert row.state_sizes == {"exp_avg": 8 * (16 + 4), "exp_avg_sq": 8 * 16 * 2, "master_param": 8 * 16}


def test_layers_that_compiled_code_runs_between_graphs() -> None:
    """Only in compiled modules, and only where kernels cannot be traced."""

    def between(model: nn.Module, **options: Any) -> set[str]:
        return {row.name for row in explain(model, **options).rows if "between graphs" in row.fallbacks}

    def built(dtype: torch.dtype = torch.bfloat16) -> nn.ModuleDict:
        options: Any = {"params_dtype": dtype, "bias": False}
        with qs.quantized_model_init(recipe="current"):
            layers = nn.ModuleDict(
                {
                    "linear": qs.Linear(32, 32, **options),
                    "experts": qs.GroupedLinear(2, 32, 32, **options),
                    "split": qs.Linear(32, 32, tp_size=2, parallel_mode="column", **options),
                    "mlp": qs.LayerNormMLP(
                        32,
                        32,
                        activation_storage="fp8",
                        return_layernorm_output=True,
                        normalization="RMSNorm",
                        **options,
                    ),
                }
            )
        layers["plain"] = qs.Linear(32, 32, **options)
        return layers

    every = {f"{name}.weight" for name in ("linear", "split")}
    every |= {"experts.weight0", "experts.weight1", "mlp.fc1_weight", "mlp.fc2_weight"}
    model = built()
    assert between(model) == set()
    assert between(torch.compile(model)) == {f"_orig_mod.{name}" for name in every}
    model["linear"].compile()
    assert between(model) == {"linear.weight"}
    assert between(nn.ModuleDict({"model": built()["plain"]})) == set()
    with kernels_on("cpu"):
        model = built()
        model.compile()
        assert between(model) == every - {"linear.weight"}
        assert between(model, recipe="bf16") == {"split.weight", "experts.weight0", "experts.weight1"} | {
            "mlp.fc1_weight", "mlp.fc2_weight"
        }  # fmt: skip
        double = built(torch.float64)
        double.compile()
        assert between(double) == every
    with pytest.raises(FallbackError, match="compiled function runs it eagerly"):
        explain(double, strict=True)
