"""Batches that are there when their step begins: a thread prepares the next ones while a step runs.

The interface is that of torchdata's StatefulDataLoader: an iterator of batches with `state_dict` and `load_state_dict`.
Since a batch is a pure function of seed and step, the state is these two and the digest of the data, and no batch has
to be skipped after a resume.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from quantshard.errors import CheckpointError

AHEAD = 2
"""Batches that are prepared before they are asked for."""


class BatchLoader:
    """One process's share of each step's batch, on its device.

    Args:
        make: the batch of a step, a pure function.
        device: where batches go; to a GPU from pinned memory, on a stream of its own.
        last: the last step that there is a batch of.
        identity: what a checkpoint's state must agree with: "seed" and "corpus".

    `waited`: the seconds that the last call of `batch` waited. An error of `make` is raised by the call for its step.
    """

    def __init__(
        self, make: Callable[[int], Tensor], device: torch.device, last: int, identity: Mapping[str, Any]
    ) -> None:
        self.make, self.device, self.last, self.identity = make, device, last, dict(identity)
        self.step, self.waited = 0, 0.0
        self._pool = ThreadPoolExecutor(1, "batches")
        self._ready: deque[tuple[int, Future[tuple[Tensor, torch.cuda.Event | None]]]] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def batch(self, step: int) -> Tensor:
        """The batch of a step; the ones after it are prepared meanwhile."""
        began = time.perf_counter()
        while self._ready and self._ready[0][0] != step:  # asked for out of turn, as after a restore
            self._ready.popleft()[1].cancel()
        if not self._ready:
            self._prepare(step)
        batch, copied = self._ready.popleft()[1].result()
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            batch.record_stream(current)
        self.step, self.waited = step, time.perf_counter() - began
        following = self._ready[-1][0] if self._ready else step
        for more in range(following + 1, min(self.last, step + AHEAD) + 1):
            self._prepare(more)
        return batch

    def _prepare(self, step: int) -> None:
        self._ready.append((step, self._pool.submit(self._made, step)))

    def _made(self, step: int) -> tuple[Tensor, torch.cuda.Event | None]:
        batch = self.make(step)
        if self._stream is None:
            return batch.to(self.device), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            moved = batch.pin_memory().to(self.device, non_blocking=True)
            return moved, self._stream.record_event()

    def __iter__(self) -> Iterator[Tensor]:
        while self.step < self.last:
            yield self.batch(self.step + 1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: the last step, and what the order of the data follows from."""
        return {"step": self.step, **self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of a state; one of an earlier release says nothing of the data.

        Raises:
            CheckpointError: it is of other data, or of another seed.
        """
        for name, value in self.identity.items():
            if state.get(name, value) != value:
                raise CheckpointError(
                    f"the checkpoint was saved by a run with {name} = {str(state[name])[:80]}, and this one has "
                    f"{value}, so it would go on with other data; resume the run that saved it"
                )
        self.step = int(state["step"])

    def close(self) -> None:
        """Prepare nothing more. Called at the end of a training, and after an error."""
        self._pool.shutdown(wait=False, cancel_futures=True)
