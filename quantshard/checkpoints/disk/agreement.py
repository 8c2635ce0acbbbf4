"""Exchange of values and errors between ranks, so that every rank returns or raises the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, LostRankError, QuantshardError

T = TypeVar("T")
U = TypeVar("U")


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return 0 if process_groups.world() is None else dist.get_rank()


def rank_count() -> int:
    """The number of ranks; 1 without a process group."""
    return 1 if process_groups.world() is None else dist.get_world_size()


def all_gather_object(value: T) -> list[T]:
    """Every rank's value, by rank. A collective call."""
    values = [value] * rank_count()
    if process_groups.world() is not None:
        with _lost_rank_errors():
            dist.all_gather_object(values, value)
    return values


@contextmanager
def _lost_rank_errors() -> Iterator[None]:
    """Convert the failure of a collective call to a LostRankError: another rank exited or never joined."""
    try:
        yield
    except RuntimeError as error:
        if not is_loss_of_a_rank(error):
            raise
        raise LostRankError(
            f"another rank exited, was interrupted or never joined ({first_failure(error)}); see its output"
        ) from error


def is_loss_of_a_rank(error: BaseException) -> bool:
    """Whether an error of a collective call means that a rank is gone: torch then raises a plain RuntimeError."""
    has_other_cause = isinstance(error, torch.OutOfMemoryError | QuantshardError | CheckpointException)
    return isinstance(error, RuntimeError) and not has_other_cause and process_groups.world() is not None


def from_rank0(find: Callable[[], T]) -> T:
    """The result of `find` on rank 0, on all ranks. A collective call.

    If `find` fails, every rank raises; errors of other libraries become CheckpointErrors.
    """
    result, failure, error = _attempt(find) if rank() == 0 else (None, None, None)
    payload: list[Any] = [result, failure]
    if process_groups.world() is not None:
        with _lost_rank_errors():
            dist.broadcast_object_list(payload, src=0)
    raise_first([payload[1]], error)
    return cast(T, payload[0])


@contextmanager
def writing_into(what: str) -> Iterator[None]:
    """Add to errors of the block that `what` is partly loaded."""
    try:
        yield
    except QuantshardError as error:
        raise type(error)(f"{error}; {what} is partly loaded: load again, or build it again") from error


def run_on_all_ranks(call: Callable[[], T], prefix: str = "") -> T:
    """Return the result of `call` on this rank if it succeeds on all ranks. A collective call.

    Otherwise every rank raises the error of the first rank that failed, after `prefix`; errors of other libraries
    become CheckpointErrors. A rank that was interrupted raises its interrupt.
    """
    return exchange_results(call, lambda _: None, prefix)[0]


def exchange_results(call: Callable[[], T], summarize: Callable[[T], U], prefix: str = "") -> tuple[T, list[U]]:
    """Return the result of `call` on this rank, and `summarize(result)` of every rank in order of ranks.

    One collective call; see `run_on_all_ranks` for `prefix` and errors.
    """

    def call_and_summarize() -> tuple[T, U]:
        result = call()
        return result, summarize(result)

    results, failure, error = _attempt(call_and_summarize)
    by_rank = all_gather_object((failure, None if results is None else results[1]))
    raise_first([rank_failure for rank_failure, _ in by_rank], error, prefix)
    assert results is not None
    return results[0], [cast(U, summary) for _, summary in by_rank]


Failure = tuple[type[QuantshardError], str]


def _attempt(call: Callable[[], T]) -> tuple[T | None, Failure | None, BaseException | None]:
    """The result of a call, the (class, message) of its error for other ranks, and the error."""
    try:
        return call(), None, None
    except QuantshardError as error:
        return None, (type(error), str(error)), error
    except OSError as error:
        return None, (CheckpointError, str(error)), error
    except INTERRUPTS as error:
        return None, (CheckpointError, _interrupted(rank(), error)), error
    except Exception as error:  # user code can raise anything, and the other ranks wait
        return None, (CheckpointError, f"{type(error).__name__}: {first_failure(error)}"), error


def raise_first(failures: Sequence[Failure | None], error: BaseException | None = None, prefix: str = "") -> None:
    """Raise the first failure by rank. `error`: this rank's error; if it is an interrupt, it is raised instead."""
    if isinstance(error, INTERRUPTS):
        raise error
    for number, failure in enumerate(failures):
        if failure is not None:
            kind, message = failure
            raise kind(f"{prefix}{'' if number == 0 else f'on rank {number}: '}{message}") from error


INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""Deliberate ends of a process. The process itself raises them unchanged; other ranks raise a CheckpointError."""


def _interrupted(number: int, error: BaseException) -> str:
    return f"rank {number} was interrupted ({type(error).__name__})"


def raise_interrupt(error: CheckpointException, group_rank: int) -> None:
    """Raise the interrupt of a rank that DCP has wrapped in a failure. `group_rank`: this rank's number."""
    interrupts = {rank: cause for rank, (cause, _) in error.failures.items() if isinstance(cause, INTERRUPTS)}
    if group_rank in interrupts:
        raise interrupts[group_rank] from error
    for number, cause in sorted(interrupts.items()):
        raise CheckpointError(_interrupted(number, cause)) from error


def first_failed(error: BaseException) -> tuple[int, BaseException]:
    """The first failed rank and its error in DCP's exception; for other errors, this rank and the error itself."""
    if isinstance(error, CheckpointException) and error.failures:
        number = min(error.failures)
        return number, error.failures[number][0]
    return rank(), error


def first_failure(error: BaseException) -> str:
    """The first line of an error; for DCP's exception, of the first failed rank's error."""
    return words(first_failed(error)[1])


def words(error: BaseException) -> str:
    """An error in one line. An OSError is shown with its file, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {os.fsdecode(error.filename)}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
