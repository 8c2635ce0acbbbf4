"""Batches that are ready when their step begins: a thread prepares the next batches while a step runs.

The interface is that of torchdata's StatefulDataLoader: an iterator of batches with `state_dict` and `load_state_dict`.
A batch is a pure function of seed and step, so the state is the seed, the step and the digest of the data. A resume
does not need to skip batches.
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
"""The number of batches to prepare ahead."""


class BatchLoader:
    """One rank's share of each step's batch, on its device.

    Args:
        make: pure function that returns the batch of a step.
        device: destination of the batches; a GPU copies from pinned memory on a separate stream.
        last: last step that has a batch.
        identity: values that must match the state in a checkpoint: "seed" and "corpus".

    `waited`: seconds that the last call of `batch` waited. An error in `make` is raised by the call for its step.
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
        """Return the batch of a step, and start to prepare the following ones."""
        start = time.perf_counter()
        # out of order, e.g. after a restore
        while self._ready and self._ready[0][0] != step:
            self._ready.popleft()[1].cancel()
        if not self._ready:
            self._prepare(step)
        batch, copy_done = self._ready.popleft()[1].result()
        if copy_done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copy_done)
            batch.record_stream(current)
        self.step, self.waited = step, time.perf_counter() - start
        last_prepared = self._ready[-1][0] if self._ready else step
        for next_step in range(last_prepared + 1, min(self.last, step + AHEAD) + 1):
            self._prepare(next_step)
        return batch

    def _prepare(self, step: int) -> None:
        self._ready.append((step, self._pool.submit(self._made, step)))

    def _made(self, step: int) -> tuple[Tensor, torch.cuda.Event | None]:
        batch = self.make(step)
        if self._stream is None:
            return batch.to(self.device), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            device_batch = batch.pin_memory().to(self.device, non_blocking=True)
            return device_batch, self._stream.record_event()

    def __iter__(self) -> Iterator[Tensor]:
        while self.step < self.last:
            yield self.batch(self.step + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the last step, and what determines the order of the data."""
        return {"step": self.step, **self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of a state. States of earlier releases have no `identity`.

        Raises:
            CheckpointError: the state belongs to other data or another seed.
        """
        for name, value in self.identity.items():
            if state.get(name, value) != value:
                raise CheckpointError(
                    f"the checkpoint was saved by a run with {name} = {str(state[name])[:80]}, and this one has "
                    f"{value}, so it would go on with other data; resume the run that saved it"
                )
        self.step = int(state["step"])

    def close(self) -> None:
        """Stop preparing batches; called at the end of training and after an error."""
        self._pool.shutdown(wait=False, cancel_futures=True)
