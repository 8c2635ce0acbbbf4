"""Fused normalization where the registry of kernels has no case: residuals, offsets, pieces of rows, odd numbers."""

import pytest
import torch

pytest.importorskip("triton")

from quantshard.kernels.fused import norm as kn
from quantshard.kernels.fused.epilogue import KernelOutputs
from quantshard.modules.norm import Normalization
from tests.kernels.cases.base import Bound, U, agrees
from tests.kernels.cases.fused import EPS, NormReference

# numpy, under the interpreter, warns of what IEEE 754 defines
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def values(*shape, dtype=torch.bfloat16, seed=0, mean=0.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3 + mean
    return x.to(dtype).to(DEVICE)


def parameters(size, centered, dtype=torch.bfloat16, offset=0.0):
    gamma, beta = values(size, dtype=dtype, seed=8), values(size, dtype=dtype, seed=9)
    return kn.NormParameters(gamma, beta if centered else None, offset)


def check(found, expected):
    assert [place for place, pair in enumerate(zip(found, expected, strict=True)) if not agrees(*pair)] == []


@pytest.mark.parametrize("centered", [False, True])
def test_an_offset_of_the_weight(centered):
    x, dy, p = values(5, 40, mean=1.0), values(5, 40, seed=1), parameters(40, centered, offset=1.0)
    exact, high = NormReference(x, p, centered), torch.empty_like(x)
    found, same = kn.norm_statistics(x, EPS, centered)
    assert same.data_ptr() == x.data_ptr()
    kn.normalize_and_quantize(x, found, p, KernelOutputs(high=high))
    check([high, *kn.norm_backward(dy, x, found, p)], [exact.result(), *exact.gradients(dy)])


@pytest.mark.parametrize("centered", [False, True])
def test_results_are_the_oracles_or_their_neighbours(centered):
    """Both are within the bounds of the exact result; so they differ by a neighbour where their rounding does."""
    x, dy = values(37, 290).requires_grad_(), values(37, 290, seed=1)
    gamma, beta, _ = p = parameters(290, centered, torch.float32)
    leaves = [t.requires_grad_() for t in (gamma, beta) if t is not None]
    y = Normalization("LayerNorm" if centered else "RMSNorm", 290, EPS, False)(x, gamma, beta)
    wanted = torch.autograd.grad(y, [x, *leaves], dy)
    with torch.no_grad():
        found, _ = kn.norm_statistics(x, EPS, centered)
        high = torch.empty_like(y)
        kn.normalize_and_quantize(x, found, p, KernelOutputs(high=high))
        got = kn.norm_backward(dy, x, found, p)
        exact, gap = NormReference(x, p, centered), torch.finfo(y.dtype).eps
        assert ((high.double() - y).abs() <= gap * y.double().abs() + 2 * exact.result().error).all()
        assert (high != y).double().mean() < 0.01
        room = gap * wanted[0].double().abs() + 2 * exact.gradients(dy)[0].error
        assert ((got[0].double() - wanted[0]).abs() <= room).all()
        for one, other in zip(got[1:], wanted[1:], strict=False):
            assert torch.allclose(one, other, rtol=0, atol=1e-4)


def added(bound, more):
    """With a gradient of a residual, which is added before dx is rounded."""
    return Bound(bound.exact + more.double(), bound.error + U * more.double().abs())


@pytest.mark.parametrize("centered", [False, True])
def test_longer_rows_are_read_in_pieces(centered, monkeypatch):
    """Of 64 elements here; two rows of a program of backward are added where the sums lie."""
    monkeypatch.setattr(kn, "LONGEST", 64)
    monkeypatch.setattr(kn, "LONGEST_CENTERED", 64)
    monkeypatch.setattr(kn, "PROGRAMS_IN_PIECES", 2)
    x, dy, p = values(4, 150, mean=1.0), values(4, 150, seed=1), parameters(150, centered)
    residual, more = values(4, 150, seed=5), values(4, 150, seed=6)
    amax, high = torch.zeros((), device=DEVICE), torch.empty_like(x)
    of_rows, of_cols = (torch.zeros(size, device=DEVICE) for size in x.shape)
    given = {"residual": residual, "parameters": p, "amax": amax, "of_rows": (of_rows, of_cols)}
    found, total = kn.norm_statistics(x, EPS, centered, **given)
    assert torch.equal(total, x + residual)
    exact = NormReference(total, p, centered)
    kn.normalize_and_quantize(total, found, p, KernelOutputs(high=high))
    assert amax == high.abs().amax()
    assert torch.equal(of_rows, high.abs().amax(1).float()) and torch.equal(of_cols, high.abs().amax(0).float())
    got = kn.norm_backward(dy, total, found, p, residual_gradient=more)
    dx, *of_parameters = exact.gradients(dy)
    check([high, *got], [exact.result(), added(dx, more), *of_parameters])


def test_sums_over_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(kn, "PROGRAMS", 2)
    x, dy, p = values(45, 290), values(45, 290, seed=1), parameters(290, True)
    found, _ = kn.norm_statistics(x, EPS, True)
    check(kn.norm_backward(dy, x, found, p), NormReference(x, p, True).gradients(dy))
    assert kn.norm_backward(dy, x, found, p, for_parameters=False)[1:] == (None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_residuals_are_added_and_rounded_as_by_the_oracle(dtype):
    x, residual, more = (values(37, 290, dtype=dtype, seed=seed) for seed in range(3))
    p = parameters(290, False)
    found, total = kn.norm_statistics(x, EPS, False, residual=residual)
    assert torch.equal(total, x + residual)
    alone, _ = kn.norm_statistics(x + residual, EPS, False)
    assert torch.equal(found.rstd, alone.rstd)
    dx, _, _ = kn.norm_backward(x, total, found, p, residual_gradient=more)
    assert agrees(dx, added(NormReference(total, p, False).gradients(x)[0], more))


def test_large_means_do_not_spoil_layer_norm():
    """Mean 300 standard deviations: the bound says how much is lost; one pass over squares would lose all."""
    x, p = values(9, 290, dtype=torch.float32, mean=900.0), parameters(290, True, torch.float32)
    found, _ = kn.norm_statistics(x, EPS, True)
    exact = NormReference(x, p, True)
    assert exact.rstd_error.max() < 2e-3
    assert agrees(found.rstd, exact.statistics())


def test_rows_that_are_not_finite_stay_apart():
    x, p = values(4, 33), parameters(33, True)
    x[1, 7], x[2, 3], x[3] = torch.nan, torch.inf, 0.0
    amax, high = torch.zeros((), device=DEVICE), torch.empty_like(x)
    of_rows = torch.zeros(4, device=DEVICE)
    found, _ = kn.norm_statistics(x, EPS, True, parameters=p, amax=amax, of_rows=(of_rows, None))
    kn.normalize_and_quantize(x, found, p, KernelOutputs(high=high))
    assert high.isfinite().all(1).tolist() == [True, False, False, True] and amax.isnan()
    assert of_rows.isfinite().tolist() == [True, False, False, True]
    assert torch.equal(high[3], p.beta)


@pytest.mark.parametrize("shape", [(0, 7), (7, 0)])
def test_nothing_gives_nothing(shape):
    x, p = torch.empty(shape, device=DEVICE), parameters(shape[1], True)
    found, _ = kn.norm_statistics(x, EPS, True)
    kn.normalize_and_quantize(x, found, p, KernelOutputs(high=x.clone()))
    dx, dgamma, dbeta = kn.norm_backward(x, x, found, p)
    assert dx.shape == shape and not dgamma.any() and not dbeta.any()
