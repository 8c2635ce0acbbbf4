"""Amax histories of delayed scaling, all of a pass in one launch: `amax.record_amaxes_`.

history = history[1:] + [amax]         if 0 < amax < infinity, else as it was
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql


@triton.jit
def append(history, length, amax, LENGTH: tl.constexpr):
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
    append(history, length, tl.load(amaxes_ptr + tl.program_id(0)), LENGTH)


_CAPTURED: list[Tensor] = []
"""Tables that CUDA graphs hold the addresses of."""


@lru_cache(maxsize=4096)
def _table(rows: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device)


def record(histories: Sequence[Tensor], amaxes: Tensor) -> None:
    """Append amaxes [n], float32, to n different histories, float32 and contiguous, on the device of the amaxes."""
    assert all(history.is_contiguous() for history in histories), "histories are contiguous"
    rows = tuple((history.data_ptr(), history.numel()) for history in histories)
    longest = triton.next_power_of_2(max(length for _, length in rows))
    table = _table(rows, amaxes.device)
    if amaxes.is_cuda and torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(table)
    with ql.on(amaxes.device):
        record_kernel[(len(rows),)](table, amaxes, longest, num_warps=4)
