"""Cross-entropy of logits and its gradient in float32, in groups of rows to avoid a float32 copy of all logits."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

ELEMENTS_AT_ONCE: Final = 1 << 25
"""Number of logits that are converted to float32 at once: 128 MiB per temporary."""


def cross_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p of the int64 target of each row of [N, V] and log(Z) of its softmax, both float32 [N].
    Both are NaN if a logit is +inf or all logits are -inf (in the latter case a kernel returns log(Z) = -inf)."""
    parts = [_of_rows(logits[rows], targets[rows]) for rows in _at_once(logits)]
    losses, log_z = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(log_z)


def logits_gradient(
    logits: Tensor, targets: Tensor, log_z: Tensor, factors: Tensor, of_entropy: Tensor, out: Tensor | None = None
) -> Tensor:
    """factors[n] * p[n, v] - of_entropy[n] * (v == targets[n]), p: the softmax; rounded once to the logits' dtype.
    `log_z`: the second result of `cross_entropies`. `out`: contiguous output; the logits themselves are allowed."""
    grad, target_columns, columns = torch.empty_like(logits) if out is None else out, targets[:, None], log_z[:, None]
    p = (logits.gather(1, target_columns).float() - columns).exp_()
    for rows in _at_once(logits):
        torch.mul((logits[rows] - columns[rows]).exp_(), factors[rows, None], out=grad[rows])
    return grad.scatter_(1, target_columns, (p * factors[:, None] - of_entropy[:, None]).to(grad.dtype))


def _of_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    top = logits.amax(-1, keepdim=True).float()
    log_sum = (logits - top).exp_().sum(-1).log()
    # Subtract before adding the logarithm: next to a large logit the sum would be lost to rounding.
    below = (top - logits.gather(1, targets[:, None]))[:, 0]
    return below + log_sum, top[:, 0] + log_sum


def _at_once(logits: Tensor) -> Iterator[slice]:
    count = max(1, ELEMENTS_AT_ONCE // max(1, logits.shape[1]))
    return (slice(first, first + count) for first in range(0, max(1, len(logits)), count))
