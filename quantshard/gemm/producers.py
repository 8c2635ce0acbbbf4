"""What operands of GEMMs are quantized from where kernels run: values that are there, or that a kernel makes.

A normalization or an activation in front of a linear layer is such a source: one kernel computes a tile of its result,
quantizes it along both dims and notes amaxes, and the result itself is never written. What a kernel is asked for of all
matrices of one shape is an `OperandPlan`, which is made once.
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
"""Those by which a matrix is quantized, and its transpose."""

_WHOLE, _ROWS = BlockAmaxes((ALL, ALL)), BlockAmaxes((1, ALL))


class OperandProducer(ABC):
    """A matrix [R, C] of one of the dtypes of kernels; `amax`: of all of it, float32 [1, 1], if it is known."""

    amax: Tensor | None
    of_rows: BothAmaxes = (None, None)
    """Those of each row, and of each column, if they are known."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of its shape and dtype, where it is; a kernel rounds what it computes to that dtype before it
        quantizes it."""

    @abstractmethod
    def emit(self, outputs: KernelOutputs) -> Targets:
        """Launch one kernel, which makes all that is asked for."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.like.dtype

    def known(self, plan: OperandPlan) -> BothAmaxes | None:
        """The amaxes by which a plan quantizes, and nothing else, if they are known."""
        if plan.by_amax:
            return None if self.amax is None else (self.amax, self.amax)
        return self.of_rows if plan.by_rows and self.of_rows[0] is not None else None

    def measured(self, plan: OperandPlan | None = None) -> TensorSource:
        """The matrix as values in memory, with what a plan measures; one kernel makes all."""
        producer = TensorSource.empty(self.like, plan)
        self.emit(producer.wanted)
        return producer


@dataclass
class TensorSource(OperandProducer):
    """Values [R, C] that are there; of blocks of them the amaxes that a plan measures, and the scalar that is NaN if
    they are not finite, if what made them took these. `swizzle`: weights that the kernel which quantizes them may lay
    out; others leave it."""

    values: Tensor
    amax: Tensor | None = None
    blocks: AmaxRequest | None = None
    nan_flag: Tensor | None = None
    swizzle: SwizzleRequest | None = None

    @staticmethod
    def empty(like: Tensor, plan: OperandPlan | None = None) -> TensorSource:
        """Memory for values of a shape and dtype [R, C], and for what a plan measures, which a kernel is to write as
        `wanted`."""
        made = TensorSource(torch.empty(like.shape, dtype=like.dtype, device=like.device))
        if plan is None:
            return made
        one, two = plan.others
        if one is not None or two is not None:
            ((of_rows, of_cols),) = amax_kernels.plan_amaxes(like.shape, one, two).grids(like, 1)
            made.blocks = AmaxRequest(one, two, (of_rows, of_cols))
        if made.blocks is None or any(plan.by_whole):
            made.amax = workspace.zero(like.device)
        if plan.raised == "measuring":
            made.nan_flag = workspace.zero(like.device)
        return made

    @property
    def wanted(self) -> KernelOutputs:
        """All of it."""
        return KernelOutputs(high=self.values, amax=self.amax, nan_flag=self.nan_flag, measured=self.blocks)

    @property
    def like(self) -> Tensor:
        """The values."""
        return self.values

    def emit(self, outputs: KernelOutputs) -> Targets:
        """What is asked for, by one kernel."""
        return TensorSource.emit_all([self], [outputs])[0]

    @staticmethod
    def emit_all(producers: Sequence[TensorSource], outputs: Sequence[KernelOutputs]) -> Sequence[Targets]:
        """What is asked alike of several that are alike (`quantize_gradients`), by one kernel; for each `KEYS` of them
        by one, if random words are needed."""
        values, (request, other, high, amax, nan_flag, sums, _) = [each.values for each in producers], outputs[0]
        if len(values) > KEYS and any(each is not None and each.words is not None for each in (request, other)):
            few = producers[:KEYS], outputs[:KEYS]
            return [*TensorSource.emit_all(*few), *TensorSource.emit_all(producers[KEYS:], outputs[KEYS:])]
        if nan_flag is None and sums is None and high is None:
            if request is not None:
                return quantize_kernels.quantize_matrices(values, outputs, producers[0].swizzle)
            if other is not None and amax is None:
                found = quantize_kernels.quantize_matrices(
                    [x.t() for x in values], [KernelOutputs(each.other) for each in outputs]
                )
                return [(None, one) for one, _ in found]
        return activation_kernels.quantize_gradients(values, outputs)

    def measured(self, plan: OperandPlan | None = None) -> TensorSource:
        """This producer, whose values are in memory already."""
        return self


