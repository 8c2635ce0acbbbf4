"""Tables of integers on the device, by which a kernel finds tensors and rows.

A table of addresses is the same from step to step while tensors stay where they are, so it is copied once. It is found
by its numbers: where tensors have moved they differ, and nobody need tell of it.
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
"""Of `lasting_table`. Before one more is kept, all are dropped."""

_TABLES: dict[tuple[Rows, torch.device], DeviceTable] = {}
_CAPTURED: list[Tensor] = []
"""Tables that CUDA graphs hold the addresses of, and what they copy them from."""


def device_table(table: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A table on the device: int64 [rows, columns]. The copy does not wait for the device."""
    return _numbers(chain.from_iterable(table), len(table), device)


def _numbers(numbers: Iterable[int], rows: int, device: torch.device) -> Tensor:
    held = array("q", numbers)  # by way of which it takes a fifth of the time
    if not held:
        return torch.empty(0, dtype=torch.int64, device=device)
    host = torch.frombuffer(held, dtype=torch.int64).view(rows, -1)
    if device.type != "cuda":
        return host
    host = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(host)  # each replay copies it
    return host.to(device, non_blocking=True)


class DeviceTable:
    """A table that several launches read: `tensor` is for those on the current stream, whichever one it was copied
    on."""

    def __init__(self, table: Sequence[Sequence[int]], device: torch.device) -> None:
        self._table, self.device = device_table(table, device), device
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._stream = torch.cuda.current_stream(device)
            self._copied = self._stream.record_event()

    def tensor(self) -> Tensor:
        """int64 [rows, columns]."""
        if self._on_gpu:
            stream = torch.cuda.current_stream(self.device)
            if torch.cuda.is_current_stream_capturing():
                _CAPTURED.append(self._table)  # a capture begins when all that was launched has run
            elif stream != self._stream:
                stream.wait_event(self._copied)
                self._table.record_stream(stream)
        return self._table


def lasting_table(rows: Rows, device: torch.device) -> DeviceTable:
    """The table of some numbers on a device, from the last time that they were asked for."""
    found = _TABLES.get((rows, device))
    if found is None:
        found = DeviceTable(rows, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return found  # it has its numbers when the graph is replayed
        if len(_TABLES) >= MOST_TABLES:
            _TABLES.clear()
        _TABLES[rows, device] = found
    return found


def discard(device: torch.device) -> None:
    """Forget the lasting tables of a device: the next one that is asked for is made, whatever ran before."""
    for key in [key for key in _TABLES if key[1] == device]:
        _TABLES.pop(key, None)
