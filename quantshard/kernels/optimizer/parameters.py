"""What Adam over many tensors is told of a parameter, and which constants of its kernels follow.

A parameter goes one of three ways, by where the scales of what is written come from:

    ONCE    from the tile, or from past amaxes (delayed scaling): `AdamLaunchPlan.update` does all
    AFTER   of the weight from amaxes that reach beyond the tile, and there is a float32 master: `update` writes the
            states and measures, `AdamLaunchPlan.finish` quantizes the master
    TWICE   of a state too, or there is no such master: `update` measures, `finish` computes again and writes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quantshard.formats import ALL, FP16_1X128, Copy, Format, QuantizedCopy, Scaling
from quantshard.kernels import language as ql
from quantshard.kernels.optimizer import multi_tensor as km
from quantshard.kernels.optimizer import states as ks
from quantshard.sharding import Shard

ROLES: Final = ("exp_avg", "exp_avg_sq", "master", "weight")

COLS, HEIGHT, LINE = 128, 128, 2048  # of the tiles of a program; of a vector's tile


class MatrixRegion(NamedTuple):
    """Part of a global matrix. A vector is a matrix of one row; of more dims, all but the first are its columns."""

    global_shape: tuple[int, int]
    origin: tuple[int, int]
    shape: tuple[int, int]


@dataclass(frozen=True)
class PlainTensor:
    """A contiguous tensor of the rectangle's elements, float32, bfloat16 or float16."""

    tensor: Tensor

    def __post_init__(self) -> None:
        assert self.tensor.is_contiguous()


@dataclass(frozen=True)
class MasterRemainder:
    """The low halves, int16, of float32 masters whose high halves are the bfloat16 weight; contiguous."""

    tensor: Tensor

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

    def __post_init__(self) -> None:
        assert all(part.is_contiguous() for part in self.components.values())
        assert not self.fmt.copies[Copy.ROWWISE].codes.encoding.bits == 4 or self.shard.origin[1] % 2 == 0

    def is_later(self, copy: QuantizedCopy) -> bool:
        """True if scales of that copy need amaxes of more than a tile."""
        return self.is_given(copy) or copy.amax is not None

    def is_given(self, copy: QuantizedCopy) -> bool:
        """True if the grid of blocks does."""
        return ALL in copy.block or copy.scale.name in self.shared


@dataclass(frozen=True)
class AdamParameter:
    """What a step reads and writes of a parameter. Without a master, the weight is read.

    `group`: number of the group of hyperparameters. `stream`: number of the first of the four streams of random words
    (exp_avg, exp_avg_sq, master, weight) under the optimizer's seed. A scaled weight without a master is rounded with
    words of its own `key`, under the stream `key_stream`.
    """

    weight: PlainTensor | ScaledTensor
    exp_avg: PlainTensor | ScaledTensor
    exp_avg_sq: PlainTensor | ScaledTensor
    master: PlainTensor | MasterRemainder | ScaledTensor | None
    rectangle: MatrixRegion
    group: int = 0
    stream: int = 0
    key: int = 0
    key_stream: int = 0


class AdamPasses(Enum):
    """See the head of this file."""

    ONCE = 1
    AFTER = 2
    TWICE = 3


def passes_of(parameter: AdamParameter) -> AdamPasses:
    """Which way a parameter goes."""
    states = (parameter.exp_avg, parameter.exp_avg_sq, parameter.master)
    if any(isinstance(state, ScaledTensor) and is_later(state) for state in states):
        return AdamPasses.TWICE
    weight, master = parameter.weight, parameter.master
    if not isinstance(weight, ScaledTensor) or not is_later(weight):
        return AdamPasses.ONCE
    if not isinstance(master, PlainTensor) or master.tensor.dtype is not torch.float32:
        return AdamPasses.TWICE
    return AdamPasses.AFTER if weight.history is None else AdamPasses.ONCE


def is_later(state: ScaledTensor) -> bool:
    """True if any of its scales needs amaxes of more than a tile."""
    return any(state.is_later(copy) for copy in state.fmt.copies.values())


# ------------------------------------------------------------------------------------------------------------ constants


