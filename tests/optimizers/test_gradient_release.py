"""Gradients that are freed during backward give the bits of whole steps; clipping, bad gradients and bad input."""

from __future__ import annotations

import io
from contextlib import nullcontext
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.errors import ConfigurationError, NonFiniteGradientError
from quantshard.optimizers import FusedAdam, Lion, Muon, clip_grad_norm_, gradient_release, muon_groups
from tests.covering import exhaustive
from tests.distributed.models import bits
from tests.interpreter import kernels_on, prepared_once
from tests.late_flags import flags_come_late

STEPS = 3
SIZES = (34, 40, 9, 50, 3)


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_release, "UNIT_ELEMENTS", 450)


def build(recipe: str = "mxfp8") -> nn.Sequential:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        layers = [
            qs.Linear(width, height, params_dtype=torch.bfloat16, device="cpu") for width, height in pairwise(SIZES)
        ]
    return nn.Sequential(*layers, nn.Linear(SIZES[-1], 2, dtype=torch.bfloat16))


def loss_of(model: nn.Module, step: int, scale: float = 1.0) -> Tensor:
    x = torch.randn(6, SIZES[0], generator=torch.Generator().manual_seed(step)).bfloat16()
    with qs.autocast(recipe="mxfp8"):
        return (model(x).float() * scale).square().mean()


OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": lambda model, **options: FusedAdam(model.named_parameters(), lr=1e-2, **options),
    "lean8": lambda model, **options: FusedAdam(model.named_parameters(), lr=1e-2, preset="lean8", **options),
    "no masters": lambda model, **options: FusedAdam(
        model.named_parameters(), lr=1e-2, master_weights=False, exp_avg_dtype=torch.uint8, **options
    ),
    "capturable, averaging": lambda model, **options: FusedAdam(
        model.named_parameters(), lr=1e-2, capturable=True, ema_decay=0.9, **options
    ),
    "Lion": lambda model, **options: Lion(model.named_parameters(), lr=1e-3, **options),
    "Muon": lambda model, **options: Muon(muon_groups(model, head="4", adamw={"lr": 1e-2}), lr=1e-2, **options),
}


@pytest.mark.parametrize(
    ("name", "in_kernels"),
    exhaustive(
        product(OPTIMIZERS, (False, True)),
        [*product(OPTIMIZERS, [False]), *product(["lean8", "capturable, averaging", "Muon"], [True])],
    ),
)
def test_the_bits_are_those_of_whole_steps(name: str, in_kernels: bool) -> None:
    found, most_gradients = [], [0, 0]
    for releases in (False, True):
        model = build()
        optimizer = OPTIMIZERS[name](model, release_gradients=releases)
        params = list(model.parameters())

        def count(_: Tensor, params: list[Any] = params, releases: bool = releases) -> None:
            held = sum(param.numel() for param in params if param.grad is not None)
            most_gradients[releases] = max(most_gradients[releases], held)

        for param in params:
            param.register_hook(count)
        with kernels_on("cpu") if in_kernels else nullcontext(), prepared_once() if in_kernels else nullcontext():
            for step in range(STEPS):
                optimizer.param_groups[0]["lr"] *= 0.9
                loss_of(model, step).backward()
                if releases:
                    assert sum(param.numel() for param in params if param.grad is not None) < 450
                optimizer.step()
                optimizer.zero_grad()
        assert optimizer.param_groups[0]["step"] == STEPS
        found.append(bits(model, optimizer))
    assert found[0] == found[1]
    assert most_gradients[1] < 0.6 * most_gradients[0]


