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
from quantshard.formats import ALL, FP32, Copy, QuantizedCopy, Scaling
from quantshard.gemm import scaled_products
from quantshard.gemm.operands import Operand, OperandUsage, WordsOf, needs_amax, quantized_cells
from quantshard.kernels import workspace
from quantshard.kernels.fused import activation as activation_kernels
from quantshard.kernels.fused import norm as norm_kernels
from quantshard.kernels.fused.epilogue import EpilogueRequest, Targets
from quantshard.kernels.quantize import amax as amax_kernels
from quantshard.kernels.quantize import matrix as quantize_kernels
from quantshard.kernels.quantize.targets import (
    MOST_PLANS,
    Given,
    Poison,
    QuantizedOutput,
    QuantizeRequest,
    QuantizeSpec,
    padding,
)
from quantshard.numerics import Pair
from quantshard.recipe import Cell
from quantshard.sharding import Shard
from quantshard.tensor.storage import QuantizedStorage


class OperandProducer(ABC):
    """A matrix [R, C] of one of the dtypes of kernels; `amax`: of all of it, float32 [1, 1], if it is known."""

    amax: Tensor | None

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of its shape and dtype, where it is; a kernel rounds what it computes to that dtype before it
        quantizes it."""

    @abstractmethod
    def emit(self, outputs: EpilogueRequest) -> Targets:
        """Launch one kernel, which makes all that is asked for."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.like.dtype

    def measured(self) -> TensorProducer:
        """The matrix as values in memory, with their amax; one kernel makes both."""
        producer = TensorProducer.empty(self.like)
        self.emit(producer.wanted)
        return producer


@dataclass
class TensorProducer(OperandProducer):
    """Values [R, C] that are there."""

    values: Tensor
    amax: Tensor | None = None

    @staticmethod
    def empty(like: Tensor) -> TensorProducer:
        """Memory for values of a shape and dtype [R, C], and for their amax, which a kernel is to write as `wanted`."""
        values = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return TensorProducer(values, workspace.zero(like.device))

    @property
    def wanted(self) -> EpilogueRequest:
        """Both."""
        return EpilogueRequest(high=self.values, amax=self.amax)

    @property
    def like(self) -> Tensor:
        """The values."""
        return self.values

    def emit(self, outputs: EpilogueRequest) -> Targets:
        """What is asked for, by one kernel."""
        return TensorProducer.emit_all([self], [outputs])[0]

    @staticmethod
    def emit_all(producers: Sequence[TensorProducer], outputs: Sequence[EpilogueRequest]) -> Sequence[Targets]:
        """What is asked alike of several that are alike (`quantize_gradients`), by one kernel."""
        values, (request, other, high, amax, poison, sums) = [each.values for each in producers], outputs[0]
        if poison is None and sums is None and high is None:
            if request is not None:
                return quantize_kernels.quantize_matrices(values, outputs)
            if other is not None and amax is None:
                found = quantize_kernels.quantize_matrices(
                    [x.t() for x in values], [EpilogueRequest(each.other) for each in outputs]
                )
                return [(None, one) for one, _ in found]
        return activation_kernels.quantize_gradients(values, outputs)

    def measured(self) -> TensorProducer:
        """This producer, whose values are in memory already."""
        return self

    def amaxes(self, covers: Pair, transposed: bool, hadamard: bool) -> Tensor:
        """Amaxes of the blocks of the values, or of their transpose; `hadamard`: of the transformed values."""
        whole = covers == (ALL, ALL) and not hadamard
        if whole and self.amax is not None:
            return self.amax
        found = amax_kernels.block_amax(self.values.t() if transposed else self.values, covers, hadamard=hadamard)
        if whole:
            self.amax = found
        return found


