"""`Statistics`: what the numbers of a model do while it trains, measured in some of the steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral

import torch
from torch import Tensor, nn

from quantshard.argument_kinds import CALLABLE, MODULE, NUMBER, OPTIMIZER, check_arguments, suggests_names
from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError
from quantshard.tensor import observation
from quantshard.tools.statistics.alarms import Alarm, LossHistory, OnAlarm, check_share
from quantshard.tools.statistics.rows import StatisticsRow, StatisticsSample, rows_of
from quantshard.tools.statistics.slots import KINDS, PendingNumbers
from quantshard.tools.statistics.step_sample import ModelNames, StepSample


class Statistics:
    """What the numbers of a model do in every N-th step: per layer and operand amax, scales, shares of saturated values
    and of those that became zero, and signal to quantization noise; per parameter the share of codes that the step
    changed, the norm of the update by that of the values, and the norm of the gradient. And alarms.

        with quantshard.Statistics(model, optimizer, every=10) as statistics:
            for batch in data:
                loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
                for sample in statistics.step(): ...
            for sample in statistics.close(): ...  # the last one; without it the end of the block drops it

    The numbers are those of the global tensors, on any number of ranks (of large second operands, on a GPU, of a
    quarter: docs/statistics.md). Training keeps its bits. A step that is not
    sampled costs nothing: no hook is there, and nothing is called but `step`. In a sampled one the device adds up, and
    the host reads the sums a step later. A sampled step keeps a copy of the weights' codes and of the values that
    are trained through the optimizer's step; and where kernels run, the backward of a gated MLP makes the two gradients
    of its activation's inputs once more, as values in their dtype, but under current scaling (docs/statistics.md has
    figures). Make it after `fully_shard` and the
    optimizer: a collective call where there are ranks, as `step` is after a sampled step.

    Args:
        model: with quantshard's modules, or converted.
        optimizer: one, several, or none: then nothing is known of updates, gradients, or the error of stored weights.
        every: sample steps that this divides; 0: none, for alarms of the loss alone.
        step: the step that was done last.
        saturation: an alarm above this share of saturated values of an operand, in a sampled step; 1 turns it off.
        loss_spike: an alarm if the loss is so many deviations above the median (`LossHistory`); 0 turns it off.
        on_alarm: is called with each `Alarm`, on all ranks if they give `step` the same losses; without one they are
            warnings. What it raises is raised by `step`.

    Raises:
        ConfigurationError: an argument does not fit; another Statistics samples now.
    """

    @suggests_names
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
        check_arguments("Statistics", MODULE, model=model)
        check_arguments("Statistics", NUMBER, saturation=saturation, loss_spike=loss_spike)
        check_arguments("Statistics", CALLABLE.or_none, on_alarm=on_alarm)
        for name, value in (("every", every), ("step", step)):
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
                raise ConfigurationError(f"Statistics({name}={value!r}): it must be a whole number, 0 or more")
        optimizers = [] if optimizer is None else [optimizer] if not isinstance(optimizer, Sequence) else optimizer
        for each in optimizers:
            check_arguments("Statistics", OPTIMIZER, optimizer=each)
        self.every, self.done = int(every), int(step)
        self._saturation, self._losses = check_share("Statistics: saturation", saturation), LossHistory(loss_spike)
        self._on_alarm, self._optimizers = on_alarm or _warn, list(optimizers)
        self._group = process_groups.world()
        self._sample: StepSample | None = None
        self._pending: tuple[int, list[int], PendingNumbers, list[Alarm]] | None = None
        self._told: list[Alarm] = []
        self._names = self._checked(model) if every else None
        self._begin()

    def _checked(self, model: nn.Module) -> ModelNames:
        names = ModelNames(model, self._group)
        if not names.own:
            raise ConfigurationError("Statistics: the model has no parameters")
        meta = next((name for name, param in names.own.items() if param.is_meta), None)
        if meta is not None:
            raise ConfigurationError(f"Statistics: {meta} is on the meta device; give the model its values first")
        held = set(names.own.values())
        trained = [param for each in self._optimizers for group in each.param_groups for param in group["params"]]
        if trained and not held.intersection(trained):
            raise ConfigurationError(
                "Statistics: none of the optimizer's parameters is the model's; make it after fully_shard, which puts "
                "others in their place, and build the optimizer after it too"
            )
        return names

    def __enter__(self) -> Statistics:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def __del__(self) -> None:
        """Who forgets `close` is not observed for ever."""
        if getattr(self, "_sample", None) is not None:
            self._stop()

    @property
    def is_sampling(self) -> bool:
        """Whether the step that comes next, or runs, is sampled."""
        return self._sample is not None

    def _begin(self) -> None:
        if self._names is None or not self.every or (self.done + 1) % self.every:
            return
        if observation.active is not None:
            raise ConfigurationError(
                "another Statistics samples this step; close() the earlier one, or make it in a `with` block, which "
                "does so at its end; two that are wanted need steps of their own"
            )
        self._sample = observation.active = StepSample(self._names, self._optimizers)

    @contextmanager
    def whole_step(self) -> Iterator[StepSample]:
        """Around a sampled step, from its forward through its optimizers' steps, which so may be captured as a CUDA
        graph. Steps that are not sampled have a graph of their own:

            with torch.cuda.graph(sampled), statistics.whole_step() as sample: train_step()  # once
            if statistics.is_sampling:
                sampled.replay(); statistics.step(loss, sample)
            else:
                plain.replay(); statistics.step(loss)

        A collective call where there are ranks.

        Raises:
            ConfigurationError: the step is not sampled.
        """
        if self._sample is None:
            raise ConfigurationError(
                f"Statistics.whole_step: step {self.done + 1} is not sampled (every={self.every}): see is_sampling"
            )
        sample = self._sample
        sample.captures = True
        yield sample
        sample.measure(self._group)

    def step(self, loss: float | None = None, sample: StepSample | None = None) -> list[StatisticsSample]:
        """A step is over, its optimizer's included. A collective call if it was sampled.

        Args:
            sample: of a sampled step that a CUDA graph replayed, what `whole_step` gave when that was captured.
            loss: of this step, if alarms of it are wanted: a number that is on the host, and the same on all ranks, as
                a mean over them is. Nothing is exchanged to judge it, so of different losses a spike may be one rank's
                alone, and the others wait for that rank for ever if `on_alarm` raises there.

        Returns:
            What came to the host: the sample of the step before, if that was sampled; and of a step that was not, one
            without rows if it had an alarm.

        Raises:
            ConfigurationError: the loss is a tensor; a sample of a step that is not sampled, or that was not captured.
        """
        if isinstance(loss, Tensor):
            raise ConfigurationError("Statistics.step(loss=): a tensor would be waited for; give loss.item()")
        if sample is not None and (self._sample is None or sample.numbers is None):
            why = "is not sampled" if self._sample is None else "is sampled, and nothing was measured in whole_step()"
            raise ConfigurationError(f"Statistics.step(sample=): step {self.done + 1} {why}")
        found = self.settle()
        self.done += 1
        alarm = None if loss is None else self._losses.add(self.done, loss)
        if alarm is not None:
            self.add_alarm(alarm)
        alarms, self._told = self._told, []
        if self._sample is not None:
            current, self._sample = self._sample, None
            current.stop()
            sample = sample or current
            if sample.numbers is None:
                sample.measure(self._group)
            self._pending = self.done, list(sample.order), sample.read(), alarms
            self._warn_of_nothing(sample)
        elif alarms:
            found.append(StatisticsSample(self.done, alarms=tuple(alarms)))
        self._begin()
        return found

    def add_alarm(self, alarm: Alarm) -> None:
        """Raise an alarm of one's own, of the step whose `step` comes next; on all ranks, if `on_alarm` may raise."""
        self._told.append(alarm)
        self._on_alarm(alarm)

    def _warn_of_nothing(self, sample: StepSample) -> None:
        if not sample.order and self._names is not None and self._names.rows():
            warnings.warn(
                f"Statistics: step {self.done} was sampled, and no layer showed an operand: they were not called, were "
                "called outside autocast or in eval mode, were replayed by a CUDA graph, or are high-precision layers "
                "in a graph of torch.compile",
                stacklevel=3,
            )

    def settle(self) -> list[StatisticsSample]:
        """The sample of the last sampled step, if it was not returned yet; waits for that step's device work."""
        if self._pending is None or self._names is None:
            return []
        (step, order, pending, told), self._pending = self._pending, None
        rows = rows_of(pending.read(), self._names.weights, list(self._names.sizes), self._names.sizes)
        alarms = list(self._alarms(step, rows, order))
        for alarm in alarms:
            self._on_alarm(alarm)
        return [StatisticsSample(step, tuple(rows), (*told, *alarms))]

    def _alarms(self, step: int, rows: Sequence[StatisticsRow], order: Sequence[int]) -> Iterable[Alarm]:
        assert self._names is not None
        places: dict[tuple[str, str], int] = {}
        for place, number in enumerate(order):
            weight, (role, _) = self._names.weights[number // len(KINDS)], KINDS[number % len(KINDS)]
            places.setdefault((weight, role.value), place)
            places.setdefault((_module(weight), role.value), place)  # where other ranks have seen their experts
        bad = [row for row in rows if row.nonfinite]
        if bad:
            at = [
                places.get((row.name, row.role), places.get((_module(row.name), row.role), len(order))) for row in bad
            ]
            first = bad[at.index(min(at))]
            share = first.nonfinite or 0.0
            yield Alarm(
                "nan", first.name, share,
                f"step {step}: {share:.2g} of the {first.role.replace('grad_output', 'output gradient')} of "
                f"{first.name} are infinite or NaN, the first in this step of {len(bad)} operands with such values",
            )  # fmt: skip
        over = [(row, share) for row in rows if (share := _saturated(row)) > self._saturation]
        if over:
            row, share = max(over, key=lambda pair: pair[1])
            more = f"; {len(over) - 1} more are above" if len(over) > 1 else ""
            yield Alarm(
                "saturation", row.name, share,
                f"step {step}: {share:.2%} of the {row.role.replace('grad_output', 'output gradient')} of {row.name} "
                f"saturate, more than {self._saturation:.2%}{more}",
            )  # fmt: skip

    def close(self) -> list[StatisticsSample]:
        """Sample no more, and return what `step` has not returned yet."""
        self._stop()
        return self.settle()

    def _stop(self) -> None:
        if self._sample is not None:
            self._sample.stop()
            self._sample = None
        self.every = 0


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _saturated(row: StatisticsRow) -> float:
    return max(row.error.saturated or 0.0, (row.wgrad and row.wgrad.saturated) or 0.0)


def _warn(alarm: Alarm) -> None:
    warnings.warn(alarm.text, stacklevel=3)
