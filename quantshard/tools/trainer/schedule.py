"""Learning-rate schedules: functions of the settings and the step number alone.

All rise linearly to `lr` over `warmup` steps. Then, until `decay_steps`:

    constant   lr
    linear     linear decay to lr x lr_floor
    cosine     half a cosine down to lr x lr_floor (Loshchilov and Hutter, 2017, arXiv:1608.03983)
    wsd        lr, then linear decay to lr x lr_floor over the last `decay_share` of decay_steps: warmup, stable, decay
               (Hu et al., 2024, arXiv:2404.06395)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from quantshard.tools.trainer.settings.config import TrainSettings


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
    """Return the learning rate of a step, counted from 1."""
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    begin, end = settings.warmup, settings.decay_steps
    if settings.schedule == "wsd":
        begin = max(begin, end - round(settings.decay_share * end))
    done = min(1.0, max(0, step - begin) / max(1, end - begin))
    return settings.lr * _FALLS[settings.schedule](done, settings.lr_floor)


def shortfalls(settings: TrainSettings, resumed_after: int | None = None) -> Iterator[str]:
    """Yield warnings about parts of the schedule that the run will not reach, and, after a resume, about steps after
    the end of the schedule. Both can be intended, for example if the run will be extended.

    `settings`: resolved settings. `resumed_after`: last step before a resume.
    """
    steps, warmup, end = settings.steps, settings.warmup, settings.decay_steps
    falls, top = settings.schedule != "constant", settings.lr
    rate = f"{learning_rate(settings, steps):g}"
    if warmup > steps:
        yield f"warmup = {warmup} is more than steps = {steps}: the learning rate ends at {rate}, not at {top:g}"
    elif falls and end > steps:
        floor = f"{top * settings.lr_floor:g}"
        yield f"decay_steps = {end} is more than steps = {steps}: the learning rate ends at {rate}, not at {floor}"
    elif falls and warmup > end:
        yield f"warmup = {warmup} is more than decay_steps = {end}: after it the learning rate is at once {rate}"
    elif falls and warmup == end == steps:
        yield f"warmup = {warmup} is all of steps = {steps}: the learning rate never falls"
    elif settings.schedule == "wsd" and not round(settings.decay_share * end):
        yield f"decay_share = {settings.decay_share} of {end} steps is none: the learning rate never falls"
    last = max(end, warmup)
    if falls and last < steps and settings.lr_floor == 0:
        yield f"decay_steps = {end}, lr_floor = 0: steps {last + 1} to {steps} have a learning rate of 0"
    elif falls and resumed_after is not None and (first := max(last, resumed_after) + 1) <= steps:
        yield f"the schedule ended at step {last}: steps {first} to {steps} have a learning rate of {rate}"
