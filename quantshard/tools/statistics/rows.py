"""What a sampled step says, a row for each operand and parameter, made of the sums on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quantshard.numerics.quantization_error import EXTREMES, SUMS
from quantshard.recipe import TensorRole
from quantshard.tools.statistics.alarms import Alarm
from quantshard.tools.statistics.slots import KINDS, PARAMETER, SampleNumbers


@dataclass(frozen=True)
class OperandError:
    """What quantizing did to an operand; what does not apply is None.

    Args:
        scale: the largest of the scales that codes are multiplied by.
        scale_min: the smallest, where there are several.
        saturated: share of the values beyond the largest code, by more than rounding.
        underflowed: share of the values other than zero that became zero.
        sqnr_db: signal to quantization noise, 10 log10(sum of x**2 / sum of (x - q)**2); None if there is no error.
    """

    scale: float | None = None
    scale_min: float | None = None
    saturated: float | None = None
    underflowed: float | None = None
    sqnr_db: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Those that apply, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class StatisticsRow:
    """One operand in one step, of the global tensor.

    Args:
        name: of the weight's parameter. Several weights that read one input have it under the first one's name.
        role: "weight", "input" or "grad_output".
        amax: the largest finite magnitude.
        nonfinite: share of the values that are infinite or NaN.
        error: of the operand as its first GEMM reads it (fprop, or dgrad of a gradient).
        wgrad: where it was quantized for wgrad once more, along tokens, what that did; None else.
        changed: share of a weight's codes that the step changed.
        update_ratio: norm of a parameter's update by its norm before, of masters where there are some.
        grad_norm: norm of a parameter's gradient, as the optimizer was given it: after clipping.
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
        """As JSON can write it: what does not apply is left out, as is a share of values not finite that is zero."""
        found: dict[str, Any] = {"name": self.name, "role": self.role}
        found |= {} if self.amax is None else {"amax": self.amax}
        found |= self.error.to_dict()
        found |= {"nonfinite": self.nonfinite} if self.nonfinite else {}
        found |= {} if self.wgrad is None else {"wgrad": self.wgrad.to_dict()}
        others = {name: getattr(self, name) for name in ("changed", "update_ratio", "grad_norm")}
        return found | {name: value for name, value in others.items() if value is not None}


@dataclass(frozen=True)
class StatisticsSample:
    """What was found in one step; `rows` is empty of a step that was not sampled and had an alarm."""

    step: int
    rows: tuple[StatisticsRow, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As a line of `statistics.jsonl`."""
        return {
            "step": self.step,
            "rows": [row.to_dict() for row in self.rows],
            "alarms": [alarm.to_dict() for alarm in self.alarms],
        }


def rows_of(
    numbers: SampleNumbers, weights: Sequence[str], parameters: Sequence[str], sizes: Mapping[str, int]
) -> list[StatisticsRow]:
    """Rows in the order of the parameters, of those that anything is known of; `sizes`: elements of each, globally."""
    places = {name: place for place, name in enumerate(weights)}
    found = []
    for number, name in enumerate(parameters):
        updated = _of_parameter(numbers.parameters[number], sizes[name])
        for role in TensorRole:
            of_update = updated if role is TensorRole.WEIGHT else {}
            operand = _of_operand(numbers, places[name], role) if name in places else {}
            if operand or of_update:
                found.append(StatisticsRow(name, role.value, **operand, **of_update))
    return found


def _of_operand(numbers: SampleNumbers, place: int, role: TensorRole) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, (other, for_wgrad) in enumerate(KINDS):
        if other is not role:
            continue
        sums = dict(zip(SUMS, numbers.sums[place, kind].tolist(), strict=True))
        extremes = dict(zip(EXTREMES, numbers.extremes[place, kind].tolist(), strict=True))
        if not sums["elements"]:
            continue
        if not for_wgrad or "amax" not in found:
            found |= {"amax": extremes["amax"], "nonfinite": sums["nonfinite"] / sums["elements"]}
        found["wgrad" if for_wgrad else "error"] = _error(sums, extremes)
    return found


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
    known = dict(zip(PARAMETER, numbers.tolist(), strict=True))
    if not known["elements"]:
        return {}
    found = {"grad_norm": math.sqrt(known["gradient"] * size / known["elements"])}  # each replica has counted its own
    if known["codes"]:
        found["changed"] = known["changed"] / known["codes"]
    if known["value"]:
        found["update_ratio"] = math.sqrt(known["update"] / known["value"])
    return {name: value for name, value in found.items() if math.isfinite(value)}
