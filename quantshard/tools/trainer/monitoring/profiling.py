"""`--profile N`: traces N steps of a rank with torch.profiler and, on a GPU, takes a memory snapshot with call
stacks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from quantshard import private_torch
from quantshard.errors import QuantshardError
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import complain
from quantshard.tools.trainer.run_dir import RunDir

WARM_UP: Final = 3
"""Steps before the trace, which compile kernels and allocate memory."""


class StepProfile:
    """Traces `steps` steps of this rank after the first `WARM_UP` steps; 0 disables tracing.

    The trace RUN/profile/rank-N.json opens in Perfetto (ui.perfetto.dev) or chrome://tracing, the GPU memory snapshot
    memory-rank-N.pickle in pytorch.org/memory_viz. `note` reports a missing snapshot (on a CPU) and a training that
    ended before the first traced step; a shorter trace is written as it is.

    If a file cannot be written (e.g. on a host without the run's folder), a warning is shown and training continues,
    because other ranks wait for this one.
    """

    def __init__(self, run: RunDir, rank: int, device: torch.device, steps: int, note: Callable[[str], object]) -> None:
        self._run, self._rank, self._device, self._steps, self._note = run, rank, device, steps, note
        self._done = 0
        self._trace: profile | None = None
        self._notes_memory = False

    def __enter__(self) -> StepProfile:
        return self

    def step(self) -> None:
        """Count a finished step; start or write the trace when due."""
        self._done += 1
        if self._steps and self._done == WARM_UP:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
            self._begin_memory()
            self._trace = profile(activities=kinds, record_shapes=True, profile_memory=True)
            self._trace.start()
        elif self._done == WARM_UP + self._steps:
            self._write()

    def _begin_memory(self) -> None:
        if self._device.type != "cuda":
            self._note("no snapshot of memory is written: PyTorch makes one of a GPU alone, and not of a CPU")
            return
        try:
            private_torch.begin_memory_history(self._device)
            self._notes_memory = True
        except (QuantshardError, RuntimeError) as error:
            complain(f"[rank {self._rank}] WARNING: {error}; this process writes no snapshot of memory")

    def _write(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        with self._warned("the trace"):
            trace.stop()
            if self._done > WARM_UP:
                self._export(trace.export_chrome_trace, f"rank-{self._rank}.json")
        if self._notes_memory:
            self._notes_memory = False
            with self._warned("the snapshot of the memory"):
                if self._done > WARM_UP:
                    self._export(private_torch.end_memory_history, f"memory-rank-{self._rank}.pickle")
                else:
                    private_torch.end_memory_history(None)

    @contextmanager
    def _warned(self, what: str) -> Iterator[None]:
        try:
            yield
        except (QuantshardError, OSError, RuntimeError) as error:
            complain(f"[rank {self._rank}] WARNING: {error}; {what} of this process is lost")

    def _export(self, write: Callable[[str], object], name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, name)
            write(str(file))
            outputs.write_file(self._run.profile / name, file.read_bytes(), within=self._run.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()
        if self._steps and self._done <= WARM_UP and error is None:
            self._note(
                f"no step was traced: --profile {self._steps} begins after {WARM_UP} steps, and {self._done} were "
                "trained"
            )
