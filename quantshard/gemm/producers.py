"""What operands of GEMMs are quantized from where kernels run: values that are there, or that a kernel makes.

A normalization or an activation in front of a linear layer is such a source: one kernel computes a tile of its result,
quantizes it along both dims and notes amaxes, and the result itself is never written. `BidirectionalQuantization` asks
a source for the codes, scales and sums that a linear layer needs, and puts them together as storages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantshard import kernel_dispatch, sharding
from quantshard.formats import ALL, FP32, Copy, QuantizedCopy, Scaling
from quantshard.kernels.fused import activation as activation_kernels
from quantshard.kernels.fused import norm as norm_kernels
from quantshard.kernels.fused.epilogue import EpilogueRequest, Targets
from quantshard.kernels.quantize import amax as amax_kernels
from quantshard.kernels.quantize import matrix as quantize_kernels
from quantshard.kernels.quantize import scales as scale_kernels
from quantshard.kernels.quantize.targets import QuantizedOutput, QuantizeRequest
from quantshard.numerics import Pair, RandomBits
from quantshard.recipe import Cell
from quantshard.tensor.storage import QuantizedStorage

WordsOf = Callable[[Pair], RandomBits]
"""Gives the random words of a whole matrix by its shape."""


class OperandProducer(ABC):
    """A matrix [R, C] of one of the dtypes of kernels."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of its shape and dtype, where it is; a kernel rounds what it computes to that dtype before it
        quantizes it."""

    @abstractmethod
    def emit(self, outputs: EpilogueRequest) -> Targets:
        """Launch one kernel, which makes all that is asked for."""

    @property
    def shape(self) -> Pair:
        """Rows and columns."""
        return (self.like.shape[0], self.like.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.like.device

    def measured(self) -> TensorProducer:
        """The matrix as values in memory, with their amax; one kernel makes both."""
        values, amax = torch.empty(self.shape, dtype=self.dtype, device=self.device), zero(self.device)
        self.emit(EpilogueRequest(high=values, amax=amax))
        return TensorProducer(values, amax.view(1, 1))


@dataclass
class TensorProducer(OperandProducer):
    """Values [R, C] that are there; `amax`: of all of them, float32 [1, 1], if it is known."""

    values: Tensor
    amax: Tensor | None = None

    @property
    def like(self) -> Tensor:
        """The values."""
        return self.values

    def emit(self, outputs: EpilogueRequest) -> Targets:
        """What is asked for, by one kernel."""
        if outputs.poison is None and outputs.sums is None and outputs.high is None:
            if outputs.request is not None:
                return quantize_kernels.quantize_matrix(self.values, outputs.request, outputs.other, outputs.amax)
            if outputs.other is not None and outputs.amax is None:
                return None, quantize_kernels.quantize_matrix(self.values.t(), outputs.other)[0]
        return activation_kernels.quantize_gradient(self.values, outputs)

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

    @property
    def like(self) -> Tensor:
        """The input of the function."""
        return self.gate

    def emit(self, outputs: EpilogueRequest) -> Targets:
        """What is asked for, by one kernel."""
        return activation_kernels.activate_and_quantize(self.gate, self.activation, self.up, outputs)


def zero(device: torch.device) -> Tensor:
    """A float32 scalar for an amax or a poison."""
    return torch.zeros((), dtype=torch.float32, device=device)


@dataclass
class ReductionOutputs:
    """Where a kernel puts what is wanted of the values besides codes; see `epilogue.EpilogueRequest`."""

    amax: Tensor | None = None
    sums: Tensor | None = None


@dataclass(frozen=True)
class QuantizeSpec:
    """How a matrix, or its transpose, is quantized: by a cell, under delayed scaling by an amax [1, 1] that is known.

    `words`: for stochastic rounding.
    """

    cell: Cell
    amax: Tensor | None = None
    words: WordsOf | None = None

    @property
    def copy(self) -> QuantizedCopy:
        """The copy that operands have."""
        return self.cell.format.copies[Copy.ROWWISE]

    @property
    def measures(self) -> bool:
        """True if an amax must be known before values are quantized, and is not."""
        return self.amax is None and not self.cell.format.is_local


def covers(dtype: torch.dtype, *cells: Cell | None) -> bool:
    """True if kernels quantize whole matrices of this dtype by these cells."""
    return dtype in kernel_dispatch.KERNEL_DTYPES and all([cell is None or cell.format.is_narrow for cell in cells])


@dataclass
class BidirectionalQuantization:
    """A matrix [R, C] that is to be quantized by `first`, and its transpose [C, R] by `second`, each if it is there.

    `shared`: one quantization serves both, which `first` names and is to be transposed too. `poisons`: it must be found
    out if not all values are finite.
    """

    first: QuantizeSpec | None
    second: QuantizeSpec | None
    shared: bool
    poisons: bool
    sinks: ReductionOutputs

    def prepared(self, like: OperandProducer, given: TensorProducer | None = None) -> PreparedQuantization:
        """The request to a kernel for a source of the shape of `like`; `given`: its values, if they are in memory."""
        shape, dtype = like.shape, like.dtype
        one = None if self.first is None else _ResolvedSpec.of(self.first, shape, dtype, given, False)
        two = None if self.second is None else _ResolvedSpec.of(self.second, shape[::-1], dtype, given, True)
        request = None if one is None else replace(one.request, transposed=self.shared)
        poison = zero(like.device) if self.poisons else None
        into = poison
        if self.poisons and self.shared and one is not None and one.is_scalar:  # a scale of NaN is poison enough
            assert one.stored is not None
            poison, into = None, one.stored.view(())
        outputs = EpilogueRequest(
            request, None if two is None else two.request, None, self.sinks.amax, into, self.sinks.sums
        )
        return PreparedQuantization(outputs, one, two, poison)


@dataclass
class PreparedQuantization:
    """`outputs`: what a kernel is asked for. `finish` makes storages of what it gives.

    `poison`: float32 scalar, which the kernel makes NaN if not all values are finite; None if it is in the scale.
    """

    outputs: EpilogueRequest
    one: _ResolvedSpec | None
    two: _ResolvedSpec | None
    poison: Tensor | None

    def finish(self, targets: Targets) -> tuple[QuantizedStorage | None, QuantizedStorage | None]:
        """A matrix, and its transpose."""
        target, other = targets
        found = None if self.one is None or target is None else self.one.storage(target)
        if found is not None and target is not None and target.transposed is not None:
            return found, _transposed(found, target.transposed)
        return found, None if self.two is None or other is None else self.two.storage(other)


@dataclass
class _ResolvedSpec:
    """A way with what is known before the kernel runs: stored scales, if they are not taken from the values."""

    way: QuantizeSpec
    shape: Pair
    request: QuantizeRequest
    stored: Tensor | None

    @staticmethod
    def of(
        way: QuantizeSpec, shape: Pair, dtype: torch.dtype, given: TensorProducer | None, transposed: bool
    ) -> _ResolvedSpec:
        copy, scaling = way.copy, way.cell.scaling
        hadamard, stored, multipliers, second = scaling.random_hadamard, None, None, None
        if ALL in copy.block:
            amax = way.amax
            if amax is None:
                assert given is not None, "an amax is needed first"
                amax = given.amaxes(copy.block, transposed, hadamard)
            stored, multipliers = scale_kernels.scales(amax, copy, scaling, dtype)
        elif copy.amax is not None:
            assert given is not None, "an amax is needed first"
            second = given.amaxes(copy.amax.covers, transposed, hadamard)
        plain = Scaling(scaling.power_of_two, scaling.margin, scaling.epsilon, random_hadamard=hadamard)
        shape = padded(shape, way.cell)
        words = None if way.words is None or not scaling.stochastic_rounding else way.words(shape)
        by_columns = read_by_columns(copy)
        request = QuantizeRequest(copy, plain, (0, 0), multipliers, second, words, by_columns=by_columns)
        return _ResolvedSpec(way, shape, request, stored)

    @property
    def is_scalar(self) -> bool:
        """True if there is one scale, in float32."""
        return self.stored is not None and self.stored.numel() == 1 and self.stored.dtype is torch.float32

    def storage(self, target: QuantizedOutput) -> QuantizedStorage:
        copy = self.way.copy
        scale = self.stored if self.stored is not None else target.scale
        assert scale is not None
        components = {copy.codes.name: target.codes, copy.scale.name: scale}
        if copy.amax is not None and self.request.second_amax is not None:
            components[copy.amax.name] = self.request.second_amax
        return QuantizedStorage(self.way.cell, sharding.whole(self.shape), components)


def _transposed(storage: QuantizedStorage, transposed: Tensor) -> QuantizedStorage:
    codes = storage.cell.format.copies[Copy.ROWWISE].codes.name
    components = {name: transposed if name == codes else part.t() for name, part in storage.components.items()}
    rows, cols = storage.shard.shape
    return QuantizedStorage(storage.cell, sharding.whole((cols, rows)), components)


def read_by_columns(copy: QuantizedCopy) -> bool:
    """True if products read the scales of a copy column by column (`backend`): stored so, they need not be copied.

    (A graph of torch.compile takes no such strides from an operator, and copies what is kept for backward.)
    """
    eight = copy.codes.encoding.bits == 8
    return eight and copy.scale.encoding is FP32 and copy.block[0] == 1 and copy.block[1] != ALL


def padded(shape: Pair, cell: Cell) -> Pair:
    """The shape of the codes for values of `shape`: rows that are transformed are filled up to a multiple of 16."""
    return (shape[0], shape[1] + (-shape[1] % 16 if cell.scaling.random_hadamard else 0))
