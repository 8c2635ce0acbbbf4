"""Fused normalization: statistics, results and gradients within the stated bounds, codes equal to the oracle's."""

import pytest
import torch

pytest.importorskip("triton")

from quantshard import numerics
from quantshard.formats import ALL, FP8_128X128, FP8_E4M3, MXFP8_1X32, MXFP8_32X32, NVFP4_16X16, Copy, Scaling
from quantshard.kernels.fused import norm as kn
from quantshard.kernels.fused.epilogue import EpilogueRequest
from quantshard.kernels.quantize import targets as kt
from quantshard.modules.norm import layer_norm, rms_norm

# numpy, under the interpreter, warns of what IEEE 754 defines
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
U, EPS = 2.0**-24, 1e-5
GAP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
SHAPES = [(1, 1), (11, 290), (2, 4100)]


def values(*shape, dtype=torch.bfloat16, seed=0, mean=0.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3 + mean
    return x.to(dtype).to(DEVICE)


def parameters(size, centered, dtype=torch.bfloat16, offset=0.0):
    gamma, beta = values(size, dtype=dtype, seed=8), values(size, dtype=dtype, seed=9)
    return kn.NormParameters(gamma, beta if centered else None, offset)


class Exact:
    """The formulas of kernels/norm.py in float64, and the bounds below them."""

    def __init__(self, z, centered, p):
        self.z = z = z.double()
        self.centered, self.gamma = centered, p.gamma.double() + p.offset
        self.beta = torch.zeros_like(self.gamma) if p.beta is None else p.beta.double()
        self.d = d = kn.depth(z.shape[1])
        self.mean = z.mean(1, keepdim=True) if centered else 0.0
        self.rstd = ((z - self.mean).square().mean(1, keepdim=True) + EPS).rsqrt()
        self.unit = (z - self.mean) * self.rstd
        self.y = self.unit * self.gamma + self.beta
        m = z.abs().mean(1, keepdim=True) * self.rstd * centered
        self.e = (d / 2 + 8) * U + d * U * m
        self.a = self.e + 4 * U
        self.b = (self.a + d * U) * m
        self.f = self.a * self.unit.abs() + self.b

    def y_error(self):
        return self.f * self.gamma.abs() + 4 * U * ((self.unit * self.gamma).abs() + self.beta.abs())

    def gradients(self, dy):
        dy = dy.double()
        g, unit = dy * self.gamma, self.unit
        of_g = g.mean(1, keepdim=True) * self.centered
        dx = (g - unit * (g * unit).mean(1, keepdim=True) - of_g) * self.rstd
        mean_g, mean_g_unit = (t.abs().mean(1, keepdim=True) for t in (g, g * unit))
        error = (3 * self.a + (self.d + 16) * U) * (g.abs() + unit.abs() * mean_g_unit + mean_g)
        error = self.rstd * (error + self.b * (unit.abs() * mean_g + mean_g_unit))
        return dx, error, (dy * unit).sum(0), dy.sum(0)


def close(got, want, error, dtype):
    """Within `error` before the one rounding to dtype, which adds half a gap."""
    apart = (got.double() - want).abs()
    limit = error + GAP[dtype] / 2 * (want.abs() + error)
    assert (apart <= limit).all(), ((apart / limit).max(), apart.max())


CASES = [(c, o, d) for c in (False, True) for o, d in ((0.0, torch.bfloat16), (1.0, torch.float32))]
CASES.append((True, 0.0, torch.float16))


@pytest.mark.parametrize("centered, offset, dtype", CASES)
def test_results_and_gradients_are_within_the_stated_bounds(centered, offset, dtype):
    for shape in SHAPES:
        x, dy = values(*shape, dtype=dtype, mean=1.0), values(*shape, dtype=dtype, seed=1)
        p = parameters(shape[1], centered, dtype, offset)
        exact = Exact(x, centered, p)
        found, same = kn.norm_statistics(x, EPS, centered)
        assert same.data_ptr() == x.data_ptr()
        close(found.rstd[:, None], exact.rstd, exact.e * exact.rstd, torch.float32)
        high = torch.empty_like(x)
        kn.normalize_and_quantize(x, found, p, EpilogueRequest(high=high))
        close(high, exact.y, exact.y_error(), dtype)

        dx, dgamma, dbeta = kn.norm_backward(dy, x, found, p)
        want, error, want_gamma, want_beta = exact.gradients(dy)
        close(dx, want, error, dtype)
        unit_error = (dy.double().abs() * (exact.f + shape[0] * U * exact.unit.abs())).sum(0)
        close(dgamma, want_gamma, unit_error, torch.float32)
        assert (dbeta is None) != centered
        if centered:
            close(dbeta, want_beta, shape[0] * U * dy.double().abs().sum(0), torch.float32)


@pytest.mark.parametrize("centered", [False, True])
def test_results_are_the_oracles_or_their_neighbours(centered):
    """Both are within the bounds of the exact result; so they differ by a neighbour where their rounding does."""
    x, dy = values(37, 290).requires_grad_(), values(37, 290, seed=1)
    gamma, beta, _ = p = parameters(290, centered, torch.float32)
    leaves = [t.requires_grad_() for t in (gamma, beta) if t is not None]
    y = layer_norm(x, gamma, beta, EPS) if centered else rms_norm(x, gamma, EPS)
    wanted = torch.autograd.grad(y, [x, *leaves], dy)
    with torch.no_grad():
        found, _ = kn.norm_statistics(x, EPS, centered)
        high = torch.empty_like(y)
        kn.normalize_and_quantize(x, found, p, EpilogueRequest(high=high))
        got = kn.norm_backward(dy, x, found, p)
        exact = Exact(x, centered, p)
        bounds = (GAP[y.dtype] * y.double().abs() + 2 * exact.y_error(), exact.gradients(dy)[1])
        assert ((high.double() - y).abs() <= bounds[0]).all()
        assert (high != y).double().mean() < 0.01
        assert ((got[0].double() - wanted[0]).abs() <= GAP[y.dtype] * wanted[0].double().abs() + 2 * bounds[1]).all()
        for one, other in zip(got[1:], wanted[1:], strict=False):
            assert torch.allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("centered", [False, True])
def test_longer_rows_are_read_in_pieces(centered, monkeypatch):
    """Of 64 elements here; two rows of a program of backward are added where the sums lie."""
    monkeypatch.setattr(kn, "LONGEST", 64)
    monkeypatch.setattr(kn, "LONGEST_CENTERED", 64)
    monkeypatch.setattr(kn, "PROGRAMS_IN_PIECES", 2)
    x, dy, p = values(4, 150, mean=1.0), values(4, 150, seed=1), parameters(150, centered)
    residual, more = values(4, 150, seed=5), values(4, 150, seed=6)
    amax, high = torch.zeros((), device=DEVICE), torch.empty_like(x)
    found, total = kn.norm_statistics(x, EPS, centered, residual=residual, parameters=p, amax=amax)
    assert torch.equal(total, x + residual)
    exact = Exact(total, centered, p)
    kn.normalize_and_quantize(total, found, p, EpilogueRequest(high=high))
    close(high, exact.y, exact.y_error(), x.dtype)
    assert amax == high.abs().amax()
    dx, dgamma, dbeta = kn.norm_backward(dy, total, found, p, residual_gradient=more)
    want, error, want_gamma, want_beta = exact.gradients(dy)
    close(dx, want + more.double(), error + U * more.double().abs(), x.dtype)
    close(dgamma, want_gamma, (dy.double().abs() * (exact.f + 4 * U * exact.unit.abs())).sum(0), torch.float32)
    if centered:
        close(dbeta, want_beta, 4 * U * dy.double().abs().sum(0), torch.float32)


def test_sums_over_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(kn, "PROGRAMS", 2)
    x, dy, p = values(45, 290), values(45, 290, seed=1), parameters(290, True)
    found, _ = kn.norm_statistics(x, EPS, True)
    exact = Exact(x, True, p)
    dx, dgamma, dbeta = kn.norm_backward(dy, x, found, p)
    want, error, want_gamma, want_beta = exact.gradients(dy)
    close(dx, want, error, x.dtype)
    close(dgamma, want_gamma, (dy.double().abs() * (exact.f + 45 * U * exact.unit.abs())).sum(0), torch.float32)
    close(dbeta, want_beta, 45 * U * dy.double().abs().sum(0), torch.float32)
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
    exact = Exact(total, False, p)
    want, error, *_ = exact.gradients(x)
    close(dx, want + more.double(), error + U * more.double().abs(), dtype)


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_128X128, MXFP8_1X32, MXFP8_32X32, NVFP4_16X16], ids=lambda f: f.name)
def test_codes_are_the_oracles_of_the_results(fmt):
    shape, copy, scaling = (37, 290), fmt.copies[Copy.ROWWISE], Scaling()
    for centered in (False, True) if fmt is FP8_E4M3 else (True,):
        x, p = values(*shape, mean=0.5), parameters(290, centered)
        amax, high = torch.zeros((), device=DEVICE), torch.empty_like(x)
        found, _ = kn.norm_statistics(x, EPS, centered, parameters=p, amax=amax)
        kn.normalize_and_quantize(x, found, p, EpilogueRequest(high=high))
        grids = numerics.amaxes(high, fmt)
        multipliers = numerics.encode_scales(grids, fmt, scaling, x.dtype)
        assert amax == high.abs().amax()
        given = multipliers[copy.scale.name] if ALL in copy.block else None
        asked = kt.QuantizeRequest(copy, scaling, (0, 0), given, grids.get("amax"), None, fmt.transposable)
        other = None if fmt.transposable else kt.QuantizeRequest(copy, scaling, second_amax=grids.get("amax"))
        target, two = kn.normalize_and_quantize(x, found, p, EpilogueRequest(asked, other))
        codes = numerics.quantize_codes(high, copy, multipliers)
        assert torch.equal(target.codes, codes)
        if target.scale is not None:
            assert torch.equal(target.scale, numerics.scales(grids, fmt, scaling, x.dtype)[copy.scale.name])
        if two is not None:
            transposed = high.t().contiguous()
            multipliers = numerics.encode_scales(numerics.amaxes(transposed, fmt), fmt, scaling, x.dtype)
            assert torch.equal(two.codes, numerics.quantize_codes(transposed, copy, multipliers))
        else:
            unpacked = numerics.unpack(codes, copy.codes.encoding, shape[1]).t().contiguous()
            assert torch.equal(target.transposed, numerics.pack(unpacked, copy.codes.encoding))


