"""Exchange of values and errors between ranks, so that every rank returns or raises the same; errors of DCP."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from quantshard.errors import CheckpointError, LostRankError, QuantshardError

T = TypeVar("T")
U = TypeVar("U")

Failure = tuple[type[QuantshardError], str]
"""The class and the message of an error, as they are sent to other ranks."""

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""Deliberate ends of a process. The process itself raises them unchanged; other ranks raise a CheckpointError."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rank_count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather_object(value: T) -> list[T]:
    """Every rank's value, by rank. A collective call."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    with _lost_rank_errors():
        dist.all_gather_object(values, value)
    return values


@contextmanager
def _lost_rank_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_loss_of_a_rank(error):
            raise
        raise LostRankError(f"another rank exited or never joined ({reason(error)}); see its output") from error


def exchange_results(call: Callable[[], T], summarize: Callable[[T], U], prefix: str = "") -> tuple[T, list[U]]:
    """The result of `call` on this rank, and `summarize(result)` of every rank. One collective call.

    If `call` fails, every rank raises the first such rank's error, after `prefix`; others as CheckpointErrors.
    """
    result, summary, failure, cause = None, None, None, None
    try:
        result = call()
        summary = summarize(result)
    except (Exception, *INTERRUPTS) as error:  # user code can raise anything, and the other ranks wait
        failure, cause = _failure(error), error
    by_rank = all_gather_object((failure, summary))
    raise_first([rank_failure for rank_failure, _ in by_rank], cause, prefix)
    return cast(T, result), [cast(U, rank_summary) for _, rank_summary in by_rank]


def run_on_all_ranks(call: Callable[[], T], prefix: str = "") -> T:
    """The result of `call` on this rank if it succeeds on all ranks; see `exchange_results`. A collective call."""
    return exchange_results(call, lambda _: None, prefix)[0]


def from_rank0(call: Callable[[], T]) -> T:
    """The result of `call` on rank 0, on all ranks; see `exchange_results`. A collective call."""
    payload: list[Any] = [None, None]
    cause = None
    if rank() == 0:
        try:
            payload[0] = call()
        except (Exception, *INTERRUPTS) as error:  # user code can raise anything, and the other ranks wait
            payload[1], cause = _failure(error), error
    if dist.is_initialized():
        with _lost_rank_errors():
            dist.broadcast_object_list(payload, src=0)
    raise_first([payload[1]], cause)
    return cast(T, payload[0])


def _failure(error: BaseException) -> Failure:
    if isinstance(error, QuantshardError):
        return type(error), str(error)
    if isinstance(error, INTERRUPTS):
        return CheckpointError, _interrupted(rank(), error)
    return CheckpointError, str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {reason(error)}"


def raise_first(failures: Sequence[Failure | None], cause: BaseException | None = None, prefix: str = "") -> None:
    """Raise the first failure by rank. `cause`: this rank's error; if it is an interrupt, it is raised instead."""
    if isinstance(cause, INTERRUPTS):
        raise cause
    for number, failure in enumerate(failures):
        if failure is not None:
            kind, message = failure
            raise kind(f"{prefix}{'' if number == 0 else f'on rank {number}: '}{message}") from cause


@contextmanager
def writing_into(what: str) -> Iterator[None]:
    """Add to errors of the block that `what` is partly loaded."""
    try:
        yield
    except QuantshardError as error:
        raise type(error)(f"{error}; {what} is partly loaded: load again, or build it again") from error


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
        raise CheckpointError(_interrupted(number, cause)) from error


def _interrupted(number: int, error: BaseException) -> str:
    return f"rank {number} was interrupted ({type(error).__name__})"


def first_failed(error: BaseException) -> tuple[int, BaseException]:
    """The first failed rank and its error in DCP's exception; for other errors, this rank and the error itself."""
    if isinstance(error, CheckpointException) and error.failures:
        number = min(error.failures)
        return number, error.failures[number][0]
    return rank(), error


def reason(error: BaseException) -> str:
    """An error in one line: an OSError with its file, without its number; DCP's by the first failed rank's error."""
    _, cause = first_failed(error)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror if cause.filename is None else f"{cause.strerror}: {os.fsdecode(cause.filename)}"
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
