"""Settings of a step, in the form that multi-tensor kernels read.

There is a row for each group or, where settings depend on shapes (Muon), for each shape in a group. This file does not
import Triton.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from quantshard.numerics import averages
from quantshard.numerics.adam import Hyperparameters, float32
from quantshard.numerics.lion import LionSettings
from quantshard.numerics.muon import MuonSettings

SETTINGS: Final = ("lr", "beta1", "rest1", "beta2", "rest2", "correction1", "correction2", "eps", "l2", "decay",
                   "ratio", "share", "kept", "nesterov")  # fmt: skip
"""Columns of settings, float32. For Muon the betas are the weights of its two interpolations."""


@dataclass(frozen=True)
class SettingsRow:
    """One row of settings: columns known to the host, and values that can be tensors (`step`, int64, `lr`, `kept`).

    `kept`: factor that Muon's weight decay leaves of a master. `betas`: Adam's betas for bias correction, if
    `corrects`. `ema_decay`: decay of averages of the weights.
    """

    step: int | Tensor
    lr: float | Tensor
    columns: Mapping[str, float]
    kept: float | Tensor = 1.0
    betas: tuple[float, float] = (0.0, 0.0)
    corrects: bool = False
    ema_decay: float = 0.0


def adam_row(h: Hyperparameters) -> SettingsRow:
    """Return the row of a group of Adam."""
    betas = float32(h.beta1), float32(h.beta2)
    l2, decay = (0.0, h.weight_decay) if h.decoupled else (h.weight_decay, 0.0)
    columns = {**_shares(*betas), "eps": h.eps, "l2": l2, "decay": decay, "ratio": h.largest_ratio}
    if not isinstance(h.step, Tensor):
        columns |= dict(zip(("correction1", "correction2"), map(float, h.corrections), strict=True))
    return SettingsRow(h.step, h.lr, columns, betas=betas, corrects=h.bias_correction, ema_decay=h.ema_decay)


def lion_row(settings: LionSettings, step: int | Tensor, ema_decay: float) -> SettingsRow:
    """Return the row of a group of Lion."""
    columns = {**_shares(float32(settings.beta1), float32(settings.beta2)), "decay": settings.weight_decay}
    return SettingsRow(step, settings.lr, columns, ema_decay=ema_decay)


def muon_row(settings: MuonSettings, step: int | Tensor, ema_decay: float, shape: tuple[int, ...]) -> SettingsRow:
    """Return the row for matrices of this (global) shape in a group of Muon."""
    columns = {**_shares(1 - settings.momentum, settings.momentum), "nesterov": float(settings.nesterov)}
    return SettingsRow(step, settings.adjusted_lr(shape), columns, settings.kept, ema_decay=ema_decay)


def _shares(beta1: float, beta2: float) -> dict[str, float]:
    return {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2}


def table_of(rows: Sequence[SettingsRow], seed: int | None) -> list[int]:
    """Return the part of a step's table, int64, that rows fill: seeds and steps, decays, bias correction flags, and
    columns.

    Two float32 columns share an int64. Values that are tensors are filled in on the device.
    """
    table: list[int] = []
    decays: list[float] = []
    floats: list[float] = []
    for row in rows:
        columns, step = dict(row.columns), 0
        if not isinstance(row.step, Tensor):
            assert not isinstance(row.lr, Tensor) and not isinstance(row.kept, Tensor)
            step = row.step
            columns |= {"lr": float(row.lr), "kept": float(row.kept)}
            columns["share"] = float(averages.share(row.ema_decay, step)) if row.ema_decay else 0.0
        table += [seed or 0, step]
        decays += [*row.betas, row.ema_decay]
        floats += [columns.get(name, 0.0) for name in SETTINGS]
    floats += [0.0] * (len(floats) % 2)
    return [*table, *_as_int64("d", decays), *[int(row.corrects) for row in rows], *_as_int64("f", floats)]


def _as_int64(kind: str, values: Sequence[float]) -> tuple[int, ...]:
    data = struct.pack(f"<{len(values)}{kind}", *values)
    return struct.unpack(f"<{len(data) // 8}q", data)
