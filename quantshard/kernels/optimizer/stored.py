"""Inputs of a step in multi-tensor kernels: how a parameter and its states are stored, its formula and its settings.

This file does not import Triton.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from torch import Tensor

from quantshard.formats import ALL, Format, Orientation, OrientedCodes, Scaling
from quantshard.numerics import adam, lion, muon
from quantshard.numerics.adam import Hyperparameters, float32
from quantshard.numerics.lion import LionSettings
from quantshard.numerics.muon import MuonSettings
from quantshard.numerics.states import MASTER, WEIGHT, StateKind, StateSpec
from quantshard.sharding import Shard


class Algorithm(IntEnum):
    """The formulas of `kernels.optimizer.formulas`."""

    ADAM = 0
    LION = 1
    MUON = 2

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """States of a parameter, not counting the master."""
        return (adam.STATES, lion.STATES, muon.STATES)[self]


class MatrixRegion(NamedTuple):
    """Part of a global matrix. A vector has one row; further dims than two are flattened into the columns."""

    global_shape: tuple[int, int]
    origin: tuple[int, int]
    shape: tuple[int, int]


@dataclass(frozen=True)
class PlainTensor:
    """A contiguous tensor with the rectangle's elements: float32, bfloat16 or float16; int16 for a remainder; uint8 for
    the low bytes of a `SPLIT` master."""

    tensor: Tensor
    kind: StateKind = StateKind.PLAIN

    def __post_init__(self) -> None:
        assert self.tensor.is_contiguous()


@dataclass(frozen=True)
class ScaledTensor:
    """The components of a format row, with all resident entries, contiguous.

    `history`: amax history of delayed scaling. `shared`: names of components that other ranks contribute amaxes to.
    """

    fmt: Format
    scaling: Scaling
    shard: Shard
    components: Mapping[str, Tensor]
    history: Tensor | None = None
    shared: frozenset[str] = frozenset()
    kind = StateKind.SCALED

    def __post_init__(self) -> None:
        assert all(part.is_contiguous() for part in self.components.values())
        assert not self.fmt.copies[Orientation.ROWWISE].codes.encoding.bits == 4 or self.shard.origin[1] % 2 == 0

    @property
    def deferred(self) -> bool:
        """True if any scale needs amaxes from beyond a tile."""
        return any(self.is_later(copy) for copy in self.fmt.copies.values())

    def is_later(self, copy: OrientedCodes) -> bool:
        """True if a scale of this copy needs amaxes from beyond a tile."""
        return self.is_given(copy) or copy.amax is not None

    def is_given(self, copy: OrientedCodes) -> bool:
        """True if the block scales of this copy need amaxes from beyond a tile."""
        return ALL in copy.block or copy.scale.name in self.shared


StoredTensor = PlainTensor | ScaledTensor


@dataclass(frozen=True)
class StepParameter:
    """The tensors of a parameter that a step reads and writes.

    `stored`: tensors by role; without a master, the weight is read. `group`: number of its row of settings. `stream`:
    the first of its random streams under the optimizer's seed: one per state, the master, and the weight. `key`,
    `key_stream`: random words of a scaled weight without a master. `bounded`: see `numerics.adam.adam`.
    """

    stored: Mapping[str, StoredTensor]
    rectangle: MatrixRegion
    group: int = 0
    stream: int = 0
    key: int = 0
    key_stream: int = 0
    bounded: bool = False
    algorithm: Algorithm = Algorithm.ADAM

    @property
    def roles(self) -> list[str]:
        """Roles of its two states ("" if there is only one), master and weight."""
        first, second, *_ = *(spec.role for spec in self.algorithm.states), ""
        return [first, second, MASTER, WEIGHT]

    @property
    def weight(self) -> StoredTensor:
        """The parameter itself."""
        return self.stored[WEIGHT]

    @property
    def master(self) -> StoredTensor | None:
        """The tensor that is read and updated instead of the weight, or None."""
        return self.stored.get(MASTER)

    @property
    def scaled(self) -> dict[str, ScaledTensor]:
        """Tensors stored in components, by role."""
        return {role: tensor for role, tensor in self.stored.items() if isinstance(tensor, ScaledTensor)}


# Settings ---------------------------------------------------------------------------------------------------------

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
            columns["share"] = float(adam.average_share(row.ema_decay, step)) if row.ema_decay else 0.0
        table += [seed or 0, step]
        decays += [*row.betas, row.ema_decay]
        floats += [columns.get(name, 0.0) for name in SETTINGS]
    floats += [0.0] * (len(floats) % 2)
    return [*table, *_as_int64("d", decays), *[int(row.corrects) for row in rows], *_as_int64("f", floats)]


def _as_int64(kind: str, values: Sequence[float]) -> tuple[int, ...]:
    data = struct.pack(f"<{len(values)}{kind}", *values)
    return struct.unpack(f"<{len(data) // 8}q", data)