def test_large_means_do_not_spoil_layer_norm():
    """Mean 300 standard deviations: the bound says how much is lost; one pass over squares would lose all."""
    x, p = values(9, 290, dtype=torch.float32, mean=900.0), parameters(290, True, torch.float32)
    found, _ = kn.norm_statistics(x, EPS, True)
    exact = Exact(x, True, p)
    assert exact.e.max() < 2e-3
    close(found.rstd[:, None], exact.rstd, exact.e * exact.rstd, torch.float32)


def test_rows_that_are_not_finite_stay_apart():
    x, p = values(4, 33), parameters(33, True)
    x[1, 7], x[2, 3], x[3] = torch.nan, torch.inf, 0.0
    amax, high = torch.zeros((), device=DEVICE), torch.empty_like(x)
    found, _ = kn.norm_statistics(x, EPS, True, parameters=p, amax=amax)
    kn.normalize_and_quantize(x, found, p, EpilogueRequest(high=high))
    assert high.isfinite().all(1).tolist() == [True, False, False, True] and amax.isnan()
    assert torch.equal(high[3], p.beta)


@pytest.mark.parametrize("shape", [(0, 7), (7, 0)])
def test_nothing_gives_nothing(shape):
    x, p = torch.empty(shape, device=DEVICE), parameters(shape[1], True)
    found, _ = kn.norm_statistics(x, EPS, True)
    kn.normalize_and_quantize(x, found, p, EpilogueRequest(high=x.clone()))
    dx, dgamma, dbeta = kn.norm_backward(x, x, found, p)
    assert dx.shape == shape and not dgamma.any() and not dbeta.any()
