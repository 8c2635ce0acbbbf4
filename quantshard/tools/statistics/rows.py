"""Numbers of a sampled step: their accumulators on the device, and the rows and alarms that the host makes of them.

At the end of a step, one collective reduces the accumulators of all ranks to rows of the global tensors: counts and
squares are summed, amaxes and scales are maximized. Replicas of an operand are all counted, so shares and ratios do not
depend on their number. Counts are integers in float64, so the order of summation does not change them; squares can
differ in the last bits.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch
from quantshard.collectives import process_groups
from quantshard.collectives.process_groups import Group
from quantshard.numerics.quantization_error import EMPTY, EXTREMES, SUMS
from quantshard.recipe import TensorRole
from quantshard.tensor.storage import QuantizedStorage

KINDS: Final = (
    (TensorRole.WEIGHT, False),
    (TensorRole.INPUT, False),
    (TensorRole.INPUT, True),
    (TensorRole.GRAD_OUTPUT, False),
    (TensorRole.GRAD_OUTPUT, True),
)
"""Operands of a weight: the role, and whether the operand was quantized separately for wgrad."""

PARAMETER: Final = ("elements", "codes", "gradient", "update", "value", "changed")
"""Columns of a parameter, float64: number of elements; number of codes; sums of squares of the gradient, of the update
and of the values before the update; number of codes that the step changed."""

_COPIES: Final = 16
"""Copies of each row that kernels add to, to spread contending atomic additions."""


class SampleBuffer:
    """Rows on one device, reused by every sampled step."""

    def __init__(self, weights: int, parameters: int, device: torch.device) -> None:
        copies, rows = _COPIES if kernel_dispatch.kernels_on(device) else 1, weights * len(KINDS)
        self.sums = torch.zeros(copies, rows, len(SUMS), dtype=torch.float64, device=device)
        # Filled on the device, because a captured graph copies only pinned memory from the host.
        self._empty = torch.cat([torch.full((1,), value, dtype=torch.float32, device=device) for value in EMPTY])
        self.extremes = self._empty.expand(copies, rows, len(EXTREMES)).contiguous()
        self.parameters = torch.zeros(parameters, len(PARAMETER), dtype=torch.float64, device=device)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        self.sums.zero_()
        self.extremes.copy_(self._empty)
        self.parameters.zero_()

    def add_operand(self, row: int, values: Tensor, operand: Tensor | QuantizedStorage, partial: bool = False) -> None:
        """Add values [(matrices,) R, C] and their quantized form, if any. `partial`: sample part of a large matrix."""
        if row not in self._views:
            self._views[row] = self.sums[:, row], self.extremes[:, row]
        sums, extremes = self._views[row]
        if not isinstance(operand, QuantizedStorage):
            kernel_dispatch.quantization_error_of(values).add_values(sums, extremes, values)
            return
        if len(operand.shape) == 3:  # each matrix of a stack has its own scales
            for index, matrix in enumerate(values.reshape(operand.shape)):
                self.add_operand(row, matrix, operand.matrix(index), partial)
            return
        spec, (copy, *_) = operand.spec, operand.spec.format.copies.values()
        kernel_dispatch.quantization_error_of(values, copy).add_error(
            sums, extremes, values, copy, operand.touched(), operand.shard.origin, spec.scaling.random_hadamard,
            partial,
        )  # fmt: skip

    def add_codes(self, row: int, storage: QuantizedStorage) -> None:
        """Add a weight without a master: amax and scales of the values that the codes represent, and no error."""
        buffer = SampleBuffer(1, 0, storage.device)
        buffer.add_operand(0, storage.dequantize(), storage)
        self.sums[0, row, :3] += buffer.sums[:, 0, :3].sum(0)
        self.extremes[0, row] = _merged(torch.cat([buffer.extremes[:, 0], self.extremes[:1, row]]))

    def flat(self) -> Tensor:
        parts = (self.sums.sum(0), _merged(self.extremes).double(), self.parameters)
        return torch.cat([part.flatten() for part in parts])


def _merged(extremes: Tensor) -> Tensor:
    """Reduce extremes [copies, ..., columns] over the copies."""
    return torch.cat([extremes[..., :2].amax(0), extremes[..., 2:].amin(0)], -1)


def gathered(buffers: Sequence[SampleBuffer], weights: int, parameters: int, group: Group) -> Tensor:
    """Reduce the numbers of all buffers and ranks to one float64 vector for `rows_of`. A collective call."""
    sizes = _sizes(weights, parameters)
    device = buffers[0].sums.device
    if group is not None:
        device = process_groups.collective_device(group)
    rows = torch.stack([buffer.flat().to(device) for buffer in buffers])
    if group is not None:
        flat = _reduced(rows, sizes)
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, flat, group=group)
        rows = torch.stack(parts)
    return _reduced(rows, sizes)


def _sizes(weights: int, parameters: int) -> list[int]:
    rows = weights * len(KINDS)
    return [rows * len(SUMS), rows * len(EXTREMES), parameters * len(PARAMETER)]


def _reduced(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    sums, extremes, parameters = rows.split(list(sizes), dim=1)
    by_slot = extremes.unflatten(1, (-1, len(EXTREMES)))
    return torch.cat([sums.sum(0), _merged(by_slot).flatten(), parameters.sum(0)])


@dataclass(frozen=True)
class Alarm:
    """An event ("loss spike", "saturation", "nan" or "large gradient"), its source, its magnitude, and a sentence.

    `name`: a parameter, a module, "loss", or "gradient" if the source of a non-finite gradient was not located.
    """

    kind: str
    name: str
    value: float
    text: str


OnAlarm = Callable[[Alarm], None]
"""Callback for each alarm; an exception from it ends the training."""

SPAN: Final = 50
_FEWEST = 20
_NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation for normal numbers."""
_FLOOR = 0.005
"""Smallest deviation, as a share of the median, so that nearly constant losses do not spike."""


