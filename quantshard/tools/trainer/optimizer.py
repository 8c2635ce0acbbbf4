"""The optimizer of a run, and its learning rate: a function of the settings and the step number alone.

All rise linearly to `lr` over `warmup` steps. Then, until `decay_steps`:

    constant   lr
    linear     linear decay to lr x lr_floor
    cosine     half a cosine down to lr x lr_floor (Loshchilov and Hutter, 2017, arXiv:1608.03983)
    wsd        lr, then linear decay to lr x lr_floor over the last `decay_share` of decay_steps: warmup, stable, decay
               (Hu et al., 2024, arXiv:2404.06395)
"""

import fnmatch
import math
from typing import Any

from torch import nn

from quantshard.optimizers import ElementwiseOptimizer, FusedAdam, Lion, Muon, muon_groups
from quantshard.state_storage import LION, MUON
from quantshard.tensor import components
from quantshard.tools.trainer.settings.config import TrainSettings

_NO_HIDDEN_LAYERS = ("embedding", "positions", "head", "layers.*.mlp.router")
"""Modules of the built-in decoder outside of its hidden layers; transformers models declare theirs."""


def make_optimizer(model: nn.Module, settings: TrainSettings) -> ElementwiseOptimizer:
    """Build the optimizer; only matrices get weight decay. Frees initial values that its masters hold now."""
    betas = (settings.beta1, settings.beta2)
    adam: dict[str, Any] = {"betas": betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
    common: dict[str, Any] = {
        "lr": settings.lr,
        "capturable": settings.cuda_graphs,
        "ema_decay": settings.ema,
        "release_gradients": settings.release_gradients,
        # an infinite norm is measured only
        "max_grad_norm": (settings.clip or math.inf) if settings.release_gradients else 0.0,
        **settings.state_options.arguments(settings.optimizer),
    }
    optimizer: ElementwiseOptimizer
    if settings.optimizer == MUON:
        # AdamW's learning rate, so that one schedule serves all groups
        common |= {"momentum": settings.momentum, "adjust_lr_fn": "match_rms_adamw"}
        groups = muon_groups(model, head=muon_head(model, settings), adamw=adam)
        optimizer = Muon(groups, weight_decay=settings.weight_decay, **common)
    elif settings.optimizer == LION:
        optimizer = Lion(_groups(model), betas=betas, weight_decay=settings.weight_decay, **common)
    else:
        optimizer = FusedAdam(_groups(model), **adam, **common)
    for param in model.parameters():
        weight = components.quantized_local(param)
        if weight is not None:
            weight.clear_high_precision_init_val()
    return optimizer


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(name, param) for name, param in named if param.ndim >= 2]},
        {"params": [(name, param) for name, param in named if param.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_head(model: nn.Module, settings: TrainSettings) -> list[str] | None:
    """Return the modules that AdamW trains alongside Muon, in the form that `muon_groups` takes."""
    if not settings.is_by_sizes:
        return None
    names = [name for name, _ in model.named_modules()]
    return [pattern for pattern in _NO_HIDDEN_LAYERS if fnmatch.filter(names, pattern)]


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Return the learning rate of a step, counted from 1."""
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    begin, end = settings.warmup, settings.decay_steps
    if settings.schedule == "wsd":
        begin = max(begin, end - round(settings.decay_share * end))
    done, floor = min(1.0, max(0, step - begin) / max(1, end - begin)), settings.lr_floor
    if settings.schedule == "cosine":
        return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
    return settings.lr * (1 - (1 - floor) * done)
