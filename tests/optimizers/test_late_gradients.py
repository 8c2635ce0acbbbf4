"""Parameters whose first gradient comes late in the count of their group, and options that would do nothing."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam, Lion, MasterWeights
from quantshard.optimizers.adam_optimizer import largest_late_update
from quantshard.presets import ALGORITHMS
from quantshard.recipe import resolve
from quantshard.tools.trainer.models.model import LanguageModel
from quantshard.tools.trainer.optimizer import make_optimizer
from quantshard.tools.trainer.settings.config import TrainSettings


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    return model


def trained(optimizer: torch.optim.Optimizer, steps: int, *used: nn.Linear) -> None:
    for _ in range(steps):
        for layer in used:
            layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        optimizer.zero_grad()


def test_a_late_first_gradient_is_told_once_with_the_size_of_its_updates() -> None:
    a, b, c = layers()
    optimizer = FusedAdam([("a", a.weight), ("b", b.weight), ("c", c.weight)], lr=1e-3)
    trained(optimizer, 100, a)
    with pytest.warns(
        UserWarning, match=r"FusedAdam: b and 1 more have a first gradient in step 101 of the group"
    ) as w:
        trained(optimizer, 1, a, b, c)
    told = float(str(w[0].message).split("up to ")[1].split()[0])
    largest = 0.0
    for _ in range(60):
        before = b.weight.detach().clone()
        trained(optimizer, 1, a, b, c)
        largest = max(largest, float((b.weight.detach() - before).abs().max()) / 1e-3)
    assert largest == pytest.approx(told, abs=0.06)
    assert largest == pytest.approx(largest_late_update(0.9, 0.999, 101), rel=0.01) and largest > 2


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda params: FusedAdam(params, betas=(0.9, 0.95)), 300),
        (lambda params: FusedAdam(params), 10),
        (lambda params: FusedAdam(params, bias_correction=False), 300),
        (lambda params: Lion(params, lr=1e-4), 300),
    ],
)
def test_where_updates_stay_small_nothing_is_said(make: Any, steps: int) -> None:
    a, b, _ = layers()
    optimizer = make([a.weight, b.weight])
    trained(optimizer, steps, a)
    trained(optimizer, 1, a, b)


def test_a_group_of_its_own_and_a_load_are_told_from_it() -> None:
    a, b, c = layers()
    optimizer = FusedAdam([a.weight])
    trained(optimizer, 300, a)
    optimizer.add_param_group({"params": [b.weight]})
    trained(optimizer, 1, a, b)
    assert optimizer.param_groups[1]["step"] == 1
    other = FusedAdam([c.weight])
    state = optimizer.state_dict()
    state["param_groups"], state["state"] = state["param_groups"][:1], {0: state["state"][0]}
    other.load_state_dict(state)
    trained(other, 1, c)
    assert other.param_groups[0]["step"] == 302


def test_moments_that_are_set_by_hand_have_begun() -> None:
    a, *_ = layers()
    optimizer = FusedAdam([a.weight])
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.set_scaled_state(a.weight, name, torch.ones(4, 4))
    optimizer.param_groups[0]["step"] = 300
    trained(optimizer, 1, a)


def test_an_unfrozen_parameter_is_told() -> None:
    a, b, _ = layers()
    b.weight.requires_grad_(False)
    optimizer = FusedAdam([("a", a.weight), ("b", b.weight)])
    trained(optimizer, 200, a)
    b.weight.requires_grad_(True)
    optimizer.initialize_state(b.weight)
    with pytest.warns(UserWarning, match="b has a first gradient in step 201"):
        trained(optimizer, 1, a, b)


def test_the_largest_update_of_what_begins_with_the_count_is_one() -> None:
    assert largest_late_update(0.9, 0.999, 1) == pytest.approx(1.0)
    assert largest_late_update(0.9, 0.999, 10**6) == pytest.approx(6.56, abs=0.01)
    assert largest_late_update(0.995, 0.9999, 5000) == pytest.approx(2.91, abs=0.01)
    assert largest_late_update(0.9, 0.95, 10**6) < 1.2 and math.isfinite(largest_late_update(0.0, 0.0, 5))


def test_a_dtype_of_masters_that_there_are_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"master_weight_dtype=torch\.float16\): there are no masters"):
        FusedAdam(layers().parameters(), master_weights=False, master_weight_dtype=torch.float16)
    for kind in (FusedAdam, Lion):  # the default, as scripts for other optimizers and `StateOptions` spell it out
        kind(layers().parameters(), master_weights=False, master_weight_dtype=torch.float32)
    settings = [replace(TrainSettings(master_weights=False), optimizer=name).resolved() for name in ALGORITHMS]
    for each in settings:
        assert make_optimizer(LanguageModel(each, resolve("current"), "cpu"), each).param_groups


@pytest.mark.parametrize("make", [FusedAdam, Lion, lambda params: MasterWeights(torch.optim.AdamW, params)])
def test_a_decay_of_averages_that_are_not_kept_is_refused_in_a_step(make: Any) -> None:
    model = layers()
    optimizer = make(model.parameters())
    trained(optimizer, 1, *model)
    optimizer.param_groups[0]["ema_decay"] = 0.9
    with pytest.raises(ConfigurationError, match=r"ema_decay = 0\.9, and the optimizer keeps no averages"):
        trained(optimizer, 1, *model)
    optimizer.param_groups[0]["ema_decay"] = 0.0
    optimizer.begin_average(0.9)
    trained(optimizer, 1, *model)


@pytest.mark.parametrize(
    "entry", [{"master_weights": False}, {"master_weight_dtype": torch.float16}, {"preset": "lean8"}]
)
def test_master_weights_refuses_options_in_a_group_that_would_do_nothing(entry: dict[str, Any]) -> None:
    a, b, _ = layers()
    with pytest.raises(ConfigurationError, match=f"a group has {next(iter(entry))} = .*no option of MasterWeights"):
        MasterWeights(torch.optim.AdamW, [{"params": [a.weight], **entry}])
    optimizer = MasterWeights(torch.optim.AdamW, [a.weight])
    with pytest.raises(ConfigurationError, match="no option of MasterWeights"):
        optimizer.add_param_group({"params": [b.weight], **entry})


def test_an_inner_optimizer_may_have_options_of_these_names() -> None:
    class Inner(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 1e-3, preset: str = "") -> None:
            super().__init__(params, lr=lr)
            self.defaults["preset"] = preset

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MasterWeights(Inner, [{"params": [layers()[0].weight], "preset": "own"}])
