"""Inputs of a step in multi-tensor kernels, without Triton: how tensors are stored, and the settings of groups."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from torch import Tensor

from quantshard.formats import ALL, Format, OrientedCodes, Scaling
from quantshard.numerics import adam, lion, muon
from quantshard.numerics.states import MASTER, WEIGHT, StateKind, StateSpec
from quantshard.sharding import Shard

STACK_ROWS: Final = 32
"""Kernels update stacks whose matrices have a multiple of this many rows, so that no tile has rows of two."""


class Algorithm(IntEnum):
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
    """A contiguous tensor: float32, bfloat16 or float16; int16 remainders; uint8 low bytes of a `SPLIT` master."""

    tensor: Tensor
    kind: StateKind = StateKind.PLAIN


@dataclass(frozen=True)
class ScaledTensor:
    """Resident components of a format row. `shared`: names of those that other ranks contribute amaxes to."""

    fmt: Format
    scaling: Scaling
    shard: Shard
    components: Mapping[str, Tensor]
    history: Tensor | None = None
    shared: frozenset[str] = frozenset()
    kind = StateKind.SCALED

    @property
    def deferred(self) -> bool:
        """True if any scale needs amaxes from beyond a tile."""
        return any(self.is_given(copy) or copy.amax is not None for copy in self.fmt.copies.values())

    def is_given(self, copy: OrientedCodes) -> bool:
        """True if the block scales of this copy need amaxes from beyond a tile."""
        return ALL in copy.block or copy.scale.name in self.shared


StoredTensor = PlainTensor | ScaledTensor


@dataclass(frozen=True)
class StepParameter:
    """The tensors of a parameter that a step reads and writes.

    `stored`: tensors by role; without a master, the weight is read. `group`: number of its row of settings. `stream`:
    the first of its random streams under the optimizer's seed: one per state, the master, and the weight. `rng_key`,
    `weight_stream`: random bits of a scaled weight without a master. `bound`: see `numerics.adam.adam`.
    """

    stored: Mapping[str, StoredTensor]
    rectangle: MatrixRegion
    group: int = 0
    stream: int = 0
    rng_key: int = 0
    weight_stream: int = 0
    bound: adam.Bound = adam.Bound.NONE
    algorithm: Algorithm = Algorithm.ADAM

    @property
    def roles(self) -> list[str]:
        """Roles of its two states ("" if there is only one), master and weight."""
        first, second, *_ = *(spec.role for spec in self.algorithm.states), ""
        return [first, second, MASTER, WEIGHT]

    @property
    def weight(self) -> StoredTensor:
        return self.stored[WEIGHT]

    @property
    def master(self) -> StoredTensor | None:
        """The tensor that is read and updated instead of the weight, or None."""
        return self.stored.get(MASTER)

    @property
    def scaled(self) -> dict[str, ScaledTensor]:
        return {role: tensor for role, tensor in self.stored.items() if isinstance(tensor, ScaledTensor)}


SETTINGS: Final = ("lr", "beta1", "rest1", "beta2", "rest2", "correction1", "correction2", "eps", "l2", "decay",
                   "ratio", "most", "share", "kept", "nesterov")  # fmt: skip
"""Columns of settings, float32. For Muon the betas are the weights of its two interpolations."""


@dataclass(frozen=True)
class SettingsRow:
    """One row of settings: columns known to the host, and values that can be tensors (`step`, int64, `lr`, `kept`).

    `kept`: factor that Muon's weight decay leaves of a master. `betas`: for bias correction, if `corrects`.
    """

    step: int | Tensor
    lr: float | Tensor
    columns: Mapping[str, float]
    kept: float | Tensor = 1.0
    betas: tuple[float, float] = (0.0, 0.0)
    corrects: bool = False
    ema_decay: float = 0.0
