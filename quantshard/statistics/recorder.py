"""`Statistics`: what the numbers of a model do while it trains, measured in some of the steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantshard import kernel_dispatch, private_torch
from quantshard.collectives import process_groups
from quantshard.collectives.process_groups import Group
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.formats import Copy
from quantshard.modules.base.module import QuantizedModule
from quantshard.numerics.states import MASTER
from quantshard.optimizers.elementwise import ElementwiseOptimizer
from quantshard.recipe import TensorRole
from quantshard.statistics.alarms import Alarm, LossHistory, OnAlarm, check_share
from quantshard.statistics.rows import StatisticsRow, StatisticsSample, rows_of
from quantshard.statistics.slots import KINDS, PARAMETER, PendingNumbers, SampleBuffer, gathered
from quantshard.tensor import components, observation
from quantshard.tensor.observation import Observer
from quantshard.tensor.storage import KEY, QuantizedStorage

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class ModelNames:
    """The names of a model's parameters and of its weights that layers multiply with, those of other ranks included, in
    an order that all ranks have. A collective call where there are ranks.

    `own`: this rank's parameters, by name. `sizes`: elements of each parameter, globally.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.own = dict(model.named_parameters())
        self._modules = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedModule)}
        mine = {name: param.numel() for name, param in self.own.items()}, list(self._weights())
        told: list[Any] = [mine]
        if group is not None:
            told = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, mine, group=group)
        self.sizes = {name: size for sizes, _ in told for name, size in sizes.items()}
        self.weights = list(dict.fromkeys(name for _, weights in told for name in weights))
        self.places = {name: place for place, name in enumerate(self.sizes)}

    def _weights(self) -> Iterable[str]:
        for prefix, module in self._modules.items():
            for leaf in module._weights:
                yield f"{prefix}.{leaf}" if prefix else leaf

    def rows(self) -> dict[int, int]:
        """The first row of each weight of this rank, by its key: which a load may change."""
        numbers = {name: number for number, name in enumerate(self.weights)}
        found: dict[int, int] = {}
        for prefix, module in self._modules.items():
            for leaf in module._weights:
                key = int(module.weight_state(leaf)[KEY])
                found.setdefault(key, numbers[f"{prefix}.{leaf}" if prefix else leaf] * len(KINDS))
        return found


