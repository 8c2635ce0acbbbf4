"""A mixture of experts: the router that chooses the experts of each token, its losses, and the layer around it.

The router multiplies in the dtype of the parameters; probabilities, choices and losses are float32.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from quantshard.distributed.experts import dispatch_tokens
from quantshard.modules import GroupedLinear, Linear, MultiheadAttention, RMSNorm, autocast, quantized_model_init
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import AUXILIARY, BIAS, SEQUENCE


class Routing(NamedTuple):
    """Losses and counts of a router in one forward. A row is one token for one of its experts.

    balance_loss, z_loss: float32 scalars.
    counts: rows chosen for each expert on this rank, then the number of dropped rows: int64 [experts + 1].
    """

    balance_loss: Tensor
    z_loss: Tensor
    counts: Tensor


class ExpertMixture(nn.Module):
    """Sum over the chosen experts of weight * down(silu(gate(x)) * up(x)).

    The weights of a token's experts are their router probabilities, normalized to sum to 1. With loss-free balancing,
    the experts are those with the largest sums of probability and `router.expert_bias`.
    """

    def __init__(self, settings: TrainSettings, ep_mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.settings, self.ep_mesh = settings, ep_mesh
        self.experts, self.chosen = settings.experts, settings.experts_per_token
        with quantized_model_init(enabled=False):
            self.router = Linear(settings.hidden, settings.experts, bias=False, **options)
        if BIAS in settings.router_balance:
            bias = torch.zeros(settings.experts, dtype=torch.float32, device=options["device"])
            self.router.register_buffer("expert_bias", bias)
        inner, outer = (settings.hidden, settings.ffn), (settings.ffn, settings.hidden)
        options["ep_mesh"] = ep_mesh
        self.gate = GroupedLinear(settings.experts, *inner, bias=False, **options)
        self.up = GroupedLinear(settings.experts, *inner, bias=False, **options)
        self.down = GroupedLinear(settings.experts, *outer, bias=False, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Map x [batch, sequence, hidden] to the same shape and dtype, and return the routing."""
        with autocast(enabled=False):
            logits = self.router(x.flatten(0, 1)).float()
        probabilities = logits.softmax(-1)
        weights, experts = probabilities.topk(self.chosen)
        counts = self._counts(experts, len(x))
        # of the choice by probability alone, which the loss is about
        balance = self._balance_loss(probabilities, counts)
        if BIAS in self.settings.router_balance:
            experts = (probabilities + self.router.expert_bias).topk(self.chosen).indices
            weights, counts = probabilities.gather(-1, experts), self._counts(experts, len(x))
        weights = weights / weights.sum(-1, keepdim=True)
        # most rows of an expert in a sequence (Fedus et al., 2021, arXiv:2101.03961, equation 3)
        factor = (self.training and self.settings.capacity_factor) or math.inf
        capacity = math.ceil(min(factor * x.shape[1] * self.chosen / self.experts, x.shape[1]))
        if capacity < x.shape[1]:
            slots = expert_slots(experts.view(len(x), -1), self.experts, capacity)
            out = self._sum_of_slots(x, slots, self.experts * len(x) * capacity, weights)
        else:
            out = self._sum_of_experts(x, experts, weights)
        dropped = (counts - capacity).clamp(min=0).sum().view(1)
        return out, Routing(balance, router_z_loss(logits), torch.cat([counts.sum(0), dropped]))

    def _sum_of_experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Run the experts int64 [tokens, choices] on x [..., hidden], and sum their outputs by `weights`."""
        sent = dispatch_tokens(x.view(-1, x.shape[-1]), experts, self.experts, self.ep_mesh)
        hidden = F.silu(self.gate(sent.tokens, sent.m_splits)) * self.up(sent.tokens, sent.m_splits)
        return sent.combine(self.down(hidden, sent.m_splits), weights).view_as(x)

    def _sum_of_slots(self, x: Tensor, slots: Tensor, count: int, weights: Tensor) -> Tensor:
        """Run each expert on equally many slots, some of them zero, so that the host does not wait for their number."""
        positions = torch.arange(slots.numel(), device=x.device)
        # the position of each slot in `slots`, or their number
        source = positions.new_full((count + 1,), len(positions)).scatter_(0, slots.flatten(), positions)[:-1]
        rows = _RowsOrZeros.apply(x.flatten(0, 1), source // self.chosen, slots.view(-1, self.chosen))
        experts = torch.arange(count, device=x.device) // (count // self.experts)
        out = self._sum_of_experts(rows, experts, rows.new_ones(count))
        out = _RowsOrZeros.apply(out, slots.flatten(), source[:, None]).float().unflatten(0, (-1, self.chosen))
        return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype).view_as(x)

    def _counts(self, experts: Tensor, sequences: int) -> Tensor:
        """Count the rows of each expert by sequence: int64 [tokens, chosen] -> [sequences, experts]."""
        numbers = torch.arange(self.experts, device=experts.device)[:, None]
        return (experts.view(sequences, 1, -1) == numbers).sum(-1)

    def _balance_loss(self, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Return the loss that `router_balance` names, or 0. For "aux", counts are summed over ranks, so that the mean
        over ranks is the loss of the global batch."""
        if SEQUENCE in self.settings.router_balance:
            return balance_loss(probabilities.unflatten(0, (len(counts), -1)), counts.float())
        if self.settings.router_balance != AUXILIARY:
            return probabilities.new_zeros(())
        total = counts.sum(0).float()
        if dist.is_initialized():
            dist.all_reduce(total)
        return balance_loss(probabilities, total)


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """Load-balancing loss: 1 for an even spread of tokens and probabilities, more otherwise.

    For a batch: Fedus et al., 2021 (arXiv:2101.03961, equations 4 to 6). For the mean over sequences: DeepSeek-V3, 2024
    (arXiv:2412.19437, equations 17 to 20).

    `probabilities`: float32 [..., tokens, experts]. `counts`: float32 [..., experts], rows chosen by probability alone.
    """
    shares = counts / counts.sum(-1, keepdim=True)
    return probabilities.shape[-1] * (shares * probabilities.mean(-2)).sum(-1).mean()


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean of log(sum(exp(logits)))^2, which keeps [tokens, experts] logits small (arXiv:2202.08906, equation 5)."""
    return logits.logsumexp(-1).square().mean()


def expert_slots(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return the slot of each row: int64 [sequences, rows] in order of position -> the same shape.

    Slots are ordered by expert, then by sequence, then by position. Rows of a sequence above `capacity` per expert get
    the number of slots, and are dropped.
    """
    ordered, order = experts.sort(stable=True)
    # number of earlier rows of the sequence that have the same expert
    rank = torch.arange(experts.shape[1], device=experts.device) - torch.searchsorted(ordered, ordered)
    rank = rank.gather(1, order.argsort())
    sequence = torch.arange(len(experts), device=experts.device)[:, None]
    slot = (experts * len(experts) + sequence) * capacity + rank
    return slot.where(rank < capacity, num_experts * len(experts) * capacity)


class _RowsOrZeros(torch.autograd.Function):
    """x [rows, size] -> x[index], or zeros where an index is `rows`. Backward sums in a fixed order.

    `inverse` [rows, n]: the positions of each row in the result, or their number.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return F.pad(x, (0, 0, 0, 1))[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return F.pad(grads[0], (0, 0, 0, 1))[ctx.saved_tensors[0]].sum(1), None, None


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

    def forward(self, x: Tensor, self_attn_mask_type: str | None = None, **attention: Any) -> tuple[Tensor, Routing]:
        """Map x [batch, sequence, hidden] to the same shape and dtype, as a `TransformerLayer`, with its routing."""
        attention_out = self.self_attention(x, attn_mask_type=self_attn_mask_type, **attention)
        x = x + F.dropout(attention_out, self.dropout, self.training)
        out, routing = self.mlp(self.norm(x))
        return x + F.dropout(out, self.dropout, self.training), routing
