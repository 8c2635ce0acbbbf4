"""Sources that kernels quantize GEMM operands from: values in memory, or values that a kernel computes.

A normalization or an activation before a linear layer is such a source. One kernel computes a tile of its result,
quantizes the tile along both dims and records amaxes, and the result itself is never written. An `OperandPlan`, made
once, describes the outputs of the kernel for all matrices of one shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, sharding
from quantshard.formats import ALL, FP32, Orientation, OrientedCodes, Scaling
from quantshard.gemm import scaled_products
from quantshard.gemm.operands import Operand, OperandUsage, RandomBitsFn, needs_amax, quantized_cells
from quantshard.gemm.weight_operands import WeightOperands
from quantshard.kernels import workspace
from quantshard.kernels.fused import activation as activation_kernels
from quantshard.kernels.fused import epilogue
from quantshard.kernels.fused import norm as norm_kernels
from quantshard.kernels.fused.epilogue import KernelOutputs, Targets
from quantshard.kernels.quantize import amax as amax_kernels
from quantshard.kernels.quantize import matrix as quantize_kernels
from quantshard.kernels.quantize.random_words import KEYS
from quantshard.kernels.quantize.swizzle import SwizzleRequest
from quantshard.kernels.quantize.targets import (
    MOST_PLANS,
    AmaxRequest,
    BlockAmaxes,
    Given,
    Poison,
    QuantizedOutput,
    QuantizeRequest,
    QuantizeSpec,
    base_of,
    hides_from_kernels,
    padding,
)
from quantshard.numerics import Pair
from quantshard.recipe import CellPair, QuantSpec
from quantshard.sharding import Shard
from quantshard.tensor.storage import SECOND_SCALE, GemmKey, QuantizedStorage, operand_layout

BothAmaxes = tuple[Tensor | None, Tensor | None]
"""Amaxes to quantize a matrix and its transpose by."""

_WHOLE, _ROWS = BlockAmaxes((ALL, ALL)), BlockAmaxes((1, ALL))


class OperandProducer(ABC):
    """A matrix [R, C] of one of the kernel dtypes.

    `amax`: amax of the whole matrix, float32 [1, 1], if it is known.
    """

    amax: Tensor | None
    of_rows: BothAmaxes = (None, None)
    """Amaxes of each row and of each column, if they are known."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of the matrix's shape, dtype and device. Kernels round results to that dtype before they
        quantize."""

    @abstractmethod
    def emit(self, outputs: KernelOutputs) -> Targets:
        """Launch one kernel that writes all `outputs`."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.like.dtype

    def known(self, plan: OperandPlan) -> BothAmaxes | None:
        """The amaxes that a plan quantizes by, if they are known and the plan needs no other statistic."""
        if plan.by_amax:
            return None if self.amax is None else (self.amax, self.amax)
        return self.of_rows if plan.by_rows and self.of_rows[0] is not None else None

    def measured(self, plan: OperandPlan | None = None) -> TensorSource:
        """Write the values, and the amaxes that a plan measures, to memory with one kernel."""
        source = TensorSource.empty(self.like, plan)
        self.emit(source.wanted)
        return source


