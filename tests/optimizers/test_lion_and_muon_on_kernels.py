"""Lion and Muon whose steps run in kernels have the bits, counts and errors of those in plain PyTorch.

On a machine without a GPU Triton's interpreter runs the kernels. What is alike for all optimizers with kernels (plans,
what they do not take, steps in a row that are skipped) is in `test_on_kernels.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from quantshard.errors import NonFiniteGradientError
from quantshard.numerics.lion import LionSettings
from quantshard.optimizers import ElementwiseOptimizer, Lion, Muon, kernel_step, muon as muon_module
from tests.covering import in_turns
from tests.distributed.models import RECIPES
from tests.distributed.test_fused_adam import MASTERS, MOMENTS
from tests.interpreter import kernels_on
from tests.optimizers import test_on_kernels as of_adam
from tests.optimizers.test_on_kernels import (
    DEVICE,
    _count_writes,
    _fast,
    differing,
    everything,
    plans,
    random,
    set_grads,
)

__all__ = ["_count_writes", "_fast", "plans"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflows, in the interpreter

Params = dict[str, nn.Parameter]
MATRICES, OTHERS = ["quantized", "bf16", "fp16", "fp32", "again"], ["vector", "cube", "scalar"]


def lion(params: Params, moment: torch.dtype, **options: Any) -> Lion:
    named = list(params.items())
    groups = [{"params": named[:5], "weight_decay": 0.1}, {"params": named[5:], "lr": 0.05, "betas": (0.5, 0.9)}]
    return Lion(groups, lr=0.01, exp_avg_dtype=moment, **options)


def muon(params: Params, moment: torch.dtype, **options: Any) -> Muon:
    """Three groups: matrices of several shapes under one rate, and with other numbers; the rest is AdamW's."""
    first = [(name, params[name]) for name in MATRICES[:3]]
    second = [(name, params[name]) for name in MATRICES[3:]]
    groups = [
        {"params": first},
        {"params": [(name, params[name]) for name in OTHERS], "algorithm": "adamw", "lr": 0.01},
        {"params": second, "lr": 0.05, "momentum": 0.3, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
    ]
    return Muon(groups, lr=0.02, momentum_buffer_dtype=moment, **options)


BUILDERS: Mapping[str, Callable[..., ElementwiseOptimizer]] = {"lion": lion, "muon": muon}


def planned(optimizer: ElementwiseOptimizer) -> int:
    """How many parameters kernels take; nothing of them is left to PyTorch."""
    kernels = [optimizer._plans[None].kernels]
    kernels += [bucket.kernels for bucket in optimizer._plans[None].buckets] if isinstance(optimizer, Muon) else []
    assert not any(each._directions or any(item.grad is not None for item in each._work) for each in kernels)
    taken = sum(len(plan.indices) for each in kernels for plan in each._plans)
    assert not taken or not any(each._remaining() for each in kernels)
    return taken


def train(name: str, recipe: str, *devices: str, **options: Any) -> tuple[dict[str, Any], int]:
    """Four steps: the second is skipped, the third lacks gradients of a matrix and a vector."""
    params, _ = of_adam.build(recipe)
    optimizer = BUILDERS[name](params, **options)
    with kernels_on(*devices):
        for number in range(4):
            set_grads(params, number)
            if number == 1:
                params["fp32"].grad[1, 1] = float("nan")  # type: ignore[index]
            if number == 2:
                params["fp16"].grad = params["vector"].grad = None
            optimizer.step()
    assert optimizer.skipped_steps == 1
    return everything(params, optimizer), planned(optimizer)


def check(name: str, recipe: str, masters: str, moments: str, **options: Any) -> None:
    options = {**MASTERS[masters], "moment": MOMENTS[moments], **options}
    expected, none = train(name, recipe, **options)
    found, taken = train(name, recipe, DEVICE, **options)
    assert (none, taken) == (0, 8)
    assert not differing(found, expected)


CELLS = in_turns(RECIPES, MASTERS, [*MOMENTS])


@pytest.mark.parametrize(
    ("name", "recipe", "masters", "moments"),
    [
        pytest.param(name, *cell, marks=() if at % 5 == at // 5 % 5 and at % 2 == turn else pytest.mark.exhaustive)
        for (turn, name), (at, cell) in itertools.product(enumerate(BUILDERS), enumerate(CELLS))
    ],
)
def test_a_step_has_the_bits_of_pytorch(name: str, recipe: str, masters: str, moments: str) -> None:
    check(name, recipe, masters, moments)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("lion", {"capturable": True, "ema_decay": 0.9}, marks=pytest.mark.exhaustive),
        ("muon", {"capturable": True, "ema_decay": 0.9, "nesterov": False}),
        pytest.param("muon", {"nesterov": False, "momentum": 0.0}, marks=pytest.mark.exhaustive),
    ],
)
def test_numbers_on_the_device_and_averages(name: str, options: dict[str, Any]) -> None:
    check(name, "block", "fp32", "bf16", **options)


@pytest.mark.exhaustive
def test_rates_change_from_step_to_step() -> None:
    """As tensors too, which a captured step reads."""
    for name, build in BUILDERS.items():
        results = []
        for capturable, devices in ((False, ()), (False, (DEVICE,)), (True, (DEVICE,))):
            params, _ = of_adam.build("current")
            optimizer = build(params, torch.float32, capturable=capturable)
            with kernels_on(*devices):
                for number in range(3):
                    for group in optimizer.param_groups:
                        rate = 0.1 / (number + 3)
                        group["lr"] = torch.full_like(group["lr"], rate) if capturable else rate
                    set_grads(params, number)
                    optimizer.step()
            states = {key: value for key, value in everything(params, optimizer).items() if key[0] not in "012"}
            results.append(states)
        assert not differing(*results[:2]), name
        assert not differing(*results[1:]), name


