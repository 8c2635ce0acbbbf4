"""What one rank finds out and all must know: values and errors that are the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, ConfigurationError, LostRankError, QuantshardError

T = TypeVar("T")
U = TypeVar("U")


def rank() -> int:
    """This process's rank; 0 where there is no process group."""
    return 0 if process_groups.world() is None else dist.get_rank()


def rank_count() -> int:
    """How many ranks there are; 1 where there is no process group."""
    return 1 if process_groups.world() is None else dist.get_world_size()


def gathered(value: T) -> list[T]:
    """Every rank's value, by rank. A collective call."""
    found = [value] * rank_count()
    if process_groups.world() is not None:
        with _told():
            dist.all_gather_object(found, value)
    return found


@contextmanager
def _told() -> Iterator[None]:
    """What fails in a collective call is said as what it is: another rank is gone, or did not come."""
    try:
        yield
    except RuntimeError as error:
        if not is_loss_of_a_rank(error):
            raise
        raise LostRankError(
            f"another rank ended, was interrupted or did not come ({first_failure(error)}); look at what it said"
        ) from error


def is_loss_of_a_rank(error: BaseException) -> bool:
    """Whether an error from a collective call says that another rank is gone, as a bare RuntimeError does."""
    own = isinstance(error, torch.OutOfMemoryError | QuantshardError | CheckpointException)
    return isinstance(error, RuntimeError) and not own and process_groups.world() is not None


def from_rank0(find: Callable[[], T]) -> T:
    """What `find` returns on rank 0, on all ranks. A collective call.

    Raises:
        CheckpointError, ConfigurationError: on every rank, if raised there; any other error is said as the first.
    """
    sent: list[Any] = [None, None]
    interrupt: BaseException | None = None
    if rank() == 0:
        try:
            sent = [find(), None]
        except ConfigurationError as error:
            sent = [None, (ConfigurationError, str(error))]
        except (CheckpointError, OSError) as error:
            sent = [None, (CheckpointError, str(error))]
        except Exception as error:  # the other ranks wait
            sent = [None, (CheckpointError, f"{type(error).__name__}: {first_failure(error)}")]
        except INTERRUPTS as error:
            sent, interrupt = [None, (CheckpointError, _interrupted(0, error))], error
    if process_groups.world() is not None:
        with _told():
            dist.broadcast_object_list(sent, src=0)
    if interrupt is not None:
        raise interrupt
    if sent[1] is not None:
        kind, message = sent[1]
        raise kind(message)
    found: T = sent[0]
    return found


def raise_alike(error: str | None, prefix: str = "") -> None:
    """Raise the error of the first rank that has one, on every rank, behind a prefix. A collective call."""
    raise_first(gathered(error), prefix)


def raise_first(errors: Sequence[str | None], prefix: str = "") -> None:
    """Raise the first of the errors of all ranks, by rank, behind a prefix."""
    for number, message in enumerate(errors):
        if message is not None:
            raise CheckpointError(f"{prefix}{'' if number == 0 else f'on rank {number}: '}{message}")


def alike(own: Callable[[], T], prefix: str = "") -> T:
    """What each rank finds out for itself, if all of them do. A collective call. Errors are said behind the prefix.

    Raises:
        CheckpointError: the first rank's, or one of its kind, on every rank; any other error too is said as one.
        ConfigurationError: likewise.
        KeyboardInterrupt, SystemExit: of this rank; the others are told.
    """
    return exchanged(own, lambda _: None, prefix)[0]


def exchanged(own: Callable[[], T], tell: Callable[[T], U], prefix: str = "") -> tuple[T, list[U]]:
    """What this rank finds out for itself, and what each rank tells of its own, by rank, if none failed.

    One collective call; prefix and errors as of `alike`.
    """
    found: list[T] = []
    told: U | None = None
    failed: tuple[type[QuantshardError], str] | None = None
    cause: BaseException | None = None
    try:
        found.append(own())
        told = tell(found[0])
    except QuantshardError as error:
        failed, cause = (type(error), str(error)), error
    except OSError as error:
        failed, cause = (CheckpointError, str(error)), error
    except Exception as error:  # objects of the caller's fail in any way, and the other ranks wait
        failed, cause = (CheckpointError, f"{type(error).__name__}: {first_failure(error)}"), error
    except INTERRUPTS as error:
        gathered(((CheckpointError, _interrupted(rank(), error)), None))
        raise
    by_rank = gathered((failed, told))
    for number, (other, _) in enumerate(by_rank):
        if other is not None:
            kind, message = other
            raise kind(f"{prefix}{'' if number == 0 else f'on rank {number}: '}{message}") from cause
    return found[0], [cast(U, each) for _, each in by_rank]


INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""What ends a process because somebody wants it to: never said as an error of another kind to the process itself."""


def _interrupted(number: int, error: BaseException) -> str:
    return f"rank {number} was interrupted ({type(error).__name__})"


def raise_interrupt(error: CheckpointException, own: int) -> None:
    """Raise what interrupted a rank in DCP, which makes a failure of it.

    Raises:
        KeyboardInterrupt, SystemExit: it was this rank, whose number in the call is `own`.
        CheckpointError: it was another.
    """
    interrupts = {rank: found for rank, (found, _) in error.failures.items() if isinstance(found, INTERRUPTS)}
    if own in interrupts:
        raise interrupts[own] from error
    for number, found in sorted(interrupts.items()):
        raise CheckpointError(_interrupted(number, found)) from error


def first_failed(error: BaseException) -> tuple[int, BaseException]:
    """The first rank that had an error, and which; of one that is not DCP's, this rank's own number."""
    if isinstance(error, CheckpointException) and error.failures:
        number = min(error.failures)
        return number, error.failures[number][0]
    return rank(), error


def first_failure(error: BaseException) -> str:
    """The first line of an error; of DCP's, of the first rank that had one."""
    return words(first_failed(error)[1])


def words(error: BaseException) -> str:
    """An error in one line; one of the system's without its number, and with its file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {os.fsdecode(error.filename)}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
