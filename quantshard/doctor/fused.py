"""The kernels that compute what they quantize: normalizations, activations and rotary embeddings, in both directions.

Each function runs one on random values and returns whether it is right. Results are compared with float64 within the
bounds that the heads of `kernels/fused/norm.py` and `kernels/fused/activation.py` derive, codes with what the oracle
makes of these results, and rotations with the oracle's, bit for bit.

Imported only where `kernels.USABLE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard.doctor.cases import expected_quantization
from quantshard.formats import Format
from quantshard.kernels.fused import activation as ka
from quantshard.kernels.fused import norm as kn
from quantshard.kernels.fused import rotary as kr
from quantshard.kernels.fused.epilogue import EpilogueRequest, Targets
from quantshard.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

Shape = tuple[int, int]

EPS = 1e-5
U = 2.0**-24
TINY = 2.0**-126
GATED = "swiglu"
"""The activation whose results are quantized."""


def values(shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """Random bfloat16 numbers; a new tensor."""
    return _values(shape, seed).to(device, copy=True)


@lru_cache(maxsize=16)
def _values(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, dtype=torch.float32, generator=generator) * 3).bfloat16()


def close(found: Tensor, exact: Tensor, error: Tensor) -> bool:
    """Within `error` before the one rounding to its dtype, which adds half a gap between neighbours."""
    gap = torch.finfo(found.dtype).eps / 2
    room = error + gap * (exact.abs() + error) + U * exact.abs() + 2 * TINY
    return bool(((found.double() - exact).abs() <= room).all())


def _wanted(high: Tensor, fmt: Format) -> tuple[EpilogueRequest, Callable[[Targets], bool]]:
    """How results are to be quantized, by rows and by columns, and whether a kernel did so."""
    request, is_right, _ = expected_quantization(high, fmt, transposed=fmt.transposable)
    if fmt.transposable:
        return EpilogueRequest(request), lambda targets: is_right(targets[0])
    other, other_is_right, _ = expected_quantization(high.t(), fmt)
    return EpilogueRequest(request, other), lambda targets: is_right(targets[0]) and other_is_right(targets[1])


# -------------------------------------------------------------------------------------------------------- normalization


class NormReference:
    """A normalization of rows in float64, and how far a kernel may be from it: names as in `kernels/fused/norm.py`."""

    def __init__(self, x: Tensor, p: kn.NormParameters, centered: bool) -> None:
        z, self.centered = x.double(), centered
        self.gamma = p.gamma.double()
        self.beta = torch.zeros_like(self.gamma) if p.beta is None else p.beta.double()
        self.depth = kn.depth(x.shape[1])
        mean = z.mean(1, keepdim=True) if centered else torch.zeros_like(z[:, :1])
        self.rstd = ((z - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
        self.unit = (z - mean) * self.rstd
        m = z.abs().mean(1, keepdim=True) * self.rstd * centered
        self.a = (self.depth / 2 + 12) * U + self.depth * U * m
        self.b = (self.a + self.depth * U) * m
        self.unit_error = self.a * self.unit.abs() + self.b

    def result_is_right(self, y: Tensor) -> bool:
        """Of forward."""
        scaled = self.unit * self.gamma
        error = self.unit_error * self.gamma.abs() + 4 * U * (scaled.abs() + self.beta.abs())
        return close(y, scaled + self.beta, error)

    def gradients_are_right(self, dy: Tensor, dx: Tensor, dgamma: Tensor | None, dbeta: Tensor | None) -> bool:
        """Of backward."""
        dy, unit, rows = dy.double(), self.unit, dy.shape[0]
        g = dy * self.gamma
        of_g = g.mean(1, keepdim=True) * self.centered
        exact = (g - unit * (g * unit).mean(1, keepdim=True) - of_g) * self.rstd
        mean_g, mean_g_unit = (t.abs().mean(1, keepdim=True) for t in (g, g * unit))
        error = (3 * self.a + (self.depth + 16) * U) * (g.abs() + unit.abs() * mean_g_unit + mean_g)
        error = self.rstd * (error + self.b * (unit.abs() * mean_g + mean_g_unit))
        sums_error = (dy.abs() * (self.unit_error + rows * U * unit.abs())).sum(0)
        right = close(dx, exact, error) and dgamma is not None and close(dgamma, (dy * unit).sum(0), sums_error)
        if not right or not self.centered:
            return right and dbeta is None
        return dbeta is not None and close(dbeta, dy.sum(0), rows * U * dy.abs().sum(0))


def norm(shape: Shape, device: torch.device, centered: bool) -> bool:
    """RMSNorm, or `centered` LayerNorm, of rows: results and gradients."""
    x, dy = values(shape, device, 0), values(shape, device, 1)
    p = _parameters(shape[1], device, centered)
    statistics, _ = kn.norm_statistics(x, EPS, centered)
    high, exact = torch.empty_like(x), NormReference(x, p, centered)
    kn.normalize_and_quantize(x, statistics, p, EpilogueRequest(high=high))
    return exact.result_is_right(high) and exact.gradients_are_right(dy, *kn.norm_backward(dy, x, statistics, p))


def norm_codes(shape: Shape, device: torch.device, fmt: Format) -> bool:
    """LayerNorm with quantization, by rows and by columns: the oracle's codes of its results."""
    x, p = values(shape, device, 0), _parameters(shape[1], device, True)
    amax, high = torch.zeros((), dtype=torch.float32, device=device), torch.empty_like(x)
    statistics, _ = kn.norm_statistics(x, EPS, True, parameters=p, amax=amax)
    kn.normalize_and_quantize(x, statistics, p, EpilogueRequest(high=high))
    outputs, is_right = _wanted(high, fmt)
    targets = kn.normalize_and_quantize(x, statistics, p, outputs)
    return torch.equal(amax, high.abs().amax().float()) and is_right(targets)


