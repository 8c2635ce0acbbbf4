"""`Statistics`: numbers of a model during training, measured in some of the steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quantshard.collectives import process_groups
from quantshard.collectives.flags import copy_to_host
from quantshard.errors import ConfigurationError
from quantshard.tensor import observation
from quantshard.tools.statistics.rows import (
    KINDS,
    Alarm,
    LossHistory,
    OnAlarm,
    StatisticsRow,
    StatisticsSample,
    rows_of,
)
from quantshard.tools.statistics.step_sample import ModelNames, StepSample


class Statistics:
    """Measures a model's numbers in every N-th step, and raises alarms (docs/command-line.md#statistics-and-alarms).

        with quantshard.Statistics(model, optimizer, every=10) as statistics:
            for batch in data:
                loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
                for sample in statistics.step(): ...
            for sample in statistics.close(): ...  # the last one; without it the end of the block drops it

    Training stays bit-exact, and a sample reaches the host one step later. Create it after `fully_shard` and the
    optimizer. Construction is a collective call, as is `step` after a sampled step.

    Args:
        model: a model with quantshard's modules, or a converted one.
        optimizer: one, several, or none. Without it, updates, gradients and errors of stored weights are not measured.
        every: sample the steps that are multiples of this number; 0: none, for alarms of the loss only.
        step: number of the last completed step.
        saturation: share of saturated values of an operand above which an alarm is raised in a sampled step; 1 turns it
            off.
        loss_spike: deviations above the median at which a loss raises an alarm (`LossHistory`); 0 turns it off.
        on_alarm: called with each `Alarm`, on all ranks if they pass `step` the same losses. Default: a warning. `step`
            propagates its exceptions.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        every: int = 10,
        step: int = 0,
        saturation: float = 0.01,
        loss_spike: float = 10.0,
        on_alarm: OnAlarm | None = None,
    ) -> None:
        optimizers = [] if optimizer is None else [optimizer] if not isinstance(optimizer, Sequence) else optimizer
        self.every, self.done = int(every), int(step)
        self._saturation, self._losses = saturation, LossHistory(loss_spike)
        self._on_alarm = on_alarm or (lambda alarm: warnings.warn(alarm.text, stacklevel=3))
        self._optimizers = list(optimizers)
        self._group = process_groups.world()
        self._sample: StepSample | None = None
        self._pending: tuple[int, list[int], Callable[[], Tensor], list[Alarm]] | None = None
        self._alarms_of_step: list[Alarm] = []
        self._names = ModelNames(model) if every else None
        self._begin()

    def __enter__(self) -> Statistics:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop()
        if kind is None:
            self.settle()

    @property
    def is_sampling(self) -> bool:
        """Whether the current or next step is sampled."""
        return self._sample is not None

    def _begin(self) -> None:
        if self._names is None or not self.every or (self.done + 1) % self.every:
            return
        if observation.active is not None:
            raise ConfigurationError("another Statistics samples this step; close() it first, or use a `with` block")
        self._sample = observation.active = StepSample(self._names, self._optimizers)

    @contextmanager
    def whole_step(self) -> Iterator[StepSample]:
        """Wrap a sampled step from its forward through its optimizers' steps, to capture it as a CUDA graph.

        Steps that are not sampled need a graph of their own:

            with torch.cuda.graph(sampled), statistics.whole_step() as sample: train_step()  # once
            if statistics.is_sampling:
                sampled.replay(); statistics.step(loss, sample)
            else:
                plain.replay(); statistics.step(loss)

        A collective call.
        """
        sample = self._sample
        assert sample is not None, "this step is not sampled; check is_sampling"
        sample.captures = True
        yield sample
        sample.measure(self._group)

    def step(self, loss: float | None = None, sample: StepSample | None = None) -> list[StatisticsSample]:
        """End a step, after its optimizer's step. A collective call if the step was sampled.

        Args:
            loss: loss of this step for alarms: a number on the host, the same on all ranks (such as a mean over ranks).
                Ranks do not exchange it: with different losses a spike can be local, and if `on_alarm` raises there,
                the other ranks hang.
            sample: for a sampled step replayed by a CUDA graph: the value of `whole_step` at its capture.

        Returns:
            The samples that reached the host: the previous step's if that step was sampled; and for a step that was not
            sampled, one without rows if it raised an alarm.
        """
        samples = self.settle()
        self.done += 1
        alarm = None if loss is None else self._losses.add(self.done, loss)
        if alarm is not None:
            self.add_alarm(alarm)
        alarms, self._alarms_of_step = self._alarms_of_step, []
        if self._sample is not None:
            current, self._sample = self._sample, None
            current.stop()
            sample = sample or current
            numbers = sample.measure(self._group) if sample.numbers is None else sample.numbers
            self._pending = self.done, list(sample.order), copy_to_host(numbers), alarms
        elif alarms:
            samples.append(StatisticsSample(self.done, alarms=tuple(alarms)))
        self._begin()
        return samples

    def add_alarm(self, alarm: Alarm) -> None:
        """Raise a custom alarm for the current step; on all ranks, if `on_alarm` can raise."""
        self._alarms_of_step.append(alarm)
        self._on_alarm(alarm)

    def settle(self) -> list[StatisticsSample]:
        """Return the last sample if `step` has not returned it yet; waits for the device work of its step."""
        if self._pending is None or self._names is None:
            return []
        (step, order, read, earlier_alarms), self._pending = self._pending, None
        rows = rows_of(read(), self._names.weights, self._names.sizes)
        alarms = list(self._alarms(step, rows, order))
        for alarm in alarms:
            self._on_alarm(alarm)
        return [StatisticsSample(step, tuple(rows), (*earlier_alarms, *alarms))]

    def _alarms(self, step: int, rows: Sequence[StatisticsRow], order: Sequence[int]) -> Iterable[Alarm]:
        assert self._names is not None
        positions: dict[tuple[str, str], int] = {}
        for position, number in enumerate(order):
            weight, (role, _) = self._names.weights[number // len(KINDS)], KINDS[number % len(KINDS)]
            # The module's position is for experts that only other ranks have observed.
            for name in (weight, _module(weight)):
                positions.setdefault((name, role.value), position)

        def position_of(row: StatisticsRow) -> int:
            return positions.get((row.name, row.role), positions.get((_module(row.name), row.role), len(order)))

        if bad := [row for row in rows if row.nonfinite]:
            first = min(bad, key=position_of)
            share = first.nonfinite or 0.0
            yield Alarm(
                "nan", first.name, share,
                f"step {step}: {share:.2g} of the {first.role.replace('grad_output', 'output gradient')} of "
                f"{first.name} are infinite or NaN, the first in this step of {len(bad)} operands with such values",
            )  # fmt: skip
        shares = [(row, row.error.saturated or 0.0, (row.wgrad and row.wgrad.saturated) or 0.0) for row in rows]
        if over := [(row, max(parts)) for row, *parts in shares if max(parts) > self._saturation]:
            row, share = max(over, key=lambda pair: pair[1])
            more = f"; {len(over) - 1} more are above" if len(over) > 1 else ""
            yield Alarm(
                "saturation", row.name, share,
                f"step {step}: {share:.2%} of the {row.role.replace('grad_output', 'output gradient')} of {row.name} "
                f"saturate, more than {self._saturation:.2%}{more}",
            )  # fmt: skip

    def close(self) -> list[StatisticsSample]:
        """Stop sampling, and return the sample that `step` has not returned yet."""
        self._stop()
        return self.settle()

    def _stop(self) -> None:
        if self._sample is not None:
            self._sample.stop()
            self._sample = None
        self.every = 0


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
