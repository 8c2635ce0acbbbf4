"""Half of a checkpoint: an optimizer's state loaded beside other weights than it was saved with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam, Lion, MasterWeights
from quantshard.optimizers.master_check import warn_of_other_weights
from tests.distributed.models import RECIPES


def built(recipe: str, seed: int, **options: Any) -> tuple[nn.Module, FusedAdam]:
    torch.manual_seed(seed)
    with qs.quantized_model_init(recipe=RECIPES[recipe]):
        model = nn.Sequential(qs.Linear(48, 64, device="cpu"), nn.LayerNorm(64), qs.Linear(64, 32, device="cpu"))
    model.bfloat16()
    return model, FusedAdam(model.named_parameters(), lr=1e-2, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str) -> None:
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    with qs.autocast(recipe=RECIPES[recipe]):
        y = model(x)
    y.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_the_checkpoint_are_told_from_others(recipe: str, dtype: torch.dtype) -> None:
    """The model may be loaded before or after the optimizer; each load is looked at once."""
    model, optimizer = built(recipe, 0, master_weight_dtype=dtype)
    for _ in range(2):
        step(model, optimizer, recipe)
    weights, state = model.state_dict(), optimizer.state_dict()
    for order in ("model first", "model last", "model never"):
        other, loaded = built(recipe, 1, master_weight_dtype=dtype)
        if order == "model first":
            other.load_state_dict(weights)
        loaded.load_state_dict(state)
        if order == "model last":
            other.load_state_dict(weights)
        if order != "model never":
            step(other, loaded, recipe)
            continue
        with pytest.warns(
            UserWarning, match=r"masters of other weights .*: 0.weight is 1\d\d% .* [2-6] of 6 are by"
        ) as told:
            step(other, loaded, recipe)
        assert len(told) == 1 and told[0].filename == __file__
        assert not loaded._has_loaded, "which would look, and wait for a device, in each step"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(other, loaded, recipe)


def test_a_state_that_changed_little_is_no_other() -> None:
    """Weights of a run that went on; and parameters of zeros, which are no distance from anything."""
    model, optimizer = built("mxfp8", 0)
    step(model, optimizer, "mxfp8")
    state = optimizer.state_dict()
    step(model, optimizer, "mxfp8")
    optimizer.load_state_dict(state)
    step(model, optimizer, "mxfp8")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Lion", lambda params: Lion(params, lr=1e-3)),
        ("MasterWeights", lambda params: MasterWeights(torch.optim.AdamW, params, lr=1e-3)),
    ],
)
def test_other_optimizers_tell_it_too(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Once, and nothing where the model was loaded too."""
    model, _ = built("current", 0)
    weights, state = model.state_dict(), make(model.named_parameters()).state_dict()
    other, _ = built("current", 1)
    optimizer = make(other.named_parameters())
    optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match=f"{name} was loaded with masters of other weights"):
        step(other, optimizer, "current")
    assert not optimizer._has_loaded  # type: ignore[attr-defined]
    optimizer.load_state_dict(state)
    other.load_state_dict(weights)
    step(other, optimizer, "current")


def test_a_part_below_the_reach_of_its_scale_is_no_other() -> None:
    """Rows that a rank may hold alone, whose codes are zeros; and zeros of a master are told apart from values."""
    told = []
    for weight, master in ((0.0, 1e-6), (1.0, 0.0), (0.0, 0.0), (1.0, 1.1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_other_weights("FusedAdam", [("weight", torch.full((3, 4), weight), torch.full((3, 4), master))])
        told.append([str(each.message) for each in caught])
    assert [len(each) for each in told] == [0, 1, 0, 0] and "weight is 100% of their norm" in told[1][0]


def test_a_parameter_that_became_float64_is_refused() -> None:
    """Its states lack the digits."""
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = FusedAdam([("weight", param)], lr=1e-2)
    param.data = param.data.double()
    param.grad = torch.ones_like(param)
    with pytest.raises(ConfigurationError, match=r"weight had dtype torch.float32 .* has torch.float64 now"):
        optimizer.step()
