"""Accumulators of a sampled step: per device, one row for each operand and each parameter.

Nothing here waits for a device. At the end of the step, one collective reduces the rows of all ranks to rows of the
global tensors: counts and squares are summed, amaxes and scales are maximized. Replicas of an operand are all counted,
so shares and ratios do not depend on their number. Counts are integers in float64, so the order of summation does not
change them; squares can differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard.collectives import process_groups
from quantshard.collectives.flags import DEFERRED_DEVICES
from quantshard.collectives.process_groups import Group
from quantshard.numerics.quantization_error import EMPTY, EXTREMES, SUMS
from quantshard.recipe import TensorRole
from quantshard.tensor.storage import QuantizedStorage

KINDS: Final = (
    (TensorRole.WEIGHT, False),
    (TensorRole.INPUT, False),
    (TensorRole.INPUT, True),
    (TensorRole.GRAD_OUTPUT, False),
    (TensorRole.GRAD_OUTPUT, True),
)
"""Operands of a weight: the role, and whether the operand was quantized separately for wgrad."""

PARAMETER: Final = ("elements", "codes", "gradient", "update", "value", "changed")
"""Columns of a parameter, float64: number of elements; number of codes; sums of squares of the gradient, of the update
and of the values before the update; number of codes that the step changed."""

_COPIES: Final = 16
"""Copies of each row that kernels add to, to spread contending atomic additions."""


class SampleNumbers(NamedTuple):
    """Numbers of a sampled step on the host, float64.

    `sums`, `extremes`: [weights, kinds, columns]. `parameters`: [parameters, columns].
    """

    sums: Tensor
    extremes: Tensor
    parameters: Tensor


class SampleBuffer:
    """Rows on one device, reused by every sampled step."""

    def __init__(self, weights: int, parameters: int, device: torch.device) -> None:
        copies, rows = _COPIES if kernel_dispatch.kernels_on(device) else 1, weights * len(KINDS)
        self.sums = torch.zeros(copies, rows, len(SUMS), dtype=torch.float64, device=device)
        # Filled on the device, because a captured graph copies only pinned memory from the host.
        self._empty = torch.cat([torch.full((1,), value, dtype=torch.float32, device=device) for value in EMPTY])
        self.extremes = self._empty.expand(copies, rows, len(EXTREMES)).contiguous()
        self.parameters = torch.zeros(parameters, len(PARAMETER), dtype=torch.float64, device=device)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Reset all rows for the next sampled step."""
        self.sums.zero_()
        self.extremes.copy_(self._empty)
        self.parameters.zero_()

    def add_operand(self, row: int, values: Tensor, operand: Tensor | QuantizedStorage, partial: bool = False) -> None:
        """Add values [R, C] and their quantized form; a plain tensor as `operand` adds only the values.

        `partial`: a large matrix can be sampled in part.
        """
        if row not in self._views:
            self._views[row] = self.sums[:, row], self.extremes[:, row]
        sums, extremes = self._views[row]
        if not isinstance(operand, QuantizedStorage):
            kernel_dispatch.add_values(sums, extremes, values)
            return
        cell, (copy, *_) = operand.cell, operand.cell.format.copies.values()
        kernel_dispatch.add_quantization_error(
            sums, extremes, values, copy, operand.touched(), operand.shard.origin, cell.scaling.random_hadamard,
            partial,
        )  # fmt: skip

    def add_codes(self, row: int, storage: QuantizedStorage) -> None:
        """Add a weight without a master: amax and scales of the values that the codes represent, and no error."""
        buffer = SampleBuffer(1, 0, storage.device)
        buffer.add_operand(0, storage.dequantize(), storage)
        self.sums[0, row, :3] += buffer.sums[:, 0, :3].sum(0)
        self.extremes[0, row] = _merged(torch.cat([buffer.extremes[:, 0], self.extremes[:1, row]]))

    def flat(self) -> Tensor:
        """Concatenate all numbers into one float64 vector."""
        return torch.cat(
            [
                self.sums.sum(0).flatten(),
                _merged(self.extremes).double().flatten(),
                self.parameters.flatten(),
            ]
        )


def _merged(extremes: Tensor) -> Tensor:
    """Reduce extremes [copies, ..., columns] over the copies."""
    return torch.cat([extremes[..., :2].amax(0), extremes[..., 2:].amin(0)], -1)


def gathered(buffers: Sequence[SampleBuffer], weights: int, parameters: int, group: Group) -> Tensor:
    """Reduce the numbers of all buffers and ranks to one float64 vector for `PendingNumbers`. A collective call."""
    sizes = _sizes(weights, parameters)
    device = buffers[0].sums.device
    if group is not None:
        device = process_groups.collective_device(group)
    rows = torch.stack([buffer.flat().to(device) for buffer in buffers])
    if group is not None:
        flat = _reduced(rows, sizes)
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, flat, group=group)
        rows = torch.stack(parts)
    return _reduced(rows, sizes)


def _sizes(weights: int, parameters: int) -> list[int]:
    rows = weights * len(KINDS)
    return [rows * len(SUMS), rows * len(EXTREMES), parameters * len(PARAMETER)]


def _reduced(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    sums, extremes, parameters = rows.split(list(sizes), dim=1)
    by_slot = extremes.unflatten(1, (-1, len(EXTREMES)))
    return torch.cat([sums.sum(0), _merged(by_slot).flatten(), parameters.sum(0)])


class PendingNumbers:
    """The result of `gathered` on its way to the host."""

    def __init__(self, flat: Tensor, weights: int, parameters: int) -> None:
        self._weights, self._sizes, self._arrival, self._flat = weights, _sizes(weights, parameters), None, flat
        if flat.device.type in DEFERRED_DEVICES:
            self._flat = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            self._flat.copy_(flat, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record(torch.cuda.current_stream(flat.device))

    def read(self) -> SampleNumbers:
        """Return the numbers; waits for the copy to the host, but not for work queued later."""
        if self._arrival is not None:
            self._arrival.synchronize()
        sums, extremes, parameters = self._flat.split(self._sizes)
        shape = (self._weights, len(KINDS))
        return SampleNumbers(
            sums.view(*shape, len(SUMS)),
            extremes.view(*shape, len(EXTREMES)),
            parameters.view(-1, len(PARAMETER)),
        )
