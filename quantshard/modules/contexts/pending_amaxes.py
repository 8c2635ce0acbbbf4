"""Amaxes of delayed scaling that wait for the end of the forward or backward pass which is running."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.collectives.delayed_scaling import MISMATCHES, PendingAmaxes

_queued_flush: weakref.ReferenceType[_BackwardFlush] | None = None
_rehearses = False

backward_amaxes = PendingAmaxes()
"""Pending amaxes of output gradients in the running backward pass; global because autograd uses several threads."""


class _ThreadAmaxes(threading.local):
    def __init__(self) -> None:
        self.forward = PendingAmaxes()


_of_thread = _ThreadAmaxes()


def forward_amaxes() -> PendingAmaxes:
    """Pending amaxes of inputs and weights in the outermost autocast of this thread."""
    return _of_thread.forward


def flush_after_backward() -> None:
    """Queue the recording of output-gradient amaxes for the end of the running backward pass.

    A recomputed forward calls this function first. Otherwise a reentrant checkpoint, which runs a nested backward pass,
    would queue the recording for the end of the nested pass.
    """
    global _queued_flush
    drop_failed_backward()
    if _queued_flush is None:
        flush = _BackwardFlush()
        _queued_flush = weakref.ref(flush)
        private_torch.at_end_of_backward(flush)
        if MISMATCHES.is_pending() and private_torch.has_offloaded_parameters():
            MISMATCHES.check()  # at the end of backward FSDP2 would wait for other ranks first


class _BackwardFlush:
    """Callback at the end of a backward pass. Autograd has the only reference, so it is freed if the pass fails."""

    def __call__(self) -> None:
        global _queued_flush
        _queued_flush = None
        backward_amaxes.flush()


@contextmanager
def amaxes_noted_in(forward: PendingAmaxes, backward: PendingAmaxes) -> Iterator[None]:
    """Redirect amaxes to `forward` and `backward`; code that runs inside counts as a rehearsal, not as training."""
    global backward_amaxes, _queued_flush, _rehearses
    before, before_forward = (backward_amaxes, _queued_flush, _rehearses), _of_thread.forward
    backward_amaxes, _queued_flush, _rehearses = backward, None, True
    _of_thread.forward = forward
    try:
        yield
    finally:
        backward_amaxes, _queued_flush, _rehearses = before
        _of_thread.forward = before_forward


def is_rehearsed() -> bool:
    """True in a rehearsal, such as a warm-up pass before a capture."""
    return _rehearses


def drop_failed_backward() -> None:
    """Drop the pending amaxes of a failed backward pass. A running pass keeps its amaxes."""
    global _queued_flush
    if _queued_flush is not None and _queued_flush() is None:
        _queued_flush = None
        backward_amaxes.drop()


@torch.library.custom_op("quantshard::record_forward_amaxes", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _record_forward_amaxes(failed: bool = False) -> Tensor:
    """Record forward amaxes at the exit of the outermost autocast, as an operator of a compiled graph.

    `failed`: the exit is by an exception, so they are dropped.

    It returns a tensor because torch 2.13's inductor would use the previous layer's output after freeing it.
    """
    if failed:
        _of_thread.forward.drop()
    else:
        _of_thread.forward.flush()
    return torch.empty(0, dtype=torch.float32, device="cpu")


@_record_forward_amaxes.register_fake
def _(failed: bool = False) -> Tensor:
    private_torch.check_order_is_kept()
    return torch.empty(0, dtype=torch.float32, device="cpu")


private_torch.keep_order(torch.ops.quantshard.record_forward_amaxes.default)
