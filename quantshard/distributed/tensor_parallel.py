"""Tensor and sequence parallelism: collectives of a tensor-parallel group around the GEMMs of its layers.

On a group of one rank each function is the identity, without a collective or an autograd node. The functions come in
pairs that are each other's backward (Megatron-LM: Shoeybi et al., 2019, and Korthikanti et al., 2022):

    copy         forward the identity             backward sums over the ranks
    reduce       forward sums over the ranks      backward the identity
    gather_rows  forward joins the ranks' rows    backward sums, and keeps this rank's rows
    scatter_rows forward sums, and keeps rows     backward joins the ranks' rows
    split_rows   forward keeps this rank's rows   backward joins the ranks' rows
    join_rows    forward joins the ranks' rows    backward keeps this rank's rows

Rows are the entries of dim 0: an activation is [sequence, batch, hidden], and under sequence parallelism each rank
holds sequence / ranks consecutive rows, in the order of the group. A sum is computed in the dtype of its tensor, in an
order that the communication backend decides. Gradients of replicated parameters are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import numerics, private_torch
from quantshard.collectives import rank_checks
from quantshard.collectives.process_groups import Group, Groups
from quantshard.errors import ConfigurationError
from quantshard.gemm.operands import OperandSplit
from quantshard.tensor import parameter_state

MODES = (None, "column", "row")
"""How a layer's weight is cut: not at all, along its output features, or along its input features."""


@dataclass(frozen=True)
class TensorParallel:
    """A layer's part in a tensor-parallel group. `sequence_parallel`: other activations are split along dim 0."""

    group: Group = None
    size: int = 1
    rank: int = 0
    mode: str | None = None
    sequence_parallel: bool = False

    @classmethod
    def of(cls, group: Group, mode: str | None = None, sequence_parallel: bool = False) -> TensorParallel:
        """Return the part of this rank in `group`, which must include this rank."""
        if group is None:
            return cls(None, 1, 0, mode, sequence_parallel)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ConfigurationError(f"rank {dist.get_rank()} is not in its tensor-parallel group; pass its own group")
        return cls(group, dist.get_world_size(group), rank, mode, sequence_parallel)

    def split(self, dim: int) -> OperandSplit:
        """Describe a matrix cut along `dim` over this group, for `operands.quantize_operand` and `operands.gather`."""
        return OperandSplit(dim, self.group)


_Function = Callable[[Tensor, TensorParallel], Tensor]

NONE = TensorParallel()
"""The part of a layer that is not cut."""


def check_mode(owner: str, mode: str | None, sequence_parallel: bool) -> None:
    if mode not in MODES:
        raise ConfigurationError(f"{owner}(parallel_mode={mode!r}): use one of: {', '.join(map(repr, MODES))}")
    if mode is None and sequence_parallel:
        raise ConfigurationError(f"{owner}(sequence_parallel=True) needs parallel_mode or set_parallel_mode=True")


def stream_base(group: Groups) -> int:
    """Return a number for the data of a tensor-parallel group, equal on its ranks, to separate random streams.

    If the groups form the same mesh axes on all ranks, the number is the index among them, which is the data-parallel
    rank. Random streams are then equal to those in a run without these axes. Without a group, it is the rank itself.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    this_rank = dist.get_rank()
    ranks = [this_rank]
    for axis in () if group is None else group if isinstance(group, tuple) else (group,):
        ranks = sorted(rank + member - this_rank for rank in ranks for member in dist.get_process_group_ranks(axis))
    first, stride = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
    period = stride * len(ranks)
    if ranks != list(range(first, first + period, stride)) or first % period >= stride:
        return dist.get_world_size() + first  # not a mesh axis: above the numbers of mesh axes
    return first // period * stride + first % period


def copy_to_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return x, which is equal on every rank. Backward sums the ranks' partial gradients."""
    return cast(Tensor, _Collective.apply(x, tp, lambda x, tp: x.view_as(x), reduce_from_group)) if tp.size > 1 else x


