"""Parts of the built-in language model: a layer with a mixture of experts, and losses.

In a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538), a router in high precision chooses the experts of each
token.

Losses take logits of any dtype and make no float32 copy of them. Logits are the largest tensor of a small model: 3.1
GiB in bfloat16 for 32,768 tokens and 50,304 entries. A float32 copy raises the peak of a GPT-2 small step in BF16 on an
H200 from 17.0 to 35.4 GiB.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from quantshard import kernel_dispatch
from quantshard.distributed.experts import dispatch_tokens
from quantshard.modules import GroupedLinear, Linear, MultiheadAttention, RMSNorm, autocast, quantized_model_init
from quantshard.tools.trainer.settings.config import TrainSettings


class ExpertMixture(nn.Module):
    """Sum over the chosen experts of weight * down(silu(gate(x)) * up(x)).

    The weights of a token's experts are their router probabilities, normalized to sum to 1.
    """

    def __init__(self, settings: TrainSettings, ep_mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.ep_mesh = ep_mesh
        self.experts, self.chosen = settings.experts, settings.experts_per_token
        with quantized_model_init(enabled=False):
            self.router = Linear(settings.hidden, settings.experts, bias=False, **options)
        inner, outer = (settings.hidden, settings.ffn), (settings.ffn, settings.hidden)
        options["ep_mesh"] = ep_mesh
        self.gate = GroupedLinear(settings.experts, *inner, bias=False, **options)
        self.up = GroupedLinear(settings.experts, *inner, bias=False, **options)
        self.down = GroupedLinear(settings.experts, *outer, bias=False, **options)

    def expert_layers(self) -> list[nn.Module]:
        """The expert layers, in the order in which they run."""
        return [self.gate, self.up, self.down]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [batch, sequence, hidden] to the same shape and dtype, and return the balance loss, a float32
        scalar."""
        tokens = x.flatten(0, 1)
        with autocast(enabled=False):
            probabilities = self.router(tokens).float().softmax(-1)
        weights, experts = probabilities.topk(self.chosen)
        dispatched = dispatch_tokens(tokens, experts, self.experts, self.ep_mesh)
        hidden = F.silu(self.gate(dispatched.tokens, dispatched.m_splits)) * self.up(
            dispatched.tokens, dispatched.m_splits
        )
        out = dispatched.combine(self.down(hidden, dispatched.m_splits), weights / weights.sum(-1, keepdim=True))
        counts = (experts.flatten() == torch.arange(self.experts, device=x.device)[:, None]).sum(1)
        return out.view_as(x), _balance_loss(probabilities, counts.float())


def _balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """Load-balancing loss: 1 for an even spread of tokens and probabilities, more otherwise (Fedus et al., 2021,
    arXiv:2101.03961).

    `counts`: float32 number of tokens of each expert on this rank. They are summed over ranks in place, so that the
    mean of the result over ranks is the loss of the global batch.
    """
    num_experts = probabilities.shape[-1]
    if dist.is_initialized():
        dist.all_reduce(counts)
    return num_experts * (counts / counts.sum() * probabilities.mean(0)).sum()


class MixtureLayer(nn.Module):
    """Attention and a mixture of experts, each pre-normalized and with a residual connection."""

    def __init__(
        self, settings: TrainSettings, number: int, device: torch.device | str, ep_mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"params_dtype": settings.torch_params_dtype, "device": device}
        self.dropout = settings.dropout
        self.self_attention = MultiheadAttention(
            settings.hidden, settings.heads, settings.head_size, settings.dropout, settings.norm_eps,
            layer_number=number, attn_mask_type="causal", num_gqa_groups=settings.kv_heads, bias=False,
            input_layernorm=True, normalization="RMSNorm", qkv_format="bshd", qk_norm_before_rope=True,
            qk_norm_type="RMSNorm" if settings.qk_norm else None, qk_norm_eps=settings.norm_eps, **options,
        )  # fmt: skip
        self.norm = RMSNorm(settings.hidden, settings.norm_eps, **options)
        self.mlp = ExpertMixture(settings, ep_mesh, **options)

    def forward(self, x: Tensor, rotary_pos_emb: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map x [batch, sequence, hidden] to the same shape and dtype, and return the balance loss of the router."""
        x = x + F.dropout(self.self_attention(x, rotary_pos_emb=rotary_pos_emb), self.dropout, self.training)
        out, balance = self.mlp(self.norm(x))
        return x + F.dropout(out, self.dropout, self.training), balance


class TokenLosses(NamedTuple):
    """Means over tokens, float32 scalars: the cross-entropy in nats, and the z-loss."""

    cross_entropy: Tensor
    z_loss: Tensor


def token_losses(logits: Tensor, targets: Tensor, overwrites: bool = False) -> TokenLosses:
    """Return the mean cross-entropy and the mean z-loss of a batch of tokens.

    The z-loss is log(Z)^2, where Z is the denominator of the softmax; it keeps logits from drifting away (Chowdhery et
    al., 2022, arXiv:2204.02311). Sums are float32, and the gradient is rounded to the logits' dtype once. If a target's
    logit is -inf, the loss is infinite and the gradient finite, as in `torch.nn.functional.cross_entropy`.

    Args:
        logits: floating [..., vocabulary].
        targets: int64 [...]; every target counts.
        overwrites: let backward write the gradient over the logits, if they are contiguous, to save memory. Other
            operations must not need the logits' values then: if one saved them for backward, or on a second backward,
            PyTorch raises its error for tensors modified in place.
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
        grad_entropy, grad_z = (grad / len(logits) for grad in grads)
        # factor of each row's probabilities
        factors = grad_entropy + 2 * grad_z * log_z
        out = logits.detach() if ctx.overwrites else None
        grad_logits = kernel_dispatch.logits_gradient(logits, targets, log_z, factors, grad_entropy, out)
        # kernels write without autograd's knowledge
        if out is not None:
            torch.autograd.graph.increment_version(logits)
        return grad_logits, None, None
