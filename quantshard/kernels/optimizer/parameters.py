"""What a step needs for each parameter: its passes, the kernel constants that follow from its storage, and amaxes.

A parameter takes one of three ways through a step, by the source of the scales of the tensors that are written:

    ONCE    the tile, or past amaxes (delayed scaling): `StepLaunchPlan.update` does everything. If the new amax exceeds
            the past ones, `StepLaunchPlan.finish` quantizes the master again
    AFTER   the weight's scales need amaxes from beyond the tile, and there is a float32 master: `update` writes the
            states and measures, `StepLaunchPlan.finish` quantizes the master
    TWICE   a state's scales need them too, or there is no such master: `update` measures, `finish` computes the step
            again and writes
"""

import math
from collections.abc import Sequence
from enum import Enum

import torch

from quantshard.formats import ALL, FP16_1X128, Orientation, OrientedCodes, Scaling
from quantshard.kernels import language as ql, scale_rule as sr
from quantshard.kernels.optimizer import multi_tensor as km, states as ks
from quantshard.kernels.optimizer.stored import Algorithm, PlainTensor, ScaledTensor, StepParameter, StoredTensor
from quantshard.numerics.states import AVERAGE, MASTER, WEIGHT, StateKind

COLS, HEIGHT, LINE = 128, 128, 2048  # columns and total height of a program's tiles; length of a vector's tile
WIDE = (512, 256)
"""Columns of tiles, of 2048 elements each, for parameters with scaled states and no blocks of several rows, if these
tiles are at least four fifths full. With FP8 moments a step is 1.36 and 1.24 times as fast as with 128 columns
(benchmarks/RESULTS.md)."""


class StepPasses(Enum):
    ONCE = 1
    AFTER = 2
    TWICE = 3


def passes_of(parameter: StepParameter) -> StepPasses:
    if any(state.deferred for role, state in parameter.scaled.items() if role != WEIGHT):
        return StepPasses.TWICE
    weight = parameter.weight
    if not isinstance(weight, ScaledTensor) or not weight.deferred:
        return StepPasses.ONCE
    if not _is_float32(parameter.master):
        return StepPasses.TWICE
    return StepPasses.AFTER if weight.history is None else StepPasses.ONCE


def _is_float32(state: StoredTensor | None) -> bool:
    return isinstance(state, PlainTensor) and state.tensor.dtype is torch.float32


ABSENT = ks.StateConfig(StateKind.ABSENT.value)


def _plain(state: PlainTensor, writes: bool, stochastic: bool, keep_positive: bool) -> ks.StateConfig:
    if state.kind is StateKind.REMAINDER:
        return ks.StateConfig(state.kind.value, writes=writes)
    dtype, rule = state.tensor.dtype, None
    is_rounded = dtype is not torch.float32
    if dtype is torch.float16 and stochastic:
        rule = _rule(FP16_1X128.copies[Orientation.ROWWISE], Scaling(), state.tensor.device)
    return ks.StateConfig(
        state.kind.value, km.TYPES[dtype], rule, writes=writes, stochastic=stochastic and is_rounded,
        keep_positive=keep_positive and is_rounded,
    )  # fmt: skip


def _scaled(
    state: ScaledTensor, which: Orientation, tile: tuple[int, int], measures: bool, writes: bool, stochastic: bool,
    keep_positive: bool = False, own_key: bool = False,
) -> ks.StateConfig:  # fmt: skip
    copy = state.fmt.copies[which]
    uses_measured, second = state.is_given(copy), copy.amax is not None
    all_rows, all_cols = (size == ALL for size in copy.block)
    rows, cols = (tile[dim] if size == ALL else min(size, tile[dim]) for dim, size in enumerate(copy.block))
    return ks.StateConfig(
        state.kind.value, rule=_rule(copy, state.scaling, state.components[copy.codes.name].device),
        block_rows=1 if all_rows else copy.block[0], block_cols=1 if all_cols else copy.block[1], rows=rows, cols=cols,
        row_all=all_rows, col_all=all_cols, given=uses_measured, second=second, measures=measures and uses_measured,
        measures_second=measures and second and which is Orientation.ROWWISE, writes=writes, stochastic=stochastic,
        keep_positive=keep_positive, own_key=own_key,
    )  # fmt: skip


def _split(weight: StoredTensor, writes: bool) -> ks.StateConfig:
    """The kernel config of a `SPLIT` master: the low bytes that extend a weight's codes."""
    assert isinstance(weight, ScaledTensor)
    copy = weight.fmt.copies[Orientation.ROWWISE]
    device = weight.components[copy.codes.name].device
    rule = _rule(copy, weight.scaling, device)._replace(element=ql.element(copy.codes.encoding.extended, device))
    return ks.StateConfig(StateKind.SPLIT.value, rule=rule, writes=writes, stochastic=True)


def _rule(copy: OrientedCodes, scaling: Scaling, device: torch.device) -> sr.ScaleRule:
    return sr.scale_rule(copy, scaling, torch.float32, device)


