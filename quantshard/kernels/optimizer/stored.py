"""What kernels over many tensors are told of a parameter: where it and its states are, how each is stored, by which
formula it is stepped.

No Triton is needed to say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from quantshard.formats import ALL, Format, Orientation, OrientedCodes, Scaling
from quantshard.numerics import adam, lion, muon
from quantshard.numerics.states import MASTER, WEIGHT, StateKind, StateSpec
from quantshard.sharding import Shard


class Algorithm(IntEnum):
    """The formulas of `kernels.optimizer.formulas`."""

    ADAM = 0
    LION = 1
    MUON = 2

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """What it keeps of a parameter beside the master."""
        return (adam.STATES, lion.STATES, muon.STATES)[self]


class MatrixRegion(NamedTuple):
    """Part of a global matrix. A vector is a matrix of one row; of more dims, all but the first are its columns."""

    global_shape: tuple[int, int]
    origin: tuple[int, int]
    shape: tuple[int, int]


@dataclass(frozen=True)
class PlainTensor:
    """A contiguous tensor of the rectangle's elements: float32, bfloat16 or float16; int16 if it is a remainder, uint8
    if it is that of a weight's codes."""

    tensor: Tensor
    kind: StateKind = StateKind.PLAIN

    def __post_init__(self) -> None:
        assert self.tensor.is_contiguous()


@dataclass(frozen=True)
class ScaledTensor:
    """Components of a format row, all resident entries, contiguous.

    `history`: of delayed scaling. `shared`: names of the components whose amaxes other ranks take part in.
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
        """True if any of its scales needs amaxes of more than a tile."""
        return any(self.is_later(copy) for copy in self.fmt.copies.values())

    def is_later(self, copy: OrientedCodes) -> bool:
        """True if scales of that copy do."""
        return self.is_given(copy) or copy.amax is not None

    def is_given(self, copy: OrientedCodes) -> bool:
        """True if the grid of blocks does."""
        return ALL in copy.block or copy.scale.name in self.shared


StoredTensor = PlainTensor | ScaledTensor


@dataclass(frozen=True)
class StepParameter:
    """What a step reads and writes of a parameter.

    `stored`: by role; without a master, the weight is read. `group`: number of its row of settings. `stream`: number of
    the first of the streams of random words (one for each state, the master and the weight) under the optimizer's seed.
    A scaled weight without a master is rounded with words of its own `key`, under the stream `key_stream`. `bounded`:
    as for `numerics.adam.adam`.
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
        """Of its two states, "" where it has but one, master and weight."""
        first, second, *_ = *(spec.role for spec in self.algorithm.states), ""
        return [first, second, MASTER, WEIGHT]

    @property
    def weight(self) -> StoredTensor:
        """The parameter itself."""
        return self.stored[WEIGHT]

    @property
    def master(self) -> StoredTensor | None:
        """What is read and updated in its place, if it has one."""
        return self.stored.get(MASTER)

    @property
    def scaled(self) -> dict[str, ScaledTensor]:
        """What is stored in components, by role."""
        return {role: thing for role, thing in self.stored.items() if isinstance(thing, ScaledTensor)}
