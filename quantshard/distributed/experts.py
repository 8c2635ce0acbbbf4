"""Expert parallelism: tokens go to the ranks that hold the experts which a router chose, and come back.

Experts are spread over an axis of a mesh, in order: rank r of R holds experts r * n / R to (r + 1) * n / R - 1. Two
all-to-alls move tokens, `dispatch_tokens` and `Dispatch.combine`, each the other's backward; a small one before tells
each rank how many come. Where one rank has all experts nothing is exchanged, and on a GPU nobody waits for these
numbers.

An expert's tokens are in the order of the ranks that they came from, and of one rank in its own order: that of one
process that has the tokens of all ranks, one rank after the other. Its gradients are those of the mean over the ranks
of their losses, as FSDP2 and DistributedDataParallel give those of all other parameters. So the experts of an axis
compute what they do in one process that has all of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import kernel_dispatch, private_torch
from quantshard.argument_kinds import MESH, TENSOR, WHOLE_NUMBER, check_arguments
from quantshard.errors import ConfigurationError


def local_experts(owner: str, num_experts: int, ep_mesh: DeviceMesh | None) -> range:
    """Which experts this rank holds of `num_experts` that are spread over a 1-D mesh; all without one.

    Raises:
        ConfigurationError: on every rank: the mesh has several axes, or does not divide the experts; or there are none.
    """
    check_arguments(owner, MESH.or_none, ep_mesh=ep_mesh)
    if num_experts < 1:
        raise ConfigurationError(f"{owner}: {num_experts} experts; there must be 1 or more")
    if ep_mesh is None:
        return range(num_experts)
    if ep_mesh.ndim != 1:
        raise ConfigurationError(
            f"{owner}: ep_mesh has {ep_mesh.ndim} axes {ep_mesh.mesh_dim_names}; give the one that experts are spread "
            'over, such as mesh["ep"]'
        )
    ranks = ep_mesh.size()
    if num_experts % ranks:
        raise ConfigurationError(
            f"{owner}: {num_experts} experts cannot be spread equally over the {ranks} ranks of ep_mesh; choose a "
            f"multiple of {ranks}"
        )
    here = num_experts // ranks
    first = ep_mesh.get_local_rank() * here
    return range(first, first + here)


@dataclass(frozen=True, eq=False)
class TokenRoute:
    """The way of each row of one dispatch, a row being one token for one of its experts.

    `order`: of the rows that this rank sends, sorted by expert, the place in [tokens, choices], flattened. `sent`,
    `received`: rows to and from each rank. `sorting`: of the received rows, sorted by expert, the place as received;
    None if they came so. `choices`: experts of a token.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    sorting: Tensor | None
    choices: int
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> int:
        """How many ranks the experts are spread over."""
        return len(self.sent)


