"""What one rank finds out and all must know: values and errors that are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from quantshard import amax
from quantshard.errors import CheckpointError, ConfigurationError, QuantshardError

T = TypeVar("T")


def rank() -> int:
    """This process's rank; 0 where there is no process group."""
    return 0 if amax.world() is None else dist.get_rank()


def count() -> int:
    """How many ranks there are; 1 where there is no process group."""
    return 1 if amax.world() is None else dist.get_world_size()


def gathered(value: T) -> list[T]:
    """Every rank's value, by rank. A collective call."""
    found = [value] * count()
    if amax.world() is not None:
        dist.all_gather_object(found, value)
    return found


def from_rank0(find: Callable[[], T]) -> T:
    """What `find` returns on rank 0, on all ranks. A collective call.

    Raises:
        CheckpointError, ConfigurationError: on every rank, if raised there; any other error is said as the first.
    """
    sent: list[Any] = [None, None]
    if rank() == 0:
        try:
            sent = [find(), None]
        except ConfigurationError as error:
            sent = [None, (ConfigurationError, str(error))]
        except (CheckpointError, OSError) as error:
            sent = [None, (CheckpointError, str(error))]
        except Exception as error:  # the other ranks wait
            sent = [None, (CheckpointError, f"{type(error).__name__}: {first_failure(error)}")]
    if amax.world() is not None:
        dist.broadcast_object_list(sent, src=0)
    if sent[1] is not None:
        kind, message = sent[1]
        raise kind(message)
    found: T = sent[0]
    return found


def raise_alike(error: str | None, prefix: str = "") -> None:
    """Raise the error of the first rank that has one, on every rank, behind a prefix. A collective call."""
    for number, message in enumerate(gathered(error)):
        if message is not None:
            raise CheckpointError(f"{prefix}{'' if number == 0 else f'on rank {number}: '}{message}")


def alike(own: Callable[[], T], prefix: str = "") -> T:
    """What each rank finds out for itself, if all of them do. A collective call. Errors are said behind the prefix.

    Raises:
        CheckpointError: the first rank's, or one of its kind, on every rank; any other error too is said as one.
        ConfigurationError: likewise.
    """
    found: list[T] = []
    failed: tuple[type[QuantshardError], str] | None = None
    cause: Exception | None = None
    try:
        found.append(own())
    except QuantshardError as error:
        failed, cause = (type(error), str(error)), error
    except OSError as error:
        failed, cause = (CheckpointError, str(error)), error
    except Exception as error:  # objects of the caller's fail in any way, and the other ranks wait
        failed, cause = (CheckpointError, f"{type(error).__name__}: {first_failure(error)}"), error
    for number, other in enumerate(gathered(failed)):
        if other is not None:
            kind, message = other
            raise kind(f"{prefix}{'' if number == 0 else f'on rank {number}: '}{message}") from cause
    return found[0]


def first_failure(error: BaseException) -> str:
    """The first line of an error; of DCP's, of the first rank that had one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
