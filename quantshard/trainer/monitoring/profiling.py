"""`--profile N`: what N steps of a process do, as a trace of torch.profiler with the memory that they ask for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from quantshard.errors import QuantshardError
from quantshard.terminal import outputs
from quantshard.terminal.screen import complain
from quantshard.trainer.run_dir import RunDir

WARM_UP: Final = 3
"""Steps that pass before any is traced: they compile and allocate what later ones find."""


class StepProfile:
    """Traces `steps` steps of this process, from that after its first `WARM_UP`; 0: none.

    RUN/profile/rank-N.json opens in Perfetto (ui.perfetto.dev) or chrome://tracing. A training that ends before leaves
    what it has; if that is no step, `note` is told. A trace that cannot be written, as on a host without the run's
    folder, is lost with a warning: the training goes on, for other processes wait for this one.
    """

    def __init__(self, run: RunDir, rank: int, device: torch.device, steps: int, note: Callable[[str], object]) -> None:
        self._run, self._rank, self._device, self._steps, self._note = run, rank, device, steps, note
        self._done = 0
        self._trace: profile | None = None

    def __enter__(self) -> StepProfile:
        return self

    def step(self) -> None:
        """A step is over."""
        self._done += 1
        if self._steps and self._done == WARM_UP:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
            self._trace = profile(activities=kinds, record_shapes=True, profile_memory=True)
            self._trace.start()
        elif self._done == WARM_UP + self._steps:
            self._write()

    def _write(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        try:
            trace.stop()
            if self._done > WARM_UP:
                self._export(trace)
        except (QuantshardError, OSError, RuntimeError) as error:
            complain(f"[rank {self._rank}] WARNING: {error}; the trace of this process is lost")

    def _export(self, trace: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            trace.export_chrome_trace(str(file))
            outputs.write_file(self._run.profile / f"rank-{self._rank}.json", file.read_bytes(), within=self._run.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()
        if self._steps and self._done <= WARM_UP and error is None:
            self._note(
                f"no step was traced: --profile {self._steps} begins after {WARM_UP} steps, and {self._done} were "
                "trained"
            )
