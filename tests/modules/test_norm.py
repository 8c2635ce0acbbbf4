"""LayerNorm and RMSNorm against float64, within bounds of float32 arithmetic; their modules' arguments and births.

u = 2**-24 is the relative error of one float32 operation. A mean of n terms is off by at most n u times the mean of
their magnitudes, in any order of summation; the bounds below add this up along the formula.
"""

import pytest
import torch

from quantshard.errors import ConfigurationError
from quantshard.modules import LayerNorm, RMSNorm, quantized_model_init
from quantshard.modules.norm import Normalization

U = 2.0**-24
EPS = 1e-5
SIZES = [1, 2, 96, 257]


def data(size: int, tokens: int = 37, dtype: torch.dtype = torch.float32, offset: float = 0.0):
    torch.manual_seed(size)
    x = (torch.randn(tokens, size) * torch.rand(tokens, 1) * 3 + offset).to(dtype)
    return x, (1 + torch.randn(size) / 2), torch.randn(size), torch.randn(tokens, size).to(dtype)


class Reference:
    """Values and gradients in float64, and how far float32 may be from them."""

    def __init__(self, x, weight, bias, dy, centered):
        x, weight, dy = x.double(), weight.double(), dy.double()
        n, tokens = x.shape[-1], x.shape[0]
        d = x - x.mean(-1, keepdim=True) if centered else x
        rstd = 1 / (d.square().mean(-1, keepdim=True) + EPS).sqrt()
        unit = d * rstd
        # d is off by n u mean|x|, its mean square by twice that over the deviation, and n u; the root halves it
        level = x.abs().mean(-1, keepdim=True) * rstd if centered else torch.zeros_like(rstd)
        relative = U * ((n + 1) * (level + 1) + n / 2 + 8)
        self.unit_bound = U * (n + 1) * level + unit.abs() * relative
        self.y = unit * weight + (0 if bias is None else bias.double())
        self.y_bound = weight.abs() * self.unit_bound + 3 * U * (self.y.abs() + (unit * weight).abs())
        du = dy * weight
        terms = [du, unit * (du * unit).mean(-1, keepdim=True), du.mean(-1, keepdim=True) if centered else 0 * du]
        self.dx = rstd * (terms[0] - terms[1] - terms[2])
        mixed = (du.abs() * self.unit_bound).mean(-1, keepdim=True) * unit.abs()
        mixed = mixed + self.unit_bound * (du * unit).abs().mean(-1, keepdim=True)
        sizes = du.abs() + unit.abs() * (du * unit).abs().mean(-1, keepdim=True) + du.abs().mean(-1, keepdim=True)
        self.dx_bound = rstd * (mixed + sizes * (U * (n + 8) + relative))
        self.dweight = (dy * unit).sum(0)
        self.dweight_bound = (dy.abs() * (self.unit_bound + U * (tokens + 2) * unit.abs())).sum(0)
        self.dbias = dy.sum(0)
        self.dbias_bound = U * tokens * dy.abs().sum(0)


def assert_within(got, want, bound):
    excess = (got.double() - want).abs() - bound
    assert excess.max() <= 0, f"off by {(got.double() - want).abs().max():.3g}, {excess.max():.3g} over the bound"


