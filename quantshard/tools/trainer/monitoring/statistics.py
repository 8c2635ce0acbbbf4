"""What a run does with statistics and alarms: lines of `statistics.jsonl`, and notes to whoever watches it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from quantshard.optimizers import ElementwiseOptimizer
from quantshard.optimizers.guards import too_large
from quantshard.tools.statistics import Alarm, Statistics, StatisticsSample, first_nonfinite
from quantshard.tools.statistics.step_sample import StepSample
from quantshard.tools.trainer.settings.config import TrainSettings


class RunStatistics:
    """The statistics of a run from the step after `done` on, for `record`, and its alarms, for `note`, as warnings. A
    collective call.

    An alarm is shown when it is known, and written with its step: those of the loss and of a skipped step at once,
    others with the sample, a step later. Of some skipped steps in a row the first is looked at. If its gradients were
    finite, but too large, the optimizer knows of which parameter; else it is run once more, to find where its values
    that are not finite come from, or to say that none came again (`first_nonfinite`); that changes nothing, so all
    losses stay what they are without alarms.
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
        every = settings.statistics_every
        if every and done < settings.steps < (done // every + 1) * every:
            text = f"statistics_every = {every}: none of the steps {done + 1} to {settings.steps} is sampled"
            note(text, logging.WARNING)
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
        """Whether the step that comes next is sampled."""
        return self._statistics.is_sampling

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Around all that the device does in a sampled step, which may be captured as a CUDA graph. What the step last
        captured found is what its replays find."""
        with self._statistics.whole_step() as self._sample:
            yield

    def stepped(self, loss: float, again: Callable[[], object]) -> None:
        """A step is over, within `whole_step` if it was sampled. A collective call. `again`: makes its forward and
        backward once more."""
        skipped = self._optimizer.skipped_steps
        is_first, self._skips, self._skipped = not self._skips, skipped > self._skipped, skipped
        if self._skips and is_first:
            kind, name, text = self._why_skipped(again)
            self._statistics.add_alarm(Alarm(kind, name, 1.0, f"step {self._statistics.done + 1} was skipped: {text}"))
        self._write(self._statistics.step(loss, self._sample if self.is_sampling else None))

    def _why_skipped(self, again: Callable[[], object]) -> tuple[str, str, str]:
        """The kind, name and text of the alarm of the step that is over. A collective call."""
        if name := self._optimizer.large_gradient:
            return "large gradient", name, too_large(name)
        found = first_nonfinite(self._model, again)
        if found is None:
            return "nan", "gradient", "a gradient was infinite or NaN; in the same pass made once more, none is"
        return "nan", found.name, found.text

    def settle(self) -> None:
        """Write what is known before a checkpoint is saved, from which a resume would not write it."""
        self._write(self._statistics.settle())

    def __enter__(self) -> RunStatistics:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sample no more, and write what is known, unless the run failed: other ranks may not have."""
        samples = self._statistics.close() if kind is None else []
        self._statistics.__exit__(kind)
        self._write(samples)

    def _show(self, alarm: Alarm) -> None:
        self._note(f"ALARM ({alarm.kind}): {alarm.text}", logging.WARNING)

    def _write(self, samples: Iterable[StatisticsSample]) -> None:
        for sample in samples:
            self._record(sample.to_dict())
