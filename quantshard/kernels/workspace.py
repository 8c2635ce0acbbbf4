"""Zeroed scalars that kernels raise: amaxes, NaN flags, and scales of whole tensors. Many share one allocation.

A scalar is handed out once. Its zero is ordered with the stream of the request, so only later launches on that stream
can raise it.
"""

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


def launch_queue(device: torch.device) -> LaunchQueue:
    """Return the queue of this thread's launches on a device; only launches in one queue are ordered.

    During the capture of a CUDA graph the queue differs, because its launches run with the graph.
    """
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
    """Drop the free scalars of a device, so that the next request allocates."""
    for queue in [queue for queue in _FREE if queue[0] == device]:
        _FREE.pop(queue, None)


def zero(device: torch.device, written: bool = False) -> Tensor:
    """Return a float32 zero [1, 1], or uninitialized memory if a kernel writes it before it is read (`written`).

    A captured or traced graph gets a separate scalar, because a replay only zeroes memory that was zeroed in the graph.
    """
    queue = launch_queue(device)
    if queue[2] or tracing.on:
        return (torch.empty if written else torch.zeros)((1, 1), dtype=torch.float32, device=device)
    try:
        return _FREE[queue].pop()
    except (KeyError, IndexError):  # another thread can take the last one
        scalars = zero_scalars(device, 1, 1)
        scalar = scalars.pop()
        _FREE[queue] = scalars
        return scalar
