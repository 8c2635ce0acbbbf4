"""The mathematics of Muon, once: pure functions of gradient, momentum and master, and of one whole matrix.

Only `orthogonalized` sees a whole matrix; all else is element by element, so it can be done on a part of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard.numerics.adam import float32
from quantshard.numerics.states import StateSpec

MOMENTUM_BUFFER = "momentum_buffer"
STATES = (StateSpec(MOMENTUM_BUFFER),)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the iteration, by Jordan et al. (2024): chosen so that small singular values grow the fastest."""

EPS = 1e-7

RATE_FACTORS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""By `adjust_lr_fn`, what a matrix's shape makes of the learning rate: as Jordan et al. have it; and by Liu et al.
(2025, arXiv:2502.16982), such that the root mean square of an update is that of AdamW's, 0.2 to 0.4 of a rate."""


@dataclass(frozen=True)
class MuonSettings:
    """The numbers of one step, as `torch.optim.Muon` names them. `lr` may be a float64 scalar tensor, and then no value
    is read back from its device."""

    lr: float | Tensor
    momentum: float
    nesterov: bool
    weight_decay: float
    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    eps: float
    adjust_lr_fn: str

    @property
    def kept(self) -> float | Tensor:
        """What weight decay leaves of a master, as a factor."""
        return 1 - self.lr * self.weight_decay

    def adjusted_lr(self, shape: tuple[int, ...]) -> float | Tensor:
        """The learning rate of a matrix of this (global) shape [rows, columns]."""
        return self.lr * RATE_FACTORS[self.adjust_lr_fn](*shape)


class MuonMomentum(NamedTuple):
    """What one step makes of a gradient: float32, of its shape. `update` is what is orthogonalized."""

    buffer: Tensor
    update: Tensor


def momentum(grad: Tensor, buffer: Tensor, settings: MuonSettings) -> MuonMomentum:
    """The momentum after a gradient, float32, element by element; the arguments are not changed.

        m = m + (1 - mu) (g - m)        u = g + mu (m - g) with Nesterov's momentum, else m

    Products and sums are rounded one by one, so every shard has the same bits. `torch.lerp`, by which
    `torch.optim.Muon` does it, contracts them where it is vectorized, and not in the elements left over.
    """
    grad = grad.float()
    buffer = _lerp(buffer, grad, 1 - settings.momentum)
    return MuonMomentum(buffer, _lerp(grad, buffer, settings.momentum) if settings.nesterov else buffer)


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Between two tensors, in whichever form of PyTorch's lerp has the smaller error."""
    if float32(weight) < 0.5:  # as kernels have it
        return start + weight * (end - start)
    return end - (1 - weight) * (end - start)


def orthogonalized(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """The nearest semi-orthogonal matrix U V^T of a bfloat16 matrix U S V^T, about: bfloat16 [rows, columns].

    `ns_steps` of the iteration of Newton and Schulz, X <- a X + (b A + c A^2) X with A = X X^T, from X / |X|, of the
    matrix or, if it has more rows than columns, its transpose. Singular values end near 1, between about 0.7 and 1.2.
    The operations are those of `torch.optim.Muon`, but for the norm, whose squares are summed in float64: that of a
    large gradient does not overflow, and hardly depends on the order of the sum.

    The bits of matrix products depend on their shapes, so it is called with whole matrices on all meshes. A matrix of
    zeros stays one.
    """
    a, b, c = settings.ns_coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    norm = torch.linalg.vector_norm(x, dtype=torch.float64).to(torch.bfloat16)
    x = x / norm.clamp(min=settings.eps)
    for _ in range(settings.ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def muon(master: Tensor, direction: Tensor, shape: tuple[int, ...], settings: MuonSettings) -> Tensor:
    """The new values of a master: w (1 - lr wd) - lr(shape) u, float32, element by element.

    `direction`: the elements that `orthogonalized` has where those of `master` are. `shape`: of the whole matrix.
    """
    return master * _rounded(settings.kept) - _rounded(settings.adjusted_lr(shape)) * direction.float()


def _rounded(number: float | Tensor) -> float | Tensor:
    """As it multiplies a float32 tensor."""
    return number.float() if isinstance(number, Tensor) else number
