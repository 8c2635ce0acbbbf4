"""What a run measures: statistics and alarms, and traces of steps."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from quantshard import private_torch
from quantshard.errors import QuantshardError
from quantshard.optimizers import ElementwiseOptimizer
from quantshard.optimizers.guards import too_large
from quantshard.tools.statistics import Alarm, Statistics, StatisticsSample, first_nonfinite
from quantshard.tools.statistics.step_sample import StepSample
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import complain
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings

WARM_UP: Final = 3
"""Steps before the trace, which compile kernels and allocate memory."""


@contextmanager
def traced_steps(run: RunDir, rank: int, device: torch.device, steps: int) -> Iterator[Callable[[], object]]:
    """Trace `steps` steps of this rank after the first `WARM_UP` steps; 0: none. Yields a function to call after each
    step.

    The trace RUN/profile/rank-N.json opens in Perfetto (ui.perfetto.dev) or chrome://tracing, the GPU memory snapshot
    memory-rank-N.pickle in pytorch.org/memory_viz. If a file cannot be written (e.g. on a host without the run's
    folder), a warning is shown and training continues, because other ranks wait for this one.
    """
    if not steps:
        yield lambda: None
        return
    kinds, records_memory = [ProfilerActivity.CPU], False

    @contextmanager
    def warned(what: str) -> Iterator[None]:
        try:
            yield
        except (QuantshardError, OSError, RuntimeError) as error:
            complain(f"[rank {rank}] WARNING: {error}; {what} of this process is lost")

    def export(write: Callable[[str], object], name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, name)
            write(str(file))
            outputs.write_file(run.profile / name, file.read_bytes(), within=run.path)

    def write(trace: profile) -> None:
        with warned("the trace"):
            export(trace.export_chrome_trace, f"rank-{rank}.json")
        if records_memory:
            with warned("the memory snapshot"):
                export(private_torch.end_memory_history, f"memory-rank-{rank}.pickle")

    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
        with warned("the memory snapshot"):
            private_torch.begin_memory_history(device)
            records_memory = True
    plan = schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1)
    with profile(
        activities=kinds, schedule=plan, on_trace_ready=write, record_shapes=True, profile_memory=True
    ) as trace:
        yield trace.step
    if trace.step_num <= WARM_UP and rank == 0:
        complain(f"no step was traced: --profile begins after {WARM_UP} steps, and {trace.step_num} were trained")


class RunStatistics:
    """Passes statistics of a run to `record`, and alarms to `note`, from the step after `done` on. Collective.

    An alarm is shown as soon as it is known and recorded with its step. Alarms about the loss and skipped steps are
    known at once, others one step later, with the sample.

    Only the first of several skipped steps in a row is diagnosed. If its gradients were finite but too large, the
    optimizer knows the parameter. Otherwise the step's passes run again to locate the first non-finite value
    (`first_nonfinite`), if it recurs. The diagnosis changes no state, so losses are the same as without alarms.
    """

    def __init__(
        self,
        settings: TrainSettings,
        model: nn.Module,
        optimizer: ElementwiseOptimizer,
        record: Callable[[Mapping[str, Any]], None],
        note: Callable[[str, int], None],
        done: int,
    ) -> None:
        self._model, self._optimizer, self._record, self._note = model, optimizer, record, note
        self._skipped, self._skips = optimizer.skipped_steps, False
        self._sample: StepSample | None = None
        self._statistics = Statistics(
            model,
            optimizer,
            every=settings.statistics_every,
            step=done,
            saturation=settings.alarm_saturation,
            loss_spike=settings.alarm_loss_spike,
            on_alarm=self._show,
        )

    @property
    def is_sampling(self) -> bool:
        """Whether the next step is sampled."""
        return self._statistics.is_sampling

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Context around all device work of a sampled step, which can be captured as a CUDA graph. Replays use the
        sample of the last capture."""
        with self._statistics.whole_step() as self._sample:
            yield

    def stepped(self, loss: float, again: Callable[[], object]) -> None:
        """Finish a step, which ran within `whole_step` if it was sampled. Collective. `again`: callable that repeats
        the step's forward and backward."""
        skipped = self._optimizer.skipped_steps
        is_first, self._skips, self._skipped = not self._skips, skipped > self._skipped, skipped
        if self._skips and is_first:
            kind, name, text = self._why_skipped(again)
            self._statistics.add_alarm(Alarm(kind, name, 1.0, f"step {self._statistics.done + 1} was skipped: {text}"))
        self._write(self._statistics.step(loss, self._sample if self.is_sampling else None))

    def _why_skipped(self, again: Callable[[], object]) -> tuple[str, str, str]:
        """Return the kind, name and text of the alarm of a skipped step. Collective."""
        if name := self._optimizer.large_gradient:
            return "large gradient", name, too_large(name)
        source = first_nonfinite(self._model, again)
        if source is None:
            return "nan", "gradient", "a gradient was infinite or NaN; in the same pass made once more, none is"
        return "nan", source.name, source.text

    def settle(self) -> None:
        """Record the pending sample before a checkpoint is saved, because a resume from the checkpoint would lose
        it."""
        self._write(self._statistics.settle())

    def __enter__(self) -> RunStatistics:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop sampling. Record the pending sample unless the run failed, because other ranks may not have failed."""
        samples = self._statistics.close() if kind is None else []
        self._statistics.__exit__(kind)
        self._write(samples)

    def _show(self, alarm: Alarm) -> None:
        self._note(f"ALARM ({alarm.kind}): {alarm.text}", logging.WARNING)

    def _write(self, samples: Iterable[StatisticsSample]) -> None:
        for sample in samples:
            self._record(sample.to_dict())