@dataclass
class NormProducer(OperandProducer):
    """Rows x [R, C] through a normalization; `statistics`, `parameters`: as in `kernels.fused.norm`."""

    x: Tensor
    statistics: norm_kernels.NormStatistics
    parameters: norm_kernels.NormParameters
    amax: Tensor | None = None
    of_rows: BothAmaxes = (None, None)

    @property
    def like(self) -> Tensor:
        """The rows before."""
        return self.x

    def emit(self, outputs: KernelOutputs) -> Targets:
        """What is asked for, by one kernel."""
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
        """The input of the function."""
        return self.gate

    def emit(self, outputs: KernelOutputs) -> Targets:
        """What is asked for, by one kernel."""
        return activation_kernels.activate_and_quantize(self.gate, self.activation, self.up, outputs)


@dataclass
class GatedGradientProducer(OperandProducer):
    """The gradient of `gate` [R, C] of a gated activation, from that of its result, `dh`; that of `up` is not made."""

    dh: Tensor
    gate: Tensor
    activation: str
    up: Tensor
    amax: Tensor | None = None

    @property
    def like(self) -> Tensor:
        """The input of the function."""
        return self.gate

    def emit(self, outputs: KernelOutputs) -> Targets:
        """What is asked for, by one kernel."""
        found, _ = activation_kernels.activate_backward_and_quantize(
            self.dh, self.gate, self.activation, self.up, outputs, KernelOutputs()
        )
        return found


def is_by_amax(cell: QuantSpec | None) -> bool:
    """True if values are quantized by their own amax, that of all of them, and by nothing else that is measured."""
    if cell is None or cell.scaling.history or cell.scaling.random_hadamard:
        return False
    copy = cell.format.copies[Orientation.ROWWISE]
    return copy.block == (ALL, ALL) and copy.amax is None


@lru_cache(MOST_PLANS)
def are_by_amax(cells: CellPair) -> bool:
    """True if `is_by_amax` is true of both."""
    return all(map(is_by_amax, cells))


@lru_cache(MOST_PLANS)
def are_by_rows(cells: CellPair) -> bool:
    """True if values are quantized by both by the amaxes of rows, and by nothing else that is measured."""
    scalings = [cell is not None and cell.scaling for cell in cells]
    plain = all(each and not (each.history or each.random_hadamard) for each in scalings)
    copies = [cell.format.copies[Orientation.ROWWISE] for cell in cells if cell is not None]
    return plain and all(copy.block == _ROWS.block_shape and copy.amax is None for copy in copies)


def row_amaxes(cells: CellPair, like: Tensor, both: bool) -> BothAmaxes:
    """Memory for the amaxes of the rows of values like these [..., C] and, if `both`, of columns, zero, if cells
    quantize by these; else none."""
    if not are_by_rows(cells):
        return None, None
    plan = amax_kernels.plan_amaxes(epilogue.matrix(like).shape, _ROWS, _ROWS if both else None)
    return plan.grids(like, 1)[0]


@lru_cache(MOST_PLANS)
def block_shape(dtype: torch.dtype, cells: CellPair) -> bool:
    """True if kernels quantize whole matrices of this dtype by these cells."""
    return dtype in kernel_dispatch.KERNEL_DTYPES and all([cell is None or cell.format.is_narrow for cell in cells])


