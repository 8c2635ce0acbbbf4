"""Small device memory of kernels: zeroed scalars that they raise (amaxes, NaN flags, scales), and tables of integers.

Many scalars share one allocation. A scalar is handed out once. Its zero is ordered with the stream of the request, so
only later launches on that stream can raise it.

Tables hold addresses of tensors and row numbers. A table of addresses stays the same until tensors move, so it is
copied once, and cached by its contents.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from quantshard.kernels import tracing

LaunchQueue = tuple[torch.device, int, bool]
"""A device, one of its streams, and whether a CUDA graph is being captured."""

SCALARS: Final = 64
APART: Final = 4
"""Distance between scalars, in float32: kernels are compiled for addresses that are multiples of 16 bytes."""

_FREE: dict[LaunchQueue, list[Tensor]] = {}

Rows = tuple[tuple[int, ...], ...]

MOST_TABLES: Final = 1024

_TABLES: dict[tuple[Rows, torch.device], DeviceTable] = {}
_CAPTURED: list[Tensor] = []
"""Tables with addresses in CUDA graphs, and the host memory that the graphs copy from."""


def launch_queue(device: torch.device) -> LaunchQueue:
    """Return the queue of this thread's launches on a device; only launches in one queue are ordered."""
    if device.type != "cuda":
        return device, 0, False
    # several times as fast as torch.cuda.current_stream, and each launch asks
    stream = torch.accelerator.current_stream(device.index).stream_id
    return device, stream, torch.cuda.is_current_stream_capturing()


def zero_scalars(device: torch.device, *shape: int) -> list[Tensor]:
    """Return float32 zeros of `shape`, () or (1, 1), in one allocation. Autograd can save scalars of shape (1, 1)."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # some are raised outside inference mode
            return zero_scalars(device, *shape)
    block = torch.zeros(SCALARS, APART, dtype=torch.float32, device=device)
    scalars = block[:, :1].view(SCALARS, *shape[1:])  # strides of 1, so that they can be viewed as bytes
    # Views from `unbind` share a version counter, so a write to one would invalidate the others for autograd. Views
    # from `unsafe_split` have separate counters.
    return list(torch.unsafe_split(scalars, 1) if shape else scalars.unbind())


def discard(device: torch.device) -> None:
    """Drop the free scalars and the tables of a device, so that the next request allocates."""
    for queue in [queue for queue in _FREE if queue[0] == device]:
        _FREE.pop(queue, None)
    for key in [key for key in _TABLES if key[1] == device]:
        _TABLES.pop(key, None)


def zero(device: torch.device, written: bool = False) -> Tensor:
    """Return a float32 zero [1, 1] or, if a kernel writes it before it is read (`written`), uninitialized memory."""
    queue = launch_queue(device)
    if queue[2] or tracing.on:  # a replay only zeroes memory that was zeroed in its graph
        return (torch.empty if written else torch.zeros)((1, 1), dtype=torch.float32, device=device)
    try:
        return _FREE[queue].pop()
    except (KeyError, IndexError):  # another thread can take the last one
        scalars = zero_scalars(device, 1, 1)
        scalar = scalars.pop()
        _FREE[queue] = scalars
        return scalar


def device_table(table: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy a table to the device, int64 [rows, columns], without waiting for the device."""
    buffer = array("q", chain.from_iterable(table))  # five times as fast as torch.tensor
    if not buffer:
        return torch.empty(0, dtype=torch.int64, device=device)
    host = torch.frombuffer(buffer, dtype=torch.int64).view(len(table), -1)
    if device.type != "cuda":
        return host
    host = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(host)  # each replay copies it
    return host.to(device, non_blocking=True)


class DeviceTable:
    def __init__(self, table: Sequence[Sequence[int]], device: torch.device) -> None:
        self._table, self.device = device_table(table, device), device
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._stream = torch.cuda.current_stream(device)
            self._copied = self._stream.record_event()

    def tensor(self) -> Tensor:
        """Return the table for launches on the current stream, int64 [rows, columns]."""
        if self._on_gpu:
            stream = torch.cuda.current_stream(self.device)
            if torch.cuda.is_current_stream_capturing():
                _CAPTURED.append(self._table)  # all earlier launches finish before a capture begins
            elif stream != self._stream:
                stream.wait_event(self._copied)
                self._table.record_stream(stream)
        return self._table


def lasting_table(rows: Rows, device: torch.device) -> DeviceTable:
    """Return the table of these numbers on a device, from a cache if possible."""
    table = _TABLES.get((rows, device))
    if table is None:
        table = DeviceTable(rows, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return table  # filled only when the graph is replayed
        if len(_TABLES) >= MOST_TABLES:
            _TABLES.clear()
        _TABLES[rows, device] = table
    return table
