"""Detects that the GPU waits for the host, and suggests `--cuda-graphs` once if the run could use them.

A step that is bound by the GPU is launched long before it has finished: at the last launch, the driver's queue still
holds about 1000 kernels. If the queue is empty at that point, the GPU waited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.settings.checks import check_features
from quantshard.tools.trainer.settings.config import TrainSettings

_FIRST, _STEPS = 5, 20
"""Warm-up steps (kernels compile), and steps to measure."""
_SECONDS, _SHARE = 1.5e-3, 0.03
"""Bounds on the device time left after the last launch, in seconds and as a share of the launch time, below which the
host is the bottleneck."""


class HostWait:
    """Collects, per step, the launch time and the time that the host then waits for the device."""

    def __init__(self, settings: TrainSettings, note: Callable[[str, int], None]) -> None:
        self._note, self._asked = note, not settings.cuda_graphs and _could_be_captured(settings)
        self._times: list[tuple[float, float]] = []

    def add(self, launching: float, waiting: float) -> None:
        """Add the two times of a step on a GPU, in seconds."""
        if not self._asked:
            return
        self._times.append((launching, waiting))
        if len(self._times) < _FIRST + _STEPS:
            return
        self._asked = False
        launched, waited = (median(times) for times in zip(*self._times[_FIRST:], strict=True))
        if waited < min(_SECONDS, _SHARE * launched):
            self._note(
                f"the GPU waits for the host: a step takes {(launched + waited) * 1e3:.0f} ms, and nearly all of that "
                "to launch it; --cuda-graphs replays steps, with the same bits",
                logging.INFO,
            )


def _could_be_captured(settings: TrainSettings) -> bool:
    try:
        check_features(replace(settings, cuda_graphs=True))
    except ConfigurationError:
        return False
    return True
