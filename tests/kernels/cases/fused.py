"""Registry rows for `kernels/fused/`: normalizations, activations, rotary embeddings, gradients and their sums.

Normalizations and activations run in both directions, also with quantized results. Results are compared with float64
within the bounds derived in `kernels/fused/norm.py` and `kernels/fused/activation.py`. Codes are compared with the
oracle's codes of these results; rotations and sums have the oracle's bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, numerics
from quantshard.formats import ALL, Format, Orientation
from quantshard.modules.layernorm_mlp import ACTIVATIONS
from quantshard.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from quantshard.numerics import Pair
from tests.kernels.cases.base import TINY, TOO_FAR, Bound, Expected, KernelCase, KernelRow, U, bytes_of, random_like
from tests.kernels.cases.quantize import QUANTIZED, is_decoded, quantization, results_of, timed_of

if kernels.USABLE:
    from quantshard.kernels.fused import activation as ka, cross_entropy as ke, norm as kn, rotary as kr, rounded_sum
    from quantshard.kernels.fused.epilogue import KernelOutputs, Targets
    from quantshard.kernels.quantize import amax
    from quantshard.kernels.quantize.targets import AmaxRequest, BlockAmaxes

EPS = 1e-5
GATED = "swiglu"
"""Activation for the cases with quantized results."""
SUMMED = 3
"""Number of weights that read one input: query, key and value."""


def _wanted(high: Tensor, fmt: Format, decoded: int = 0) -> tuple[KernelOutputs, list[Expected]]:
    """Request to quantize results by rows and by columns, and the oracle's outputs.

    `decoded`: 1 for values instead of the rowwise codes, 2 for values of both.
    """
    if fmt.transposable:
        request, expected = quantization(high, fmt, transposed=True)
        return KernelOutputs(request), [*expected, *results_of(None)]
    request, expected = quantization(high, fmt, decoded=decoded > 0)
    columnwise_request, columnwise_expected = quantization(high.t(), fmt, decoded=decoded > 1)
    return KernelOutputs(request, columnwise_request), [*expected, *columnwise_expected]


def _flat(targets: Targets) -> list[Tensor | None]:
    return [part for output in targets for part in results_of(output)]


def _bytes(expected: list[Expected]) -> int:
    return bytes_of(*(part for part in expected if isinstance(part, Tensor)))


# -------------------------------------------------------------------------------------------------------- normalization


class NormReference:
    """A normalization of rows in float64, with error bounds; names as in `kernels/fused/norm.py`."""

    def __init__(self, x: Tensor, p: kn.NormParameters, centered: bool) -> None:
        z, self.centered = x.double(), centered
        self.gamma = p.gamma.double() + p.offset
        self.beta = torch.zeros_like(self.gamma) if p.beta is None else p.beta.double()
        self.depth = 32 + 10 + -(x.shape[1] // -kn.LONGEST_CENTERED)
        mean = z.mean(1, keepdim=True) if centered else torch.zeros_like(z[:, :1])
        self.rstd = ((z - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
        self.unit = (z - mean) * self.rstd
        m = z.abs().mean(1, keepdim=True) * self.rstd * centered
        self.rstd_error = (self.depth / 2 + 8) * U + self.depth * U * m
        self.a = self.rstd_error + 4 * U
        self.b = (self.a + self.depth * U) * m
        self.unit_error = self.a * self.unit.abs() + self.b

    def result(self) -> Bound:
        """Bound of forward."""
        scaled = self.unit * self.gamma
        error = self.unit_error * self.gamma.abs() + 4 * U * (scaled.abs() + self.beta.abs())
        return Bound(scaled + self.beta, error)

    def statistics(self) -> Bound:
        """Bound of 1/rms of the rows, float64 [rows]."""
        return Bound(self.rstd[:, 0], (self.rstd_error * self.rstd)[:, 0])

    def gradients(self, dy: Tensor) -> list[Bound | None]:
        """Bounds of backward: dx, dgamma and, for LayerNorm, dbeta."""
        dy, unit, rows = dy.double(), self.unit, dy.shape[0]
        g = dy * self.gamma
        centered_mean = g.mean(1, keepdim=True) * self.centered
        exact = (g - unit * (g * unit).mean(1, keepdim=True) - centered_mean) * self.rstd
        mean_g, mean_g_unit = (t.abs().mean(1, keepdim=True) for t in (g, g * unit))
        error = (3 * self.a + (self.depth + 16) * U) * (g.abs() + unit.abs() * mean_g_unit + mean_g)
        error = self.rstd * (error + self.b * (unit.abs() * mean_g + mean_g_unit))
        sums_error = (dy.abs() * (self.unit_error + rows * U * unit.abs())).sum(0)
        bounds: list[Bound | None] = [Bound(exact, error), Bound((dy * unit).sum(0), sums_error)]
        return [*bounds, Bound(dy.sum(0), rows * U * dy.abs().sum(0)) if self.centered else None]


def norm_parameters(x: Tensor, centered: bool, offset: float = 0.0) -> kn.NormParameters:
    """Random parameters for rows as long as x's, in x's dtype."""
    gamma, beta = (random_like(x, seed, x.shape[1:]) for seed in (8, 9))
    return kn.NormParameters(gamma, beta if centered else None, offset)


def norm_case(x: Tensor, centered: bool, longer: bool = False) -> KernelCase:
    """Statistics, results and gradients of RMSNorm or (`centered`) LayerNorm over rows.

    `longer`: a few rows that exceed what backward holds in registers.
    """
    if longer:
        x = x.new_empty(2, kn.LONGEST + x.shape[1])
    x, dy = random_like(x, 0), random_like(x, 1)
    p = norm_parameters(x, centered)

    def launch() -> list[Tensor | None]:
        statistics, _ = kn.norm_statistics(x, EPS, centered)
        high = torch.empty_like(x)
        kn.normalize_and_quantize(x, statistics, p, KernelOutputs(high=high))
        return [statistics.rstd, high, *kn.norm_backward(dy, x, statistics, p)]

    def oracle() -> list[Expected]:
        exact = NormReference(x, p, centered)
        return [exact.statistics(), exact.result(), *exact.gradients(dy)]

    return KernelCase(launch, oracle, 6 * bytes_of(x))  # x three times, dy, the result and dx


def norm_codes_case(x: Tensor, fmt: Format, decoded: bool = False) -> KernelCase:
    """LayerNorm quantized by rows and by columns: the amax, or amaxes of rows and columns, and codes.

    The expected codes are the oracle's codes of the kernel's own results. `decoded`: values instead of the rowwise
    codes.
    """
    x, p = random_like(x, 0), norm_parameters(x, True)
    high = torch.empty_like(x)
    kn.normalize_and_quantize(x, kn.norm_statistics(x, EPS, True)[0], p, KernelOutputs(high=high))
    outputs, expected = _wanted(high, fmt, int(decoded))
    by_rows = fmt.copies[Orientation.ROWWISE].block == (1, ALL)

    def launch() -> list[Tensor | None]:
        amax, rows, cols = (torch.zeros(size, dtype=torch.float32, device=x.device) for size in ((), *x.shape))
        row_and_col_amaxes = (rows, cols) if by_rows else (None, None)
        amax_out = None if by_rows else amax
        statistics, _ = kn.norm_statistics(x, EPS, True, parameters=p, amax=amax_out, of_rows=row_and_col_amaxes)
        return [amax_out, *row_and_col_amaxes, *_flat(kn.normalize_and_quantize(x, statistics, p, outputs))]

    def oracle() -> list[Expected]:
        magnitudes = high.abs().float()
        if by_rows:
            return [None, magnitudes.amax(1), magnitudes.amax(0), *expected]
        return [magnitudes.amax(), None, None, *expected]

    return KernelCase(launch, oracle, 2 * bytes_of(x) + _bytes(expected))


# ---------------------------------------------------------------------------------------------------------- activations


class ActivationReference:
    """An activation in float64, with error bounds; names as in `kernels/fused/activation.py`."""

    def __init__(self, gate: Tensor, name: str, up: Tensor | None) -> None:
        kind, self.x = ka.GATED.get(name, name), gate.double()
        self.value, self.slope, self.z, self.weight = _exact(self.x, kind)
        self.factor = None if up is None else up.double()

    def _near(self, factor: Tensor) -> Bound:
        error = (5 * self.z + 12) * U * self.value.abs() + TINY * self.x.abs()
        return Bound(self.value * factor, error * factor.abs())

    def _up(self) -> Tensor:
        return torch.ones_like(self.value) if self.factor is None else self.factor

    def result(self) -> Bound:
        """Bound of forward."""
        return self._near(self._up())

    def gradients(self, dh: Tensor) -> list[Bound | None]:
        """Bounds of backward: gradient of the gate and, for a gated activation, of the other factor."""
        d = dh.double() * self._up()
        error = (5 * self.z + 16) * U * self.weight + TINY * (1 + 3 * self.z)
        return [Bound(d * self.slope, error * d.abs()), None if self.factor is None else self._near(dh.double())]


def _exact(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """act(x), act'(x), and the factors |z| and (1 + |z|) s(z) of the bounds in `kernels/fused/activation.py`."""
    if kind in ("relu", "srelu"):
        h = x.clamp(min=0)
        value, slope = (h, (x > 0).double()) if kind == "relu" else (h * h, 2 * h)
        return value, slope, torch.zeros_like(x), slope
    if kind == "sigmoid":
        s = torch.sigmoid(x)
        return s, s * torch.sigmoid(-x), x.abs(), s
    ones = torch.ones_like(x)
    if kind == "gelu":
        c = 2 * math.sqrt(2 / math.pi)
        z, dz = c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x**2)
    else:
        z, dz = (x, ones) if kind == "silu" else (1.702 * x, 1.702 * ones)
    s = torch.sigmoid(z)
    weight = (1 + z.abs() * (3 if kind == "gelu" else 1)) * s
    return x * s, s + x * s * torch.sigmoid(-z) * dz, z.abs(), weight


