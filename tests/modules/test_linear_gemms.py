"""The three GEMMs of Linear under every recipe, against float64 products of operands that are quantized here.

Which operand is quantized how is written down once more in `CASES`, not read from the recipes. The products themselves
are bounded by float32 accumulation: each of the K products and the sums of them are off by one rounding (u = 2**-24),
(K + 2) u times the sum of magnitudes in any order; the result is then rounded once to the output's dtype.
"""

import copy
import pickle
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from quantshard import formats, numerics, recipe as recipes
from quantshard.formats import Format, Orientation, Scaling
from quantshard.modules import Linear, autocast, quantized_model_init
from quantshard.tensor.parameter_state import RNG_DRAWS, RNG_KEY
from tests import oracle
from tests.covering import exhaustive, in_turns
from tests.distributed.models import MXFP4_RECIPE

U = 2.0**-24
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
IN, OUT = 200, 257
PLAIN = Scaling()
HISTORY = 3


@dataclass(frozen=True)
class Case:
    """Formats of weight, input and output gradient; `delayed`: scaled by past amaxes; the rest is NVFP4's wgrad."""

    recipe: recipes.Recipe
    weight: Format
    x: Format
    dy: Format
    scaling: Scaling = PLAIN
    delayed: bool = False
    hadamard: bool = False
    stochastic: bool = False


MXFP8, MXFP4, NVFP4 = formats.MXFP8_1X32, formats.MXFP4_1X32, formats.NVFP4_1X16
CASES = {
    "delayed": Case(
        recipes.DelayedScaling(amax_history_len=HISTORY),
        formats.FP8_E4M3, formats.FP8_E4M3, formats.FP8_E5M2, delayed=True,
    ),
    "current": Case(recipes.Float8CurrentScaling(), formats.FP8_E4M3, formats.FP8_E4M3, formats.FP8_E5M2),
    "block": Case(
        recipes.Float8BlockScaling(),
        formats.FP8_128X128, formats.FP8_1X128, formats.FP8_1X128, Scaling(power_of_two=True),
    ),
    "rowwise": Case(
        recipes.Float8RowwiseScaling(),
        formats.FP8_1XROW, formats.FP8_1XROW, formats.FP8_1XROW, Scaling(power_of_two=True),
    ),
    "mxfp8": Case(recipes.MXFP8BlockScaling(), formats.MXFP8_32X32, MXFP8, MXFP8),
    "mxfp8-both": Case(recipes.MXFP8BlockScaling(enable_2d_quantization=False), formats.MXFP8_BOTH, MXFP8, MXFP8),
    "mxfp4, which no recipe names": Case(MXFP4_RECIPE, formats.MXFP4_32X32, MXFP4, MXFP4),
    "nvfp4": Case(
        recipes.NVFP4BlockScaling(), formats.NVFP4_16X16, NVFP4, NVFP4, hadamard=True, stochastic=True
    ),
}  # fmt: skip


def quantized(x, fmt, scaling=PLAIN, words=None, which=Orientation.ROWWISE, amax=None):
    """The values that [R, C] is quantized to, along its last dim, in float64."""
    if amax is not None:
        grids = {"scale_inv": amax.view(1, 1)}
        parts = oracle.scales(grids, fmt, scaling)
        multipliers = oracle.encode_scales(grids, fmt, scaling)
        parts["codes"] = numerics.quantize_codes(x, fmt.copies[which], multipliers)
    else:
        parts = numerics.quantize(x, fmt, scaling, words=None if words is None else {which: words})
    return numerics.dequantize(fmt.copies[which], parts, (x.shape[0], x.shape[1])).double()


class Expected:
    """The operands of the three GEMMs of one step, quantized one by one."""

    def __init__(self, case, weight, x, dy, key, draw, amaxes):
        def cast(values, fmt, drawn_by="", **how):
            if not case.stochastic or not drawn_by:
                return quantized(values, fmt, case.scaling, **how)
            if drawn_by == "rows":
                words = numerics.random_words(key, draw, 1, tuple(values.shape))
            else:  # the words of the same elements, the halves of each exchanged
                words = numerics.random_words(key, draw, 1, tuple(values.shape)[::-1]).t()
                words = (words << 16) % 2**32 + (words >> 16)
            return quantized(values, fmt, replace(case.scaling, stochastic_rounding=True), words=words, **how)

        def for_wgrad(values):
            turned = values.t()
            if not case.hadamard:
                return turned
            return numerics.hadamard16(turned)  # pads the tokens to a multiple of 16

        x_amax, dy_amax = amaxes if case.delayed else (None, None)
        self.x = cast(x, case.x, amax=x_amax)
        self.x_wgrad = cast(for_wgrad(x), case.x, amax=x_amax)
        self.dy = cast(dy, case.dy, drawn_by="rows", amax=dy_amax)
        self.dy_wgrad = cast(for_wgrad(dy), case.dy, drawn_by="columns", amax=dy_amax)
        self.w = cast(weight, case.weight)
        self.w_dgrad = (
            cast(weight, case.weight, which=Orientation.COLUMNWISE) if len(case.weight.copies) == 2 else self.w
        )