@dataclass
class TensorSource(OperandProducer):
    """Values [R, C] in memory, optionally with the amaxes of blocks that a plan measures.

    `nan_flag`: scalar that is NaN if values are not finite, if the producer of the values checked this. `swizzle`:
    weights that the quantizing kernel may lay out as well; other kernels ignore them.
    """

    values: Tensor
    amax: Tensor | None = None
    blocks: AmaxRequest | None = None
    nan_flag: Tensor | None = None
    swizzle: SwizzleRequest | None = None

    @staticmethod
    def empty(like: Tensor, plan: OperandPlan | None = None) -> TensorSource:
        """Allocate values like `like` [R, C] and the outputs that a plan measures, for a kernel to write through
        `wanted`."""
        source = TensorSource(torch.empty(like.shape, dtype=like.dtype, device=like.device))
        if plan is None:
            return source
        blocks, transposed_blocks = plan.others
        if blocks is not None or transposed_blocks is not None:
            ((of_rows, of_cols),) = amax_kernels.plan_amaxes(like.shape, blocks, transposed_blocks).grids(like, 1)
            source.blocks = AmaxRequest(blocks, transposed_blocks, (of_rows, of_cols))
        if source.blocks is None or any(plan.by_whole):
            source.amax = workspace.zero(like.device)
        if plan.raised == "measuring":
            source.nan_flag = workspace.zero(like.device)
        return source

    @property
    def wanted(self) -> KernelOutputs:
        """Kernel outputs that fill all fields."""
        return KernelOutputs(high=self.values, amax=self.amax, nan_flag=self.nan_flag, measured=self.blocks)

    @property
    def like(self) -> Tensor:
        """The values."""
        return self.values

    def emit(self, outputs: KernelOutputs) -> Targets:
        """Launch one kernel that writes all `outputs`."""
        return TensorSource.emit_all([self], [outputs])[0]

    @staticmethod
    def emit_all(producers: Sequence[TensorSource], outputs: Sequence[KernelOutputs]) -> Sequence[Targets]:
        """Write the same kind of outputs of several similar matrices (`quantize_gradients`) with one kernel. If random
        words are needed, a kernel takes at most `KEYS` matrices."""
        values, (request, request_t, high, amax, nan_flag, sums, _) = [item.values for item in producers], outputs[0]
        if len(values) > KEYS and any(item is not None and item.words is not None for item in (request, request_t)):
            head = producers[:KEYS], outputs[:KEYS]
            return [*TensorSource.emit_all(*head), *TensorSource.emit_all(producers[KEYS:], outputs[KEYS:])]
        if nan_flag is None and sums is None and high is None:
            if request is not None:
                return quantize_kernels.quantize_matrices(values, outputs, producers[0].swizzle)
            if request_t is not None and amax is None:
                results = quantize_kernels.quantize_matrices(
                    [x.t() for x in values], [KernelOutputs(item.other) for item in outputs]
                )
                return [(None, output) for output, _ in results]
        return activation_kernels.quantize_gradients(values, outputs)

    def measured(self, plan: OperandPlan | None = None) -> TensorSource:
        """Return self, since the values are in memory already."""
        return self


@dataclass
class NormProducer(OperandProducer):
    """Rows x [R, C] through a normalization; `statistics` and `parameters` as in `kernels.fused.norm`."""

    x: Tensor
    statistics: norm_kernels.NormStatistics
    parameters: norm_kernels.NormParameters
    amax: Tensor | None = None
    of_rows: BothAmaxes = (None, None)

    @property
    def like(self) -> Tensor:
        """The input rows."""
        return self.x

    def emit(self, outputs: KernelOutputs) -> Targets:
        """Launch one kernel that writes all `outputs`."""
        return norm_kernels.normalize_and_quantize(self.x, self.statistics, self.parameters, outputs)


@dataclass
class ActivationProducer(OperandProducer):
    """An activation of `gate` [R, C], times `up` of the same shape if it is gated; as in `kernels.fused.activation`."""

    gate: Tensor
    activation: str
    up: Tensor | None
    amax: Tensor | None = None

    @property
    def like(self) -> Tensor:
        """The input of the activation."""
        return self.gate

    def emit(self, outputs: KernelOutputs) -> Targets:
        """Launch one kernel that writes all `outputs`."""
        return activation_kernels.activate_and_quantize(self.gate, self.activation, self.up, outputs)


@dataclass
class GatedGradientProducer(OperandProducer):
    """The gradient of `gate` [R, C] in a gated activation, from the gradient `dh` of its result; without `up`'s."""

    dh: Tensor
    gate: Tensor
    activation: str
    up: Tensor
    amax: Tensor | None = None

    @property
    def like(self) -> Tensor:
        """The input of the activation."""
        return self.gate

    def emit(self, outputs: KernelOutputs) -> Targets:
        """Launch one kernel that writes all `outputs`."""
        gate_targets, _ = activation_kernels.activate_backward_and_quantize(
            self.dh, self.gate, self.activation, self.up, outputs, KernelOutputs()
        )
        return gate_targets


def is_by_amax(cell: QuantSpec | None) -> bool:
    """True if quantizing needs the amax of the whole matrix and no other statistic."""
    if cell is None or cell.scaling.history or cell.scaling.random_hadamard:
        return False
    copy = cell.format.copies[Orientation.ROWWISE]
    return copy.block == (ALL, ALL) and copy.amax is None


@lru_cache(MOST_PLANS)
def are_by_amax(cells: CellPair) -> bool:
    """True if `is_by_amax` holds for both cells."""
    return all(map(is_by_amax, cells))