def activation_case(x: Tensor, name: str) -> KernelCase:
    """Results and gradients of one of `ACTIVATIONS`."""
    gate, dh, up = (random_like(x, seed) for seed in range(3))
    gated = name in ka.GATED

    def launch() -> list[Tensor | None]:
        high, d_gate, d_up = (torch.empty_like(x) for _ in range(3))
        ka.activate_and_quantize(gate, name, up if gated else None, KernelOutputs(high=high))
        second = KernelOutputs(high=d_up) if gated else None
        ka.activate_backward_and_quantize(dh, gate, name, up if gated else None, KernelOutputs(high=d_gate), second)
        return [high, d_gate, d_up if gated else None]

    def oracle() -> list[Expected]:
        exact = ActivationReference(gate, name, up if gated else None)
        return [exact.result(), *exact.gradients(dh)]

    return KernelCase(launch, oracle, (8 if gated else 5) * bytes_of(x))


def activation_codes_case(x: Tensor, fmt: Format, decoded: bool = False) -> KernelCase:
    """A gated activation quantized by rows and by columns, forward and backward.

    `decoded`: values instead of codes for operands that are not saved: the rowwise one in forward, both in backward.
    """
    gate, dh, up = (random_like(x, seed) for seed in range(3))
    highs = [torch.empty_like(x) for _ in range(3)]
    ka.activate_and_quantize(gate, GATED, up, KernelOutputs(high=highs[0]))
    ka.activate_backward_and_quantize(dh, gate, GATED, up, *(KernelOutputs(high=high) for high in highs[1:]))
    (outputs, *gradient_outputs), expected = zip(
        *(_wanted(high, fmt, decoded * num_transient) for high, num_transient in zip(highs, (1, 2, 2), strict=True)),
        strict=True,
    )

    def launch() -> list[Tensor | None]:
        forward = ka.activate_and_quantize(gate, GATED, up, outputs)
        backward = ka.activate_backward_and_quantize(dh, gate, GATED, up, *gradient_outputs)
        return [part for targets in (forward, *backward) for part in _flat(targets)]

    all_expected = [part for parts in expected for part in parts]
    return KernelCase(launch, lambda: all_expected, 5 * bytes_of(x) + _bytes(all_expected))