def excess(got, a, b, bias=None):
    """By how much `got` is further from a @ b + bias than float32 accumulation and one rounding allow."""
    want, level = a @ b, a.abs() @ b.abs()
    if bias is not None:
        want, level = want + bias.double(), level + bias.double().abs()
    accumulated = (a.shape[1] + 2) * U * level
    bound = accumulated + ROUNDING[got.dtype] * (want.abs() + accumulated)
    return ((got.double() - want).abs() - bound).max()


def step(linear, recipe, tokens, dtype, number):
    torch.manual_seed(100 + number)
    x = (torch.randn(tokens, IN) * (1 + number)).to(dtype).requires_grad_()
    dy = (torch.randn(tokens, OUT) * torch.rand(tokens, 1) / (1 + number)).to(dtype)
    with autocast(recipe=recipe):
        y = linear(x)
    linear.weight.grad = linear.bias.grad = None
    y.backward(dy)
    return x.detach(), dy, y.detach(), x.grad


def build(recipe, dtype):
    torch.manual_seed(7)
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        linear = Linear(IN, OUT, params_dtype=dtype)
    linear.bias.data.copy_(torch.randn(OUT))
    return linear


DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
"""Of inputs and of parameters."""


@pytest.mark.parametrize(
    ("name", "tokens", "dtypes"),
    exhaustive(product(CASES, [1, 3, 37], DTYPES), in_turns(CASES, [1, 3, 37], DTYPES)),
)
def test_three_gemms(name, tokens, dtypes):
    dtype, params = dtypes
    case = CASES[name]
    linear = build(case.recipe, params)
    weight = linear.weight.get_high_precision_init_val()
    key = int(linear.weight_state("weight")[RNG_KEY])
    seen = [torch.zeros(HISTORY), torch.zeros(HISTORY)]  # amaxes of x and dy
    for number in range(2):
        x, dy, y, dx = step(linear, case.recipe, tokens, dtype, number)
        want = Expected(case, weight, x, dy, key, number, [history.amax() for history in seen])
        assert (y.dtype, dx.dtype) == (dtype, dtype)
        assert (linear.weight.grad.dtype, linear.bias.grad.dtype) == (params, params)
        assert excess(y, want.x, want.w.t(), linear.bias.detach()) <= 0
        assert excess(dx, want.dy, want.w_dgrad) <= 0
        assert excess(linear.weight.grad, want.dy_wgrad, want.x_wgrad.t()) <= 0
        assert excess(linear.bias.grad[None], torch.ones(1, tokens).double(), dy.double()) <= 0
        for history, tensor in zip(seen, (x, dy), strict=True):
            history[number] = tensor.abs().amax()
    assert int(linear.weight_state("weight")[RNG_DRAWS]) == (2 if case.stochastic else 0)


@pytest.mark.parametrize("name", CASES)
def test_bounds_are_narrower_than_quantization(name):
    """Negative control: products of operands that are quantized in another way are out of bounds."""
    case = CASES[name]
    linear = build(case.recipe, torch.float32)
    weight = linear.weight.get_high_precision_init_val()
    key = int(linear.weight_state("weight")[RNG_KEY])
    amaxes = [torch.tensor(0.0)] * 2
    x, dy, y, dx = step(linear, case.recipe, 37, torch.float32, 0)
    want = Expected(case, weight, x, dy, key, 0, amaxes)
    assert excess(y, x.double(), want.w.t(), linear.bias.detach()) > 0
    assert excess(y, want.x, weight.double().t(), linear.bias.detach()) > 0
    assert excess(dx, dy.double(), want.w_dgrad) > 0
    assert excess(linear.weight.grad, dy.double().t(), want.x_wgrad.t()[:37]) > 0
    assert excess(linear.weight.grad, want.dy_wgrad[:, :37], x.double()) > 0
    if case.stochastic:
        other = Expected(case, weight, x, dy, key, 1, amaxes)
        assert excess(dx, other.dy, want.w_dgrad) > 0
        assert excess(linear.weight.grad, other.dy_wgrad, want.x_wgrad.t()) > 0


