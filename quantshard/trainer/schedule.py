"""Learning rates: a function of the settings and the number of a step alone.

All rise linearly to `lr` over `warmup` steps. Then, until `decay_steps`:

    constant   lr
    linear     falls to lr x lr_floor in a line
    cosine     falls to lr x lr_floor in half a cosine (Loshchilov and Hutter, 2017, arXiv:1608.03983)
    wsd        lr; in the last `decay_share` of decay_steps falls to lr x lr_floor in a line: warmup, stable, decay
               (Hu et al., 2024, arXiv:2404.06395)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from quantshard.trainer.settings.config import TrainSettings


def _cosine(done: float, floor: float) -> float:
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def _linear(done: float, floor: float) -> float:
    return 1 - (1 - floor) * done


_FALLS: Final[dict[str, Callable[[float, float], float]]] = {
    "constant": lambda done, floor: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _linear,
}


def learning_rate(settings: TrainSettings, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    begin, end = settings.warmup, settings.decay_steps
    if settings.schedule == "wsd":
        begin = max(begin, end - round(settings.decay_share * end))
    done = min(1.0, max(0, step - begin) / max(1, end - begin))
    return settings.lr * _FALLS[settings.schedule](done, settings.lr_floor)