class LossHistory:
    """The last losses without spikes. After 20 spikes in a row, the last one starts a new history."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._last: deque[float] = deque(maxlen=SPAN)
        self._spikes = 0

    def add(self, step: int, loss: float) -> Alarm | None:
        if not self.limit:
            return None
        alarm = self._spike(step, loss)
        self._spikes = self._spikes + 1 if alarm is not None else 0
        if self._spikes >= _FEWEST:
            self._last.clear()
        if math.isfinite(loss) and (alarm is None or self._spikes >= _FEWEST):
            self._last.append(loss)
        return alarm

    def _spike(self, step: int, loss: float) -> Alarm | None:
        if not math.isfinite(loss):
            return Alarm("loss spike", "loss", loss, f"step {step}: the loss is {loss}")
        if len(self._last) < _FEWEST:
            return None
        middle = median(self._last)
        deviation = max(_NORMAL * median(abs(previous - middle) for previous in self._last), _FLOOR * abs(middle))
        if loss - middle <= self.limit * deviation:
            return None
        return Alarm(
            "loss spike", "loss", loss,
            f"step {step}: the loss is {loss:.4g}; the median of the last {len(self._last)} was {middle:.4g}, and "
            f"{self.limit:g} deviations of {deviation:.2g} are allowed",
        )  # fmt: skip


@dataclass(frozen=True)
class OperandError:
    """Error from quantizing an operand; fields that do not apply are None.

    `scale`: the largest scale that codes are multiplied by. `scale_min`: the smallest, if there are several.
    `saturated`: share of values that exceed the largest code by more than rounding. `underflowed`: share of nonzero
    values that became zero. `sqnr_db`: signal to quantization noise, 10 log10(sum of x**2 / sum of (x - q)**2); None if
    there is no error.
    """

    scale: float | None = None
    scale_min: float | None = None
    saturated: float | None = None
    underflowed: float | None = None
    sqnr_db: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that apply, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class StatisticsRow:
    """One operand of the global tensor in one step.

    Args:
        name: name of the weight's parameter. For weights that read the same input: the first of them.
        role: "weight", "input" or "grad_output".
        amax: largest finite magnitude.
        nonfinite: share of values that are infinite or NaN.
        error: error of the operand of the first GEMM (fprop, or dgrad for a gradient).
        wgrad: error of the operand that was quantized separately for wgrad, along tokens; None otherwise.
        changed: share of a weight's codes that the step changed.
        update_ratio: norm of a parameter's update relative to its norm before; of masters if there are any.
        grad_norm: norm of a parameter's gradient as the optimizer reads it, after clipping.
    """

    name: str
    role: str
    amax: float | None = None
    nonfinite: float | None = None
    error: OperandError = field(default_factory=OperandError)
    wgrad: OperandError | None = None
    changed: float | None = None
    update_ratio: float | None = None
    grad_norm: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can represent, without fields that do not apply and without a zero `nonfinite`."""
        fields = {
            "name": self.name, "role": self.role, "amax": self.amax, **self.error.to_dict(),
            "nonfinite": self.nonfinite or None, "wgrad": None if self.wgrad is None else self.wgrad.to_dict(),
            "changed": self.changed, "update_ratio": self.update_ratio, "grad_norm": self.grad_norm,
        }  # fmt: skip
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class StatisticsSample:
    """Statistics of one step. `rows` is empty for a step that was not sampled but raised an alarm."""

    step: int
    rows: tuple[StatisticsRow, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a line of `statistics.jsonl`; a value of an alarm that is not finite is a string."""
        alarms = [vars(a) | {"value": a.value if math.isfinite(a.value) else str(a.value)} for a in self.alarms]
        return {"step": self.step, "rows": [row.to_dict() for row in self.rows], "alarms": alarms}


def rows_of(numbers: Tensor, weights: Sequence[str], sizes: Mapping[str, int]) -> list[StatisticsRow]:
    """Build rows in the order of `sizes` (global number of elements by parameter) from the result of `gathered`."""
    sums, extremes, parameters = numbers.split(_sizes(len(weights), len(sizes)))
    sums, extremes = sums.view(-1, len(KINDS), len(SUMS)), extremes.view(-1, len(KINDS), len(EXTREMES))
    index_of_weight = {name: index for index, name in enumerate(weights)}
    rows = []
    for (name, size), columns in zip(sizes.items(), parameters.view(-1, len(PARAMETER)), strict=True):
        updated, weight = _of_parameter(columns, size), index_of_weight.get(name)
        for role in TensorRole:
            update = updated if role is TensorRole.WEIGHT else {}
            operand = {} if weight is None else _of_operand(sums[weight], extremes[weight], role)
            if operand or update:
                rows.append(StatisticsRow(name, role.value, **operand, **update))
    return rows


def _of_operand(sums_by_kind: Tensor, extremes_by_kind: Tensor, role: TensorRole) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for kind, (kind_role, for_wgrad) in enumerate(KINDS):
        sums = dict(zip(SUMS, sums_by_kind[kind].tolist(), strict=True))
        extremes = dict(zip(EXTREMES, extremes_by_kind[kind].tolist(), strict=True))
        if kind_role is not role or not sums["elements"]:
            continue
        if not for_wgrad or "amax" not in fields:
            fields |= {"amax": extremes["amax"], "nonfinite": sums["nonfinite"] / sums["elements"]}
        fields["wgrad" if for_wgrad else "error"] = _error(sums, extremes)
    return fields


def _error(sums: Mapping[str, float], extremes: Mapping[str, float]) -> OperandError:
    largest, smallest = extremes["scale"], extremes["smallest_scale"]
    scale = largest if math.isfinite(smallest) else None
    scale_min = smallest if smallest < largest else None
    count = sums["quantized"]
    if not count:
        return OperandError(scale, scale_min)
    ratio = sums["signal"] / sums["noise"] if sums["noise"] else 0.0
    return OperandError(
        scale,
        scale_min,
        sums["saturated"] / count,
        sums["underflowed"] / sums["nonzero"] if sums["nonzero"] else 0.0,
        10 * math.log10(ratio) if 0 < ratio < math.inf else None,
    )


def _of_parameter(numbers: Tensor, size: int) -> dict[str, Any]:
    columns = dict(zip(PARAMETER, numbers.tolist(), strict=True))
    if not columns["elements"]:
        return {}
    # Replicas add to both sums, so normalize by the counted elements.
    fields = {"grad_norm": math.sqrt(columns["gradient"] * size / columns["elements"])}
    if columns["codes"]:
        fields["changed"] = columns["changed"] / columns["codes"]
    if columns["value"]:
        fields["update_ratio"] = math.sqrt(columns["update"] / columns["value"])
    return {name: value for name, value in fields.items() if math.isfinite(value)}


class ExpertLoads:
    """Loads of the experts of each layer, relative to the layer's mean: 1 is an even load.

    `limit`: load over `SPAN` = 50 steps below which an expert raises an alarm, once until it recovers; 0: off.
    `figures`: the largest load of the last step, and the share of rows that were dropped.
    `rows`: the loads of the last step, as rows of `statistics.jsonl`.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.figures, self.rows = limit, dict[str, float](), list[dict[str, Any]]()
        self._history, self._dead = list[Tensor](), set[tuple[int, int]]()

    def add(self, step: int, layers: int, counts: Sequence[float]) -> Alarm | None:
        """Add a step. `counts`: of each layer, the rows of each expert and then the number of dropped rows."""
        table = torch.tensor(counts, dtype=torch.float64, device="cpu").view(layers, -1)
        rows, dropped = table[:, :-1], table[:, -1] / table[:, :-1].sum(1)
        loads = rows / rows.mean(1, keepdim=True)
        figures = {"expert_load_max": loads.max().item(), "dropped_rows": dropped.mean().item()}
        self.figures = {name: figure for name, figure in figures.items() if figure}
        self.rows = [
            {"name": f"layers.{layer}.mlp", "role": "experts", "load": [round(load, 4) for load in of_layer],
             "load_max": max(of_layer), "load_min": min(of_layer), "dropped": share}
            for layer, (of_layer, share) in enumerate(zip(loads.tolist(), dropped.tolist(), strict=True))
        ]  # fmt: skip
        self._history.append(loads)
        if len(self._history) < SPAN:
            return None
        # every step has the same number of rows
        loads, self._history = torch.stack(self._history).mean(0), []
        dead = {(layer, expert) for layer, expert in (loads < self.limit).nonzero().tolist()}
        new, self._dead = sorted(dead - self._dead), dead
        if not new:
            return None
        layer, expert = min(new, key=lambda place: loads[place].item())
        name, load = f"layers.{layer}.mlp", loads[layer, expert].item()
        text = f"expert {expert} of {name} got {load:.1%} of the mean load in {SPAN} steps, less than {self.limit:.1%}"
        more = f"; {len(new) - 1} more are below" if len(new) > 1 else ""
        return Alarm("dead expert", f"{name}.{expert}", load, f"step {step}: {text}{more}")
