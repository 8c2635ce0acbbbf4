"""Muon's formula: pure functions of gradient, momentum and master, and of one whole matrix.

Only `orthogonalized` needs a whole matrix. All other functions are elementwise, so they also work on a shard.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantshard.numerics.adam import float32
from quantshard.numerics.states import StateSpec

MOMENTUM_BUFFER = "momentum_buffer"
STATES = (StateSpec(MOMENTUM_BUFFER),)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the iteration by Jordan et al. (2024), which makes small singular values grow the fastest."""

EPS = 1e-7

RATE_FACTORS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factor of the learning rate by the shape of a matrix, for each `adjust_lr_fn`.

    original: by Jordan et al. (2024).
    match_rms_adamw: by Liu et al. (2025, arXiv:2502.16982), with AdamW's root mean square of an update.
"""


@dataclass(frozen=True)
class MuonSettings:
    """The numbers of one step, named as in `torch.optim.Muon`. A float64 scalar tensor `lr` stays on its device."""

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
        """Factor that weight decay applies to a master."""
        return 1 - self.lr * self.weight_decay

    def adjusted_lr(self, shape: tuple[int, ...]) -> float | Tensor:
        """Return the learning rate of a matrix of this global shape [rows, columns]."""
        return self.lr * RATE_FACTORS[self.adjust_lr_fn](*shape)


def momentum(grad: Tensor, buffer: Tensor, settings: MuonSettings) -> tuple[Tensor, Tensor]:
    """Compute the momentum m after a gradient, and the matrix u to orthogonalize, in float32 and out of place.

        m = m + (1 - mu) (g - m)        u = g + mu (m - g) with Nesterov's momentum, else m

    Products and sums are rounded separately, which `torch.lerp` does not do in vectorized loops.
    """
    grad = grad.float()
    buffer = _lerp(buffer, grad, 1 - settings.momentum)
    return buffer, _lerp(grad, buffer, settings.momentum) if settings.nesterov else buffer


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Interpolate between two tensors, in the form of PyTorch's lerp that has the smaller error."""
    if float32(weight) < 0.5:  # as kernels have it
        return start + weight * (end - start)
    return end - (1 - weight) * (end - start)


def orthogonalized(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix U V^T of a bfloat16 matrix U S V^T: bfloat16 [rows, columns].

    Runs `ns_steps` Newton-Schulz iterations, X <- a X + (b A + c A^2) X with A = X X^T, from X / |X|, on the matrix or,
    if it has more rows than columns, on its transpose. Singular values end between about 0.7 and 1.2. The operations
    are those in `torch.optim.Muon`, except that the norm sums squares in float64, so that it does not overflow.
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
    """Return the new values of a master, w (1 - lr wd) - lr(shape) u: float32, elementwise.

    Args:
        direction: the elements of `orthogonalized` at the positions of `master`.
        shape: shape of the whole matrix.
    """
    return master * _rounded(settings.kept) - _rounded(settings.adjusted_lr(shape)) * direction.float()


def _rounded(number: float | Tensor) -> float | Tensor:
    """Convert a scalar tensor to float32, the precision in which it multiplies a float32 tensor."""
    return number.float() if isinstance(number, Tensor) else number
