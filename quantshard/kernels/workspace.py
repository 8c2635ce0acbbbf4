"""Zeroed scalars for kernels to raise: amaxes, poisons, and scales of whole tensors. Many share one allocation.

A scalar is handed out once. It is zero in the order of the stream that it was asked for on, whose later launches alone
may raise it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

LaunchQueue = tuple[torch.device, int, bool]
"""A device, a stream of it, and whether a CUDA graph is captured."""

SCALARS: Final = 64
"""Scalars that share an allocation."""
APART: Final = 4
"""Float32 from one to the next: kernels are compiled for addresses that are multiples of 16 bytes."""

_FREE: dict[LaunchQueue, list[Tensor]] = {}


def launch_queue(device: torch.device) -> LaunchQueue:
    """Which queue this thread's launches on a device go to now: what was launched there has run before them, and of
    others nobody knows. While a CUDA graph is captured it is another one, since its launches run with the graph."""
    if device.type != "cuda":
        return device, 0, False
    return device, torch.cuda.current_stream(device).cuda_stream, torch.cuda.is_current_stream_capturing()


def zero_scalars(device: torch.device, *shape: int) -> list[Tensor]:
    """Float32 zeros of `shape`, () or (1, 1), in one allocation. Those of (1, 1) may be saved for backward."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # some may be raised outside of it
            return zero_scalars(device, *shape)
    block = torch.zeros(SCALARS, APART, dtype=torch.float32, device=device)
    scalars = block[:, :1].view(SCALARS, *shape[1:])  # with strides of 1, so that they can be seen as bytes
    # Views of `unbind` share a version counter, so that a write to one invalidates what backward saved of the others.
    # Those of `unsafe_split` have counters of their own.
    return list(torch.unsafe_split(scalars, 1) if shape else scalars.unbind())


def discard(device: torch.device) -> None:
    """Forget the free scalars of a device: the next one that is asked for brings an allocation, whatever ran before."""
    for queue in [queue for queue in _FREE if queue[0] == device]:
        _FREE.pop(queue, None)


class _LocalState(threading.local):
    on = False


separate = _LocalState()
"""`on` within `separate_allocations`."""


@contextmanager
def separate_allocations() -> Iterator[None]:
    """Inside, on this thread, each scalar has an allocation of its own: for operators of compiled functions. Their
    results may not share memory, and where CUDA graphs are made of them memory is the graphs' before they are
    captured, of which nothing may be kept."""
    before = separate.on
    separate.on = True
    try:
        yield
    finally:
        separate.on = before


def zero(device: torch.device, written: bool = False) -> Tensor:
    """Float32 [1, 1], zero; or anything, if it is `written` by a kernel before it is read.

    A captured graph gets one of its own: a replay zeroes only what was zeroed within it.
    """
    queue = launch_queue(device)
    if queue[2] or separate.on:
        return (torch.empty if written else torch.zeros)((1, 1), dtype=torch.float32, device=device)
    try:
        return _FREE[queue].pop()
    except (KeyError, IndexError):  # another thread may have taken the last one
        found = zero_scalars(device, 1, 1)
        scalar = found.pop()
        _FREE[queue] = found
        return scalar
