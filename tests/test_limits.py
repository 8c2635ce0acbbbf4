"""Fallbacks: each is named where it is taken, by `explain` and as an error under strict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard import kernels, limits, sharding
from quantshard.errors import FallbackError
from quantshard.formats import FORMATS, Orientation
from quantshard.gemm import operands, predictions
from quantshard.recipe import QuantSpec, Recipe, resolve


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with a native path for every GEMM."""
    monkeypatch.setattr(predictions, "gemm_path", lambda cell, device, recipe=None: ("native", "tried"))


def linear(recipe: str | Recipe = "current", **options: Any) -> qs.Linear:
    with qs.quantized_model_init(recipe=recipe, **options):
        return qs.Linear(96, 57)


def forward(layer: nn.Module, recipe: str | Recipe = "current", enabled: bool = True) -> None:
    with qs.autocast(enabled, recipe=recipe, strict=True):
        layer(torch.ones(2, 96))


def late_history() -> None:
    layer = linear("delayed")
    del layer.input_amax_history
    forward(layer, "delayed")


def fetched() -> None:
    layer = linear(qs.recipe.MXFP8BlockScaling(enable_2d_quantization=False))
    storage = layer.weight.quantized_storage
    storage.gathered = True
    for part in [name for name, c in storage.spec.format.by_name.items() if c.copy is Orientation.ROWWISE]:
        del storage.components[part]
    forward(layer, qs.recipe.MXFP8BlockScaling(enable_2d_quantization=False))


def cut() -> None:
    layer = linear("block")
    storage = layer.weight.quantized_storage
    # as the second of several ranks has it
    storage.shard, storage.gathered = sharding.whole((157, 96)).piece(0, 100, 57), True
    forward(layer, "block")


TAKEN: dict[str, Callable[[], None]] = {
    "quantized each forward": lambda: forward(linear(enabled=False)),
    "dequantized": lambda: forward(linear(), enabled=False),
    "extra gather": fetched,
    "cut blocks": cut,
    "late amax history": late_history,
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.usefixtures("native")
def test_strict_autocast_raises(name: str) -> None:
    with pytest.raises(FallbackError) as error:
        TAKEN[name]()
    assert str(limits.FALLBACKS[name]) in str(error.value)
    assert "Linear." in str(error.value)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("start", "crosses"), [(0, False), (128, False), (100, True), (256, False)])
def test_only_cuts_of_tensor_parallelism_inside_blocks_fall_back(start: int, crosses: bool) -> None:
    """A shard of FSDP2 is gathered before it is multiplied."""
    storage = linear("block").weight.quantized_storage
    storage.shard = sharding.whole((300, 96)).piece(0, start, 100)
    device = torch.device("cpu")
    assert "cut blocks" not in predictions.fallbacks(storage, resolve("block"), device)
    storage.gathered = True
    assert ("cut blocks" in predictions.fallbacks(storage, resolve("block"), device)) is crosses


def test_emulation_is_a_fallback() -> None:
    with pytest.raises(FallbackError, match=r"strict: Linear.weight: its GEMMs dequantize both operands"):
        forward(linear())


@pytest.mark.usefixtures("native")
def test_strict_passes_where_nothing_falls_back() -> None:
    forward(linear())
    forward(linear(enabled=False), "bf16")
    assert qs.explain(linear(), recipe="current", strict=True).fallbacks == ()


def test_not_strict_raises_nothing_and_gives_the_same_bits() -> None:
    layer = linear()
    with qs.autocast(recipe="current"):
        layer(torch.ones(2, 96))


def test_recomputation_stays_strict() -> None:
    """The second forward runs after autocast was left."""
    layer, x = linear(), torch.ones(2, 96, requires_grad=True)
    gemm_path = predictions.gemm_path
    try:
        predictions.gemm_path = lambda cell, device, recipe=None: ("native", "tried")  # type: ignore[assignment]
        with qs.autocast(recipe="current", strict=True):
            out = qs.checkpoint(layer, x)
    finally:
        predictions.gemm_path = gemm_path
    with pytest.raises(FallbackError):
        out.sum().backward()


def test_a_weight_that_dgrad_cannot_read_natively_is_named() -> None:
    cells = [QuantSpec(fmt) for fmt in FORMATS.values() if not fmt.transposable and len(fmt.copies) == 1]
    assert cells
    for cell in cells:
        storage = operands.quantize_operand(torch.ones(32, 96), cell)
        assert "dgrad dequantizes" in predictions.fallbacks(storage, None, torch.device("cpu"))


def test_a_gpu_without_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, recipe = linear().weight.quantized_storage, resolve("current")
    for usable in (True, False):
        monkeypatch.setattr(kernels, "USABLE", usable)
        assert ("no kernels" in predictions.fallbacks(weight, recipe, torch.device("cuda"))) == (not usable)
        assert "no kernels" not in predictions.fallbacks(weight, recipe, torch.device("cpu"))
        assert "no kernels" not in predictions.fallbacks(None, resolve("bf16"), torch.device("cuda"))


def test_explain_names_them_and_strict_raises() -> None:
    model = nn.ModuleDict({"ours": linear(), "plain": nn.Linear(4, 4)})
    report = qs.explain(model, recipe="current")
    assert {row.name: row.fallbacks for row in report.rows if row.fallbacks} == {
        "ours.weight": ("emulated",), "plain.weight": ("foreign module",),
    }  # fmt: skip
    assert "fallback: plain.weight: foreign module: its GEMMs run in high precision, because" in " ".join(
        str(report).split()
    )
    with pytest.raises(FallbackError, match=r"ours.weight: emulated: .*\n.*plain.weight: foreign module"):
        qs.explain(model, recipe="current", strict=True)
    assert qs.explain(model, recipe="bf16").rows[-2].fallbacks == ()


def test_explain_names_moments_that_stay_float32() -> None:
    model = linear()
    optimizer = qs.optimizers.FusedAdam(model.parameters(), exp_avg_dtype=torch.uint8)
    (weight, bias) = qs.explain(model, optimizer).rows
    assert "float32 states" not in weight.fallbacks
    assert bias.fallbacks == ("float32 states",)


def test_every_recipe_is_as_the_table_says() -> None:
    for name in ("delayed", "current", "block", "mxfp8", "nvfp4"):
        cell = resolve(name).weight
        assert cell is not None
        assert "dgrad dequantizes" not in predictions.fallbacks(
            linear(name).weight.quantized_storage, resolve(name), torch.device("cpu")
        )


def test_every_entry_of_the_table_is_used() -> None:
    """An entry that no code takes or raises would be a claim of the limits page alone."""
    root = Path(limits.__file__).parent
    source = "".join(p.read_text(encoding="utf-8") for p in root.rglob("*.py") if p.name != "limits.py")
    assert [name for name in (*limits.FALLBACKS, *limits.REFUSALS) if f'"{name}"' not in source] == []
