"""A save in the background, and how ranks wait for one together."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

from quantshard.checkpoints.disk import agreement, commit
from quantshard.checkpoints.disk.commit import SaveTarget
from quantshard.checkpoints.disk.ownership import Ownership
from quantshard.errors import CheckpointError

POLL_SECONDS = 10.0
"""After how long a rank whose writing goes on asks the others about theirs."""
POLLS_AFTER_FAILURE = 3
"""How often it does so once one has failed, before it counts its own as lost."""


@dataclass(frozen=True)
class SaveReport:
    """What a save cost this rank.

    `bytes`: of the tensors that it holds. `held_seconds`: for how long training stood still; `background_seconds`: how
    long the save then took beside it, None while it runs.
    """

    step: int
    path: str
    bytes: int
    held_seconds: float
    background_seconds: float | None = 0.0


@dataclass
class PendingSave:
    """A save in the background. Until it is done its future holds it, and so the `owner`, whatever the Manager does."""

    report: SaveReport
    target: SaveTarget
    future: Future[Any]
    owner: Ownership | None
    began: float
    ended: float | None = None
    running: tuple[int, ...] = ()
    """The ranks whose writing was not done when the others were last asked."""

    def end(self, _: object) -> None:
        """What its future calls when it is done."""
        self.ended, self.owner = time.perf_counter(), None

    def failures(self) -> list[str | None]:
        """What failed on each rank, once all have written, or soon after one has failed. A collective call.

        The ranks ask each other every `POLL_SECONDS`. To wait for its own writing first, a rank could wait for one that
        has failed: a process that saves looks half an hour for the others of its group.
        """
        asked_again = 0
        while True:
            done = bool(wait_for([self.future], POLL_SECONDS).done)
            error = self.future.exception() if done else None
            said = None if error is None else commit.said_of(self.report.path, error)
            ranks = agreement.gathered((done, said))
            found = [of_rank for _, of_rank in ranks]
            asked_again += any(found)
            self.running = tuple(number for number, (ended, _) in enumerate(ranks) if not ended)
            if not self.running or asked_again > POLLS_AFTER_FAILURE:
                return found


def wait_for_process(saves: Collection[Future[Any]]) -> None:
    """Wait until the process that saves is free, on every rank. A collective call.

    Ranks end a save within moments of each other: where it runs on and has ended elsewhere, it failed there.

    Raises:
        CheckpointError: it is not free soon after it is on another rank; the same on every rank.
    """
    asked_again = 0
    while True:
        ranks = agreement.gathered(bool(wait_for(saves, POLL_SECONDS).not_done))
        if not any(ranks):
            return
        asked_again += not all(ranks)
        if asked_again > POLLS_AFTER_FAILURE:
            raise CheckpointError(
                f"on rank {ranks.index(True)}: the process that saves is busy with a save of another Manager, which "
                "has ended on other ranks; call that one's wait(), which says what failed"
            )