def test_gradients_are_clipped_by_the_norm_of_the_backward_before() -> None:
    """Saved and loaded in between; and with two passes by their own norm."""
    model, twin = build(), build()
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2, release_gradients=True, max_grad_norm=0.05)
    other = FusedAdam(twin.named_parameters(), lr=1e-2)
    norm = float("inf")
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        loss_of(twin, step).backward()
        scale = gradient_release.clipping.scale_to(torch.tensor(norm, dtype=torch.float64), 0.05)
        next_norm = float(clip_grad_norm_(twin, float("inf")))
        for param in twin.parameters():
            assert param.grad is not None
            param.grad.mul_(scale if step else 1.0)
        norm = next_norm
        other.step()
        other.zero_grad()
        assert optimizer.state_dict()["param_groups"][0]["grad_norm"] == norm
        if step == 1:
            saved = [io.BytesIO(), io.BytesIO()]
            torch.save(model.state_dict(), saved[0])
            torch.save(optimizer.state_dict(), saved[1])
            model = build()
            optimizer = FusedAdam(model.named_parameters(), lr=1e-2, release_gradients=True, max_grad_norm=0.05)
            for target, file in zip((model, optimizer), saved, strict=True):
                file.seek(0)
                target.load_state_dict(torch.load(file))  # type: ignore[attr-defined]
    assert bits(model, optimizer) == bits(twin, other) and norm > 0.05
    for step in range(2):
        with optimizer.measure_grad_norm():
            loss_of(model, step).backward()
        assert all(param.grad is None for param in model.parameters())
        loss_of(model, step).backward()
        optimizer.step()
        loss_of(twin, step).backward()
        clip_grad_norm_(twin, 0.05)
        other.step()
        other.zero_grad()
    assert bits(model, optimizer) == bits(twin, other)


def test_measuring_changes_nothing_else() -> None:
    """Neither without gradients, nor if backward fails; and `main_grad` is measured and scaled too."""
    model = build()
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2, release_gradients=True, max_grad_norm=0.05)
    with optimizer.measure_grad_norm():
        loss_of(model, 0).backward()
        with pytest.raises(ConfigurationError, match="not inside"):
            optimizer.step()
    before, norm = bits(model, optimizer), float(optimizer.param_groups[0]["grad_norm"])
    with optimizer.measure_grad_norm():
        pass
    with pytest.raises(ZeroDivisionError), optimizer.measure_grad_norm():
        loss_of(model, 1).backward()
        raise ZeroDivisionError
    assert all(param.grad is None for param in model.parameters())
    assert bits(model, optimizer) == before and float(optimizer.param_groups[0]["grad_norm"]) == norm > 0

    layer = qs.Linear(16, 16, device="cpu", bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 16)
    optimizer = FusedAdam(layer.named_parameters(), lr=1e-2, release_gradients=True, max_grad_norm=0.05)
    for measures in (True, False):
        with optimizer.measure_grad_norm() if measures else nullcontext():
            layer(torch.ones(2, 16)).square().sum().backward()
    expected = float(layer.weight.main_grad.norm())
    assert float(optimizer.param_groups[0]["grad_norm"]) == pytest.approx(expected)
    optimizer.step()
    assert float(layer.weight.main_grad.norm()) == pytest.approx(0.05, rel=1e-4)