class DirectionPlan(NamedTuple):
    """How a matrix, or its transpose, is quantized: by a cell, which to a kernel is a spec, into a rectangle.

    `transposed`: that of the transpose of what is made. `measured`: the blocks whose amaxes a kernel must be given.
    `wraps`: a dtype of PyTorch is none that kernels know.
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
        """`shared`: codes of the transpose are made too. `nan_flags`: values may be infinite or NaN.

        `decodes`: values replace codes, because nothing keeps the operand and products read values.
        """
        if cell is None:
            return None
        copy, scaling = cell.format.copies[Orientation.ROWWISE], cell.scaling
        hadamard = scaling.random_hadamard
        given: Given = "amaxes" if ALL in copy.block else ""
        nan_flag: Poison = ""
        ready = like.is_ready(cell, shape)
        if nan_flags and shared and copy.block == (ALL, ALL) and not hadamard:  # a scale of NaN is poison enough
            nan_flag = "apart" if delayed else "amax"
        elif nan_flags and ready and copy.amax is not None:
            nan_flag = "amax"  # of all values: the second scale
        elif nan_flags and given and not delayed and copy.block != (ALL, ALL):
            nan_flag = "given"  # by the kernel that measures
        plain = Scaling(scaling.power_of_two, scaling.margin, scaling.epsilon, random_hadamard=hadamard)
        spec = QuantizeSpec(
            copy, plain, (0, 0), shared, read_by_columns(copy), given, nan_flag, decodes and not shared, ready
        )
        rows, cols = shape[0], shape[1] + padding(shape[1], spec)
        blocks = copy.block if given else None if copy.amax is None else copy.amax.block_shape
        measured = None if blocks is None else BlockAmaxes(blocks, hadamard)
        shard = sharding.whole((rows, cols))
        layout, other = (operand_layout(cell.format, each) for each in (shard, sharding.whole((cols, rows))))
        return DirectionPlan(cell, spec, shard, layout, other, measured, ready and hides_from_kernels(copy))

    def request(self, amaxes: Tensor | None, words: RandomBitsFn | None, nan_flag: Tensor | None) -> QuantizeRequest:
        """That to a kernel; `amaxes`: those of blocks, or the second one, where it needs them. `nan_flag`: as the spec
        wants it."""
        if self.measured is None:
            amaxes = None
        spec, how = self.spec, self.spec.nan_flag
        drawn = words(self.shard) if words is not None and self.cell.scaling.stochastic_rounding else None
        return QuantizeRequest(
            spec, amaxes if spec.given else None, None if spec.given else amaxes, drawn,
            nan_flag if how == "apart" else None, nan_flag if how == "given" else None,
        )  # fmt: skip

    def operand(self, output: QuantizedOutput, transposed: bool = False) -> Operand:
        """What a kernel has made, or its transpose."""
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
    """Dtype of a matrix, and compute capability of the GPU that multiplies it. `stored`: codes and scales are wanted as
    formats store them, since not products alone read them. `turned`: it is multiplied first with a weight whose codes
    are in no such product, whatever the hardware."""

    dtype: torch.dtype
    capability: scaled_products.Capability | None
    stored: bool = False
    turned: bool = False

    def is_emulated(self, cell: QuantSpec | None, first: bool = False) -> bool:
        """True if products read the matrix, quantized by `cell`, as values of its dtype: on this hardware its codes are
        in none, or in none with the weight that it is multiplied with `first`."""
        if cell is None or self.capability is None or self.dtype is not torch.bfloat16:  # read in another dtype
            return False
        return (first and self.turned) or not self._has_product(cell)

    def is_ready(self, cell: QuantSpec, shape: Pair) -> bool:
        """True if codes and scales of a matrix [R, C] can be made as products read them: there is one, and it asks for
        no more rows or columns, of the matrix or of its transpose; of scales of 8 bits each row has its own."""
        copy = cell.format.copies[Orientation.ROWWISE]
        fits = 0 not in shape and shape[0] % 16 == 0 and shape[1] % (128 // copy.codes.encoding.bits) == 0
        own = copy.scale.encoding.bits > 8 or copy.block[0] == 1
        return fits and own and not self.stored and self._has_product(cell)

    def _has_product(self, cell: QuantSpec) -> bool:
        kind = scaled_products.stored_kind(cell.format)
        return any(
            each.is_of(self.capability)
            for kinds, each in scaled_products.NATIVE.items()
            if kind in kinds or scaled_products.flat(kind) in kinds
        )


operand_kind = lru_cache(MOST_PLANS)(OperandKind)
"""It is the same in each call."""


MeasuredBlocks = tuple[BlockAmaxes | None, BlockAmaxes | None]
"""Those of a matrix, and of its transpose, whose amaxes are taken."""


class OperandPlan(NamedTuple):
    """What is done with matrices [R, C] of one shape that two GEMMs read: `one` as they stand, `two` transposed; the
    first's codes are transposed too if the second GEMM reads these.

    `measured`: the blocks whose amaxes a kernel takes; `others`: if that of all values is known, which serves the
    directions that are `by_whole`. `reads_values`: a GEMM takes the values themselves, or they must be measured before
    they are quantized. `by_amax`, `by_rows`: only by the amax of all of them, or by those of rows. `nan_flag`: where it
    is known that not all values are finite: nowhere, in a scalar of its own, or in scales. `raised`: by which kernel a
    scalar is raised for that: none, the one that quantizes, or the one that measures. `draws`: random words are needed.
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
        """The amaxes that both directions need of several matrices that are alike; `past`: one that is known, to scale
        by. The `nan_flags` of those that are not finite become NaN on the way, where scales take them."""
        own, other = self.measured if given[0].amax is None else self.others
        found: Sequence[BothAmaxes] = [(None, None) if each.blocks is None else each.blocks.grids for each in given]
        if given[0].blocks is None and (own is not None or other is not None):
            found = amax_kernels.block_amaxes([each.values for each in given], own, other, nan_flags)
        by_whole, other_by_whole = self.by_whole
        results = list[BothAmaxes]()
        for each, (amax, other_amax) in zip(given, found, strict=True):
            if each.amax is None and (by_whole or other_by_whole):
                each.amax = amax if by_whole else other_amax
            results.append((
                each.amax if by_whole else past if own is None else amax,
                each.amax if other_by_whole else past if other is None else other_amax,
            ))  # fmt: skip
        return results

    def swizzle_request(self, weight_operands: WeightOperands) -> SwizzleRequest | None:
        """What of the weights that the first GEMM reads the kernel that quantizes may lay out: they wait for no poison,
        and are multiplied with codes."""
        if self.one is None or self.one.spec.decoded or self.nan_flag == "scalar":
            return None
        return weight_operands.swizzle_request(self.one.layout)

    @property
    def decodes(self) -> bool:
        """True if there is a direction that is given as values in place of codes, which are more bytes."""
        return any(way is not None and way.spec.decoded for way in (self.one, self.two))