@dataclass(frozen=True, eq=False)
class Dispatch:
    """What `dispatch_tokens` returns.

    `tokens`: [rows, hidden], the tokens of this rank's first expert, then those of the second, ... `m_splits`: how many
    each has; on a GPU, where one rank has all experts, an int64 tensor [experts] there, which nobody has waited for.
    Both are for `GroupedLinear`.
    """

    tokens: Tensor
    m_splits: list[int] | Tensor
    route: TokenRoute

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Send what the experts made of their tokens back, and sum it for each token. A collective call.

        Args:
            outputs: [rows, features], row by row from `tokens`.
            weights: [tokens, choices] or [tokens], any floating dtype: the router's weight of each expert chosen.

        Returns:
            [tokens, features] of the dtype of `outputs`, summed in float32.

        Raises:
            ConfigurationError: the shapes are not those that were dispatched.
        """
        rows, choices = self.tokens.shape[0], self.route.choices
        weights = weights.reshape(-1, choices)
        if outputs.shape[0] != rows or weights.numel() != sum(self.route.sent):
            raise ConfigurationError(
                f"Dispatch.combine: outputs {list(outputs.shape)} and weights {list(weights.shape)} do not fit the "
                f"{rows} rows that this rank's experts got and the {sum(self.route.sent) // choices} tokens with "
                f"{choices} experts each that it sent"
            )
        sorting = self.route.sorting
        if sorting is not None:
            outputs = _TakeRows.apply(outputs, _inverse(sorting), sorting, 1)
        returned = _AllToAllRows.apply(outputs, self.route, False)
        chosen = _TakeRows.apply(returned, _inverse(self.route.order), self.route.order, 1)
        parts = chosen.float().view(len(weights), choices, chosen.shape[1]) * weights.float().unsqueeze(-1)
        return parts.sum(1).to(outputs.dtype)


def dispatch_tokens(tokens: Tensor, experts: Tensor, num_experts: int, ep_mesh: DeviceMesh | None = None) -> Dispatch:
    """Send each token to the ranks that hold its experts. A collective call of the mesh; differentiable.

    Args:
        tokens: [tokens, hidden] of this rank, any number of them, 0 too.
        experts: int64 [tokens, choices] or [tokens], on the same device: which experts each token goes to.
        num_experts: of all ranks.
        ep_mesh: the axis that experts are spread over, the one that `GroupedLinear` got; None: this rank has all.

    Raises:
        ConfigurationError: on every rank, if an expert of one is out of range; or shapes or dtypes do not fit. Of one
            rank's experts on a GPU the device tells of the former, as a RuntimeError where it is next waited for.
    """
    check_arguments("dispatch_tokens", TENSOR, tokens=tokens, experts=experts)
    check_arguments("dispatch_tokens", WHOLE_NUMBER, num_experts=num_experts)
    if tokens.ndim != 2 or experts.ndim not in (1, 2) or len(experts) != len(tokens):
        raise ConfigurationError(
            f"dispatch_tokens: tokens {list(tokens.shape)} and experts {list(experts.shape)} must be [tokens, hidden] "
            "and [tokens, choices]"
        )
    if experts.dtype not in (torch.int64, torch.int32):
        raise ConfigurationError(
            f"dispatch_tokens: experts are {experts.dtype}; give their numbers as int64, not weights"
        )
    here = len(local_experts("dispatch_tokens", num_experts, ep_mesh))
    group = None if ep_mesh is None else ep_mesh.get_group()
    choices = 1 if experts.ndim == 1 else experts.shape[1]
    chosen = experts.reshape(-1)
    m_splits: list[int] | Tensor
    if here == num_experts and kernel_dispatch.has_kernels(chosen):
        m_splits, route = _stays(chosen, num_experts, choices, group)
    else:
        m_splits, route = _goes(chosen, num_experts, here, choices, group)
    order = route.order
    rows = _TakeRows.apply(tokens, order // choices, _inverse(order), choices)
    rows = _AllToAllRows.apply(rows, route, True)
    if route.sorting is not None:
        rows = _TakeRows.apply(rows, route.sorting, _inverse(route.sorting), 1)
    return Dispatch(rows, m_splits, route)


def _stays(chosen: Tensor, experts: int, choices: int, group: dist.ProcessGroup | None) -> tuple[Tensor, TokenRoute]:
    """How many rows each expert gets, and their route, where one rank has all experts; nothing is waited for."""
    ordered, order = chosen.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=chosen.device, dtype=chosen.dtype))
    if rows := len(chosen):
        inside = (bounds[0] == 0) & (bounds[-1] == rows)
        private_torch.assert_on_device(inside, f"dispatch_tokens: entries of experts are not in 0 to {experts - 1}")
    return bounds.diff(), TokenRoute(order, [rows], [rows], None, choices, group)


def _goes(
    chosen: Tensor, num_experts: int, here: int, choices: int, group: dist.ProcessGroup | None
) -> tuple[list[int], TokenRoute]:
    """How many rows each expert of this rank gets, and their route from and to all ranks."""
    sent, received = _exchange_counts(chosen, num_experts, here, group)
    order, sorting = chosen.argsort(stable=True), _sorting(received, chosen)
    route = TokenRoute(order, sent.sum(1).tolist(), received.sum(1).tolist(), sorting, choices, group)
    return received.sum(0).tolist(), route


def _exchange_counts(
    chosen: Tensor, num_experts: int, here: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Rows for each expert [ranks, experts of a rank], those sent and those received, int64 on the CPU."""
    outside = ((chosen < 0) | (chosen >= num_experts)).sum().view(1, 1)
    sent = torch.bincount(chosen.clamp(0, num_experts - 1), minlength=num_experts).view(-1, here)
    # the last column tells all ranks of a wrong index, so that none waits for tokens
    sent = received = torch.cat([sent, outside.expand(len(sent), 1)], 1)
    if group is not None and len(sent) > 1:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
    sent, received = torch.stack([sent, received]).cpu()
    if received[:, -1].any():
        raise ConfigurationError(
            f"dispatch_tokens: {int(received[:, -1].sum())} entries of experts are not in 0 to {num_experts - 1}, on "
            f"the ranks {received[:, -1].nonzero().flatten().tolist()} of the mesh; look at the router"
        )
    return sent[:, :-1], received[:, :-1]


def _sorting(received: Tensor, like: Tensor) -> Tensor | None:
    """Rows come from rank after rank, and of each by expert; the order by expert, then rank. None if it is that."""
    ranks, here = received.shape
    if ranks == 1 or here == 1:
        return None
    expert = torch.arange(here, device="cpu").repeat(ranks).repeat_interleave(received.flatten())
    return expert.argsort(stable=True).to(like.device)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _TakeRows(torch.autograd.Function):
    """x [rows, ...] -> x[index], where each row is taken `times` times; summed in a fixed order in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = grads[0][inverse]
        if ctx.times > 1:
            rows = rows.view(len(rows) // ctx.times, ctx.times, rows.shape[1]).sum(1)
        return rows, None, None, None


class _AllToAllRows(torch.autograd.Function):
    """Rows to the ranks of a route, or back. What stands between is given gradients of the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: TokenRoute, there: bool) -> Tensor:
        ctx.route, ctx.there = route, there
        return _exchanged(x, route, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ranks = ctx.route.ranks
        grad = grads[0] * ranks if ctx.there else grads[0] / ranks
        return _AllToAllRows.apply(grad, ctx.route, not ctx.there), None, None


def _exchanged(x: Tensor, route: TokenRoute, there: bool) -> Tensor:
    if route.group is None or route.ranks == 1:
        return x.view_as(x)
    sent, received = (route.sent, route.received) if there else (route.received, route.sent)
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=route.group)
    return out