@pytest.mark.parametrize(("emptied", "y_stays"), [("codes", False), ("columnwise", True)])
def test_each_gemm_reads_the_copy_along_its_sum(emptied, y_stays):
    recipe = CASES["mxfp8-both"].recipe
    linear = build(recipe, torch.float32)
    _, _, y, dx = step(linear, recipe, 3, torch.float32, 0)
    linear.weight.quantized_storage.components[emptied].zero_()
    _, _, y_without, dx_without = step(linear, recipe, 3, torch.float32, 0)
    assert torch.equal(y_without, y if y_stays else linear.bias.expand(3, OUT))
    assert torch.equal(dx_without, torch.zeros_like(dx) if y_stays else dx)


@pytest.mark.parametrize("name", CASES)
def test_leading_dims_do_not_matter(name):
    recipe = CASES[name].recipe
    results = []
    for shape in ((6, IN), (2, 3, IN), (2, 1, 3, IN)):
        linear = build(recipe, torch.float32)
        torch.manual_seed(1)
        x = torch.randn(6, IN).view(shape).requires_grad_()
        with autocast(recipe=recipe):
            y = linear(x)
        y.backward(torch.linspace(-1, 1, 6 * OUT).view(y.shape))
        assert y.shape == (*shape[:-1], OUT)
        results.append([y, x.grad, linear.weight.grad, linear.bias.grad])
    for other in results[1:]:
        assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_that_nobody_needs(name, frozen):
    """Leaving one gradient out does not change the other."""
    recipe = CASES[name].recipe
    full, half = build(recipe, torch.float32), build(recipe, torch.float32)
    half.weight.requires_grad_(frozen != "weight")
    torch.manual_seed(1)
    data, dy, grads = torch.randn(5, IN), torch.randn(5, OUT), []
    for linear, x in ((full, data.clone().requires_grad_()), (half, data.clone().requires_grad_(frozen != "x"))):
        with autocast(recipe=recipe):
            linear(x).backward(dy)
        grads.append({"x": x.grad, "weight": linear.weight.grad})
    kept = "weight" if frozen == "x" else "x"
    assert grads[1][frozen] is None
    assert torch.equal(grads[0][kept], grads[1][kept])


@pytest.mark.parametrize("name", CASES)
def test_no_tokens(name):
    recipe = CASES[name].recipe
    linear, x = build(recipe, torch.float32), torch.zeros(0, IN, requires_grad=True)
    with autocast(recipe=recipe):
        y = linear(x)
    y.sum().backward()
    assert y.shape == (0, OUT)
    assert x.grad is not None and x.grad.shape == (0, IN)
    assert torch.equal(linear.weight.grad, torch.zeros(OUT, IN))


def test_return_bias_and_no_bias():
    x = torch.randn(3, IN)
    torch.manual_seed(0)
    plain = Linear(IN, OUT)
    torch.manual_seed(0)
    apart = Linear(IN, OUT, return_bias=True)
    plain.bias.data.fill_(1.5)
    out, bias = apart(x)
    assert bias is apart.bias
    torch.testing.assert_close(plain(x), out + 1.5, rtol=0, atol=4 * U)
    torch.manual_seed(0)
    assert torch.equal(Linear(IN, OUT, bias=False)(x), out)


def test_plans_stay_with_the_layer():
    """They are made once for a recipe, for each use of an operand, and copies of the layer make their own."""
    recipe = recipes.Float8CurrentScaling()
    fast = recipes.Float8CurrentScaling(fp8_gemm_dgrad=recipes.MMParams(use_split_accumulator=False))
    with quantized_model_init(recipe=recipe):
        layer = Linear(32, 48, bias=False, device="cpu")

    def planned(used):
        x = torch.ones(16, 32, requires_grad=True)
        with autocast(recipe=used):
            layer(x).sum().backward()
        return layer.gemm_plans.planned

    planned_for, first = planned(recipe)
    plans = dict(first)
    assert planned_for == recipe and len(plans) == 2  # of the input and of the gradient
    _, again = planned(replace(recipe))
    assert again is first and again == plans, "an equal recipe needs no other plans"
    planned_for, other = planned(fast)
    assert planned_for == fast and other.keys() == plans.keys()
    assert not {*other.values()} & {*plans.values()}
    for made in (copy.deepcopy(layer).gemm_plans, pickle.loads(pickle.dumps(layer.gemm_plans))):
        assert made.planned == (None, {})