@pytest.mark.parametrize("offset", [0.0, 20.0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("centered", [True, False])
def test_values_and_gradients(centered, size, offset):
    x, weight, bias, dy = data(size, offset=offset)
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    kind = "LayerNorm" if centered else "RMSNorm"
    y = Normalization(kind, size, EPS, False)(x, weight, bias if centered else None)
    y.backward(dy)
    want = Reference(x.detach(), weight.detach(), bias.detach() if centered else None, dy, centered)
    assert_within(y, want.y, want.y_bound)
    assert_within(x.grad, want.dx, want.dx_bound)
    assert_within(weight.grad, want.dweight, want.dweight_bound)
    if centered:
        assert_within(bias.grad, want.dbias, want.dbias_bound)


@pytest.mark.parametrize("size", SIZES)
def test_reference_is_torchs(size):
    x, weight, bias, dy = data(size)
    for centered in (True, False):
        xd, wd, bd = (t.double().requires_grad_() for t in (x, weight, bias))
        if centered:
            y = torch.nn.functional.layer_norm(xd, (size,), wd, bd, EPS)
        else:
            y = torch.nn.functional.rms_norm(xd, (size,), wd, EPS)
        y.backward(dy.double())
        want = Reference(x, weight, bias if centered else None, dy, centered)
        for got, expected in ((y, want.y), (xd.grad, want.dx), (wd.grad, want.dweight)):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_bfloat16_is_float32_rounded_once(kind, params):
    x, weight, _, dy = data(96, dtype=torch.bfloat16)
    low, high = kind(96, params_dtype=params), kind(96, params_dtype=torch.float32)
    for module in (low, high):
        module.weight.data.copy_(weight.to(params))
    a, b = x.clone().requires_grad_(), x.float().requires_grad_()
    y, wanted = low(a), high(b)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wanted.bfloat16())
    y.backward(dy)
    wanted.backward(dy.float())
    assert torch.equal(a.grad, b.grad.bfloat16())
    assert torch.equal(low.weight.grad, high.weight.grad.to(params))


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_zero_centered_gamma(kind):
    x, weight, _, dy = data(96)
    zero, one = kind(96, zero_centered_gamma=True), kind(96)
    assert torch.equal(zero.weight, torch.zeros(96))
    assert torch.equal(one.weight, torch.ones(96))
    assert torch.equal(zero(x), one(x))
    zero.weight.data.copy_(weight)
    one.weight.data.copy_(weight + 1)
    for module in (zero, one):
        module(x).backward(dy)
    assert torch.equal(zero(x), one(x))
    assert torch.equal(zero.weight.grad, one.weight.grad)


def test_leading_dims_do_not_matter():
    x, weight, bias, dy = data(96, tokens=6)
    grads = []
    for shape in ((6, 96), (2, 3, 96), (1, 6, 96)):
        w = weight.clone().requires_grad_()
        Normalization("LayerNorm", 96, EPS, False)(x.view(shape), w, bias).backward(dy.view(shape))
        grads.append(w.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    one = weight.clone().requires_grad_()
    Normalization("LayerNorm", 96, EPS, False)(x[0], one, bias).backward(dy[0])
    assert one.grad.shape == weight.shape


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_parameters_stay_high_precision_and_are_born_on_meta(kind):
    with quantized_model_init(recipe="current"):
        module = kind(96, eps=1e-3, device="meta", params_dtype=torch.bfloat16)
    assert module.weight.is_meta
    module.reset_parameters()
    assert type(module.weight) is torch.nn.Parameter
    assert torch.equal(module.weight, torch.ones(96, dtype=torch.bfloat16))
    assert (module.bias is None) == (kind is RMSNorm)
    if kind is LayerNorm:
        assert torch.equal(module.bias, torch.zeros(96, dtype=torch.bfloat16))
    assert "eps=0.001" in repr(module)
    assert [name for name, _ in module.named_parameters()] == (["weight", "bias"] if kind is LayerNorm else ["weight"])


def test_eps_is_used():
    x = torch.full((1, 4), 1e-3)
    assert torch.allclose(RMSNorm(4, eps=3e-6)(x), torch.full((1, 4), 0.5))


def test_size_arguments():
    assert LayerNorm((96,)).weight.shape == (96,)
    with pytest.raises(ConfigurationError, match="only the last dim is normalized"):
        LayerNorm((2, 3))


@pytest.mark.parametrize("last", [1, 95])
def test_wrong_last_dim_is_refused(last):
    with pytest.raises(ConfigurationError, match=rf"the last dim of an input \(2, {last}\) must be 96"):
        RMSNorm(96)(torch.ones(2, last))