@dataclass
class NormProducer(OperandProducer):
    """Rows x [R, C] through a normalization; `statistics`, `parameters`: as in `kernels.fused.norm`."""

    x: Tensor
    statistics: norm_kernels.NormStatistics
    parameters: norm_kernels.NormParameters
    amax: Tensor | None = None

    @property
    def like(self) -> Tensor:
        """The rows before."""
        return self.x

    def emit(self, outputs: EpilogueRequest) -> Targets:
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

    def emit(self, outputs: EpilogueRequest) -> Targets:
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

    def emit(self, outputs: EpilogueRequest) -> Targets:
        """What is asked for, by one kernel."""
        found, _ = activation_kernels.activate_backward_and_quantize(
            self.dh, self.gate, self.activation, self.up, outputs, EpilogueRequest()
        )
        return found


def is_by_amax(cell: Cell | None) -> bool:
    """True if values are quantized by their own amax, that of all of them, and by nothing else that is measured."""
    if cell is None or cell.scaling.history or cell.scaling.random_hadamard:
        return False
    copy = cell.format.copies[Copy.ROWWISE]
    return copy.block == (ALL, ALL) and copy.amax is None


@lru_cache(MOST_PLANS)
def covers(dtype: torch.dtype, *cells: Cell | None) -> bool:
    """True if kernels quantize whole matrices of this dtype by these cells."""
    return dtype in kernel_dispatch.KERNEL_DTYPES and all([cell is None or cell.format.is_narrow for cell in cells])


class DirectionPlan(NamedTuple):
    """How a matrix, or its transpose, is quantized: by a cell, which to a kernel is a spec, into a rectangle.

    `transposed`: that of the transpose of what is made. `measured`: the blocks whose amaxes a kernel must be given.
    """

    cell: Cell
    spec: QuantizeSpec
    shard: Shard
    transposed: Shard
    measured: Pair | None

    @staticmethod
    def of(
        cell: Cell | None, shape: Pair, delayed: bool, shared: bool, poisons: bool, decodes: bool
    ) -> DirectionPlan | None:
        """`shared`: codes of the transpose are made too. `poisons`: not all values may be finite. `decodes`: values are
        wanted in place of codes, where one tile sees all of a block."""
        if cell is None:
            return None
        copy, scaling = cell.format.copies[Copy.ROWWISE], cell.scaling
        hadamard = scaling.random_hadamard
        given: Given = "amaxes" if ALL in copy.block else ""
        poison: Poison = ""
        if poisons and shared and copy.block == (ALL, ALL) and not hadamard:  # a scale of NaN is poison enough
            poison = "apart" if delayed else "amax"
        plain = Scaling(scaling.power_of_two, scaling.margin, scaling.epsilon, random_hadamard=hadamard)
        spec = QuantizeSpec(
            copy, plain, (0, 0), shared, read_by_columns(copy), given, poison, decodes and not (shared or given)
        )
        rows, cols = shape[0], shape[1] + padding(shape[1], spec)
        measured = copy.block if given else None if copy.amax is None else copy.amax.covers
        return DirectionPlan(cell, spec, sharding.whole((rows, cols)), sharding.whole((cols, rows)), measured)

    def request(
        self,
        transposed: bool,
        values: TensorProducer | None,
        past: Tensor | None,
        words: WordsOf | None,
        scale: Tensor | None,
    ) -> QuantizeRequest:
        """That to a kernel, for values or their transpose; their amaxes, or one of the past, are given as needed."""
        spec, found = self.spec, past
        if self.measured is None:
            found = None
        elif past is None or not spec.given:
            assert values is not None, "an amax is needed first"
            found = values.amaxes(self.measured, transposed, spec.scaling.random_hadamard)
        drawn = words(self.shard) if words is not None and self.cell.scaling.stochastic_rounding else None
        return QuantizeRequest(spec, found if spec.given else None, None if spec.given else found, drawn, scale)

    def operand(self, output: QuantizedOutput, transposed: bool = False) -> Operand:
        """What a kernel has made, or its transpose."""
        if self.spec.decoded:
            values: Tensor = output.codes
            return values
        copy, codes, scale = self.spec.copy, output.codes, output.scale
        if transposed:
            codes, scale = output.transposed, scale if ALL in copy.block else scale.t()
        components = {copy.codes.name: codes, copy.scale.name: scale}
        if copy.amax is not None:
            components[copy.amax.name] = output.second
        return QuantizedStorage(self.cell, self.transposed if transposed else self.shard, components)


