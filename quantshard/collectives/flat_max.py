"""Maxima of many tensors over ranks in one flat collective."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard.collectives.process_groups import Groups, collective_device, spanned

_SMALLEST = 1024  # sending 4 KiB takes no longer than 4 bytes


@dataclass
class FlatMax:
    """Replaces tensors by their maxima over process groups, with one flat collective per group.

    Values are nonnegative float32 and are compared as integers, so that NaN, which a floating-point MAX can lose,
    compares above infinity and survives.

    Args:
        padded: pad each collective to a power of two. Ranks that are out of step then mostly meet in a collective of
            the same size, and a digest that is reduced with the values detects them (`rank_checks.rank_digest`).
    """

    padded: bool = False
    _pending: list[tuple[Tensor, tuple[dist.ProcessGroup, ...]]] = field(default_factory=list)

    def add(self, tensor: Tensor, group: Groups) -> None:
        """Register a float32 tensor; `reduce` writes it in place. Without a group, the tensor stays unchanged."""
        assert tensor.dtype is torch.float32, f"FlatMax compares the bits of float32, not of {tensor.dtype}"
        if spanned(group):
            self._pending.append((tensor, spanned(group)))

    def reduce(self) -> None:
        """Run the collectives. All ranks of a group have registered the same shapes in one order, empty ones too."""
        pending, self._pending = self._pending, []
        for group in dict.fromkeys(group for _, groups in pending for group in groups):
            self._reduce_over(group, [tensor for tensor, groups in pending if group in groups])

    def _reduce_over(self, group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
        numel = sum(tensor.numel() for tensor in tensors)
        if numel == 0:
            return
        device = collective_device(group)  # tensors of parameters that FSDP2 offloads are on the CPU
        parts = [tensor.reshape(-1).to(device) for tensor in tensors]
        if self.padded:
            parts.append(parts[0].new_zeros(max(_SMALLEST, 2 ** math.ceil(math.log2(numel))) - numel))
        # abs: torch's vectorized amax can return a NaN with a sign bit, which would compare below all numbers.
        flat = torch.cat(parts).abs().view(torch.int32)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        reduced = flat.view(torch.float32)[:numel].split([tensor.numel() for tensor in tensors])
        views = [part.view(tensor.shape) for tensor, part in zip(tensors, reduced, strict=True)]
        # Copy before the next group: a tensor of two groups continues with the maxima of the first. Call the overload
        # directly: an overload packet formats its tensor arguments, which waits for the device.
        torch.ops.aten._foreach_copy_.default(tensors, views)
