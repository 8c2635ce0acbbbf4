"""`Statistics`: numbers of a model during training, measured in some of the steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral

import torch
from torch import Tensor, nn

from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError
from quantshard.tensor import observation
from quantshard.tools.statistics.rows import (
    Alarm,
    LossHistory,
    OnAlarm,
    StatisticsRow,
    StatisticsSample,
    check_share,
    rows_of,
)
from quantshard.tools.statistics.slots import KINDS, PendingNumbers
from quantshard.tools.statistics.step_sample import ModelNames, StepSample


class Statistics:
    """Measures a model's numbers in every N-th step, and raises alarms.

    Per layer and operand: amax, scales, shares of saturated and underflowed values, signal to quantization noise. Per
    parameter: share of codes that the step changed, norm of the update relative to the values, norm of the gradient.

        with quantshard.Statistics(model, optimizer, every=10) as statistics:
            for batch in data:
                loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
                for sample in statistics.step(): ...
            for sample in statistics.close(): ...  # the last one; without it the end of the block drops it

    Numbers are of the global tensors, over any number of ranks (a quarter of large second operands on a GPU:
    docs/command-line.md#statistics-and-alarms). Training stays bit-exact. Steps that are not sampled have no hooks and
    cost only the call of `step`.

    In a sampled step the device accumulates, and the host reads the sums one step later. The sampled step copies the
    codes of the weights and the trained values during the optimizer's step. With kernels, except under current
    scaling, the backward of a gated MLP also recomputes the two gradients of its activation's inputs in high precision
    (docs/command-line.md#statistics-and-alarms has figures).

    Create it after `fully_shard` and the optimizer. Construction is a collective call, as is `step` after a sampled
    step.

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

    Raises:
        ConfigurationError: an argument is invalid; another Statistics is sampling.
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
        for name, value in (("every", every), ("step", step)):
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
                raise ConfigurationError(f"Statistics({name}={value!r}): it must be a whole number, 0 or more")
        optimizers = [] if optimizer is None else [optimizer] if not isinstance(optimizer, Sequence) else optimizer
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
        params = set(names.own.values())
        trained = [
            param for optimizer in self._optimizers for group in optimizer.param_groups for param in group["params"]
        ]
        if trained and not params.intersection(trained):
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
        """Stop observing if `close` was forgotten."""
        if getattr(self, "_sample", None) is not None:
            self._stop()

    @property
    def is_sampling(self) -> bool:
        """Whether the current or next step is sampled."""
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
        """Wrap a sampled step from its forward through its optimizers' steps, to capture it as a CUDA graph.

        Steps that are not sampled need a graph of their own:

            with torch.cuda.graph(sampled), statistics.whole_step() as sample: train_step()  # once
            if statistics.is_sampling:
                sampled.replay(); statistics.step(loss, sample)
            else:
                plain.replay(); statistics.step(loss)

        A collective call.

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
        """End a step, after its optimizer's step. A collective call if the step was sampled.

        Args:
            loss: loss of this step for alarms: a number on the host, the same on all ranks (such as a mean over ranks).
                Ranks do not exchange it: with different losses a spike can be local, and if `on_alarm` raises there,
                the other ranks hang.
            sample: for a sampled step replayed by a CUDA graph: the value of `whole_step` at its capture.

        Returns:
            The samples that reached the host: the previous step's if that step was sampled; and for a step that was not
            sampled, one without rows if it raised an alarm.

        Raises:
            ConfigurationError: the loss is a tensor; `sample` was passed for a step that is not sampled, or was not
                captured.
        """
        if isinstance(loss, Tensor):
            raise ConfigurationError("Statistics.step(loss=): a tensor would be waited for; give loss.item()")
        if sample is not None and (self._sample is None or sample.numbers is None):
            problem = (
                "is not sampled" if self._sample is None else "is sampled, and nothing was measured in whole_step()"
            )
            raise ConfigurationError(f"Statistics.step(sample=): step {self.done + 1} {problem}")
        samples = self.settle()
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
            samples.append(StatisticsSample(self.done, alarms=tuple(alarms)))
        self._begin()
        return samples

    def add_alarm(self, alarm: Alarm) -> None:
        """Raise a custom alarm for the current step; on all ranks, if `on_alarm` can raise."""
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
        """Return the last sample if `step` has not returned it yet; waits for the device work of its step."""
        if self._pending is None or self._names is None:
            return []
        (step, order, pending, earlier_alarms), self._pending = self._pending, None
        rows = rows_of(pending.read(), self._names.weights, list(self._names.sizes), self._names.sizes)
        alarms = list(self._alarms(step, rows, order))
        for alarm in alarms:
            self._on_alarm(alarm)
        return [StatisticsSample(step, tuple(rows), (*earlier_alarms, *alarms))]

    def _alarms(self, step: int, rows: Sequence[StatisticsRow], order: Sequence[int]) -> Iterable[Alarm]:
        assert self._names is not None
        positions: dict[tuple[str, str], int] = {}
        for position, number in enumerate(order):
            weight, (role, _) = self._names.weights[number // len(KINDS)], KINDS[number % len(KINDS)]
            positions.setdefault((weight, role.value), position)
            # For experts that only other ranks have observed.
            positions.setdefault((_module(weight), role.value), position)
        bad = [row for row in rows if row.nonfinite]
        if bad:
            bad_positions = [
                positions.get((row.name, row.role), positions.get((_module(row.name), row.role), len(order)))
                for row in bad
            ]
            first = bad[bad_positions.index(min(bad_positions))]
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


def _saturated(row: StatisticsRow) -> float:
    return max(row.error.saturated or 0.0, (row.wgrad and row.wgrad.saturated) or 0.0)


def _warn(alarm: Alarm) -> None:
    warnings.warn(alarm.text, stacklevel=3)
