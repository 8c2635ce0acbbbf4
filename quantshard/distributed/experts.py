"""Expert parallelism: send tokens to the ranks that hold the experts chosen by a router, and return the outputs.

Experts are spread over a mesh axis, in order: rank r of R holds experts r * n / R to (r + 1) * n / R - 1. Two
all-to-alls move tokens, `dispatch_tokens` and `Dispatch.combine`, each the backward of the other, after a small one
that exchanges the numbers of tokens. If one rank has all experts, nothing is exchanged.

The tokens of an expert are ordered by the rank that sent them, then by their order on that rank, and experts get the
gradients of the mean of the ranks' losses. So they compute the same as in one process that has all tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import kernel_dispatch, private_torch
from quantshard.errors import ConfigurationError


def local_experts(owner: str, num_experts: int, ep_mesh: DeviceMesh | None) -> range:
    """Return the experts of this rank, of `num_experts` that are spread over a 1-D mesh. Without a mesh: all."""
    if ep_mesh is None:
        return range(num_experts)
    ranks = ep_mesh.size()
    if num_experts % ranks:
        raise ConfigurationError(f"{owner}: {num_experts} experts over {ranks} ranks; choose a multiple of {ranks}")
    per_rank = num_experts // ranks
    first = ep_mesh.get_local_rank() * per_rank
    return range(first, first + per_rank)


@dataclass(frozen=True, eq=False)
class TokenRoute:
    """The routing of one dispatch. A row is one token for one of its experts.

    order, inverse: for the rows that this rank sends, sorted by expert, the index into [tokens, choices], flattened,
        and its inverse.
    counts: number of rows that this rank sends to each expert of all ranks; empty if one rank has all.
    m_splits: number of rows that each expert of this rank receives, as in `Dispatch`.
    sent, received: number of rows to and from each rank.
    sorting: for the received rows, sorted by expert, the index as received; None: already sorted.
    choices: experts per token.
    """

    order: Tensor
    inverse: Tensor
    counts: list[int]
    m_splits: list[int] | Tensor
    sent: list[int]
    received: list[int]
    sorting: Tensor | None
    choices: int
    group: dist.ProcessGroup | None

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the rows that this rank sends, sorted by expert, of tokens [tokens, hidden]. Differentiable."""
        rows: Tensor = _TakeRows.apply(tokens, self.order // self.choices, self.inverse, self.choices)
        return rows

    def sums_of(self, rows: Tensor) -> Tensor:
        """Sum the rows of each token, as the backward of `rows_of`. Not differentiable."""
        return _sums(rows[self.inverse], self.choices)

    def exchange(self, rows: Tensor, there: bool) -> Tensor:
        """Send rows, sorted by expert, to their experts, or back. A collective call; differentiable."""
        exchanged: Tensor = _Exchange.apply(rows, self, there)
        return exchanged

    def combine(self, outputs: Tensor, weights: Tensor, are_back: bool = False) -> Tensor:
        """See `Dispatch.combine`. `are_back`: whether the outputs are back from their experts."""
        weights, rows = weights.reshape(-1, self.choices), sum(self.sent if are_back else self.received)
        if outputs.shape[0] != rows or weights.numel() != sum(self.sent):
            sent = f"{sum(self.sent) // self.choices} tokens with {self.choices} experts"
            sizes = f"outputs {list(outputs.shape)} and weights {list(weights.shape)}"
            raise ConfigurationError(f"Dispatch.combine: {sizes} do not fit the {rows} rows and {sent}")
        returned = outputs if are_back else self.exchange(outputs, False)
        by_choice = _TakeRows.apply(returned, self.inverse, self.order, 1)
        parts = by_choice.float().view(len(weights), self.choices, by_choice.shape[1]) * weights.float().unsqueeze(-1)
        return parts.sum(1).to(outputs.dtype)


@dataclass(frozen=True, eq=False)
class Dispatch:
    """The result of `dispatch_tokens`, with `tokens` and `m_splits` as `GroupedLinear` takes them.

    tokens: [rows, hidden]: the tokens of this rank's first expert, then of the second, ...
    m_splits: number of tokens per expert. If one rank has all experts on a GPU, an int64 tensor [experts] on the
        GPU, so that the host does not wait for it.
    """

    tokens: Tensor
    m_splits: list[int] | Tensor
    route: TokenRoute

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Send the experts' outputs back and sum them per token. A collective call.

        Args:
            outputs: [rows, features], one row per row of `tokens`.
            weights: [tokens, choices] or [tokens], any floating dtype: the router's weight of each chosen expert.

        Returns [tokens, features] in the dtype of `outputs`, summed in float32.
        """
        return self.route.combine(outputs, weights)


def dispatch_tokens(tokens: Tensor, experts: Tensor, num_experts: int, ep_mesh: DeviceMesh | None = None) -> Dispatch:
    """Send each token to the ranks that hold its experts. A collective call over the mesh; differentiable.

    Args:
        tokens: [tokens, hidden] of this rank. The number of tokens can be 0.
        experts: int64 [tokens, choices] or [tokens], on the same device: the experts of each token.
        num_experts: number of experts on all ranks.
        ep_mesh: the axis that experts are spread over, also passed to `GroupedLinear`. None: this rank has all experts.

    If an expert index is out of range, every rank raises, on a GPU with all experts at the next synchronization.
    """
    route = route_tokens(tokens, experts, num_experts, ep_mesh)
    return Dispatch(route.exchange(route.rows_of(tokens), True), route.m_splits, route)


def route_tokens(tokens: Tensor, experts: Tensor, num_experts: int, ep_mesh: DeviceMesh | None) -> TokenRoute:
    """Exchange the numbers of tokens per expert, and return the route of a dispatch; see `dispatch_tokens`."""
    is_matching = tokens.ndim == 2 and experts.ndim in (1, 2) and len(experts) == len(tokens)
    if not is_matching or experts.is_floating_point():
        shapes = f"tokens {list(tokens.shape)} and experts {experts.dtype} {list(experts.shape)}"
        raise ConfigurationError(f"dispatch_tokens: {shapes} must be [tokens, hidden] and int64 [tokens, choices]")
    num_local = len(local_experts("dispatch_tokens", num_experts, ep_mesh))
    group = None if ep_mesh is None else ep_mesh.get_group()
    choices = 1 if experts.ndim == 1 else experts.shape[1]
    indices = experts.reshape(-1)
    if num_local == num_experts and kernel_dispatch.has_kernels(indices):
        return _local_route(indices, num_experts, choices, group)
    return _exchanged_route(indices, num_experts, num_local, choices, group)


def _local_route(chosen: Tensor, experts: int, choices: int, group: dist.ProcessGroup | None) -> TokenRoute:
    """Return the route if one rank has all experts. Does not wait for the device."""
    ordered, order = chosen.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=chosen.device, dtype=chosen.dtype))
    if rows := len(chosen):
        inside = (bounds[0] == 0) & (bounds[-1] == rows)
        private_torch.assert_on_device(inside, f"dispatch_tokens: entries of experts are not in 0 to {experts - 1}")
    return TokenRoute(order, _inverse(order), [], bounds.diff(), [rows], [rows], None, choices, group)


def _exchanged_route(
    chosen: Tensor, num_experts: int, num_local: int, choices: int, group: dist.ProcessGroup | None
) -> TokenRoute:
    """Return the route of this rank's rows from and to all ranks."""
    outside = ((chosen < 0) | (chosen >= num_experts)).sum().view(1, 1)
    # [ranks, experts of a rank]
    sent = torch.bincount(chosen.clamp(0, num_experts - 1), minlength=num_experts).view(-1, num_local)
    # the last column reports a wrong index to all ranks, so that no rank waits for tokens
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
    sent, received = sent[:, :-1], received[:, :-1]
    order, sorting = chosen.argsort(stable=True), None
    if len(received) > 1 and num_local > 1:
        # rows arrive by rank, then expert
        expert = torch.arange(num_local, device="cpu").repeat(len(received)).repeat_interleave(received.flatten())
        sorting = expert.argsort(stable=True).to(chosen.device)
    return TokenRoute(
        order, _inverse(order), sent.flatten().tolist(), received.sum(0).tolist(), sent.sum(1).tolist(),
        received.sum(1).tolist(), sorting, choices, group,
    )  # fmt: skip


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _TakeRows(torch.autograd.Function):
    """x [rows, ...] -> x[index], where each row appears `times` times. Backward sums in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _sums(grads[0][inverse], ctx.times), None, None, None


def _sums(rows: Tensor, times: int) -> Tensor:
    """Sum `times` consecutive rows."""
    return rows if times == 1 else rows.view(len(rows) // times, times, rows.shape[1]).sum(1)


class _Exchange(torch.autograd.Function):
    """Send rows along a route, or back. Operations in between get gradients of the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: TokenRoute, there: bool) -> Tensor:
        ctx.route, ctx.there = route, there
        return _exchanged(x, route, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ranks = len(ctx.route.sent)
        grad = grads[0] * ranks if ctx.there else grads[0] / ranks
        return _Exchange.apply(grad, ctx.route, not ctx.there), None, None


def _exchanged(x: Tensor, route: TokenRoute, there: bool) -> Tensor:
    if route.group is None or len(route.sent) == 1:
        return x.view_as(x)
    sent, received, sorting = route.sent, route.received, route.sorting
    if not there:
        sent, received = received, sent
        x = x if sorting is None else x[_inverse(sorting)]
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=route.group)
    return out[sorting] if there and sorting is not None else out