def measured_case(x: Tensor, block_shape: Pair, hadamard: bool = False) -> KernelCase:
    """High-precision results of a normalization and an activation (forward and backward), with amaxes of their blocks.

    `hadamard`: only amaxes by columns, of transformed values.
    """
    rows, dh, up = (random_like(x, seed) for seed in range(3))
    p, statistics = norm_parameters(rows, True), kn.norm_statistics(rows, EPS, True)[0]
    rowwise, columnwise = None if hadamard else BlockAmaxes(block_shape), BlockAmaxes(block_shape, hadamard)
    plan = amax.plan_amaxes((x.shape[0], x.shape[1]), rowwise, columnwise)
    sizes = [0 if spans is None else math.prod(spans) for spans in (plan.spans, plan.other_spans)]

    def launch() -> list[Tensor | None]:
        highs = [torch.empty_like(x) for _ in range(4)]
        grids = plan.grids(x, len(highs))
        norm_outputs, result_outputs, *gradient_outputs = (
            KernelOutputs(high=high, measured=AmaxRequest(rowwise, columnwise, grid))
            for high, grid in zip(highs, grids, strict=True)
        )
        kn.normalize_and_quantize(rows, statistics, p, norm_outputs)
        ka.activate_and_quantize(rows, GATED, up, result_outputs)
        ka.activate_backward_and_quantize(dh, rows, GATED, up, *gradient_outputs)
        return [
            *highs,
            *(
                part if part is None else part.view(-1)[:size]
                for grid in grids
                for part, size in zip(grid, sizes, strict=True)
            ),
        ]

    def oracle() -> list[Expected]:
        highs = launch()[:4]
        expected: list[Expected] = [*highs]
        for high in highs:
            assert high is not None
            columns = numerics.hadamard16(high.t()) if hadamard else high.t()
            expected.append(None if hadamard else numerics.block_amax(high, block_shape).view(-1))
            expected.append(numerics.block_amax(columns, block_shape).view(-1))
        return expected

    return KernelCase(launch, oracle, 9 * bytes_of(x))


