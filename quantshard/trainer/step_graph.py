"""A training step as a CUDA graph: the host makes one call for its thousands of launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from quantshard.errors import UnsupportedOperationError

WARMUP = 2
"""Eager steps before a capture, in which kernels are compiled and FSDP2 finds the order of its gathers."""

DeviceStep = Callable[[Tensor, Tensor], Tensor]
"""What the device does in a step, of a batch and a flag; it reads nothing back, and returns what is to be read."""
StepContext = Callable[[], AbstractContextManager[Any]]
"""What is entered around a step, in which the device does more then."""


class StepGraph:
    """A step that runs eagerly `WARMUP` times, is captured, and replayed from then on, with the same bits.

    So is the step within each of the contexts that are entered around it, as a graph of its own. Their memory is not
    shared: what a capture leaves behind, as flags that are read later, a replay of another graph would overwrite.

    A graph reads its arguments at the addresses of the capture, so they are copied there. What a replay returns is
    overwritten by its next one.
    """

    def __init__(self, step: DeviceStep) -> None:
        self._step = step
        self._eager: dict[StepContext, int] = {}
        self._replays: dict[StepContext, Callable[[], Tensor]] = {}
        self._arguments: tuple[Tensor, Tensor] | None = None

    def __call__(self, batch: Tensor, flag: Tensor, around: StepContext = nullcontext) -> Tensor:
        """A step; `around`: equal at each call for the same.

        Raises:
            UnsupportedOperationError: it cannot be captured.
        """
        count = self._eager.get(around, 0)
        if count < WARMUP:
            self._eager[around] = count + 1
            with around():
                return self._step(batch, flag)
        if self._arguments is None:
            self._arguments = batch.clone(), flag.clone()
        for argument, value in zip(self._arguments, (batch, flag), strict=True):
            argument.copy_(value)
        if around not in self._replays:
            self._replays[around] = self._captured(around, self._arguments)
        return self._replays[around]()

    def close(self) -> None:
        """Let go of the graphs; a later call captures anew. A communicator of NCCL waits, when it is destroyed, until
        no graph has its collectives any more."""
        self._replays.clear()

    def _captured(self, around: StepContext, arguments: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
        def work() -> Tensor:
            with around():
                return self._step(*arguments)

        return recorded(work)


def recorded(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The replay of a CUDA graph of some work, which is not run now.

    Raises:
        UnsupportedOperationError: something in it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # batches are pinned by another thread
            result = work()
    except RuntimeError as error:
        cause = error.__context__ or error  # the end of a capture raises too
        raise UnsupportedOperationError(
            f"cuda_graphs: a step of this model cannot be captured ({str(cause).splitlines()[0]}); start again without "
            "--cuda-graphs, or, if there is a checkpoint, go on with: quantshard resume RUN --no-cuda-graphs"
        ) from error

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
