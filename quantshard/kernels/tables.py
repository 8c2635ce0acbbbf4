"""Tables of integers on the device, from which kernels read addresses of tensors and row numbers.

A table of addresses stays the same until tensors move, so it is copied once, and cached by its contents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

import torch
from torch import Tensor

Rows = tuple[tuple[int, ...], ...]

MOST_TABLES: Final = 1024

_TABLES: dict[tuple[Rows, torch.device], DeviceTable] = {}
_CAPTURED: list[Tensor] = []
"""Tables with addresses in CUDA graphs, and the host memory that the graphs copy from."""


def device_table(table: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy a table to the device, int64 [rows, columns], without waiting for the device."""
    return _numbers(chain.from_iterable(table), len(table), device)


def _numbers(numbers: Iterable[int], rows: int, device: torch.device) -> Tensor:
    buffer = array("q", numbers)  # five times as fast as torch.tensor
    if not buffer:
        return torch.empty(0, dtype=torch.int64, device=device)
    host = torch.frombuffer(buffer, dtype=torch.int64).view(rows, -1)
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


def discard(device: torch.device) -> None:
    for key in [key for key in _TABLES if key[1] == device]:
        _TABLES.pop(key, None)
