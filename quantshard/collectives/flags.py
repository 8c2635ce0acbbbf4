"""Flags that the device finds out and the host reads later, so that nothing waits for the device in between."""

from __future__ import annotations

import torch
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard.errors import ConfigurationError, RankMismatchError

DEFERRED_DEVICES = {"cuda"}
"""Types of the devices that run behind the host."""


class PendingFlag:
    """A bool scalar on its way to the host, as the device has it when all that it was given so far is done."""

    def __init__(self, flag: Tensor) -> None:
        self.is_here = flag.device.type not in DEFERRED_DEVICES
        self._value, self._arrival = (flag.clone(), None) if self.is_here else _sent(flag)

    def __bool__(self) -> bool:
        """Its value; waits for it, but not for what the device was given later."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return bool(self._value)


def _sent(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    arriving = torch.empty(flag.shape, dtype=flag.dtype, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(flag.device))
    return arriving, arrival


class MismatchRecord:
    """Whether ranks were found to disagree, which the host of each learns at the same `check`, whenever it gets there.

    What a CPU finds is said by the next `check`. What a GPU finds is said by the first `check` after that, as all ranks
    of a group take the same ones in the same order: none may wait on its host for a collective that the others do not
    come to; before it would, there is a `check`. A captured CUDA graph notes it in each replay, for the first `check`
    after the next `add` that is not captured, and for `settle`.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._found: dict[torch.device, Tensor] = {}
        self._sent: list[PendingFlag] = []
        self._is_captured = False

    def add(self, differs: Tensor) -> None:
        """Note a bool scalar, equal on all ranks that it concerns.

        Raises:
            ConfigurationError: the first of a device is added while a CUDA graph is captured.
        """
        is_capturing = kernel_dispatch.is_capturing()
        found = self._found.get(differs.device)
        if found is None:
            if is_capturing:  # memory of the graph has no value before a replay
                raise ConfigurationError(
                    "a CUDA graph is captured of what ranks must agree on, and none of it ran before; run a step "
                    "before the capture"
                )
            with torch.inference_mode(False):
                found = self._found[differs.device] = torch.zeros((), dtype=torch.bool, device=differs.device)
        found.logical_or_(differs)
        if is_capturing:
            self._is_captured = True
        else:
            self._sent.append(PendingFlag(found))

    def is_pending(self) -> bool:
        """Whether the next `check` may wait for the device."""
        return bool(self._sent)

    def check(self, waits: bool = True) -> None:
        """Raise if any was true; `waits`: also of those that the device has yet to send.

        Raises:
            RankMismatchError: on every rank that they concern.
        """
        if not self._sent or kernel_dispatch.is_capturing():
            return
        read = [flag for flag in self._sent if waits or flag.is_here]
        self._sent = [flag for flag in self._sent if not (waits or flag.is_here)]
        if any([bool(flag) for flag in read]):
            self._raise()

    def settle(self) -> None:
        """The same of all that was ever added, replays of captured graphs included: waits for the device.

        Raises:
            RankMismatchError: as `check`.
        """
        self.check()
        if self._is_captured and not kernel_dispatch.is_capturing() and any(map(bool, self._found.values())):
            self._raise()

    def _raise(self) -> None:
        for found in self._found.values():
            found.zero_()
        self._sent.clear()
        raise RankMismatchError(self._message)
