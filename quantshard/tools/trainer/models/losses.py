"""The losses of a language model, from logits of any dtype, without a float32 copy of all of them.

Logits are the largest tensor of a small model, 3.1 GiB in bfloat16 of 32,768 tokens and 50,304 entries. With all of
them in float32 too, the peak of a step of GPT-2 small in BF16 was 35.4 GiB on an H200, and here it is 17.0: they are
kept as they are (`numerics/cross_entropy.py`, `kernels/fused/cross_entropy.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch


class TokenLosses(NamedTuple):
    """Means over tokens, float32 scalars: the cross-entropy in nats, and the z-loss."""

    cross_entropy: Tensor
    z_loss: Tensor


def token_losses(logits: Tensor, targets: Tensor, overwrites: bool = False) -> TokenLosses:
    """Of logits [..., vocabulary], floating, and targets int64 [...], tokens all of them (none is left out): the mean
    of -log p of the targets, and that of log(Z)^2, Z being the denominator of the softmax (Chowdhery et al., 2022,
    arXiv:2204.02311), which keeps logits from drifting away.

    Sums are taken in float32; the gradient is rounded to the logits' dtype once. Of a target whose logit is -inf the
    loss is infinite and the gradient, as that of `torch.nn.functional.cross_entropy`, is finite.

    `overwrites`: backward writes the gradient over the logits, if they are contiguous, which saves the memory of one of
    both. Nothing but this loss may need their values then; what saved them for its own backward, or a second backward,
    raises PyTorch's error of a tensor that was modified in place.
    """
    return TokenLosses(*_TokenLosses.apply(logits.flatten(0, -2), targets.flatten(), overwrites))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, overwrites: bool) -> tuple[Tensor, Tensor]:
        losses, log_z = kernel_dispatch.cross_entropies(logits, targets)
        ctx.save_for_backward(logits, targets, log_z)
        ctx.overwrites = overwrites and logits.is_contiguous()
        return losses.mean(), log_z.square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_z = ctx.saved_tensors
        of_entropy, of_z = (grad / len(logits) for grad in grads)
        factors = of_entropy + 2 * of_z * log_z  # of each row's p
        out = logits.detach() if ctx.overwrites else None
        found = kernel_dispatch.logits_gradient(logits, targets, log_z, factors, of_entropy, out)
        if out is not None:  # kernels write without autograd's knowledge
            torch.autograd.graph.increment_version(logits)
        return found, None, None