def test_a_formula_of_ones_own_is_not_replaced_by_a_kernel() -> None:
    """A subclass of Lion with another update is stepped by that."""

    class Halved(Lion):
        def update(
            self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: LionSettings
        ) -> kernel_step.Update:
            new, kept = super().update(param, grad, master, states, settings)
            return (master + new) / 2, kept

    moved = []
    for of in (Lion, Halved):
        param = nn.Parameter(random(4, 16, seed=1).to(DEVICE))
        before = param.detach().clone()
        optimizer = of([param], lr=0.5)
        param.grad = random(4, 16, seed=2).to(DEVICE)
        with kernels_on(DEVICE):
            optimizer.step()
        assert bool(optimizer._plans[None].kernels._plans) == (of is Lion)
        moved.append((before - param.detach()).abs().amax().item())
    assert moved == pytest.approx([0.5, 0.25])


def test_a_muon_that_a_graph_holds_keeps_its_tables() -> None:
    """Matrices are added, so other buckets are made; a graph holds tables of the former."""
    params, _ = of_adam.build("current")
    added = {"params": [("again", params.pop("again"))]}
    optimizer = Muon([{"params": [("fp32", params["fp32"])]}], lr=0.02)
    with kernels_on(DEVICE):
        for number in range(2):
            set_grads(params, number)
            optimizer.step()
            if number == 0:
                former = optimizer._plans[None]
                former.buckets[0].kernels._plans[0].launches._captured.append(torch.zeros(1))
                optimizer.add_param_group(added)
    assert optimizer._captured == [former]


def test_plans_stay_where_other_matrices_have_gradients(plans: list[Any]) -> None:
    """Experts without tokens have none."""
    params, _ = of_adam.build("current")
    optimizer = muon(params, torch.float32)
    with kernels_on(DEVICE):
        for number in range(4):
            set_grads(params, number)
            params["fp32" if number % 2 else "bf16"].grad = None
            optimizer.step()
    assert len(plans) == 2  # of matrices, and of AdamW's


@pytest.fixture
def one_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_module, "BUCKET_BYTES", 1)  # or as many as the largest matrix has


def test_buckets_share_the_room_of_one(one_a_bucket: None) -> None:
    """What is orthogonalized of all matrices is never there at once; and nothing stays after a step, or one that
    raises."""
    results = []
    for devices in ((), (DEVICE,)):
        params = {f"w{number}": nn.Parameter(random(16, 32, seed=number).to(DEVICE)) for number in range(4)}
        optimizer = Muon(list(params.items()), lr=0.02, max_skipped_in_a_row=1)
        starts: list[int] = []
        real = kernel_step.KernelStep.set_directions

        def noted(self: Any, parts: Any, real: Any = real, starts: list[int] = starts) -> None:
            starts.extend(direction.data_ptr() for direction in self._directions.values())
            real(self, parts)

        with kernels_on(*devices), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_step.KernelStep, "set_directions", noted)
            set_grads(params, 0)
            optimizer.step()
            assert (
                len(optimizer._plans[None].buckets) == 4
                and len(starts) == 4 * len(devices)
                and len(set(starts)) == len(devices)
            )
            results.append(everything(params, optimizer))  # type: ignore[arg-type]
            params["w1"].grad[0, 0] = float("nan")  # type: ignore[index]
            with pytest.raises(NonFiniteGradientError):
                optimizer.step()
                # A GPU that is behind the host raises in the next step.
                optimizer.step()
        assert planned(optimizer) == 4 * len(devices)
        after = everything(params, optimizer)  # type: ignore[arg-type]
        assert set(differing(after, results[-1])) == {"0 skipped_steps", "0 skipped_in_a_row"}
    assert not differing(*results)


@pytest.mark.parametrize("masters", ["fp32", "none"])
def test_a_skipped_step_writes_nothing_beside_kernels(masters: str, one_a_bucket: None) -> None:
    """Of a matrix whose gradient, of float64, no kernel takes, and which is finite where another's is not."""
    results = []
    for devices in ((), (DEVICE,)):
        params, _ = of_adam.build("current")
        options: dict[str, Any] = {**MASTERS[masters], "use_decoupled_grad": True}
        optimizer = muon(params, torch.float32, **options)
        with kernels_on(*devices):
            for number in range(3):
                set_grads(params, number, "decoupled_grad")
                params["quantized"].decoupled_grad = params["quantized"].decoupled_grad.double()
                if number == 1:
                    params["bf16"].decoupled_grad[0, 0] = float("inf")
                optimizer.step()
        assert optimizer.skipped_steps == 1
        results.append(everything(params, optimizer))
    assert not differing(*results)


def test_a_formula_of_ones_own_for_adamws_groups() -> None:
    """A subclass of Muon with another update steps these by it, on kernels too."""

    class Halved(Muon):
        def update(self, param: Any, grad: Any, master: Tensor, states: Any, settings: Any) -> kernel_step.Update:
            new, kept = super().update(param, grad, master, states, settings)
            return (master + new) / 2, kept

    moved = []
    for of in (Muon, Halved):
        param = nn.Parameter(torch.ones(4, 16, device=DEVICE))
        group: dict[str, Any] = {"params": [param], "algorithm": "adamw", "lr": 0.5, "weight_decay": 0.0}
        optimizer = of([group])
        param.grad = torch.ones_like(param)
        with kernels_on(DEVICE):
            optimizer.step()
        moved.append(param[0, 0].item())
    assert moved == pytest.approx([0.5, 0.75])
