"""Amax histories of delayed scaling, all of a pass in one launch.

The oracles are `delayed_scaling.record_amaxes_` and `delayed_scaling.history_amaxes`.

history = history[1:] + [amax]         if 0 < amax < infinity, else as it was
past    = max(history)                 or its newest
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard import private_torch
from quantshard.kernels.launch import launch_kernel


@triton.jit
def push_amax(history, length, amax, LENGTH: tl.constexpr):
    """Move a history of this length by one and end it with the amax, if it is recorded; LENGTH: a power of two."""
    at = tl.arange(0, LENGTH)
    rolled = tl.load(history + at + 1, mask=at < length - 1, other=0.0)
    rolled = tl.where(at == length - 1, amax, rolled)
    tl.debug_barrier()  # all have read before one writes
    recorded = tl.where((amax > 0) & (amax < float("inf")), length, 0)
    tl.store(history + at, rolled, mask=at < recorded)


@triton.jit
def record_kernel(table, amaxes_ptr, LENGTH: tl.constexpr):
    row = table + tl.program_id(0) * 2
    history = tl.load(row).to(tl.pointer_type(tl.float32))
    length = tl.load(row + 1)
    push_amax(history, length, tl.load(amaxes_ptr + tl.program_id(0)), LENGTH)


@triton.jit
def past(history, length, MOST_RECENT: tl.constexpr, LENGTH: tl.constexpr):
    """`delayed_scaling.history_amax` of a history of this length; LENGTH: a power of two."""
    if MOST_RECENT:
        return tl.load(history + length - 1)
    else:
        at = tl.arange(0, LENGTH)
        recorded = tl.load(history + at, mask=at < length, other=0.0)
        return tl.max(recorded.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)


@triton.jit
def past_kernel(table, amaxes_ptr, STRIDE: tl.constexpr, MOST_RECENT: tl.constexpr, LENGTH: tl.constexpr):
    row = table + tl.program_id(0) * 2
    history = tl.load(row).to(tl.pointer_type(tl.float32))
    tl.store(amaxes_ptr + tl.program_id(0) * STRIDE, past(history, tl.load(row + 1), MOST_RECENT, LENGTH))


@lru_cache(maxsize=4096)
def _table(rows: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int64)
    # not from memory that can be paged out, which a copy would wait for
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def record(histories: Sequence[Tensor], amaxes: Tensor) -> None:
    """Append amaxes [n], float32, to n different histories, float32 and contiguous, on the device of the amaxes."""
    table, longest = _described(histories, amaxes.device)
    launch_kernel(record_kernel, (len(histories),), amaxes.device, table, amaxes, longest, num_warps=4)


def pasts(histories: Sequence[Tensor], most_recent: bool, stride: int = 1) -> Tensor:
    """The amax that each of n histories, as in `record`, stands for: float32 [n], each `stride` behind the other."""
    table, longest = _described(histories, histories[0].device)
    amaxes = torch.empty(len(histories), stride, dtype=torch.float32, device=histories[0].device)
    launch_kernel(
        past_kernel, (len(histories),), amaxes.device, table, amaxes, stride, most_recent, longest, num_warps=1
    )
    return amaxes[:, 0]


def _described(histories: Sequence[Tensor], device: torch.device) -> tuple[Tensor, int]:
    """Addresses and lengths, int64 [n, 2] on the device, and a power of two that is no less than a length."""
    rows = tuple([(history.data_ptr(), history.numel()) for history in histories])
    table = _table(rows, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        private_torch.keep_with(histories[0], table)  # the graph has its address, and is not replayed without these
    return table, triton.next_power_of_2(max([length for _, length in rows]))
