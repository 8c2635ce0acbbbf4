"""The losses of a language model, from logits of any dtype, without a float32 copy of all of them.

Logits are the largest tensor of a small model, 3.1 GiB in bfloat16 of 32,768 tokens and 50,304 entries. With
`torch.nn.functional.cross_entropy`, of all of them in float32, the peak of a step of GPT-2 small is 27.3 GiB, and here
15.2 (by `quantshard.plan`): they are kept as they are, and each pass takes some rows at a time to float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

ELEMENTS_AT_ONCE: Final = 1 << 25
"""Logits that are float32 at a time: 128 MiB, twice."""


class TokenLosses(NamedTuple):
    """Means over tokens, float32 scalars: the cross-entropy in nats, and the z-loss."""

    cross_entropy: Tensor
    z_loss: Tensor


def token_losses(logits: Tensor, targets: Tensor) -> TokenLosses:
    """Of logits [..., vocabulary], floating, and targets int64 [...], tokens all of them (none is left out): the mean
    of -log p of the targets, and that of log(Z)^2, Z being the denominator of the softmax (Chowdhery et al., 2022,
    arXiv:2204.02311), which keeps logits from drifting away.

    Sums are taken in float32; the gradient is rounded to the logits' dtype once. log(Z) is the target's logit less
    its log p, so off by a rounding of that logit; the largest logit stands in where log p is -inf. The loss is then
    infinite and the gradient, as that of `torch.nn.functional.cross_entropy`, is finite.
    """
    return TokenLosses(*_TokenLosses.apply(logits.flatten(0, -2), targets.flatten()))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        chosen = targets[:, None]
        parts = [_of_rows(logits[rows], chosen[rows]) for rows in _at_once(logits)]
        log_p, log_z = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits, chosen, log_p, log_z)
        return -log_p.mean(), log_z.square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, chosen, log_p, log_z = ctx.saved_tensors
        of_entropy, of_z = (grad / len(logits) for grad in grads)
        factor = of_entropy + 2 * of_z * log_z  # of each row's p
        found = torch.empty_like(logits)
        for rows in _at_once(logits):
            torch.mul((logits[rows] - log_z[rows]).exp_(), factor[rows], out=found[rows])
        return found.scatter_(1, chosen, (log_p.exp() * factor - of_entropy).to(found.dtype)), None


def _of_rows(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """log p of the targets, and log(Z), [rows, 1] both."""
    found = logits.log_softmax(-1, dtype=torch.float32)
    log_p = found.gather(1, chosen)
    known = torch.where(log_p.isneginf(), logits.argmax(-1, keepdim=True), chosen)
    return log_p, logits.gather(1, known).float() - found.gather(1, known)


def _at_once(logits: Tensor) -> Iterator[slice]:
    count = max(1, ELEMENTS_AT_ONCE // max(1, logits.shape[1]))
    return (slice(first, first + count) for first in range(0, len(logits), count))
