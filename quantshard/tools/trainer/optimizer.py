"""The optimizer of a run: class, parameter groups and options from the settings."""

from __future__ import annotations

import fnmatch
from typing import Any

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
        **settings.state_options.arguments,
        capturable=settings.cuda_graphs,
        ema_decay=settings.ema,
    )


def _lion(model: nn.Module, settings: TrainSettings) -> Lion:
    return Lion(
        _groups(model),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        **settings.state_options.lion_arguments,
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
        **settings.state_options.muon_arguments,
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