def measure_all(producers: Sequence[TensorProducer]) -> None:
    """Take the amaxes of several that are alike, by one kernel."""
    found = amax_kernels.block_amaxes([each.values for each in producers], (ALL, ALL))
    for each, amax in zip(producers, found, strict=True):
        each.amax = amax


class OperandKind(NamedTuple):
    """Dtype of a matrix, and compute capability of the GPU that multiplies it."""

    dtype: torch.dtype
    capability: scaled_products.Capability | None

    def is_emulated(self, cell: Cell | None) -> bool:
        """True if products read the matrix, quantized by `cell`, as values of its dtype: on this hardware its codes are
        in none."""
        if cell is None or self.capability is None or self.dtype is not torch.bfloat16:  # read in another dtype
            return False
        kind = scaled_products.stored_kind(cell.format)
        found = [
            each
            for kinds, each in scaled_products.NATIVE.items()
            if kind in kinds or scaled_products.flat(kind) in kinds
        ]
        return not any(each.is_of(self.capability) for each in found)


class OperandPlan(NamedTuple):
    """What is done with matrices [R, C] of one shape that two GEMMs read: `one` as they stand, `two` transposed; the
    first's codes are transposed too if the second GEMM reads these.

    `reads_values`: a GEMM takes the values themselves, or they must be measured before they are quantized. `by_amax`:
    only by the amax of all of them. `poison`: where it is known that not all values are finite: nowhere, in a scalar of
    its own, or in the scale. `draws`: random words are needed.
    """

    one: DirectionPlan | None
    two: DirectionPlan | None
    reads_values: bool
    by_amax: bool
    poison: Literal["", "scalar", "scale"]
    draws: bool

    @property
    def decodes(self) -> bool:
        """True if there is a direction that is given as values in place of codes, which are more bytes."""
        return any(way is not None and way.spec.decoded for way in (self.one, self.two))


@lru_cache(MOST_PLANS)
def plan_operand(
    first: Cell | None, second: Cell | None, wanted: OperandUsage, delayed: bool, shape: Pair, like: OperandKind
) -> OperandPlan:
    """For matrices of `shape` that are quantized by `first`, and for wgrad by `second`; `delayed`: by past amaxes."""
    quantized, transposed, shared = quantized_cells(first, second, wanted)
    values = [number <= wanted.passing and like.is_emulated(cell) for number, cell in ((1, first), (2, second))]
    one = DirectionPlan.of(quantized, shape, delayed, shared, wanted.poison, values[0])
    two = DirectionPlan.of(transposed, shape[::-1], delayed, False, False, values[1])
    plain = (wanted.first and first is None) or (wanted.second and second is None)
    ways = [way for way in (one, two) if way is not None]
    measured = not delayed and needs_amax(*[way.cell for way in ways])
    by_amax = measured and not plain and all(is_by_amax(way.cell) for way in ways)
    in_scale = one is not None and one.spec.poison
    poison: Literal["", "scalar", "scale"] = "scale" if in_scale else "scalar" if wanted.poison else ""
    draws = any(way.cell.scaling.stochastic_rounding for way in ways)
    return OperandPlan(one, two, plain or measured, by_amax, poison, draws)


def read_by_columns(copy: QuantizedCopy) -> bool:
    """True if products read the scales of a copy column by column (`backend`): stored so, they need not be copied.

    (A graph of torch.compile takes no such strides from an operator, and copies what is kept for backward.)
    """
    eight = copy.codes.encoding.bits == 8
    return eight and copy.scale.encoding is FP32 and copy.block[0] == 1 and copy.block[1] != ALL
