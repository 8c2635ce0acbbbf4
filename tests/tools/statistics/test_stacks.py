"""Statistics of stacks of experts, against values computed from the tensors of a step."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import quantshard as qs
from quantshard import kernel_dispatch
from quantshard.gemm import operands
from quantshard.modules.gemms.grouped import ExpertsLayer, ExpertsReader
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.recipe import TensorRole, resolve
from quantshard.statistics import Statistics, StatisticsRow
from quantshard.tensor import components, observation
from tests.covering import exhaustive
from tests.tools.statistics.test_recorder import bits

pytest.importorskip("transformers", "5.0")

from quantshard.interop.conversion.experts import ConvertedExperts
from tests.interop.conversion.mixtures import mixture, stacks, tokens

Rows = dict[tuple[str, str], StatisticsRow]
RECIPES = [(name,) for name in ("current", "mxfp8", "nvfp4", "rowwise")]


def converted(recipe: str) -> Any:
    model = mixture("Qwen3-MoE", num_hidden_layers=1)
    qs.convert(model, recipe)
    return model


def train_step(model: Any, optimizer: Any, number: int = 0) -> None:
    model(input_ids=tokens(number), labels=tokens(number)).loss.backward()
    optimizer.step()


def sampled(model: Any, optimizer: Any) -> Rows:
    with Statistics(model, optimizer, every=1, saturation=1) as statistics:
        train_step(model, optimizer)
        statistics.step()
        (sample,) = statistics.close()
    return {(row.name, row.role): row for row in sample.rows}


def record_operands(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[Any, Any]]:
    """Record the input, token counts and output gradient of each stack, by the name of its parameter."""
    calls: dict[str, dict[Any, Any]] = {}
    real = ConvertedExperts.multiply

    def multiply(self: Any, name: str, x: Tensor, counts: Any, *others: Any) -> Tensor:
        y = real(self, name, x, counts, *others)
        call = calls[f"{self.name}.{name}"] = {TensorRole.INPUT: x.detach().clone(), "counts": counts}
        y.register_hook(lambda grad: call.update({TensorRole.GRAD_OUTPUT: grad.clone()}))
        return y

    monkeypatch.setattr(ConvertedExperts, "multiply", multiply)
    return calls


def check_values(row: StatisticsRow, x: Tensor, q: Tensor) -> None:
    """Check a row against values and what they were quantized to. Sums of n squares in float64 are off by n 2**-53 of
    their sum, so a logarithm is well within 1e-9."""
    noise = float((x.double() - q.double()).square().sum())
    assert row.amax == float(x.abs().max()) and row.nonfinite == 0
    assert row.error.sqnr_db == pytest.approx(10 * math.log10(float(x.double().square().sum()) / noise), rel=1e-9)
    assert row.error.underflowed == int(((q == 0) & (x != 0)).sum()) / int((x != 0).sum())


def storage_of(param: Tensor) -> Any:
    return components.quantized_local(param).quantized_storage  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", exhaustive(RECIPES, [("current",), ("nvfp4",)]))
def test_weights(recipe: str) -> None:
    """A stack has the numbers of the matrix of all its rows."""
    model = converted(recipe)
    optimizer, params = FusedAdam(model.parameters(), lr=1e-3), stacks(model)
    old = {name: optimizer.get_unscaled_state(param, "master_param").clone() for name, param in params.items()}
    old_codes = {name: storage_of(param).clone().components for name, param in params.items()}
    rows = sampled(model, optimizer)
    assert len(params) == 2
    for name, param in params.items():
        row, master, storage = (
            rows[name, "weight"],
            optimizer.get_unscaled_state(param, "master_param"),
            storage_of(param),
        )
        check_values(row, master.flatten(0, 1), storage.dequantize())
        assert row.grad_norm == pytest.approx(float(param.grad.double().norm()), rel=1e-9)
        ratio = float((master - old[name]).double().norm() / old[name].double().norm())
        assert row.update_ratio == pytest.approx(ratio, rel=1e-6)
        (copy, *_) = storage.spec.format.copies.values()
        codes, before = (parts[copy.codes.name] for parts in (storage.components, old_codes[name]))
        halves = (0xF, 0xF0) if copy.codes.encoding.bits == 4 else (0xFF,)
        changed = sum(int(((codes ^ before) & half).count_nonzero()) for half in halves)
        assert row.changed == changed / (codes.numel() * len(halves)) > 0
        if recipe == "current":
            scales = storage.components[copy.scale.name]
            assert scales.shape == (4, 1)
            assert (row.error.scale, row.error.scale_min) == (float(scales.max()), float(scales.min()))


@pytest.mark.parametrize("recipe", exhaustive(RECIPES, [("mxfp8",)]))
def test_operands(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all experts, each expert's quantized on its own. NVFP4 rounds gradients stochastically."""
    model, calls = converted(recipe), record_operands(monkeypatch)
    rows = sampled(model, FusedAdam(model.parameters(), lr=1e-3))
    assert calls.keys() == stacks(model).keys()
    for name, call in calls.items():
        for role in (TensorRole.INPUT, TensorRole.GRAD_OUTPUT):
            row, (spec, _) = rows[name, role.value], resolve(recipe).activations[role]
            assert spec is not None and (row.wgrad is None) == (recipe == "current")
            if spec.scaling.stochastic_rounding:
                assert row.amax == float(call[role].abs().max()) and (row.error.sqnr_db or 0) > 10
                continue
            parts = call[role].split(list(call["counts"]))
            quantized = [operands.quantize_operand(part, spec).dequantize() for part in parts if len(part)]
            check_values(row, call[role], torch.cat(quantized))