@lru_cache(MOST_PLANS)
def plan_operand(cells: CellPair, wanted: OperandUsage, delayed: bool, shape: Pair, like: OperandKind) -> OperandPlan:
    """For matrices of `shape` that are quantized by the first cell, and for wgrad by the second; `delayed`: by past
    amaxes."""
    first, second = cells
    quantized, transposed, shared = quantized_cells(first, second, wanted)
    nan_flags, passing = wanted.nan_flag, wanted.passing
    decodes = passing >= 1 and like.is_emulated(quantized, True), passing >= 2 and like.is_emulated(transposed)
    one = DirectionPlan.of(quantized, shape, delayed, shared, nan_flags, like, decodes[0])
    two = DirectionPlan.of(transposed, shape[::-1], delayed, False, nan_flags, like, decodes[1])
    own, other = (None if way is None or (delayed and way.spec.given) else way.measured for way in (one, two))
    by_whole = own == _WHOLE, other == _WHOLE
    others = None if by_whole[0] else own, None if by_whole[1] else other
    plain = (wanted.first and first is None) or (wanted.second and second is None)
    out_grads = [way for way in (one, two) if way is not None]
    measured = not delayed and needs_amax(*[way.cell for way in out_grads])
    by_amax = measured and not plain and all(is_by_amax(way.cell) for way in out_grads)
    by_rows = measured and not plain and all(way.measured == _ROWS for way in out_grads)
    in_scale = bool(out_grads) and all(way.spec.nan_flag for way in out_grads)
    nan_flag: Literal["", "scalar", "scale"] = "scale" if in_scale else "scalar" if wanted.nan_flag else ""
    raised: Literal["", "quantizing", "measuring"] = "quantizing" if nan_flag == "scalar" else ""
    if nan_flag == "scale":
        kinds = {way.spec.nan_flag for way in out_grads}
        raised = "quantizing" if "apart" in kinds else "measuring" if "given" in kinds else ""
    draws = any(way.cell.scaling.stochastic_rounding for way in out_grads)
    blocks = own, None if all(by_whole) else other
    return OperandPlan(one, two, blocks, others, by_whole, plain or measured, by_amax, by_rows, nan_flag, raised, draws)


def read_by_columns(copy: OrientedCodes) -> bool:
    """True if products read the scales of a copy column by column (`backend`): stored so, they need not be copied.

    (A graph of torch.compile takes no such strides from an operator, and copies what is kept for backward.)
    """
    eight = copy.codes.encoding.bits == 8
    return eight and copy.scale.encoding is FP32 and copy.block[0] == 1 and copy.block[1] != ALL
