"""Background saves: the copy that is written, and how ranks wait for the end of a save together."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement, commit
from quantshard.checkpoints.disk.commit import SaveTarget
from quantshard.checkpoints.disk.ownership import Ownership
from quantshard.errors import CheckpointError

POLL_SECONDS = 10.0
"""How long a rank that is still writing waits before it polls the other ranks."""
POLLS_AFTER_FAILURE = 3
"""Number of polls after a rank has failed, before this rank gives up its own save."""


class Stager(AsyncStager):
    """Copies states. When `stage` returns, the copy is complete and holds the state at the time of the call.

    The memory is pinned if there is a GPU, and reused by the next copy. So the previous copy must be written before the
    next `stage`. `shared`: put the copy in shared memory, for another process.
    """

    def __init__(self, shared: bool) -> None:
        self._gpu = torch.cuda.is_available()
        self._copier = private_torch.state_dict_stager(pin_memory=self._gpu, share_memory=shared)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the copy; entries keep their types (a DTensor keeps its placements)."""
        copy: dict[str, Any] = self._copier.stage(state_dict, non_blocking=self._gpu)
        if self._gpu:
            torch.cuda.synchronize()
        return copy

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` is synchronous."""

    def close(self) -> None:
        """Free the memory."""
        self._copier.close()


class CopiedStateStager(AsyncStager):
    """Stager for a state that is already a copy."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state itself."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the memory belongs to the `Stager`."""


@dataclass(frozen=True)
class SaveReport:
    """The cost of a save on this rank.

    `bytes`: size of this rank's tensors. `held_seconds`: how long training was blocked. `background_seconds`: how long
    the save then ran in the background; None while it runs.
    """

    step: int
    path: str
    bytes: int
    held_seconds: float
    background_seconds: float | None = 0.0


@dataclass
class PendingSave:
    """A background save. Its future keeps it and its `owner` alive until the save ends, even if the Manager is gone."""

    report: SaveReport
    target: SaveTarget
    future: Future[Any]
    owner: Ownership | None
    began: float
    ended: float | None = None
    running: tuple[int, ...] = ()
    """The ranks that were still writing at the last poll."""

    def end(self, _: object) -> None:
        """Record the end of the save; the callback of `future`."""
        self.ended, self.owner = time.perf_counter(), None

    def failures(self) -> list[agreement.Failure | None]:
        """Each rank's failure, or None, once all ranks have written or soon after one has failed. A collective call.

        The ranks poll each other every `POLL_SECONDS`. A rank cannot simply wait for its own write: if another rank has
        failed, the saving process waits half an hour for the rest of its group.
        """
        polls_after_failure = 0
        while True:
            done = bool(wait_for([self.future], POLL_SECONDS).done)
            error = self.future.exception() if done else None
            reason = None if error is None else commit.save_failure(self.report.path, error)
            failure: agreement.Failure | None = None if reason is None else (CheckpointError, reason)
            ranks = agreement.all_gather_object((done, failure))
            errors = [rank_error for _, rank_error in ranks]
            polls_after_failure += any(errors)
            self.running = tuple(number for number, (rank_done, _) in enumerate(ranks) if not rank_done)
            if not self.running or polls_after_failure > POLLS_AFTER_FAILURE:
                return errors


def wait_for_process(saves: Collection[Future[Any]]) -> None:
    """Wait on every rank until the saving process is free. A collective call.

    Ranks end a save within moments of each other. If a save still runs on some ranks only, it failed on the others.

    Raises:
        CheckpointError: the process is still busy after it was free on another rank; the same on every rank.
    """
    polls_after_failure = 0
    while True:
        ranks = agreement.all_gather_object(bool(wait_for(saves, POLL_SECONDS).not_done))
        if not any(ranks):
            return
        polls_after_failure += not all(ranks)
        if polls_after_failure > POLLS_AFTER_FAILURE:
            raise CheckpointError(
                f"on rank {ranks.index(True)}: the process that saves is busy with a save of another Manager, which "
                "has ended on other ranks; call that one's wait(), which says what failed"
            )
