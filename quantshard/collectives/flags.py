"""Flags that the device computes and the host reads later, so that the host does not wait for the device in between."""

from collections.abc import Callable

import torch
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard.errors import ConfigurationError, RankMismatchError

DEFERRED_DEVICES = {"cuda"}
"""Device types that run asynchronously to the host."""


def copy_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the host, of the values after all work queued so far. The returned function waits for it only."""
    if tensor.device.type not in DEFERRED_DEVICES:
        values = tensor.clone()
        return lambda: values
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(tensor.device))

    def read() -> Tensor:
        arrival.synchronize()
        return copy

    return read


class PendingFlag:
    """A bool scalar that is being copied to the host; see `copy_to_host`."""

    def __init__(self, flag: Tensor) -> None:
        self.is_here = flag.device.type not in DEFERRED_DEVICES
        self._read = copy_to_host(flag)

    def __bool__(self) -> bool:
        return bool(self._read())


class MismatchRecord:
    """Records whether ranks disagree, and raises on all of them at the same `check`, however far each host has got.

    A mismatch on a CPU is raised by the next `check`, on a GPU by the next one that waits, and in a captured CUDA graph
    by the first one after an `add` outside a capture, or by `settle`. No rank may raise while others wait for it, so
    there is a `check` before every collective. `flags`: what was recorded, by device.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self.flags: dict[torch.device, Tensor] = {}
        self._sent: list[PendingFlag] = []
        self._is_captured = False

    def add(self, differs: Tensor) -> None:
        """Record a bool scalar that is equal on all ranks concerned."""
        is_capturing = kernel_dispatch.is_capturing()
        flag = self.flags.get(differs.device)
        if flag is None:
            if is_capturing:  # a graph's memory has no value before the first replay
                raise ConfigurationError("a graph captures a new check of ranks; run a step before the capture")
            with torch.inference_mode(False):
                flag = self.flags[differs.device] = torch.zeros((), dtype=torch.bool, device=differs.device)
        flag.logical_or_(differs)
        if is_capturing:
            self._is_captured = True
        else:
            self._sent.append(PendingFlag(flag))

    def is_pending(self) -> bool:
        """True if the next `check` can wait for the device."""
        return bool(self._sent)

    def check(self, waits: bool = True) -> None:
        """Raise if any recorded flag is true; with `waits` also those that the device has not sent yet."""
        if not self._sent or kernel_dispatch.is_capturing():
            return
        arrived = [flag for flag in self._sent if waits or flag.is_here]
        self._sent = [flag for flag in self._sent if not (waits or flag.is_here)]
        if any([bool(flag) for flag in arrived]):
            self._raise()

    def settle(self) -> None:
        """Raise if any flag was ever true, including replays of captured graphs. Waits for the device."""
        self.check()
        if self._is_captured and not kernel_dispatch.is_capturing() and any(map(bool, self.flags.values())):
            self._raise()

    def _raise(self) -> None:
        for flag in self.flags.values():
            flag.zero_()
        self._sent.clear()
        raise RankMismatchError(self._message)
