"""Whether the GPU waits for the host, which `--cuda-graphs` spares: told once, of a run that could replay its steps.

A step that the GPU bounds is launched long before it has run: when the last launch is made, as many as the driver keeps
in its queue, some 1000, are still to run. Where nothing is, the GPU waited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.settings.combinations import check_combinations
from quantshard.tools.trainer.settings.config import TrainSettings

_FIRST, _STEPS = 5, 20
"""Steps that compile kernels, and those that are looked at."""
_SECONDS, _SHARE = 1.5e-3, 0.03
"""What the device has still to do at most, when all of a step is launched, if the host is what bounds it."""


class HostWait:
    """Is told of each step how long it took to launch it, and how long the host then waited for the device."""

    def __init__(self, settings: TrainSettings, note: Callable[[str, int], None]) -> None:
        self._note, self._asked = note, not settings.cuda_graphs and _could_be_captured(settings)
        self._times: list[tuple[float, float]] = []

    def add(self, launching: float, waiting: float) -> None:
        """Seconds of a step on a GPU."""
        if not self._asked:
            return
        self._times.append((launching, waiting))
        if len(self._times) < _FIRST + _STEPS:
            return
        self._asked = False
        launched, waited = (median(each) for each in zip(*self._times[_FIRST:], strict=True))
        if waited < min(_SECONDS, _SHARE * launched):
            self._note(
                f"the GPU waits for the host: a step takes {(launched + waited) * 1e3:.0f} ms, and nearly all of that "
                "to launch it; --cuda-graphs replays steps, with the same bits",
                logging.INFO,
            )


def _could_be_captured(settings: TrainSettings) -> bool:
    try:
        check_combinations(replace(settings, cuda_graphs=True))
    except ConfigurationError:
        return False
    return True
