"""Amax histories of delayed scaling; one launch handles all histories of a pass.

The oracles are `delayed_scaling.record_amaxes_` and `delayed_scaling.history_amaxes`.

history = history[1:] + [amax]         if 0 < amax < infinity, else unchanged
past    = max(history)                 or the newest amax
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.workspace import lasting_table


@triton.jit
def push_amax(history, length, amax, LENGTH: tl.constexpr):
    """Shift a history by one and append the amax, if it is positive and finite. LENGTH: a power of two >= length."""
    index = tl.arange(0, LENGTH)
    rolled = tl.load(history + index + 1, mask=index < length - 1, other=0.0)
    rolled = tl.where(index == length - 1, amax, rolled)
    tl.debug_barrier()  # all threads read before any writes
    recorded = tl.where((amax > 0) & (amax < float("inf")), length, 0)
    tl.store(history + index, rolled, mask=index < recorded)


@triton.jit
def history_of(table):
    row = table + tl.program_id(0)
    return tl.load(row).to(tl.pointer_type(tl.float32)), tl.load(row + tl.num_programs(0))


@triton.jit
def record_kernel(table, amaxes_ptr, LENGTH: tl.constexpr):
    history, length = history_of(table)
    push_amax(history, length, tl.load(amaxes_ptr + tl.program_id(0)), LENGTH)


@triton.jit
def past(history, length, MOST_RECENT: tl.constexpr, LENGTH: tl.constexpr):
    """`delayed_scaling.history_amax` of a history. LENGTH: a power of two >= length."""
    if MOST_RECENT:
        return tl.load(history + length - 1)
    else:
        index = tl.arange(0, LENGTH)
        recorded = tl.load(history + index, mask=index < length, other=0.0)
        return tl.max(recorded.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)


@triton.jit
def past_kernel(table, amaxes_ptr, STRIDE: tl.constexpr, MOST_RECENT: tl.constexpr, LENGTH: tl.constexpr):
    history, length = history_of(table)
    tl.store(amaxes_ptr + tl.program_id(0) * STRIDE, past(history, length, MOST_RECENT, LENGTH))


def record(histories: Sequence[Tensor], amaxes: Tensor) -> None:
    """Append amaxes [n], float32, to n different histories: float32, contiguous, on the device of the amaxes."""
    table, longest = _described(histories, amaxes.device)
    launch_kernel(record_kernel, (len(histories),), amaxes.device, table, amaxes, longest, num_warps=4)


def pasts(histories: Sequence[Tensor], most_recent: bool, stride: int = 1) -> Tensor:
    """Return the amax that each of n histories stands for, float32 [n], with this stride between results."""
    table, longest = _described(histories, histories[0].device)
    amaxes = torch.empty(len(histories), stride, dtype=torch.float32, device=histories[0].device)
    launch_kernel(
        past_kernel, (len(histories),), amaxes.device, table, amaxes, stride, most_recent, longest, num_warps=1
    )
    return amaxes[:, 0]


def _described(histories: Sequence[Tensor], device: torch.device) -> tuple[Tensor, int]:
    """Addresses and lengths, int64 [2, n] on the device, and a power of two >= all lengths."""
    # map, because experts have hundreds of histories
    rows = tuple(map(Tensor.data_ptr, histories)), tuple(map(Tensor.numel, histories))
    return lasting_table(rows, device).tensor(), triton.next_power_of_2(max(rows[1]))