def _parameters(size: int, device: torch.device, centered: bool) -> kn.NormParameters:
    return kn.NormParameters(values((size,), device, 8), values((size,), device, 9) if centered else None, 0.0)


# ---------------------------------------------------------------------------------------------------------- activations


def _exact(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """act(x), act'(x), and the factors of the bounds of `kernels/fused/activation.py`: |z|, and (1 + |z|) s(z)."""
    if kind in ("relu", "srelu"):
        h = x.clamp(min=0)
        value, slope = (h, (x > 0).double()) if kind == "relu" else (h * h, 2 * h)
        return value, slope, torch.zeros_like(x), slope
    one = torch.ones_like(x)
    if kind == "gelu":
        c = 2 * math.sqrt(2 / math.pi)
        z, dz = c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x**2)
    else:
        z, dz = (x, one) if kind == "silu" else (1.702 * x, 1.702 * one)
    s = torch.sigmoid(z)
    weight = (1 + z.abs() * (3 if kind == "gelu" else 1)) * s
    return x * s, s + x * s * torch.sigmoid(-z) * dz, z.abs(), weight


def activation(shape: Shape, device: torch.device, name: str) -> bool:
    """One of `ka.GATED` or `ka.PLAIN`: results and gradients."""
    gate, dh, up = (values(shape, device, seed) for seed in range(3))
    high, d_gate, d_up = (torch.empty_like(gate) for _ in range(3))
    gated = name in ka.GATED
    ka.activate_and_quantize(gate, name, up if gated else None, EpilogueRequest(high=high))
    second = EpilogueRequest(high=d_up) if gated else None
    ka.activate_backward_and_quantize(dh, gate, name, up if gated else None, EpilogueRequest(high=d_gate), second)

    value, slope, z, weight = _exact(gate.double(), ka.GATED.get(name, name))
    factor, x, dh = up.double() if gated else torch.ones_like(value), gate.double(), dh.double()
    near = (5 * z + 12) * U * value.abs() + TINY * x.abs()
    near_slope = (5 * z + 16) * U * weight + TINY * (1 + 3 * z)
    return (
        close(high, value * factor, near * factor.abs())
        and close(d_gate, dh * factor * slope, near_slope * (dh * factor).abs())
        and (not gated or close(d_up, dh * value, near * dh.abs()))
    )


def activation_codes(shape: Shape, device: torch.device, fmt: Format) -> bool:
    """A gated activation with quantization, forward and backward, by rows and by columns."""
    gate, dh, up = (values(shape, device, seed) for seed in range(3))
    highs = [torch.empty_like(gate) for _ in range(3)]
    ka.activate_and_quantize(gate, GATED, up, EpilogueRequest(high=highs[0]))
    ka.activate_backward_and_quantize(
        dh, gate, GATED, up, EpilogueRequest(high=highs[1]), EpilogueRequest(high=highs[2])
    )
    (outputs, *of_gradients), tests = zip(*(_wanted(high, fmt) for high in highs), strict=True)
    found = [
        ka.activate_and_quantize(gate, GATED, up, outputs),
        *ka.activate_backward_and_quantize(dh, gate, GATED, up, *of_gradients),
    ]
    return all(is_right(targets) for targets, is_right in zip(found, tests, strict=True))


def gradient_codes(shape: Shape, device: torch.device, fmt: Format) -> bool:
    """The gradient of an output as it is, with its amax and the sum over its rows."""
    dy, amax = values(shape, device, 0), torch.zeros((), dtype=torch.float32, device=device)
    sums = torch.empty(shape[1], dtype=torch.float32, device=device)
    request, is_right, _ = expected_quantization(dy, fmt, transposed=fmt.transposable)
    target, _ = ka.quantize_gradient(dy, EpilogueRequest(request, amax=amax, sums=sums))
    exact = dy.double()
    near = close(sums, exact.sum(0), shape[0] * U * exact.abs().sum(0))
    return is_right(target) and near and torch.equal(amax, dy.abs().amax().float())


# --------------------------------------------------------------------------------------------------------------- rotary


def rotary(shape: Shape, device: torch.device, interleaved: bool) -> bool:
    """Queries of [rows, 2, heads, features], forward and backward: the oracle's bits."""
    heads, features = (shape[1] // 128, 128) if shape[1] % 128 == 0 else (3, 2 * (shape[1] // 12))
    t, dy = (values((shape[0], 2, heads, features), device, seed) for seed in range(2))
    angles = RotaryPositionEmbedding(features, interleaved=interleaved)(shape[0], device=device)
    with kernel_dispatch.kernels_only_on():
        leaf = t.clone().requires_grad_()
        want = apply_rotary_pos_emb(leaf, angles, interleaved=interleaved)
        (wanted_gradient,) = torch.autograd.grad(want, leaf, dy)
    both = kr.tables(angles)
    forward = kr.rotate(t, *both, interleaved=interleaved)
    backward = kr.rotate(dy, *both, interleaved=interleaved, backward=True)
    return torch.equal(forward, want) and torch.equal(backward, wanted_gradient)
