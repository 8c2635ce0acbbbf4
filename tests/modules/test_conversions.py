"""What PyTorch does to a module from outside: casts, copies, parametrizations. It works as on nn.Linear, or raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import quantshard as qs
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from tests.tensor.test_tensor import differing

DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]


def build(recipe: str = "mxfp8", stored: bool = True) -> qs.Linear:
    torch.manual_seed(0)
    with qs.quantized_model_init(enabled=stored, recipe=recipe):
        return qs.Linear(64, 48, device="cpu")


def data(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(layer: nn.Module, recipe: str, x: Tensor) -> Tensor:
    with qs.autocast(recipe=recipe):
        out: Tensor = layer(x)
    out.float().square().sum().backward()
    return out.detach()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_change_no_code(recipe: str, how: str, used: bool) -> None:
    """Before a first forward and behind it: then with its gradient. Histories, keys and counts stay as well."""
    layer, dtype = build(recipe), DTYPES[how]
    if used:
        run(layer, recipe, data())
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    weight = layer.weight
    getattr(layer, how)()
    assert layer.weight is weight and layer.weight.dtype == dtype  # an optimizer has it
    assert layer.weight.grad is None or layer.weight.grad.dtype == dtype
    assert not differing({**before, "bias": before["bias"].to(dtype)}, layer.state_dict())
    other = copy.deepcopy(layer)
    out = run(layer, recipe, data(dtype))
    assert out.dtype == dtype == layer.weight.grad.dtype
    assert torch.equal(out, run(other, recipe, data(dtype)))
    assert differing(other.float().state_dict(), before) == differing(layer.float().state_dict(), before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_is_another_module(recipe: str) -> None:
    """With a state of its own: neither training it nor calling it, under the same autocast too, touches the first."""
    layer = build(recipe)
    run(layer, recipe, data())
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    other = copy.deepcopy(layer)
    assert not differing(before, other.state_dict())
    with torch.no_grad():
        other.bias.fill_(3)
    qs.requantize_([(other.weight, torch.randn(48, 64))])
    run(other, recipe, 3 * data())
    assert not differing(before, layer.state_dict())
    if recipe == "delayed":
        with qs.autocast(recipe=recipe):
            layer(5 * data()), other(7 * data())
        largest = data().abs().max()
        assert layer.input_amax_history[-1] == (5 * data()).abs().max() > largest
        assert other.input_amax_history[-1] == (7 * data()).abs().max()


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("stored", [True, False])
def test_no_dtype_that_is_no_number(stored: bool) -> None:
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(
            (ConfigurationError, UnsupportedOperationError), match=r"complex64|cannot be torch.float8_e4m"
        ):
            build(stored=stored).to(dtype)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def old_weight_norm(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer)


PARAMETRIZATIONS: dict[str, Callable[[Any], Any]] = {
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": old_weight_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("how", PARAMETRIZATIONS)
def test_parametrizations_of_weights_in_high_precision(how: str) -> None:
    """The weight that is computed is what GEMMs read, quantized by the recipe; gradients reach what it is made of."""
    layer, plain = build(stored=False), nn.Linear(64, 48)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    for each in (layer, plain):
        torch.manual_seed(2)
        PARAMETRIZATIONS[how](each)
    assert torch.equal(run(layer, "bf16", data()), run(plain, "bf16", data()))
    ours, theirs = ({name: p.grad for name, p in each.named_parameters()} for each in (layer, plain))
    assert not differing(ours, theirs)
    with qs.autocast(recipe="mxfp8"):
        quantized = layer.eval()(data())
    born = build(stored=False).eval()
    with torch.no_grad():
        born.weight.copy_(layer.weight)
    with qs.autocast(recipe="mxfp8"):
        assert torch.equal(quantized, born(data()))
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    other = build(stored=False)
    PARAMETRIZATIONS[how](other)
    other.load_state_dict(state)
    assert torch.equal(other.eval()(data()), layer(data()))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("how", [how for how in PARAMETRIZATIONS if how != "orthogonal"])
def test_parametrizations_of_stored_weights_are_refused(how: str) -> None:
    """And leave the module as it was, except the old weight_norm, which has deleted the weight by then. `orthogonal`
    first replaces the weight by a plain one."""
    layer = build()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with pytest.raises((UnsupportedOperationError, RuntimeError, NotImplementedError)):
        PARAMETRIZATIONS[how](layer)
    if how == "old weight_norm":
        with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
            layer(data())
    else:
        assert not differing(before, layer.state_dict())
        assert torch.equal(layer(data()), build()(data()))