def step_kernel_config(
    p: StepParameter, aligned: bool, measures: bool, writes_states: bool, writes_weight: bool
) -> ks.StepKernelConfig:
    tile = _tile(p, aligned)
    master = p.master
    writes_codes = writes_weight and (master is None or master.kind is not StateKind.REMAINDER)

    def state(role: str, keep_positive: bool = False) -> ks.StateConfig:
        tensor = p.stored.get(role)
        if tensor is None:
            return ABSENT
        if isinstance(tensor, PlainTensor):
            return _plain(tensor, writes_states, True, keep_positive)
        return _scaled(tensor, Orientation.ROWWISE, tile, measures, writes_states, True, keep_positive)

    def weight(which: Orientation) -> ks.StateConfig:
        is_read = master is None
        if isinstance(p.weight, PlainTensor):
            return _plain(p.weight, writes_codes, is_read, False) if which is Orientation.ROWWISE else ABSENT
        if which not in p.weight.fmt.copies:
            return ABSENT
        return _scaled(p.weight, which, tile, measures, writes_codes, is_read, own_key=is_read)

    specs = p.algorithm.states
    state1, *remaining = (state(spec.role, spec.nonnegative) for spec in specs)
    rowwise = weight(Orientation.ROWWISE)
    high = rowwise.kind == StateKind.SCALED and writes_codes and not rowwise.given and rowwise.block_rows > rowwise.rows
    by_four = p.rectangle.global_shape[1] % 4 == 0 or p.rectangle.global_shape[0] == 1
    chunks = 1 if tile[0] == 1 else HEIGHT * COLS // math.prod(tile)
    is_split = master is not None and master.kind is StateKind.SPLIT
    config = ks.StepKernelConfig(
        *tile, chunks, aligned, by_four, high, p.bound.value, p.algorithm.value, len(specs),
        state1, remaining[0] if remaining else ABSENT, _split(p.weight, writes_states) if is_split else state(MASTER),
        rowwise, weight(Orientation.COLUMNWISE), state(AVERAGE),
    )  # fmt: skip
    if high and not _is_float32(master):
        config = config._replace(measuring=step_kernel_config(p, aligned, False, False, False))
    return config._replace(only_raises=not (writes_states or writes_weight) and _only_raises(config))


def _only_raises(config: ks.StepKernelConfig) -> bool:
    """True if a pass that measures amaxes measures the weight's only, and the largest update is known."""
    weight = config.weight
    # a grid of blocks needs the amax of every tile
    of_tensor = weight.row_all and weight.col_all if weight.measures else weight.measures_second
    others = [state for state in config if isinstance(state, ks.StateConfig) and state is not weight]
    is_bounded = config.bound > 0 if config.algorithm == Algorithm.ADAM else config.algorithm == Algorithm.LION
    return of_tensor and is_bounded and not any(state.measures or state.measures_second for state in others)


def _tile(p: StepParameter, aligned: bool) -> tuple[int, int]:
    """Rows and columns of a tile: few rows, to save registers, but whole blocks unless they are much higher."""
    (rows, cols), (_, first) = p.rectangle.shape, p.rectangle.origin
    if rows == 1 and not p.scaled:
        return 1, LINE
    heights = {copy.block[0] for state in p.scaled.values() for copy in state.fmt.copies.values()} - {1, ALL}
    if aligned and not heights and any(role != WEIGHT for role in p.scaled):
        for width in WIDE:
            tiles = -(-(first + cols) // width) - first // width
            if tiles * width * 4 <= cols * 5:
                return LINE // width, width
    return (32 if any(16 < height <= 32 for height in heights) else 16), COLS


def is_aligned(p: StepParameter) -> bool:
    """Return True if kernels can read and write 16 bytes of values at once, for any dtype."""
    tensors = []
    for state in p.stored.values():
        if isinstance(state, ScaledTensor):
            tensors += [state.components[copy.codes.name] for copy in state.fmt.copies.values()]
        else:
            tensors.append(state.tensor)
    lengths = (p.rectangle.shape[1], p.rectangle.origin[1])
    return all(n % 16 == 0 for n in lengths) and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


USED, REDO = "used", "redo"
"""Delayed scaling: the amax that sets the scale; whether to quantize again."""


class AmaxWorkspace:
    """Zeroed float32 memory for a step's amaxes: `flat`, cut into `grids` by parameter, role and component."""

    def __init__(self, parameters: Sequence[StepParameter], device: torch.device) -> None:
        shapes: dict[tuple[int, str, str], tuple[int, int]] = {}
        for number, parameter in enumerate(parameters):
            for role, state in parameter.scaled.items():
                for copy in state.fmt.copies.values():
                    if state.is_given(copy):
                        shapes[number, role, copy.scale.name] = state.shard.component_shape(copy.scale)
                    if copy.amax is not None:
                        shapes[number, role, copy.amax.name] = (1, 1)
                if state.history is not None:
                    shapes |= {(number, role, USED): (1, 1), (number, role, REDO): (1, 1)}
        sizes = [rows * cols for rows, cols in shapes.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = zip(shapes.items(), self.flat.split(sizes) if sizes else (), strict=True)
        self.grids = {key: part.view(shape) for (key, shape), part in parts}

    def address(self, number: int, role: str, name: str) -> int:
        grid = self.grids.get((number, role, name))
        return 0 if grid is None else grid.data_ptr()
