"""Statistics where kernels run: the numbers that the oracle has, and training keeps its bits."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import quantshard as qs
from quantshard import kernel_dispatch, numerics
from quantshard.formats import FORMATS, Orientation
from quantshard.kernels.quantize import error
from quantshard.modules.gemms import grouped
from quantshard.numerics.quantization_error import EMPTY, SUMS, add_error
from quantshard.optimizers import FusedAdam
from tests.covering import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def trained(recipe, every, kernels, monkeypatch):
    """State and samples of a step of layers whose inputs and gradients are quantized by fused kernels."""
    monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {DEVICE} if kernels else set())
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(
            qs.LayerNormMLP(32, 48, activation="swiglu", params_dtype=torch.bfloat16, device=DEVICE),
            qs.LayerNormMLP(32, 32, activation="gelu", params_dtype=torch.bfloat16, device=DEVICE),
        )
    optimizer, found = FusedAdam(model.parameters(), lr=1e-3), []
    with qs.Statistics(model, optimizer, every=every, saturation=1) as statistics:
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
        with qs.autocast(recipe=recipe):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [*statistics.step(), *statistics.close()]
    return [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)], found


RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")


@pytest.mark.parametrize("recipe", exhaustive([(name,) for name in RECIPES], [("mxfp8",)]))
def test_kernels_tell_what_the_oracle_does(recipe, monkeypatch):
    plain, _ = trained(recipe, 0, True, monkeypatch)
    bits, samples = trained(recipe, 1, True, monkeypatch)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(plain, bits, strict=True)
    )
    _, wanted = trained(recipe, 1, False, monkeypatch)
    assert len(samples) == len(wanted) == 1
    for row, other in zip(samples[0].rows, wanted[0].rows, strict=True):
        found, exact = row.to_dict(), other.to_dict()
        assert found.keys() == exact.keys()
        for part, whole in ((found, exact), (found.get("wgrad", {}), exact.get("wgrad", {}))):
            for key in part.keys() - {"name", "role", "wgrad"}:
                assert part[key] == pytest.approx(whole[key], rel=1e-3, abs=1e-6), (row.name, row.role, key)


@pytest.mark.parametrize("recipe", exhaustive([("delayed",), ("block",), ("current",)], [("delayed",)]))
def test_experts_at_once_tell_what_each_does(recipe, monkeypatch):
    """Those that kernels quantize and multiply together, beside the oracle's, one by one; histories go on as ever."""
    chosen = qs.recipe.DelayedScaling(amax_history_len=3) if recipe == "delayed" else recipe
    together = []
    real = grouped.grouped_linear
    monkeypatch.setattr(grouped, "grouped_linear", lambda *args: together.append(1) or real(*args))

    def run(every: int, kernels: bool) -> tuple[dict, list]:
        monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {DEVICE} if kernels else set())
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe=chosen):
            model = qs.GroupedLinear(2, 128, 32, bias=False, params_dtype=torch.bfloat16, device=DEVICE)
        found = []
        with qs.Statistics(model, None, every=every, saturation=1) as statistics:
            for step in range(2):
                x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step)).bfloat16().to(DEVICE)
                with qs.autocast(recipe=chosen):
                    y = model(x.requires_grad_(), [5, 3])
                y.backward(torch.randn(8, 32, generator=torch.Generator().manual_seed(9)).bfloat16().to(DEVICE))
                found += statistics.step()
            found += statistics.close()
        return model.state_dict(), found

    plain, _ = run(0, True)
    assert together
    state, samples = run(1, True)
    _, wanted = run(1, False)
    for name, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.view(torch.uint8), state[name].view(torch.uint8)), name
    for sample, other in zip(samples, wanted, strict=True):
        for row, exact in zip(sample.rows, other.rows, strict=True):
            assert (row.name, row.role, row.amax) == (exact.name, exact.role, exact.amax)
            assert row.error.underflowed == exact.error.underflowed and row.error.scale == exact.error.scale
            assert (row.error.sqnr_db or 0.0) == pytest.approx(exact.error.sqnr_db or 0.0, rel=1e-5)
            assert (row.wgrad is None) == (exact.wgrad is None)


