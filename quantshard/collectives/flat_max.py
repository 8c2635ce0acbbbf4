"""Maxima over ranks of many tensors in one flat collective, and the check that ranks hold the same."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard.collectives.process_groups import Groups, collective_device, spanned
from quantshard.errors import RankMismatchError

_SMALLEST = 1024  # 4 KiB cost what 4 bytes cost


@dataclass
class FlatMax:
    """Tensors to be replaced by their maxima over process groups: one flat collective per group.

    Values are float32 and not negative. They are compared as the integers that their bits spell: the order is the
    same, and NaN, which a floating-point MAX may lose, stands above infinity and survives.

    `padded`: each collective is filled up to a power of two. Ranks that are out of step then mostly meet in one of the
    same size, and a digest that goes with the values tells them (`rank_digest`).
    """

    padded: bool = False
    _pending: list[tuple[Tensor, tuple[dist.ProcessGroup, ...]]] = field(default_factory=list)

    def add(self, tensor: Tensor, group: Groups) -> None:
        """Register a float32 tensor; it is written in place by `reduce`. Without a group it stays as it is."""
        assert tensor.dtype is torch.float32, f"FlatMax compares the bits of float32, not of {tensor.dtype}"
        if spanned(group):
            self._pending.append((tensor, spanned(group)))

    def reduce(self) -> None:
        """Run the collectives. Every rank of a group must have registered the same shapes in the same order, empty
        tensors too: the groups are taken in the order of registration, and ranks that take them in another one wait
        for each other."""
        pending, self._pending = self._pending, []
        for group in dict.fromkeys(group for _, groups in pending for group in groups):
            self._reduce_over(group, [tensor for tensor, groups in pending if group in groups])

    def _reduce_over(self, group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
        numel = sum(tensor.numel() for tensor in tensors)
        if numel == 0:
            return
        device = collective_device(group)  # parameters that FSDP2 offloaded are on the CPU
        parts = [tensor.reshape(-1).to(device) for tensor in tensors]
        if self.padded:
            parts.append(parts[0].new_zeros(max(_SMALLEST, 2 ** math.ceil(math.log2(numel))) - numel))
        # abs: torch's vectorized amax gives NaN with a sign bit, which would be below all numbers
        flat = torch.cat(parts).abs().view(torch.int32)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        reduced = flat.view(torch.float32)[:numel].split([tensor.numel() for tensor in tensors])
        views = [part.view(tensor.shape) for tensor, part in zip(tensors, reduced, strict=True)]
        # Now, and not after the last group: a tensor of two groups goes on from the first one's maxima. A few launches
        # copy all of them. By overload: a packet prints the tensors of its arguments, and so waits for the device.
        torch.ops.aten._foreach_copy_.default(tensors, views)


_DIGEST = 0xFFFFFF  # 24 bits, which a float32 holds exactly: digests travel among amaxes


def rank_digest(identity: object, device: torch.device) -> Tensor:
    """Float32 [2], for `FlatMax`: a digest of what must be equal on all ranks, by its `repr`, and its complement."""
    found = zlib.crc32(repr(identity).encode()) & _DIGEST  # not `hash`, which differs between processes
    digest = torch.full((2,), found, dtype=torch.float32, device=device)  # numbers of a launch: no copy is waited for
    digest[1].fill_(_DIGEST - found)
    return digest


_Number = TypeVar("_Number", float, Tensor)


def was_alike(highest: _Number, complement: _Number) -> _Number:
    """Whether all ranks gave the same `rank_digest`, from what MAX made of it: if two ranks differ, one has the larger
    digest and the other the larger complement, and the maxima add up to more."""
    return highest + complement == _DIGEST


SEED_ALIKE = "seed torch alike on all ranks (torch.manual_seed(seed)) before the model is built, or load a checkpoint"


def check_equal_on_ranks(named: dict[str, Tensor], group: Groups, what: str, remedy: str = SEED_ALIKE) -> None:
    """Raise the same error on every rank if int64 tensors [1] differ between the ranks of `group`. One collective for
    each of its process groups.

    Raises:
        RankMismatchError: naming the first that differs.
    """
    if not spanned(group) or not named:
        return
    values = torch.cat([v.reshape(1) for v in named.values()])
    extremes = torch.stack([values, ~values])  # ~ reverses the order, as minus would but for the smallest int64
    for each in spanned(group):
        extremes = extremes.to(collective_device(each))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=each)
    highest, lowest = extremes[0].cpu(), ~extremes[1].cpu()
    for name, high, low in zip(named, highest.tolist(), lowest.tolist(), strict=True):
        if high != low:
            raise RankMismatchError(f"{what} of {name!r} differs between ranks ({low} and {high}); {remedy}")
