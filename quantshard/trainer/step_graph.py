"""A training step as a CUDA graph: the host makes one call for its thousands of launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantshard.errors import UnsupportedOperationError

WARMUP = 2
"""Eager steps before the capture, in which kernels are compiled and FSDP2 finds the order of its gathers."""

DeviceStep = Callable[[Tensor, Tensor], Tensor]
"""What the device does in a step, of a batch and a flag; it reads nothing back, and returns what is to be read."""


class StepGraph:
    """A step that runs eagerly `WARMUP` times, is captured, and replayed from then on, with the same bits.

    A graph reads its arguments at the addresses of the capture, so they are copied there. What a replay returns is
    overwritten by the next one.
    """

    def __init__(self, step: DeviceStep) -> None:
        self._step, self._left = step, WARMUP
        self._arguments: tuple[Tensor, Tensor] | None = None
        self._replay: Callable[[], Tensor] | None = None

    def __call__(self, batch: Tensor, flag: Tensor, *, eager: bool = False) -> Tensor:
        """A step. `eager`: of which something is wanted that only Python sees.

        Raises:
            UnsupportedOperationError: it cannot be captured.
        """
        if eager or self._left:
            self._left -= not eager
            return self._step(batch, flag)
        if self._replay is None:
            kept = self._arguments = batch.clone(), flag.clone()
            self._replay = recorded(lambda: self._step(*kept))
        assert self._arguments is not None
        for argument, value in zip(self._arguments, (batch, flag), strict=True):
            argument.copy_(value)
        return self._replay()


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