def test_gradients_are_clamped() -> None:
    model, twin = build(), build()
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2, release_gradients=True, max_grad_value=1e-4)
    other = FusedAdam(twin.named_parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    loss_of(twin, 0).backward()
    torch.nn.utils.clip_grad_value_(twin.parameters(), 1e-4)
    other.step()
    assert bits(model, optimizer) == bits(twin, other)


@pytest.mark.parametrize("capturable", [False, True])
def test_bad_gradients_change_nothing_and_count_one_step(capturable: bool) -> None:
    model = build()
    optimizer = FusedAdam(
        model.named_parameters(), lr=1e-2, release_gradients=True, max_grad_norm=1.0, max_skipped_in_a_row=3,
        capturable=capturable,
    )  # fmt: skip
    loss_of(model, 0).backward()
    optimizer.step()
    before, norm = bits(model, optimizer), float(optimizer.param_groups[0]["grad_norm"])
    for number in range(2):
        loss_of(model, 1, scale=float("inf")).backward()
        with nullcontext() if capturable or number else pytest.warns(UserWarning, match="this step is skipped"):
            optimizer.step()
    assert bits(model, optimizer) == before and optimizer.skipped_steps == 2
    assert float(optimizer.param_groups[0]["grad_norm"]) == norm > 0
    assert int(optimizer.param_groups[0]["step"]) == 1
    loss_of(model, 2).backward()
    optimizer.step()
    assert bits(model, optimizer) != before and torch.as_tensor(optimizer.param_groups[0]["grad_norm"]).isfinite()
    with pytest.raises(NonFiniteGradientError, match="3 steps in a row"):
        for _ in range(3):
            loss_of(model, 1, scale=float("inf")).backward()
            optimizer.step()
        assert optimizer.skipped_steps


def test_flags_that_come_late_from_the_device() -> None:
    """A step learns about the bad gradients of the step before when its first gradients are released."""
    found = []
    for releases in (False, True):
        model = build()
        optimizer = FusedAdam(model.named_parameters(), lr=1e-2, preset="lean8", release_gradients=releases)
        with flags_come_late(), kernels_on("cpu"), prepared_once():
            for step, scale in enumerate((1.0, float("inf"), 1.0)):
                loss_of(model, step, scale).backward()
                with (
                    pytest.warns(UserWarning, match="the step before this one")
                    if step == 2 and not releases
                    else nullcontext()
                ):
                    optimizer.step()
                optimizer.zero_grad()
            assert optimizer.skipped_steps == 1
        found.append(bits(model, optimizer))
    assert found[0] == found[1]


def test_parameters_whose_gradients_are_not_released_step_at_the_end() -> None:
    """Those without a gradient, and those whose layers add to `main_grad`."""
    found = []
    for releases in (False, True):
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe="mxfp8"):
            model = nn.Sequential(*(qs.Linear(16, 16, device="cpu", fuse_wgrad_accumulation=True) for _ in range(2)))
        for layer in model:
            layer.weight.main_grad = torch.zeros(16, 16)  # type: ignore[union-attr]
        extra = nn.Parameter(torch.ones(5))
        optimizer = FusedAdam([*model.named_parameters(), ("extra", extra)], lr=1e-2, release_gradients=releases)
        for _ in range(2):
            with qs.autocast(recipe="mxfp8"):
                model(torch.ones(2, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert extra.equal(torch.ones(5))
        found.append(bits(model, optimizer))
    assert found[0] == found[1]


def test_bad_input() -> None:
    model = build()
    for options, message in (
        ({"release_gradients": True, "use_decoupled_grad": True}, "cannot use_decoupled_grad"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm\) needs release_gradients"),
        ({"release_gradients": True, "max_grad_value": -1.0}, "at least 0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            FusedAdam(model.named_parameters(), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_grad_norm"):
        with FusedAdam(model.named_parameters()).measure_grad_norm():
            pass
    optimizer = FusedAdam(model.named_parameters(), release_gradients=True)
    with pytest.raises(ConfigurationError, match=r"gradient of 0\.weight: another FusedAdam releases it"):
        Lion(model.named_parameters(), release_gradients=True)
    other = build()
    hook = other[0].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ConfigurationError, match=r"gradient of 0\.weight: <built-in function print> runs after it"):
        Lion(other.named_parameters(), release_gradients=True)
    hook.remove()
    loss_of(model, 0).backward()
    with pytest.raises(ConfigurationError, match="use its max_grad_norm"):
        clip_grad_norm_(model, 1.0)
    with pytest.raises(ConfigurationError, match=r"call step\(\) first"):
        optimizer.state_dict()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigurationError, match="omit GradScaler"):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
    with pytest.raises(ConfigurationError, match=r"a second backward before step\(\)"):
        loss_of(model, 0).backward()
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.load_state_dict(FusedAdam(build().named_parameters()).state_dict())
    loss_of(model, 0).backward()
    optimizer.step()
    del optimizer
    FusedAdam(model.named_parameters(), release_gradients=True)