class StepSample(Observer):
    """One sampled step, from before its forward until after its optimizers' steps."""

    def __init__(self, names: ModelNames, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._names, self._optimizers, self._rows = names, optimizers, names.rows()
        self._buffers: dict[torch.device, SampleBuffer] = {}
        self.order: dict[int, None] = {}
        """Rows in the order in which operands were seen."""
        self._codes: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._by_param = {param: name for name, param in names.own.items()}
        self._hooks: list[RemovableHandle] = [each.register_step_pre_hook(self._stepping) for each in optimizers]

    # What it is shown ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def see_operand(
        self, key: Tensor, role: TensorRole, for_wgrad: bool, values: Tensor, operand: Tensor | QuantizedStorage
    ) -> None:
        """As of all observers. Layers of other models are none of its business."""
        first = self._rows.get(int(key))
        if first is None:
            return
        if kernel_dispatch.is_capturing():
            raise UnsupportedOperationError(
                "Statistics: a CUDA graph is captured in a step that is sampled, and each replay would be counted to "
                "it; capture before Statistics is made, whose samples will not see what replays compute"
            )
        row = first + _KIND_NUMBERS[role, for_wgrad]
        self.order.setdefault(row)
        self._buffer(values.device).add_operand(row, values.detach(), operand)

    @torch.no_grad()
    def see_update(self, param: Tensor, planned: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """As of all observers."""
        name = self._by_param.get(param)
        if name is not None and param.grad is not None:
            self._add_update(name, *planned())

    def _add_update(self, name: str, before: Tensor, after: Tensor) -> None:
        row = self._buffer(before.device).parameters[self._names.places[name]]
        row[PARAMETER.index("value")] += _square(before)
        row[PARAMETER.index("update")] += _square(after - before)

    def _buffer(self, device: torch.device) -> SampleBuffer:
        found = self._buffers.get(device)
        if found is None:
            found = SampleBuffer(len(self._names.weights), len(self._names.sizes), device)
            self._buffers[device] = found
        return found

    # Around an optimizer's step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before it: gradients, and what the step will have changed."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self._by_param.get(param)
                grad = param.grad if param.grad is not None else getattr(param, "decoupled_grad", None)
                if name is None or grad is None:
                    continue
                local = private_torch.local_tensor(grad)
                row = self._buffer(local.device).parameters[self._names.places[name]]
                row[PARAMETER.index("elements")] += local.numel()
                row[PARAMETER.index("gradient")] += _square(local)
                quantized = components.quantized_local(param)
                if quantized is not None:
                    self._codes[name] = _codes(quantized.quantized_storage).clone()
                if not isinstance(optimizer, ElementwiseOptimizer):  # which says it before, without a copy
                    self._before[name] = _values(optimizer, param).clone()

    @torch.no_grad()
    def finish(self, group: Group) -> PendingNumbers:
        """After the optimizers' steps: look at the weights, and bring all numbers together. A collective call."""
        self.stop()
        for optimizer in self._optimizers:
            for each in optimizer.param_groups:
                for param in each["params"]:
                    name = self._by_param.get(param)
                    if name in self._before:
                        self._add_update(name, self._before.pop(name), _values(optimizer, param))
        owners = {
            param: optimizer for optimizer in self._optimizers for of in optimizer.param_groups for param in of["params"]
        }
        for name, param in self._names.own.items():
            quantized = components.quantized_local(param)
            if quantized is not None:
                self._add_weight(name, param, quantized.quantized_storage, owners.get(param))
        if not self._buffers:
            self._buffer(private_torch.local_tensor(next(iter(self._names.own.values()))).device)
        return gathered(list(self._buffers.values()), len(self._names.weights), len(self._names.sizes), group)

    def _add_weight(
        self, name: str, param: Tensor, storage: QuantizedStorage, owner: torch.optim.Optimizer | None
    ) -> None:
        row = self._rows.get(int(storage.state[KEY]))
        if row is None:
            return
        buffer = self._buffer(storage.device)
        if owner is not None and _has_master(owner, param):
            buffer.add_operand(row, _values(owner, param), storage)
        else:
            buffer.add_codes(row, storage)
        before = self._codes.pop(name, None)
        if before is not None:
            of_parameter = buffer.parameters[self._names.places[name]]
            differing = before ^ _codes(storage)
            packed = storage.cell.format.copies[Copy.ROWWISE].codes.encoding.bits < 8
            found = [differing & 0xF, differing & 0xF0] if packed else [differing]
            of_parameter[PARAMETER.index("codes")] += differing.numel() * len(found)
            of_parameter[PARAMETER.index("changed")] += sum((part != 0).sum() for part in found)

    def stop(self) -> None:
        """See no more."""
        if observation.active is self:
            observation.active = None
        while self._hooks:
            self._hooks.pop().remove()


def _square(x: Tensor) -> Tensor:
    """The sum of the squares, in float64, without a copy of x in it."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _codes(storage: QuantizedStorage) -> Tensor:
    copy = storage.cell.format.copies[Copy.ROWWISE]
    return storage.components[copy.codes.name]


def _has_master(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    return any(str(key).startswith(MASTER) for key in optimizer.state.get(param, {}))


def _values(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """The local values that an optimizer trains: those of the master, or else of the parameter."""
    if _has_master(optimizer, param):
        if isinstance(optimizer, ElementwiseOptimizer):
            return private_torch.local_tensor(optimizer.get_unscaled_state(param, MASTER))
        return private_torch.local_tensor(optimizer.state[param][MASTER])
    quantized = components.quantized_local(param)
    if quantized is not None:
        return quantized.quantized_storage.dequantize()
    return private_torch.local_tensor(param).detach()


class Statistics:
    """What the numbers of a model do in every N-th step: per layer and operand amax, scales, shares of saturated values
    and of those that became zero, and signal to quantization noise; per parameter the share of codes that the step
    changed, the norm of the update by that of the values, and the norm of the gradient. And alarms.

        statistics = quantshard.Statistics(model, optimizer, every=10)
        for batch in data:
            loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            for sample in statistics.step(): ...
        statistics.close()

    The numbers are those of the global tensors, on any number of ranks. Training keeps its bits. A step that is not
    sampled costs nothing: no hook is there, and nothing is called but `step`. In a sampled one the device adds up, and
    the host reads the sums a step later. A sampled step keeps a copy of the weights' codes through the optimizer's step,
    and of the values that an optimizer trains that is not quantshard's. Make it after `fully_shard` and the optimizer,
    which is a collective call where there are ranks, as `step` is after a sampled step.

    Args:
        model: with quantshard's modules, or converted.
        optimizer: one, several, or none: then nothing is known of updates, gradients, or the error of stored weights.
        every: sample steps that this divides; 0: none, for alarms of the loss alone.
        step: the step that was done last.
        saturation: an alarm above this share of saturated values of an operand, in a sampled step; 1 turns it off.
        loss_spike: an alarm if the loss is so many deviations above the median (`LossHistory`); 0 turns it off.
        on_alarm: is called with each `Alarm`, on all ranks; without one they are warnings. What it raises is raised by
            `step`.

    Raises:
        ConfigurationError: an argument does not fit; another Statistics samples now.
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
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigurationError(f"Statistics({name}={value!r}): it must be a whole number, 0 or more")
        optimizers = [] if optimizer is None else [optimizer] if not isinstance(optimizer, Sequence) else optimizer
        self.every, self.done = every, step
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

    @property
    def is_sampling(self) -> bool:
        """Whether the step that comes next, or runs, is sampled."""
        return self._sample is not None

    def _begin(self) -> None:
        if self._names is None or not self.every or (self.done + 1) % self.every:
            return
        if observation.active is not None:
            raise ConfigurationError("another Statistics samples this step; close() it, or give each steps of its own")
        self._sample = observation.active = StepSample(self._names, self._optimizers)

    def step(self, loss: float | None = None) -> list[StatisticsSample]:
        """A step is over, its optimizer's included. A collective call if it was sampled.

        Args:
            loss: of this step, if alarms of it are wanted: a number that is on the host.

        Returns:
            What came to the host: the sample of the step before, if that was sampled; and of a step that was not, one
            without rows if it had an alarm.
        """
        if isinstance(loss, Tensor):
            raise ConfigurationError("Statistics.step(loss=): a tensor would be waited for; give loss.item()")
        found = self.settle()
        self.done += 1
        alarm = None if loss is None else self._losses.add(self.done, loss)
        if alarm is not None:
            self.add_alarm(alarm)
        alarms, self._told = self._told, []
        if self._sample is not None:
            sample, self._sample = self._sample, None
            self._pending = self.done, list(sample.order), sample.finish(self._group), alarms
            self._warn_of_nothing(sample)
        elif alarms:
            found.append(StatisticsSample(self.done, alarms=tuple(alarms)))
        self._begin()
        return found

    def add_alarm(self, alarm: Alarm) -> None:
        """Raise an alarm of one's own, of the step whose `step` comes next."""
        self._told.append(alarm)
        self._on_alarm(alarm)

    def _warn_of_nothing(self, sample: StepSample) -> None:
        if not sample.order and self._names is not None and self._names.rows():
            warnings.warn(
                f"Statistics: step {self.done} was sampled, and no layer showed an operand: they were not called, were "
                "called outside autocast or in eval mode, or were replayed by a CUDA graph",
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
        for place, row in enumerate(order):
            weight, (role, _) = self._names.weights[row // len(KINDS)], KINDS[row % len(KINDS)]
            places.setdefault((weight, role.value), place)
        bad = [row for row in rows if row.nonfinite]
        if bad:
            first = min(bad, key=lambda row: places.get((row.name, row.role), len(places)))
            share = first.nonfinite or 0.0
            yield Alarm(
                "nan", first.name, share,
                f"step {step}: {share:.2g} of the {first.role.replace('grad_output', 'output gradient')} of "
                f"{first.name} are infinite or NaN, the first in this step of {len(bad)} operands that have such values",
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


def _saturated(row: StatisticsRow) -> float:
    return max(row.error.saturated or 0.0, (row.wgrad and row.wgrad.saturated) or 0.0)


def _warn(alarm: Alarm) -> None:
    warnings.warn(alarm.text, stacklevel=3)
