"""Which operand loses most: against GEMMs computed here; and which layers are named."""

import math

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard import numerics
from quantshard.errors import ConfigurationError
from quantshard.formats import Orientation
from quantshard.recipe import Gemm, TensorRole, resolve
from quantshard.tensor import observation
from quantshard.tools.statistics.sensitivity import gaussian_error, gemm_errors, suggest


def model_of(seed=0):
    torch.manual_seed(seed)
    layers = [qs.Linear(64, 96, bias=False, params_dtype=torch.float32, device="cpu")]
    layers += [qs.Linear(96, 32, bias=False, params_dtype=torch.float32, device="cpu")]
    return nn.Sequential(*layers)


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def run(model):
    loss = model(X).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "current", "delayed"])
def test_errors_are_those_of_the_gemms(name):
    """Of the last layer: y = x w^T, dy = 2 y, and its own products of operands that the oracle quantizes."""
    model, recipe = model_of(), resolve(name)
    found = gemm_errors(model, dict.fromkeys("01", recipe), lambda: run(model))
    assert len(found) == 12 and [each.error for each in found] == sorted((each.error for each in found), reverse=True)
    errors = {(each.gemm, each.operand): each.error for each in found if each.weight == "1.weight"}
    x, w = model[0](X).detach(), model[1].weight.detach()
    dy = 2 * (x @ w.t())
    ways = {
        (Gemm.FPROP, TensorRole.INPUT): (x, w),
        (Gemm.DGRAD, TensorRole.GRAD_OUTPUT): (dy, w.t()),
        (Gemm.WGRAD, TensorRole.INPUT): (x.t(), dy.t()),
        (Gemm.FPROP, TensorRole.WEIGHT): (w, x),
    }
    for (gemm, role), (a, b) in ways.items():
        cell = recipe.weight if role is TensorRole.WEIGHT else recipe.table[role, gemm]
        if cell.scaling.stochastic_rounding or cell.scaling.random_hadamard:
            assert 0.01 < errors[gemm.value, role.value] < 0.3
            continue
        a = a.contiguous()
        parts = numerics.quantize(a, cell.format, cell.scaling)
        q = numerics.dequantize(cell.format.copies[Orientation.ROWWISE], parts, tuple(a.shape))
        exact = (a.double() @ b.double().t()).norm()
        expected = float(((q.double() - a.double()) @ b.double().t()).norm() / exact)
        assert errors[gemm.value, role.value] == pytest.approx(expected, rel=1e-3), (gemm, role)
    assert observation.active is None


def test_a_pass_without_layers_is_refused():
    model = model_of()
    with pytest.raises(ConfigurationError, match="called no layer"):
        gemm_errors(model, {"0": resolve("mxfp8")}, lambda: None)


def test_each_layer_by_its_own_recipe():
    """As it is by a recipe that all have."""
    model, recipes = model_of(), {"0": resolve("mxfp8"), "1": resolve("current")}

    def errors_of(recipes):
        found = gemm_errors(model, recipes, lambda: run(model))
        return {(each.layer, each.gemm, each.operand): each.error for each in found}

    found, ofs = errors_of(recipes), {name: errors_of(dict.fromkeys("01", recipe)) for name, recipe in recipes.items()}
    assert len(found) == 12 and all(error == ofs[key[0]][key] for key, error in found.items())


def test_an_expert_without_tokens_has_no_errors():
    model = qs.GroupedLinear(3, 64, 64, bias=False, params_dtype=torch.float32, device="cpu")
    found = gemm_errors(
        nn.ModuleList([model]), {"0": resolve("mxfp8")}, lambda: model(X, [12, 0, 20]).square().sum().backward()
    )
    assert {each.weight for each in found} == {"0.weight0", "0.weight2"} and all(0 < each.error < 1 for each in found)


@pytest.mark.parametrize(
    ("errors", "kept"),
    [
        ([[0.03]] * 28, []),
        ([[0.03 + 0.001 * (n % 5)] * 6 for n in range(28)], []),
        ([[0.03]] * 27 + [[0.0601]], [27]),
        ([[0.03]] * 27 + [[0.0599]], []),
        # median 5, MAD 2.5: twice the median is passed, the median + 6 MAD is not
        ([[1.0], [2.0], [3.0], [5.0], [7.0], [8.0], [19.0]], []),
        ([[1.0], [2.0], [3.0], [5.0], [7.0], [8.0], [23.1]], [6]),
        # the number of GEMMs of a layer, and those in high precision, do not count
        ([[0.03] * 6, [0.03] * 600, [0.03] * 6 + [0.0] * 60], []),
        ([[0.0]] * 5 + [[0.03]], []),
        ([[math.inf], [0.03], [0.03]], [0]),
        ([[0.03], [0.03, math.nan], [0.03]], [1]),
        ([[math.inf], [math.nan], [0.03]], [0, 1]),
        ([[0.03]] * 5 + [[0.07] + [0.0] * 9], [5]),
        ([], []),
    ],
)
def test_layers_that_stand_out(errors, kept):
    names = [f"layers.{number}" for number in range(len(errors))]
    found = suggest(dict(zip(names, errors, strict=True)), {"*": "mxfp8"})
    assert found.kept == tuple(names[number] for number in kept)
    assert 0 <= found.removed <= 1


@pytest.mark.parametrize(("name", "mantissa_bits"), [("current", 3), ("mxfp8", 3)])
def test_gaussian_error_is_that_of_rounding(name, mantissa_bits):
    """Rounding has the variance ulp^2 / 12, here integrated over the normal density."""
    x = torch.linspace(1e-4, 8, 400_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    ulp = torch.exp2(x.log2().floor() - mantissa_bits)
    expected = float(((ulp.square() / 12 * density).sum() / (x.square() * density).sum()).sqrt())
    assert gaussian_error(resolve(name).weight) == pytest.approx(expected, rel=0.03)
    assert gaussian_error(None) == 0


def test_errors_of_normal_operands_are_gaussian():
    """With and without stochastic rounding and the Hadamard transform."""
    torch.manual_seed(0)
    model = nn.Sequential(qs.Linear(256, 256, bias=False, params_dtype=torch.float32, device="cpu"))
    model[0].weight.data.normal_()
    x, dy = torch.randn(256, 256), torch.randn(256, 256)
    for name in ("mxfp8", "nvfp4", "current"):
        for each in gemm_errors(model, {"0": resolve(name)}, lambda: model(x).backward(dy)):
            assert each.error == pytest.approx(each.gaussian, rel=0.05), each


def test_layers_are_put_before_the_patterns():
    errors = {f"layers.{number}": [math.nan if number == 1 else 0.1] for number in range(4)}
    assert suggest(errors, {"layers.1": "current", "*": "mxfp8"}).recipes == "layers.1=bf16,*=mxfp8"
    found = suggest(errors, {"layers.0": "bf16", "*": "mxfp8"})
    assert found.recipes == "layers.1=bf16,layers.0=bf16,*=mxfp8" and found.kept == ("layers.1",)


def test_layers_are_what_convert_takes_too():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])}).bfloat16()
    qs.convert(model, {"layers.0": "bf16", "*": "mxfp8"})
    assert type(model["layers"][0]) is nn.Linear and type(model["layers"][1]) is not nn.Linear
