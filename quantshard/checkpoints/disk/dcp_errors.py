"""Errors of DCP and torch.distributed: interrupts, lost ranks, and their descriptions."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from quantshard.errors import CheckpointError, QuantshardError

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""Deliberate ends of a process. The process itself raises them unchanged; other ranks raise a CheckpointError."""


def is_loss_of_a_rank(error: BaseException) -> bool:
    """Whether an error of a collective call means that a rank is gone: torch then raises a plain RuntimeError."""
    has_other_cause = isinstance(error, torch.OutOfMemoryError | QuantshardError | CheckpointException)
    return isinstance(error, RuntimeError) and not has_other_cause and dist.is_initialized()


def raise_interrupt(error: BaseException, group_rank: int) -> None:
    """Raise the interrupt of a rank, if DCP has wrapped one in its exception. `group_rank`: this rank's number."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    interrupts = {number: cause for number, (cause, _) in failures.items() if isinstance(cause, INTERRUPTS)}
    if group_rank in interrupts:
        raise interrupts[group_rank] from error
    for number, cause in sorted(interrupts.items()):
        raise CheckpointError(interrupted(number, cause)) from error


def interrupted(number: int, error: BaseException) -> str:
    return f"rank {number} was interrupted ({type(error).__name__})"


def first_failed(error: BaseException) -> tuple[int, BaseException]:
    """The first failed rank and its error in DCP's exception; for other errors, this rank and the error itself."""
    if isinstance(error, CheckpointException) and error.failures:
        number = min(error.failures)
        return number, error.failures[number][0]
    return dist.get_rank() if dist.is_initialized() else 0, error


def words(error: BaseException) -> str:
    """An error in one line: an OSError with its file, without its number; DCP's by the first failed rank's error."""
    _, cause = first_failed(error)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror if cause.filename is None else f"{cause.strerror}: {os.fsdecode(cause.filename)}"
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
