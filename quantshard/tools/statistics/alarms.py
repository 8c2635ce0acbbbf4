"""Alarms: what of a step its user should know at once, and when it is one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from quantshard.errors import ConfigurationError


@dataclass(frozen=True)
class Alarm:
    """What happened, to what, how large it was, and a sentence.

    `kind`: "loss spike", "saturation", "nan" or "large gradient". `name`: of the parameter, of the module, "loss", or
    "gradient" if the source of one that was infinite or NaN was not found.
    """

    kind: str
    name: str
    value: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it: a value that is not finite is a string."""
        value: Any = self.value if math.isfinite(self.value) else str(self.value)
        return {"kind": self.kind, "name": self.name, "value": value, "text": self.text}


OnAlarm = Callable[[Alarm], None]
"""Is called with each alarm; what it raises ends the training."""

_SPAN = 50
"""The losses before a step that it is compared with."""
_FEWEST = 20
"""Of which there must be so many."""
_NORMAL = 1.4826
"""Standard deviations of normal numbers for one of their median absolute deviation."""
_FLOOR = 0.005
"""The least that counts as a deviation, as a share of the median: losses that hardly move spike by nothing."""


class LossHistory:
    """The last losses, and whether the next one is a spike.

    It is one if it is not finite, or if it is above the median of the last 50 losses by more than `limit` of their
    deviations, which are 1.4826 times the median of |loss - median|, or 0.5 % of the median if that is more. Of fewer
    than 20 losses none is. A spike is not added, so that a second one is compared with what was before the first; after
    20 in a row it is the new level, and the history begins anew.
    """

    def __init__(self, limit: float) -> None:
        if not 0 <= limit < math.inf:
            raise ConfigurationError(f"loss_spike={limit}: it is a number of deviations, 10 for one; 0 turns it off")
        self.limit = limit
        self._last: deque[float] = deque(maxlen=_SPAN)
        self._spikes = 0

    def add(self, step: int, loss: float) -> Alarm | None:
        """Compare a loss with those before, and remember it."""
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
        deviation = max(_NORMAL * median(abs(other - middle) for other in self._last), _FLOOR * abs(middle))
        if loss - middle <= self.limit * deviation:
            return None
        return Alarm(
            "loss spike", "loss", loss,
            f"step {step}: the loss is {loss:.4g}; the median of the last {len(self._last)} was {middle:.4g}, and "
            f"{self.limit:g} deviations of {deviation:.2g} are allowed",
        )  # fmt: skip


def check_share(name: str, value: float) -> float:
    """A share of values above which there is an alarm.

    Raises:
        ConfigurationError: it is none.
    """
    if not 0 < value <= 1:
        raise ConfigurationError(f"{name}={value}: it is a share of values, above 0; 1 turns it off")
    return value