@pytest.mark.parametrize(
    ("values", "scales", "is_turned"),
    exhaustive(
        product(["not finite", "zero", "far above the scales"], ["", "NaN", "tiny"], [False, True, None]),
        [("not finite", "", None), ("zero", "NaN", None), ("far above the scales", "tiny", None)],
    ),
)
def test_unusual_values_are_counted_as_by_the_oracle(values: str, scales: str, is_turned: bool | None) -> None:
    """And scales, in a matrix that no tile divides, whose rows or columns lie beside each other in memory; None: now
    these, now those."""
    for number, name in enumerate(("fp8_e4m3", "fp8_1xrow", "fp8_128x128", "mxfp8_1x32", "nvfp4_1x16")):
        fmt = FORMATS[name]
        copy = fmt.copies[Orientation.ROWWISE]
        x = torch.randn(66, 272, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
        parts = numerics.quantize(torch.zeros_like(x) if values == "zero" else x, fmt)
        if scales == "tiny":
            x = x.float() * 2.0**-140
        if values == "not finite":
            x[0, 0], x[3, 5], x[65, 271] = math.inf, math.nan, -math.inf
        else:
            x *= 0.0 if values == "zero" else 2.0**40
        x = x.t().contiguous().t() if (number % 2 == 0 if is_turned is None else is_turned) else x
        if scales:
            stored = parts[copy.scale.name]
            codes = {"NaN": (math.nan, 0xFF, 0x7F), "tiny": (2.0**-148, 0, 1)}[scales]
            stored.fill_(codes[{"FP32": 0, "E8M0": 1}.get(copy.scale.encoding.name, 2)])
        sums, exact = torch.zeros(2, 3, len(SUMS), dtype=torch.float64, device=DEVICE)
        extremes, outer = torch.tensor(EMPTY, device=DEVICE).repeat(2, 3, 1)
        error.add_error(sums, extremes, x, copy, parts)
        add_error(exact, outer, x, copy, parts)
        assert torch.equal(sums.sum(0)[:6], exact[0, :6]), name
        assert torch.equal(torch.cat([extremes[:, :2].amax(0), extremes[:, 2:].amin(0)]), outer[0]), name
        assert sums.sum(0)[6:].tolist() == pytest.approx(exact[0, 6:].tolist(), rel=1e-5), name


@pytest.mark.parametrize("is_turned", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_part_of_a_large_matrix_counts_alone(is_turned: bool, monkeypatch) -> None:
    """One in four columns of tiles, which the last does not fill; and all of a matrix that is not large."""
    x = torch.randn(66, 1100, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    x[:, 300:320] = 0.0  # in no tile that is measured first
    fmt = FORMATS["mxfp8_1x32"]
    copy, parts = fmt.copies[Orientation.ROWWISE], numerics.quantize(x, fmt)
    x = x.t().contiguous().t() if is_turned else x
    tiles = [(at, at + 64) for at in (0, 256, 512, 768, 1024)] if is_turned else [(0, 256), (1024, 1100)]
    for largest, chosen in ((x.numel(), tiles), (x.numel() + 1, [(0, 1100)])):
        monkeypatch.setattr(error, "LARGE", largest)
        sums, exact = torch.zeros(2, 3, len(SUMS), dtype=torch.float64, device=DEVICE)
        extremes, outer = torch.tensor(EMPTY, device=DEVICE).repeat(2, 3, 1)
        error.add_error(sums, extremes, x, copy, parts, partial=True)
        for first, last in chosen:
            piece = x[:, first:last].contiguous()
            add_error(exact, outer, piece, copy, numerics.quantize(piece, fmt))
        assert exact[0, 0] == 66 * sum(last - first for first, last in chosen)
        assert torch.equal(sums.sum(0)[:6], exact[0, :6])
        assert torch.equal(torch.cat([extremes[:, :2].amax(0), extremes[:, 2:].amin(0)]), outer[0])
        assert sums.sum(0)[6:].tolist() == pytest.approx(exact[0, 6:].tolist(), rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["block", "mxfp8", "nvfp4"])
def test_an_operand_that_is_the_only_one_is_measured_whole(recipe, monkeypatch):
    """The gradient of a layer whose input needs none is quantized for wgrad alone, and tells of its values. In NVFP4,
    whose gradient is transformed before, its values are looked at by themselves, all of them."""
    monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {DEVICE})
    monkeypatch.setattr(error, "LARGE", 1)
    parts, real = [], error.add_error
    monkeypatch.setattr(error, "add_error", lambda *args: parts.append(args[-1]) or real(*args))
    layer = qs.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device=DEVICE)
    for needed in (False, True):
        with qs.Statistics(layer, None, every=1, on_alarm=lambda alarm: None) as statistics:
            with qs.autocast(recipe=recipe):
                y = layer(torch.ones(512, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=needed))
            grad = torch.ones_like(y)
            grad[200, 5], grad[201, 6] = 77.0, math.inf  # in no column of tiles that is measured of a large second one
            y.backward(grad)
            [sample] = [*statistics.step(), *statistics.close()]
        seen_before = needed or recipe == "nvfp4"
        assert sum(parts) == (2 if seen_before else 1), "second operands of input and gradient, measured by a part"
        parts.clear()
        [row] = [row for row in sample.rows if row.role == "grad_output"]
        assert (row.amax, row.nonfinite) == (77.0, 1 / grad.numel()) and [a.kind for a in sample.alarms] == ["nan"], (
            needed
        )