def all_reduce_gradient(param: Tensor, tp: TensorParallel) -> Tensor:
    """Return a replicated parameter that each rank applies to its own rows; backward sums its gradient over the ranks.

    Makes one collective per parameter. A 16-bit parameter is returned in float32, so that its gradient is rounded only
    once, after the sum.
    """
    return copy_to_group(param.float() if tp.size > 1 and param.dtype.itemsize < 4 else param, tp)


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """Add a bias [features], rounded to y's dtype, to y [..., features]. Its gradient is summed in its own dtype."""
    return _AddBias.apply(y, bias)


def reduce_from_group(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum x over the ranks; every rank gets the sum."""
    return cast(Tensor, _Collective.apply(x, tp, _summed, copy_to_group)) if tp.size > 1 else x


def gather_rows(x: Tensor, tp: TensorParallel, in_float32: bool = False) -> Tensor:
    """Gather [rows, ...] of each rank to [rows * ranks, ...], in rank order; backward sums gradients (`in_float32`)."""
    backward = (lambda dy, tp: scatter_rows(dy.float(), tp).to(dy.dtype)) if in_float32 else scatter_rows
    return cast(Tensor, _Collective.apply(x, tp, _all_rows, backward)) if tp.size > 1 else x


def join_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather rows like `gather_rows`; backward selects this rank's rows, since every rank has the whole gradient."""
    return cast(Tensor, _Collective.apply(x, tp, _all_rows, split_rows)) if tp.size > 1 else x


def scatter_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum x [rows, ...] over the ranks and return this rank's rows: [rows / ranks, ...]."""
    rows_per_rank(x.shape, tp)
    return cast(Tensor, _Collective.apply(x, tp, _summed_rows, gather_rows)) if tp.size > 1 else x


def split_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return a copy of this rank's rows of x [rows, ...], which is equal on every rank: [rows / ranks, ...]."""
    rows_per_rank(x.shape, tp)
    return cast(Tensor, _Collective.apply(x, tp, _own_rows, join_rows)) if tp.size > 1 else x


def rows_per_rank(shape: torch.Size, tp: TensorParallel) -> int:
    """Return the number of rows (dim 0) of an activation of `shape` per rank under sequence parallelism."""
    if shape[0] % tp.size:
        rows = f"the {shape[0]} rows (dim 0) of {list(shape)} over {tp.size} ranks"
        raise ConfigurationError(f"sequence parallelism cannot divide {rows}; pad to a multiple of {tp.size}")
    return shape[0] // tp.size


def dropout(x: Tensor, p: float, tp: TensorParallel) -> Tensor:
    """Drop elements of x [rows, ..., features] with probability p, and divide the others by 1 - p.

    Over several ranks, the mask is generated by global index with a key from torch's CPU generator, so ranks that have
    the same rows drop the same elements.
    """
    if tp.size == 1:
        return torch.nn.functional.dropout(x, p)
    key = parameter_state.random_key()
    rank_checks.check_equal_on_ranks(
        {"dropout": key}, tp.group, "the random key", "call torch.manual_seed alike on the group"
    )
    values = x.reshape(-1, x.shape[-1])
    shape = (values.shape[0], values.shape[1])
    whole, origin = shape, (0, 0)
    if tp.sequence_parallel:
        whole, origin = (shape[0] * tp.size, shape[1]), (shape[0] * tp.rank, 0)
    words = numerics.random_words(int(key), 0, 0, whole, origin, shape, device=x.device)
    dropped = x * (words.view(x.shape) >= p * 2.0**32)
    return dropped / (1 - p) if p < 1 else dropped


class _Collective(torch.autograd.Function):
    """A collective with another one, `backward`, for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, run: _Function, backward: _Function) -> Tensor:
        ctx.tp, ctx.run_backward = tp, backward
        return run(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.run_backward(grads[0], ctx.tp), None, None, None


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        rounded = bias.to(y.dtype)
        return y + rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].reshape(-1, grads[0].shape[-1]).sum(0, dtype=ctx.dtype)


def _summed(x: Tensor, tp: TensorParallel) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel() > 0:
        dist.all_reduce(out, group=tp.group)
    return out


def _summed_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    if out.numel() > 0:
        private_torch.reduce_scatter_single(out, x.contiguous(), group=tp.group)
    return out


def _own_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    return x.chunk(tp.size)[tp.rank].clone()  # a copy: a view would keep all rows alive


def _all_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    out = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    if out.numel() > 0:
        private_torch.all_gather_single(out, x.contiguous(), group=tp.group)
    return out
