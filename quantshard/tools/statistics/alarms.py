"""Alarms: events that the user should learn of at once, and the rules that raise them."""

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
    """An event, its source, its magnitude, and a sentence.

    `kind`: "loss spike", "saturation", "nan" or "large gradient". `name`: a parameter, a module, "loss", or "gradient"
    if the source of an infinite or NaN gradient was not located.
    """

    kind: str
    name: str
    value: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can represent; a value that is not finite is a string."""
        value: Any = self.value if math.isfinite(self.value) else str(self.value)
        return {"kind": self.kind, "name": self.name, "value": value, "text": self.text}


OnAlarm = Callable[[Alarm], None]
"""Callback for each alarm; an exception from it ends the training."""

_SPAN = 50
"""Number of previous losses that a loss is compared with."""
_FEWEST = 20
"""Fewest previous losses for a comparison."""
_NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation for normal numbers."""
_FLOOR = 0.005
"""Smallest deviation, as a share of the median, so that nearly constant losses do not spike."""


class LossHistory:
    """The last losses, and whether the next loss is a spike.

    A loss is a spike if it is not finite, or if it exceeds the median of the last 50 losses by more than `limit`
    deviations. A deviation is 1.4826 times the median of |loss - median|, but at least 0.5 % of the median. With fewer
    than 20 losses, no finite loss is a spike.

    Spikes are not added to the history. After 20 spikes in a row, the last one starts a new history.
    """

    def __init__(self, limit: float) -> None:
        if not 0 <= limit < math.inf:
            raise ConfigurationError(f"loss_spike={limit}: it is a number of deviations, 10 for one; 0 turns it off")
        self.limit = limit
        self._last: deque[float] = deque(maxlen=_SPAN)
        self._spikes = 0

    def add(self, step: int, loss: float) -> Alarm | None:
        """Compare a loss with previous losses and record it."""
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


def check_share(name: str, value: float) -> float:
    """Validate a share of values above which an alarm is raised.

    Raises:
        ConfigurationError: the share is not in (0, 1].
    """
    if not 0 < value <= 1:
        raise ConfigurationError(f"{name}={value}: it is a share of values, above 0; 1 turns it off")
    return value