@pytest.mark.parametrize("recipe", exhaustive(RECIPES, [("nvfp4",)]))
def test_training_keeps_its_bits(recipe: str) -> None:
    """Two steps, of which the second is sampled."""
    plain, watched = converted(recipe), converted(recipe)
    for model, every in ((plain, 0), (watched, 2)):
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        with Statistics(model, optimizer, every=every, saturation=1) as statistics:
            for number in range(3):
                train_step(model, optimizer, number)
                optimizer.zero_grad()
                statistics.step()
    assert bits(plain) == bits(watched)


def test_masters_of_another_optimizer_and_none() -> None:
    for make in (lambda p: MasterWeights(torch.optim.SGD, p, lr=1.0), lambda p: torch.optim.AdamW(p, 1e-3)):
        model = converted("current")
        rows = sampled(model, make(list(model.parameters())))
        for name in stacks(model):
            row = rows[name, "weight"]
            assert row.amax and row.update_ratio and row.grad_norm and row.changed is not None
    assert row.error.sqnr_db is None, "without masters a weight has no error"


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # of Triton's interpreter
def test_experts_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """They report the operands that experts one by one do, without those of the expert that has no rows."""
    pytest.importorskip("triton")
    shown, found = list[TensorRole](), []
    real = ExpertsLayer._show
    monkeypatch.setattr(
        ExpertsLayer, "_show", lambda self, x, role, both: [shown.append(role), real(self, x, role, both)]
    )
    layer = converted("current").model.layers[0].mlp.experts
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    experts = torch.tensor([[0, 2], [2, 3], [3, 0]]).repeat(4, 1)
    for context in (contextlib.nullcontext(), kernel_dispatch.kernels_only_on("cpu")):
        with context, Statistics(layer, None, every=1) as statistics:
            layer(x, experts, torch.full((12, 2), 0.5).bfloat16()).float().square().sum().backward()
            statistics.step()
            (sample,) = statistics.close()
            found.append({(row.name, row.role): row for row in sample.rows})
    one_by_one, together = found
    assert len(shown) == 4 and one_by_one.keys() == together.keys()
    for place, row in one_by_one.items():
        other = together[place]
        if place == ("gate_up_proj", "input"):
            # kernels sum squares in float32
            assert row.error.sqnr_db == pytest.approx(other.error.sqnr_db, rel=1e-5)
            assert row.amax == other.amax and row.error.scale == other.error.scale
            assert row.error.scale_min == other.error.scale_min and row.error.underflowed == other.error.underflowed
        elif place[1] != "weight":
            # the products round in another order, so later operands differ by steps of bfloat16
            assert row.amax == pytest.approx(other.amax, rel=2**-5)
            assert row.error.sqnr_db == pytest.approx(other.error.sqnr_db, abs=0.5)


def test_token_counts_on_the_device_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot read them, so it leaves these operands out."""
    monkeypatch.setattr(kernel_dispatch, "is_capturing", lambda: True)
    monkeypatch.setattr(observation, "active", object())
    monkeypatch.setattr(ExpertsLayer, "_show", lambda *_: pytest.fail("reads the counts"))
    monkeypatch.setattr(ExpertsLayer, "_by_experts", lambda *_: "codes")
    counts: Any = torch.tensor([2, 3])
    layer = ExpertsLayer([], [], counts, 0, None, {}, True, None, ExpertsReader())  # type: ignore[arg-type]
    segments: Any = None
    assert layer.quantized(torch.zeros(5, 4), TensorRole.INPUT, segments, True)[0] == "codes"
