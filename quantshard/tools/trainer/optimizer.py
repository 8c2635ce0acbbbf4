"""The optimizer of a run, and its learning rate: a function of the settings and the step number alone.

All rise linearly to `lr` over `warmup` steps. Then, until `decay_steps`:

    constant   lr
    linear     linear decay to lr x lr_floor
    cosine     half a cosine down to lr x lr_floor (Loshchilov and Hutter, 2017, arXiv:1608.03983)
    wsd        lr, then linear decay to lr x lr_floor over the last `decay_share` of decay_steps: warmup, stable, decay
               (Hu et al., 2024, arXiv:2404.06395)
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn

from quantshard.optimizers import ElementwiseOptimizer, FusedAdam, Lion, Muon, muon_groups
from quantshard.state_storage import ADAMW, LION, MUON
from quantshard.tensor import components
from quantshard.tools.trainer.settings.config import TrainSettings

_NO_HIDDEN_LAYERS = ("embedding", "positions", "head", "layers.*.mlp.router")
"""Modules of the built-in decoder outside of its hidden layers; transformers models declare theirs."""


def make_optimizer(model: nn.Module, settings: TrainSettings) -> ElementwiseOptimizer:
    """Build the optimizer. Only matrices (including stacked experts) get weight decay. The model's high-precision
    initial values are freed, because the masters hold them now."""
    optimizer = _OPTIMIZERS[settings.optimizer](model, settings)
    for param in model.parameters():
        weight = components.quantized_local(param)
        if weight is not None:
            weight.clear_high_precision_init_val()
    return optimizer


def _fused_adam(model: nn.Module, settings: TrainSettings) -> FusedAdam:
    return FusedAdam(
        _groups(model),
        lr=settings.lr,
        **_adam(settings),
        **settings.state_options.arguments(),
        capturable=settings.cuda_graphs,
        ema_decay=settings.ema,
    )


def _lion(model: nn.Module, settings: TrainSettings) -> Lion:
    return Lion(
        _groups(model),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        **settings.state_options.arguments(LION),
        capturable=settings.cuda_graphs,
        ema_decay=settings.ema,
    )


def _muon(model: nn.Module, settings: TrainSettings) -> Muon:
    """Build Muon with AdamW's learning rate, so that one schedule serves all groups."""
    return Muon(
        muon_groups(model, head=muon_head(model, settings), adamw=_adam(settings)),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
        capturable=settings.cuda_graphs,
        **settings.state_options.arguments(MUON),
        ema_decay=settings.ema,
    )


def muon_head(model: nn.Module, settings: TrainSettings) -> list[str] | None:
    """Return the modules that AdamW trains alongside Muon, in the form that `muon_groups` takes."""
    names = [name for name, _ in model.named_modules()]
    return (
        [pattern for pattern in _NO_HIDDEN_LAYERS if fnmatch.filter(names, pattern)] if settings.is_by_sizes else None
    )


_OPTIMIZERS = {ADAMW: _fused_adam, LION: _lion, MUON: _muon}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(name, param) for name, param in named if param.ndim >= 2]},
        {"params": [(name, param) for name, param in named if param.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam(settings: TrainSettings) -> dict[str, Any]:
    betas = (settings.beta1, settings.beta2)
    return {"betas": betas, "eps": settings.eps, "weight_decay": settings.weight_decay}


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
