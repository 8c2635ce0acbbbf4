"""Exchange of values and errors between ranks, so that every rank returns or raises the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch.distributed as dist

from quantshard.checkpoints.disk.dcp_errors import INTERRUPTS, interrupted, is_loss_of_a_rank, words
from quantshard.errors import CheckpointError, LostRankError, QuantshardError

T = TypeVar("T")
U = TypeVar("U")

Failure = tuple[type[QuantshardError], str]
"""The class and the message of an error, as they are sent to other ranks."""


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
        raise LostRankError(
            f"another rank exited, was interrupted or never joined ({words(error)}); see its output"
        ) from error


def exchange_results(call: Callable[[], T], summarize: Callable[[T], U], prefix: str = "") -> tuple[T, list[U]]:
    """The result of `call` on this rank, and `summarize(result)` of every rank. One collective call.

    If `call` fails on any rank, every rank raises the error of the first such rank, after `prefix`; errors of other
    libraries become CheckpointErrors.
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
        return CheckpointError, interrupted(rank(), error)
    return CheckpointError, str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {words(error)}"


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