def _stored(
    state: PlainTensor | MasterRemainder | ScaledTensor | None,
    which: Copy,
    tile: tuple[int, int],
    measures: bool,
    writes: bool,
    **options: bool,
) -> ks.StateConfig:
    """What a kernel must know of one thing stored."""
    if state is None or (isinstance(state, ScaledTensor) and which not in state.fmt.copies):
        return ks.StateConfig(ks.ABSENT.value)
    if isinstance(state, MasterRemainder):
        return ks.StateConfig(ks.HALVES.value, writes=writes)
    if isinstance(state, PlainTensor):
        dtype, stochastic = state.tensor.dtype, options.pop("stochastic") and state.tensor.dtype is not torch.float32
        rule = None
        if dtype is torch.float16 and stochastic:
            rule = ql.scale_rule(FP16_1X128.copies[Copy.ROWWISE], Scaling(), torch.float32, state.tensor.device)
        return ks.StateConfig(
            ks.PLAIN.value, km.TYPES[dtype], rule, writes=writes, stochastic=stochastic,
            keep_positive=options["keep_positive"] and dtype is not torch.float32,
        )  # fmt: skip
    copy = state.fmt.copies[which]
    given, second = state.is_given(copy), copy.amax is not None
    rows, cols = (tile[dim] if covers == ALL else min(covers, tile[dim]) for dim, covers in enumerate(copy.block))
    device = next(iter(state.components.values())).device
    all_rows, all_cols = (covers == ALL for covers in copy.block)
    return ks.StateConfig(
        ks.SCALED.value, rule=ql.scale_rule(copy, state.scaling, torch.float32, device),
        block_rows=1 if all_rows else copy.block[0], block_cols=1 if all_cols else copy.block[1], rows=rows, cols=cols,
        row_all=all_rows, col_all=all_cols, given=given, second=second, measures=measures and given,
        measures_second=measures and second and which is Copy.ROWWISE, writes=writes, **options,
    )  # fmt: skip


def adam_kernel_config(
    p: AdamParameter, aligned: bool, measures: bool, writes_states: bool, writes_weight: bool
) -> ks.AdamKernelConfig:
    """Constants of the kernel for one pass over a parameter."""
    tile = (1, LINE) if p.rectangle.shape[0] == 1 and not scaled_states(p) else (_rows(p), COLS)
    written = writes_weight and not isinstance(p.master, MasterRemainder)

    def state(value: PlainTensor | MasterRemainder | ScaledTensor | None, **options: bool) -> ks.StateConfig:
        return _stored(value, Copy.ROWWISE, tile, measures, writes_states, **options)

    def weight(which: Copy) -> ks.StateConfig:
        of_own = p.master is None and isinstance(p.weight, ScaledTensor)
        return _stored(
            p.weight, which, tile, measures, written, stochastic=p.master is None, own_words=of_own, keep_positive=False
        )

    rowwise = weight(Copy.ROWWISE)
    high = rowwise.kind == ks.SCALED.value and written and not rowwise.given and rowwise.block_rows > rowwise.rows
    assert not high or rowwise.block_rows == HEIGHT, "a program has one row of high blocks"
    by_four = p.rectangle.global_shape[1] % 4 == 0 or p.rectangle.global_shape[0] == 1
    return ks.AdamKernelConfig(
        *tile, 1 if tile[0] == 1 else HEIGHT // tile[0], aligned, by_four, high,
        isinstance(p.master, PlainTensor) and p.master.tensor.dtype is torch.float32,
        _floor(p.exp_avg) > _floor(p.exp_avg_sq),
        state(p.exp_avg, stochastic=True, keep_positive=False),
        state(p.exp_avg_sq, stochastic=True, keep_positive=True),
        state(p.master, stochastic=True, keep_positive=False),
        rowwise,
        weight(Copy.COLUMNWISE) if isinstance(p.weight, ScaledTensor) else ks.StateConfig(ks.ABSENT.value),
    )  # fmt: skip


def _floor(state: PlainTensor | ScaledTensor) -> float:
    """See `Encoding.floor`; 0 of values with an exponent of their own."""
    return state.fmt.copies[Copy.ROWWISE].codes.encoding.floor if isinstance(state, ScaledTensor) else 0.0


def _rows(p: AdamParameter) -> int:
    """Of a tile: few, for fewer registers, but whole blocks, where these are not much higher."""
    heights = [copy.block[0] for thing in scaled_states(p).values() for copy in thing.fmt.copies.values()]
    return 32 if any(16 < height <= 32 for height in heights) else 16


def scaled_states(p: AdamParameter) -> dict[str, ScaledTensor]:
    """What is stored in components, by role."""
    things = zip(ROLES, (p.exp_avg, p.exp_avg_sq, p.master, p.weight), strict=True)
    return {role: thing for role, thing in things if isinstance(thing, ScaledTensor)}


def is_aligned(p: AdamParameter) -> bool:
    """True if kernels may read and write 16 bytes of values at once, whatever the dtype."""
    tensors = []
    for thing in (p.exp_avg, p.exp_avg_sq, p.master, p.weight):
        if isinstance(thing, ScaledTensor):
            tensors += [thing.components[copy.codes.name] for copy in thing.fmt.copies.values()]
        elif thing is not None:
            tensors.append(thing.tensor)
    lengths = (p.rectangle.shape[1], p.rectangle.origin[1])
    return all(n % 16 == 0 for n in lengths) and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
