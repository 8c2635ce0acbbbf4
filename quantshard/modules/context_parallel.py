"""Context parallelism: attention over sequences whose tokens are spread over ranks.

PyTorch's `context_parallel` gives rank r of N the chunks r and 2 N - 1 - r of 2 N, which makes causal attention the
same work on every rank. In a ring, PyTorch passes keys and values on while it computes. Otherwise all of them are
gathered, and any backend computes the attention of each chunk. Their gradients are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import private_torch
from quantshard.distributed import tensor_parallel
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.errors import ConfigurationError
from quantshard.modules.attention_backends import AttentionCall
from quantshard.modules.attention_masks import Packing
from quantshard.modules.rotary import RotaryEmbedding

RING, GATHER = METHODS = ("p2p", "all_gather")


class ContextParallel(NamedTuple):
    """The ranks that share sequences. `method`: `RING` or `GATHER`, TransformerEngine's `cp_comm_type`."""

    ranks: TensorParallel
    method: str

    @classmethod
    def of(cls, group: dist.ProcessGroup, method: str) -> ContextParallel | None:
        """Return the part of this rank in a group; None if it has one rank."""
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigurationError(f"cp_group is of type {type(group).__name__}; pass a ProcessGroup")
        ranks = TensorParallel.of(group)
        return None if ranks.size == 1 else cls(ranks, method)

    @classmethod
    def running(cls) -> ContextParallel | None:
        """Return the ranks of PyTorch's `context_parallel` around the calling code, or None."""
        group = private_torch.context_parallel_group()
        return None if group is None else cls.of(group, RING if private_torch.rotates_by_all_to_all() else GATHER)

    def local(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's tokens of a tensor with all tokens."""
        chunks = x.chunk(2 * self.ranks.size, dim)
        return torch.cat((chunks[self.ranks.rank], chunks[-1 - self.ranks.rank]), dim)

    def local_angles(self, freqs: RotaryEmbedding, tokens: int) -> RotaryEmbedding:
        """Return the angles of this rank's tokens. `freqs`: of these or of all tokens."""
        if isinstance(freqs, tuple):
            return tuple(self.local_angles(angles, tokens) for angles in freqs)  # type: ignore[return-value, arg-type]
        return freqs if len(freqs) == tokens else self.local(freqs[: tokens * self.ranks.size])

    def placeholder(self, x: Tensor, layout: str) -> Tensor:
        """Return a tensor without values of the shape that x [sbhd, bshd or thd] has with the tokens of all ranks."""
        shape = list(x.shape)
        shape[layout == "bshd"] *= self.ranks.size
        return x.new_empty(()).expand(shape)

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens [tokens, ...] in the order of their positions."""
        by_rank = tensor_parallel.gather_rows(x, self.ranks, in_float32=True).unflatten(0, (self.ranks.size, 2, -1))
        return torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0))).flatten(0, 1)

    def attend(
        self, choose: Callable[..., Any], call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any
    ) -> Tensor:
        """Compute a call for the keys of all ranks. `choose`: `attention_backends.prepare` of a backend.
        Packings describe the tokens of all ranks. Masks and biases cover this rank's queries and all keys."""
        dim, diagonals = int(call.layout == "bshd"), call.diagonals
        self._check(call, q.shape[dim], k.shape[dim])
        if self.method == RING:
            call = replace(call, ring=self.ranks.group)
        else:
            k, v = self.gather(torch.stack((k, v), -2).movedim(dim, 0)).movedim(0, dim).unbind(-2)
        has_all_keys = not diagonals.is_limited and call.slopes is None and call.packings is None
        if self.method == RING or has_all_keys:
            return choose(call, q, k, bias)(call, q, k, v, bias, sinks)
        size, results = q.shape[dim] // 2, []
        for half, chunk in enumerate((self.ranks.rank, 2 * self.ranks.size - 1 - self.ranks.rank)):
            end = (chunk + 1) * size
            mask, part_bias = (x if x is None else _part(x, half * size, size, end) for x in (call.mask, bias))
            packings = call.packings and _packings_of_part(call.packings[0], k.shape[dim], end - size, end)
            # the last query is at the position of the last key
            part = replace(call, diagonals=diagonals._replace(bottom_right=True), mask=mask, packings=packings)
            tensors = q.narrow(dim, half * size, size), k.narrow(dim, 0, end), v.narrow(dim, 0, end)
            results.append(choose(part, *tensors[:2], part_bias)(part, *tensors, part_bias, sinks))
        return torch.cat(results, dim)

    def _check(self, call: AttentionCall, queries: int, keys: int) -> None:
        size, mask, packings = self.ranks.size, call.mask, call.packings
        pads = isinstance(mask, tuple) or (packings is not None and call.layout != "thd" and packings[0].has_gaps)
        lacks = {
            f"{queries} tokens per rank; make the sequence a multiple of {2 * size}": queries % 2,
            "windows with later keys; use window_size=(left, 0)": call.diagonals.right > 0,
            "padding; pack the sequences with qkv_format='thd'": pads,
            f"{queries} queries and {keys} keys; use 'no_mask'": call.diagonals.is_limited and keys != queries,
        }
        if isinstance(mask, Tensor) and mask.shape[-1] not in (1, size * keys):
            lacks[f"attention_mask {list(mask.shape)}; give it this rank's queries and all keys"] = True
        for reason in filter(lacks.get, lacks):
            raise ConfigurationError(f"context parallelism does not support {reason}")


def _part(x: Any, first: int, size: int, end: int) -> Any:
    """Return `size` queries from `first` on, and the keys up to `end`, of a mask or bias [..., queries, keys]."""
    x = x if x.shape[-2] == 1 else x.narrow(-2, first, size)
    return x if x.shape[-1] == 1 else x.narrow(-1, 0, end)


def _packings_of_part(packing: Packing, length: int, first: int, end: int) -> tuple[Packing, Packing]:
    """Return the sequences of the queries from token `first` to `end` of rows of a length, and of keys up to `end`."""
    row, start, parts = packing.starts // length, packing.starts % length, []
    for begin in (first, 0):
        starts, ends = (x.clamp(begin, end) for x in (start, start + packing.lengths))
        places = row * (end - begin) + starts - begin
        parts.append(Packing(places, ends - starts, min(packing.longest, end - begin), packing.has_gaps))
    return parts[0], parts[1]