def gradient_codes_case(x: Tensor, fmt: Format, decoded: bool = False) -> KernelCase:
    """A quantized gradient of an output, its amax, and the sum over its rows.

    `decoded`: values instead of codes, in both orientations.
    """
    dy = random_like(x, 0)
    request, expected = quantization(dy, fmt, transposed=fmt.transposable)
    outputs = KernelOutputs(request)
    if decoded:
        outputs, expected = _wanted(dy, fmt, 2)

    def launch() -> list[Tensor | None]:
        amax, sums = (torch.zeros(shape, dtype=torch.float32, device=x.device) for shape in ((), x.shape[1]))
        results = _flat(*ka.quantize_gradients([dy], [outputs._replace(amax=amax, sums=sums)]))
        return [amax, sums, *results[: len(expected)]]

    def oracle() -> list[Expected]:
        exact = dy.double()
        sums = Bound(exact.sum(0), x.shape[0] * U * exact.abs().sum(0))
        return [dy.abs().amax().float(), sums, *expected]

    return KernelCase(launch, oracle, bytes_of(x) + _bytes(expected))


# ---------------------------------------------------------------------------------------------------------------- bits


def rotary_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [S, rotated], of angles [S, 1, 1, rotated] from `RotaryPositionEmbedding`."""
    flat = angles.reshape(angles.shape[0], angles.shape[-1]).float()
    return flat.cos(), flat.sin()


def rotary_case(x: Tensor, interleaved: bool) -> KernelCase:
    """Rotation of [rows, 2, heads, features] queries, forward and backward; about twice as many features as x."""
    heads, features = (x.shape[1] // 128, 128) if x.shape[1] % 128 == 0 else (3, 2 * max(x.shape[1] // 12, 1))
    t, dy = (random_like(x, seed, (x.shape[0], 2, heads, features)) for seed in range(2))
    angles = RotaryPositionEmbedding(features, interleaved=interleaved)(x.shape[0], device=x.device)
    cos_sin = rotary_tables(angles)

    def oracle() -> list[Expected]:
        with kernel_dispatch.kernels_only_on():
            leaf = t.clone().requires_grad_()
            rotated = apply_rotary_pos_emb(leaf, angles, interleaved=interleaved)
            return [rotated.detach(), *torch.autograd.grad(rotated, leaf, dy)]

    return KernelCase(
        lambda: [
            kr.rotate(t, *cos_sin, interleaved=interleaved),
            kr.rotate(dy, *cos_sin, interleaved=interleaved, backward=True),
        ],
        oracle,
        4 * bytes_of(t),
    )


def rounded_sum_case(x: Tensor) -> KernelCase:
    """Sum of float32 gradients of an input from several weights, rounded to the dtype of x."""
    parts = [x.float() * 0.1**number for number in range(SUMMED)]

    def oracle() -> list[Expected]:
        with kernel_dispatch.kernels_only_on():
            return [kernel_dispatch.rounded_sum([part.clone() for part in parts], x.dtype)]

    return KernelCase(lambda: [rounded_sum.rounded_sum(parts, x.dtype)], oracle, bytes_of(*parts, x))


def cross_entropy_case(x: Tensor) -> KernelCase:
    """-log p of targets, log(Z) of the softmax, and the gradient of logits with a factor for each row.

    Results are compared with float64.
    """
    logits = random_like(x, 0) * 4
    rows, cols = logits.shape
    targets = torch.arange(rows, device=x.device) * 7 % cols
    factors, entropy_factors = random_like(x, 1, (rows,)).float(), random_like(x, 2, (rows,)).float()
    exact = logits.double()
    log_z32 = exact.logsumexp(-1).float()

    def launch() -> list[Tensor | None]:
        return [
            *ke.cross_entropies(logits, targets),
            ke.logits_gradient(logits, targets, log_z32, factors, entropy_factors),
        ]

    def oracle() -> list[Expected]:
        log_z, target_logits = exact.logsumexp(-1), exact.gather(1, targets[:, None])[:, 0]
        spread, steps = exact.amax(1) - exact.amin(1), -(cols // -ke.COLS)
        error = ((steps + 2) * (spread + 4) + math.log2(ke.COLS) + 4) * U
        bounds = [Bound(value, error + 2 * U * value.abs()) for value in (log_z - target_logits, log_z)]
        z, factor = exact - log_z32.double()[:, None], factors.double()[:, None]
        gradient = z.exp() * factor - entropy_factors.double()[:, None] * (
            torch.arange(cols, device=x.device) == targets[:, None]
        )
        error_of_gradient = (2 * z.abs() + 6) * U * factor.abs() * z.exp()
        return [*bounds, Bound(gradient, error_of_gradient + U * gradient.abs() + TINY * factor.abs())]

    return KernelCase(launch, oracle, 3 * bytes_of(logits))


# ---------------------------------------------------------------------------------------------------------------- rows


def _of_formats(words: str) -> dict[str, dict[str, Any]]:
    """Cases for GEMM operand formats of one copy with blocks along rows or square blocks."""
    formats = (
        f for f in QUANTIZED if len(f.copies) == 1 and (f.copies[Orientation.ROWWISE].block[0] == 1 or f.transposable)
    )
    cases: dict[str, dict[str, Any]] = {f"{words} + quantize {fmt.name}": {"fmt": fmt} for fmt in formats}
    decoded = [name for name, options in cases.items() if is_decoded(options["fmt"])]
    return cases | {f"{name}, decoded": {**cases[name], "decoded": True} for name in decoded}


NORMS = {
    "RMSNorm, forward and backward": {"centered": False},
    "LayerNorm, forward and backward": {"centered": True},
    "LayerNorm of long rows, forward and backward": {"centered": True, "longer": True},
}
NORM_CODES, ACTIVATION_CODES, GRADIENT_CODES = map(_of_formats, ("LayerNorm", "activation", "gradient"))
MEASURED: dict[str, dict[str, Any]] = {
    "values and amaxes of rows and columns": {"block_shape": (1, ALL)},
    "values and amaxes of columns, transformed": {"block_shape": (ALL, ALL), "hadamard": True},
}
FUNCTIONS = {f"{name}, forward and backward": {"name": name} for name in ACTIVATIONS}
ROTATIONS = {
    f"rotary embedding{words}, forward and backward": {"interleaved": bool(words)} for words in ("", ", interleaved")
}
SUMS: dict[str, dict[str, Any]] = {"sum of gradients": {}}
CROSS_ENTROPY: dict[str, dict[str, Any]] = {"cross-entropy and its gradient": {}}

ROWS = (
    KernelRow(
        {"statistics_kernel", "normalize_kernel", "backward_kernel", "backward_pieces_kernel"},
        norm_case, NORMS, list(NORMS)[:2], (35, 290), TOO_FAR,
    ),
    KernelRow({"statistics_kernel", "normalize_kernel"}, norm_codes_case, NORM_CODES, timed_of(NORM_CODES), (35, 290)),
    KernelRow(
        {"activate_kernel", "activate_backward_kernel"}, activation_case, FUNCTIONS, list(FUNCTIONS), (35, 290), TOO_FAR
    ),
    KernelRow(
        {"activate_kernel", "activate_backward_kernel"},
        activation_codes_case, ACTIVATION_CODES, timed_of(ACTIVATION_CODES), (35, 290),
    ),
    KernelRow(
        {"normalize_kernel", "activate_kernel", "activate_backward_kernel"},
        measured_case, MEASURED, list(MEASURED), (35, 290),
    ),
    KernelRow({"deliver_kernel"}, gradient_codes_case, GRADIENT_CODES, timed_of(GRADIENT_CODES), (35, 290)),
    KernelRow({"rotate_kernel"}, rotary_case, ROTATIONS, list(ROTATIONS), (3, 40)),
    KernelRow(
        {"cross_entropy_kernel", "logits_gradient_kernel"},
        cross_entropy_case, CROSS_ENTROPY, list(CROSS_ENTROPY), (3, 4100), TOO_FAR,
    ),
    KernelRow({"sum_kernel"}, rounded_sum_case, SUMS, list(SUMS), (33, 129)),
)  # fmt: skip
