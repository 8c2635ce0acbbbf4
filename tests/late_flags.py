"""Flags that come to the host of a CPU as they come from a GPU: when they are waited for, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantshard.collectives import flags

GPU = torch.cuda.is_available()


def sent_late(flag: Tensor) -> Callable[[], Tensor]:
    """In the place of a copy from a GPU."""
    value = flag.clone()
    return lambda: value


@contextmanager
def flags_come_late() -> Iterator[None]:
    """What a CPU finds out comes to the host as from a GPU."""
    if GPU:
        yield
        return
    before, sent = flags.DEFERRED_DEVICES, flags.copy_to_host
    flags.DEFERRED_DEVICES, flags.copy_to_host = {"cpu"}, sent_late
    try:
        yield
    finally:
        flags.DEFERRED_DEVICES, flags.copy_to_host = before, sent


@contextmanager
def read_flags() -> Iterator[tuple[set[flags.PendingFlag], list[flags.PendingFlag]]]:
    """The flags that were made, and those that the host waited for: PyTorch's guard sees no wait for an event."""
    made: set[flags.PendingFlag] = set()
    read: list[flags.PendingFlag] = []
    begin, value = flags.PendingFlag.__init__, flags.PendingFlag.__bool__

    def counted(flag: flags.PendingFlag, *args: Any) -> None:
        made.add(flag)
        begin(flag, *args)

    def waited(flag: flags.PendingFlag) -> bool:
        read.append(flag)
        return value(flag)

    flags.PendingFlag.__init__, flags.PendingFlag.__bool__ = counted, waited  # type: ignore[method-assign]
    try:
        yield made, read
    finally:
        flags.PendingFlag.__init__, flags.PendingFlag.__bool__ = begin, value  # type: ignore[method-assign]
