"""The cross-entropy of logits and its gradient, in float32, of some rows at a time: no float32 copy of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

ELEMENTS_AT_ONCE: Final = 1 << 25
"""Logits that are float32 at a time: 128 MiB, some times."""


def cross_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of the target of each row of logits [N, V], any floating dtype, targets int64 [N]; and log(Z) of its
    softmax: float32 [N]. Both are NaN if a logit is +inf, or all are -inf (of which a kernel's log(Z) is -inf)."""
    parts = [_of_rows(logits[rows], targets[rows]) for rows in _at_once(logits)]
    losses, log_z = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(log_z)


def logits_gradient(
    logits: Tensor, targets: Tensor, log_z: Tensor, factors: Tensor, of_entropy: Tensor, out: Tensor | None = None
) -> Tensor:
    """factors[n] * p[n, v] - of_entropy * (v == targets[n]), where p is the softmax, rounded to the logits' dtype once.

    Args:
        logits: [N, V], floating.
        targets: int64 [N].
        log_z: as `cross_entropies` gave them.
        factors: float32 [N].
        of_entropy: float32 scalar.
        out: where it goes, contiguous; may be the logits themselves.
    """
    found, chosen, columns = torch.empty_like(logits) if out is None else out, targets[:, None], log_z[:, None]
    p = (logits.gather(1, chosen).float() - columns).exp_()
    for rows in _at_once(logits):
        torch.mul((logits[rows] - columns[rows]).exp_(), factors[rows, None], out=found[rows])
    return found.scatter_(1, chosen, (p * factors[:, None] - of_entropy).to(found.dtype))


def _of_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    top = logits.amax(-1, keepdim=True).float()
    log_sum = (logits - top).exp_().sum(-1).log()
    below = (top - logits.gather(1, targets[:, None]))[:, 0]  # apart from log(Z), in which a large logit hides the sum
    return below + log_sum, top[:, 0] + log_sum


def _at_once(logits: Tensor) -> Iterator[slice]:
    count = max(1, ELEMENTS_AT_ONCE // max(1, logits.shape[1]))
    return (slice(first, first + count) for first in range(0, max(1, len(logits)), count))