@lru_cache(MOST_PLANS)
def are_by_rows(cells: CellPair) -> bool:
    """True if both cells quantize by the amaxes of rows and need no other statistic."""
    scalings = [cell is not None and cell.scaling for cell in cells]
    plain = all(scaling and not (scaling.history or scaling.random_hadamard) for scaling in scalings)
    copies = [cell.format.copies[Orientation.ROWWISE] for cell in cells if cell is not None]
    return plain and all(copy.block == _ROWS.block_shape and copy.amax is None for copy in copies)


def row_amaxes(cells: CellPair, like: Tensor, both: bool) -> BothAmaxes:
    """Zeroed memory for the amaxes of rows of a matrix like `like` [..., C] and, if `both`, of columns. (None, None)
    unless the cells quantize by row amaxes."""
    if not are_by_rows(cells):
        return None, None
    plan = amax_kernels.plan_amaxes(epilogue.matrix(like).shape, _ROWS, _ROWS if both else None)
    return plan.grids(like, 1)[0]


@lru_cache(MOST_PLANS)
def can_quantize(dtype: torch.dtype, cells: CellPair) -> bool:
    """True if kernels quantize whole matrices of this dtype by these cells."""
    return dtype in kernel_dispatch.KERNEL_DTYPES and all([cell is None or cell.format.is_narrow for cell in cells])


class DirectionPlan(NamedTuple):
    """How a matrix, or its transpose, is quantized: by a cell, through a kernel spec, into a rectangle.

    `layout`, `transposed`: keys of the result and of its transpose as operands. `measured`: blocks with amaxes that
    the kernel needs as input. `wraps`: Triton does not support a dtype of the result.
    """

    cell: QuantSpec
    spec: QuantizeSpec
    shard: Shard
    layout: GemmKey
    transposed: GemmKey
    measured: BlockAmaxes | None
    wraps: bool

    @staticmethod
    def of(
        cell: QuantSpec | None,
        shape: Pair,
        delayed: bool,
        shared: bool,
        nan_flags: bool,
        like: OperandKind,
        decodes: bool,
    ) -> DirectionPlan | None:
        """Plan one direction; None without a cell. `shared`: the kernel also writes the codes of the transpose.
        `nan_flags`: values may be infinite or NaN. `decodes`: the kernel returns values instead of codes, because
        nothing keeps the operand and products read values."""
        if cell is None:
            return None
        copy, scaling = cell.format.copies[Orientation.ROWWISE], cell.scaling
        hadamard = scaling.random_hadamard
        block_input: Given = "amaxes" if ALL in copy.block else ""
        nan_flag: Poison = ""
        ready = like.is_ready(cell, shape)
        if nan_flags and shared and copy.block == (ALL, ALL) and not hadamard:  # the scale itself becomes NaN
            nan_flag = "apart" if delayed else "amax"
        elif nan_flags and ready and copy.amax is not None:
            nan_flag = "amax"  # the second scale becomes NaN
        elif nan_flags and block_input and not delayed and copy.block != (ALL, ALL):
            nan_flag = "given"  # the measuring kernel sets it
        plain = Scaling(scaling.power_of_two, scaling.margin, scaling.epsilon, random_hadamard=hadamard)
        spec = QuantizeSpec(
            copy, plain, (0, 0), shared, read_by_columns(copy), block_input, nan_flag, decodes and not shared, ready
        )
        rows, cols = shape[0], shape[1] + padding(shape[1], spec)
        blocks = copy.block if block_input else None if copy.amax is None else copy.amax.block_shape
        measured = None if blocks is None else BlockAmaxes(blocks, hadamard)
        shard = sharding.whole((rows, cols))
        key, key_t = (operand_layout(cell.format, rectangle) for rectangle in (shard, sharding.whole((cols, rows))))
        return DirectionPlan(cell, spec, shard, key, key_t, measured, ready and hides_from_kernels(copy))

    def request(self, amaxes: Tensor | None, words: RandomBitsFn | None, nan_flag: Tensor | None) -> QuantizeRequest:
        """Arguments of a kernel. `amaxes`: amaxes of blocks or the second amax, if the spec needs them. `nan_flag`:
        the flag, if the spec needs one."""
        if self.measured is None:
            amaxes = None
        spec, flag_mode = self.spec, self.spec.nan_flag
        random_bits = words(self.shard) if words is not None and self.cell.scaling.stochastic_rounding else None
        return QuantizeRequest(
            spec, amaxes if spec.given else None, None if spec.given else amaxes, random_bits,
            nan_flag if flag_mode == "apart" else None, nan_flag if flag_mode == "given" else None,
        )  # fmt: skip

    def operand(self, output: QuantizedOutput, transposed: bool = False) -> Operand:
        """Wrap the output of a kernel, or its transpose, as an operand."""
        if self.spec.decoded:
            values: Tensor = output.codes
            return values
        copy, scale = self.spec.copy, output.scale
        codes = output.transposed if transposed else output.codes
        if self.wraps:
            codes, scale = base_of(codes), base_of(scale)
        if transposed and not self.spec.given:
            scale = scale.t()
        components = {copy.codes.name: codes, copy.scale.name: scale}
        if copy.amax is not None:
            components[copy.amax.name] = output.second
            if output.second_scale is not None:
                components[SECOND_SCALE] = output.second_scale
        layout = self.transposed if transposed else self.layout
        return QuantizedStorage(self.cell, layout.shard, components, layout=layout)


class OperandKind(NamedTuple):
    """Dtype of a matrix, and compute capability of the GPU that multiplies it.

    `stored`: codes and scales must be laid out as formats store them, since other code than products reads them.
    `turned`: the weight of the first GEMM has codes that no product reads in that direction, on any hardware.
    """

    dtype: torch.dtype
    capability: scaled_products.Capability | None
    stored: bool = False
    turned: bool = False

    def is_emulated(self, cell: QuantSpec | None, first: bool = False) -> bool:
        """True if products read the matrix, quantized by `cell`, as values of its dtype: this hardware multiplies such
        codes with nothing, or, for the first GEMM (`first`), not with codes of its weight."""
        if cell is None or self.capability is None or self.dtype is not torch.bfloat16:  # products read another dtype
            return False
        return (first and self.turned) or not self._has_product(cell)

    def is_ready(self, cell: QuantSpec, shape: Pair) -> bool:
        """True if a kernel can write codes and scales of a matrix [R, C] in the form that products read: there is such
        a product, it needs no padding of the matrix or its transpose, and 8-bit scales cover one row each."""
        copy = cell.format.copies[Orientation.ROWWISE]
        fits = 0 not in shape and shape[0] % 16 == 0 and shape[1] % (128 // copy.codes.encoding.bits) == 0
        has_row_scales = copy.scale.encoding.bits > 8 or copy.block[0] == 1
        return fits and has_row_scales and not self.stored and self._has_product(cell)

    def _has_product(self, cell: QuantSpec) -> bool:
        kind = scaled_products.stored_kind(cell.format)
        return any(
            product.is_of(self.capability)
            for kinds, product in scaled_products.NATIVE.items()
            if kind in kinds or scaled_products.flat(kind) in kinds
        )


operand_kind = lru_cache(MOST_PLANS)(OperandKind)
"""Cached `OperandKind`."""


MeasuredBlocks = tuple[BlockAmaxes | None, BlockAmaxes | None]
"""Blocks to measure amaxes of, in a matrix and in its transpose."""


class OperandPlan(NamedTuple):
    """How matrices [R, C] of one shape are quantized for two GEMMs: `one` as they are, `two` transposed. If the second
    GEMM shares the codes of `one`, `two` is None and the kernel transposes the codes.

    Args:
        measured: blocks with amaxes that a kernel measures.
        others: the same if the amax of the whole matrix is known, which the directions with `by_whole` use.
        reads_values: a GEMM reads the values themselves, or they must be measured before they are quantized.
        by_amax, by_rows: quantizing needs the amax of the whole matrix, or of its rows, and no other statistic.
        nan_flag: where a value that is not finite is recorded: nowhere, in a scalar, or in scales.
        raised: the kernel that sets a scalar for this: none, the quantizing one, or the measuring one.
        draws: random words are needed.
    """

    one: DirectionPlan | None
    two: DirectionPlan | None
    measured: MeasuredBlocks
    others: MeasuredBlocks
    by_whole: tuple[bool, bool]
    reads_values: bool
    by_amax: bool
    by_rows: bool
    nan_flag: Literal["", "scalar", "scale"]
    raised: Literal["", "quantizing", "measuring"]
    draws: bool

    def measure(
        self, given: Sequence[TensorSource], past: Tensor | None, nan_flags: Sequence[Tensor | None]
    ) -> Sequence[BothAmaxes]:
        """The amaxes that both directions need, for several similar matrices. `past`: a known amax to scale by. The
        `nan_flags` of matrices that are not finite become NaN, if scales record it."""
        blocks, blocks_t = self.measured if given[0].amax is None else self.others
        grids: Sequence[BothAmaxes] = [(None, None) if item.blocks is None else item.blocks.grids for item in given]
        if given[0].blocks is None and (blocks is not None or blocks_t is not None):
            grids = amax_kernels.block_amaxes([item.values for item in given], blocks, blocks_t, nan_flags)
        by_whole, by_whole_t = self.by_whole
        results = list[BothAmaxes]()
        for item, (amax, amax_t) in zip(given, grids, strict=True):
            if item.amax is None and (by_whole or by_whole_t):
                item.amax = amax if by_whole else amax_t
            results.append((
                item.amax if by_whole else past if blocks is None else amax,
                item.amax if by_whole_t else past if blocks_t is None else amax_t,
            ))  # fmt: skip
        return results

    def swizzle_request(self, weight_operands: WeightOperands) -> SwizzleRequest | None:
        """Swizzling of the first GEMM's weights that the quantizing kernel can do too. None if the weights wait for a
        nan flag, or are multiplied with values."""
        if self.one is None or self.one.spec.decoded or self.nan_flag == "scalar":
            return None
        return weight_operands.swizzle_request(self.one.layout)

    @property
    def decodes(self) -> bool:
        """True if a direction returns values instead of codes. Values take more bytes."""
        return any(way is not None and way.spec.decoded for way in (self.one, self.two))


@lru_cache(MOST_PLANS)
def plan_operand(cells: CellPair, wanted: OperandUsage, delayed: bool, shape: Pair, like: OperandKind) -> OperandPlan:
    """Plan matrices of `shape`: the first cell is for the first GEMM, the second for wgrad. `delayed`: scale by past
    amaxes."""
    first, second = cells
    quantized, transposed, shared = quantized_cells(first, second, wanted)
    nan_flags, passing = wanted.nan_flag, wanted.passing
    decodes = passing >= 1 and like.is_emulated(quantized, True), passing >= 2 and like.is_emulated(transposed)
    plan = DirectionPlan.of(quantized, shape, delayed, shared, nan_flags, like, decodes[0])
    plan_t = DirectionPlan.of(transposed, shape[::-1], delayed, False, nan_flags, like, decodes[1])
    blocks, blocks_t = (
        None if direction is None or (delayed and direction.spec.given) else direction.measured
        for direction in (plan, plan_t)
    )
    by_whole = blocks == _WHOLE, blocks_t == _WHOLE
    other_blocks = None if by_whole[0] else blocks, None if by_whole[1] else blocks_t
    plain = (wanted.first and first is None) or (wanted.second and second is None)
    directions = [direction for direction in (plan, plan_t) if direction is not None]
    measures = not delayed and needs_amax(*[direction.cell for direction in directions])
    by_amax = measures and not plain and all(is_by_amax(direction.cell) for direction in directions)
    by_rows = measures and not plain and all(direction.measured == _ROWS for direction in directions)
    in_scale = bool(directions) and all(direction.spec.nan_flag for direction in directions)
    nan_flag: Literal["", "scalar", "scale"] = "scale" if in_scale else "scalar" if wanted.nan_flag else ""
    raised: Literal["", "quantizing", "measuring"] = "quantizing" if nan_flag == "scalar" else ""
    if nan_flag == "scale":
        kinds = {direction.spec.nan_flag for direction in directions}
        raised = "quantizing" if "apart" in kinds else "measuring" if "given" in kinds else ""
    draws = any(direction.cell.scaling.stochastic_rounding for direction in directions)
    measured_blocks = blocks, None if all(by_whole) else blocks_t
    return OperandPlan(
        plan, plan_t, measured_blocks, other_blocks, by_whole, plain or measures, by_amax, by_rows,
        nan_flag, raised, draws,
    )  # fmt: skip


def read_by_columns(copy: OrientedCodes) -> bool:
    """True if products read the scales of a copy column by column (`backend`): storing them in this way saves a copy.

    (A torch.compile graph does not accept such strides from an operator, and copies the tensors kept for backward.)
    """
    eight = copy.codes.encoding.bits == 8
    return eight and copy.scale.encoding is FP32 and copy.block[0] == 1 and copy.block[1] != ALL
