"""Sources that kernels quantize GEMM operands from: values in memory, or values that a kernel computes.

A normalization or an activation before a linear layer is such a source. One kernel computes a tile of its result,
quantizes the tile along both dims and records amaxes, and the result itself is never written. A `KernelPlan`, made
once, describes the outputs of the kernel for all matrices of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from quantshard import kernel_dispatch, sharding
from quantshard.formats import ALL, FP32, Orientation, OrientedCodes, Scaling
from quantshard.gemm import hardware
from quantshard.gemm.backend import WeightOperands
from quantshard.gemm.hardware import Capability
from quantshard.gemm.operands import Operand, OperandPlan, OperandUsage, RandomBitsFn, needs_amax
from quantshard.kernels import workspace
from quantshard.kernels.fused import activation as activation_kernels
from quantshard.kernels.fused.epilogue import KernelOutputs, Targets
from quantshard.kernels.quantize import amax as amax_kernels, matrix as quantize_kernels, targets as kt
from quantshard.kernels.quantize.random_words import KEYS
from quantshard.kernels.quantize.swizzle import SwizzleRequest
from quantshard.numerics import Pair
from quantshard.recipe import QuantSpec, Recipe, TensorRole
from quantshard.recipe_table import SpecPair
from quantshard.tensor.storage import SECOND_SCALE, QuantizedStorage

BothAmaxes = tuple[Tensor | None, Tensor | None]
"""Amaxes to quantize a matrix and its transpose by."""

_WHOLE, _ROWS = kt.BlockAmaxes((ALL, ALL)), kt.BlockAmaxes((1, ALL))


@dataclass
class OperandProducer:
    """A matrix [R, C] of one of the kernel dtypes: in memory, or computed by a kernel.

    `prototype`: the matrix, or a tensor of its shape, dtype and device. `launch`: launches one kernel that computes the
    matrix and writes all outputs; None if it is in memory. The other fields are set if the kernel that wrote the matrix
    also measured it: `amax` of the whole matrix, float32 [1, 1]; `row_col_amaxes` of its rows and its columns; amaxes
    of the `blocks` of a plan; and `nan_flag`, a scalar that is NaN if values are not finite.
    """

    prototype: Tensor
    launch: Callable[[KernelOutputs], Targets] | None = None
    amax: Tensor | None = None
    row_col_amaxes: BothAmaxes = (None, None)
    blocks: kt.AmaxRequest | None = None
    nan_flag: Tensor | None = None

    @staticmethod
    def empty(like: Tensor, plan: KernelPlan | None = None) -> OperandProducer:
        """Allocate a matrix like `like` [R, C] and what a plan measures, for a kernel to write through `outputs`."""
        source = OperandProducer(torch.empty(like.shape, dtype=like.dtype, device=like.device))
        if plan is None:
            return source
        blocks, transposed_blocks = plan.smaller_blocks
        if blocks is not None or transposed_blocks is not None:
            (grids,) = amax_kernels.plan_amaxes(like.shape, blocks, transposed_blocks).grids(like, 1)
            source.blocks = kt.AmaxRequest(blocks, transposed_blocks, grids)
        if source.blocks is None or any(plan.by_whole):
            source.amax = workspace.zero(like.device)
        if plan.nan_flag is NanFlag.MEASURED:
            source.nan_flag = workspace.zero(like.device)
        return source

    @property
    def outputs(self) -> KernelOutputs:
        """Kernel outputs that fill all fields of a matrix in memory."""
        return KernelOutputs(high=self.prototype, amax=self.amax, nan_flag=self.nan_flag, measured=self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        return self.prototype.dtype

    def known_amaxes(self, plan: KernelPlan) -> BothAmaxes | None:
        """The amaxes that a plan quantizes by, if they are known and the plan needs no other statistic."""
        if plan.by_amax:
            return None if self.amax is None else (self.amax, self.amax)
        return self.row_col_amaxes if plan.by_rows and self.row_col_amaxes[0] is not None else None

    def in_memory(self, plan: KernelPlan | None = None) -> OperandProducer:
        """The matrix in memory. If necessary, one kernel writes it, and the amaxes that a plan measures."""
        if self.launch is None:
            return self
        source = OperandProducer.empty(self.prototype, plan)
        self.launch(source.outputs)
        return source


def scale_by_blocks(block_shape: Pair, specs: Iterable[QuantSpec | None]) -> bool:
    """True if all specs quantize by the amaxes of such blocks and need no other statistic."""
    for spec in specs:
        if spec is None or spec.scaling.history or spec.scaling.random_hadamard:
            return False
        copy = spec.format.copies[Orientation.ROWWISE]
        if copy.scale.block_shape != block_shape or copy.amax is not None:
            return False
    return True


def can_quantize(dtype: torch.dtype, specs: SpecPair) -> bool:
    """True if kernels quantize whole matrices of this dtype by these specs."""
    first, second = specs
    are_narrow = (first is None or first.format.is_narrow) and (second is None or second.format.is_narrow)
    return dtype in kernel_dispatch.KERNEL_DTYPES and are_narrow


def products_read_values(spec: QuantSpec | None, dtype: torch.dtype, capability: Capability | None) -> bool:
    """True if products read a matrix of `dtype`, quantized by `spec`, as values: the hardware has no such product."""
    if spec is None or capability is None or dtype is not torch.bfloat16:  # products read another dtype
        return False
    return not hardware.multiplies(spec, capability)


def is_ready(spec: QuantSpec, shape: Pair, capability: Capability | None) -> bool:
    """True if a kernel can write codes and scales of a matrix [R, C] in the form that products read: there is such a
    product, nothing is padded, and 8-bit scales cover one row each."""
    copy = spec.format.copies[Orientation.ROWWISE]
    fits = 0 not in shape and shape[0] % 16 == 0 and shape[1] % (128 // copy.codes.encoding.bits) == 0
    has_row_scales = copy.scale.encoding.bits > 8 or copy.block[0] == 1
    return fits and has_row_scales and hardware.multiplies(spec, capability)


class NanFlag(Enum):
    """Where a gradient shows that a value is not finite. Codes saturate, so they cannot show it."""

    PRODUCTS = "the quantizing kernel sets a scalar, which products add"
    AMAX = "scales follow from an amax that is not finite"
    SCALE = "the quantizing kernel writes NaN to the only scale"
    MEASURED = "the measuring kernel sets a scalar, which the quantizing kernel adds to the scales"


class DirectionPlan:
    """How kernels quantize a matrix, or its transpose: by the spec of a recipe, with a kernel's spec, into a rectangle.

    `shared`: the kernel also writes the codes of the transpose. `ready`: it writes what products read. `decodes`: it
    returns values instead of codes, because products read values and nothing keeps the operand. `has_flag`: values may
    be infinite or NaN. `delayed`: an amax to scale by is known. `amax_blocks`: blocks with amaxes that the kernel needs
    as input. `wraps`: Triton does not support a dtype of the result.
    """

    def __init__(
        self, spec: QuantSpec, shape: Pair, products: Sequence[list[Any]], *,
        delayed: bool, shared: bool, has_flag: bool, ready: bool, decodes: bool,
    ) -> None:  # fmt: skip
        copy, scaling = spec.format.copies[Orientation.ROWWISE], spec.scaling
        block_input: kt.Given = "amaxes" if ALL in copy.block else ""
        self.nan_flag: NanFlag | None = None
        if has_flag and shared and copy.block == (ALL, ALL) and not scaling.random_hadamard:
            self.nan_flag = NanFlag.SCALE if delayed else NanFlag.AMAX
        elif has_flag and ready and copy.amax is not None:  # the second scale becomes NaN
            self.nan_flag = NanFlag.AMAX
        elif has_flag and block_input and not delayed and copy.block != (ALL, ALL):
            self.nan_flag = NanFlag.MEASURED
        hadamard = scaling.random_hadamard
        plain = Scaling(scaling.power_of_two, scaling.margin, scaling.epsilon, random_hadamard=hadamard)
        self.spec, self.products = spec, products
        self.kernel_spec = kt.QuantizeSpec(
            copy, plain, (0, 0), shared, read_by_columns(copy), block_input,
            self.nan_flag is NanFlag.AMAX, self.nan_flag is NanFlag.SCALE, decodes and not shared, ready,
        )  # fmt: skip
        rows, cols = shape[0], shape[1] + kt.padding(shape[1], self.kernel_spec)
        blocks = copy.block if block_input else None if copy.amax is None else copy.amax.block_shape
        self.amax_blocks = None if blocks is None else kt.BlockAmaxes(blocks, hadamard)
        self.shard, self.transposed_shard = sharding.whole((rows, cols)), sharding.whole((cols, rows))
        self.wraps = ready and kt.hides_from_kernels(copy)

    def request(self, amaxes: Tensor | None, words: RandomBitsFn | None, nan_flag: Tensor | None) -> kt.QuantizeRequest:
        """Arguments of a kernel. `amaxes`: amaxes of blocks or the second amax, if the kernel needs them."""
        if self.amax_blocks is None:
            amaxes = None
        kernel_spec = self.kernel_spec
        random_bits = words(self.shard) if words is not None and self.spec.scaling.stochastic_rounding else None
        return kt.QuantizeRequest(
            kernel_spec, amaxes if kernel_spec.given else None, None if kernel_spec.given else amaxes, random_bits,
            nan_flag if kernel_spec.merges_scale else None, nan_flag if self.nan_flag is NanFlag.MEASURED else None,
        )  # fmt: skip

    def operand(self, output: kt.QuantizedOutput, transposed: bool = False) -> Operand:
        """Wrap the output of a kernel, or its transpose, as an operand."""
        if self.kernel_spec.decoded:
            values: Tensor = output.codes
            return values
        copy, scale = self.kernel_spec.copy, output.scale
        codes = output.transposed if transposed else output.codes
        if self.wraps:
            codes, scale = kt.base_of(codes), kt.base_of(scale)
        if transposed and not self.kernel_spec.given:
            scale = scale.t()
        components = {copy.codes.name: codes, copy.scale.name: scale}
        if copy.amax is not None:
            components[copy.amax.name] = output.second
            if output.second_scale is not None:
                components[SECOND_SCALE] = output.second_scale
        shard = self.transposed_shard if transposed else self.shard
        return QuantizedStorage(self.spec, shard, components, products=self.products[transposed])


BlocksOfBoth = tuple[kt.BlockAmaxes | None, kt.BlockAmaxes | None]
"""Blocks of a matrix and of its transpose."""


class KernelPlan(OperandPlan):
    """How kernels quantize matrices [R, C] of one shape for two GEMMs: `rowwise` as they are, `columnwise` transposed.
    If wgrad shares the codes of `rowwise`, `columnwise` is None and the kernel transposes the codes.

    `like`: tensor of the shape, dtype and device of the matrices. `delayed`: an amax to scale by is known. `stored`:
    codes and scales must be laid out as formats store them, since other code than products reads them.

    Attributes:
        amax_blocks: blocks whose amaxes a kernel measures.
        smaller_blocks: the same, if the amax of the whole matrix is known.
        keeps_values: a GEMM reads the values themselves.
        reads_values: the same, or they must be measured before they are quantized.
        by_amax, by_rows: quantizing needs the amax of the whole matrix, or of its rows, and no other statistic.
        nan_flag: where a value that is not finite shows; None if it does not matter.
        has_scalar, sets_flag: kernels need a scalar for it; the quantizing kernel sets the scalar.
        draws: random words are needed.
        decodes: a direction returns values instead of codes.
    """

    on_kernels = True

    def __init__(
        self, recipe: Recipe, role: TensorRole, usage: OperandUsage, like: Tensor, delayed: bool, stored: bool
    ) -> None:
        super().__init__(recipe, role, usage)
        shape, dtype, capability = (like.shape[0], like.shape[1]), like.dtype, hardware.capability_of(like.device)
        weight, num_transient, has_flag = recipe.weight, usage.num_transient, self.is_gradient
        if weight is None:  # the weight may have another dtype
            num_transient, stored = 0, True
        # weights whose codes no product reads in this direction, on any hardware
        turned = self.is_gradient and weight is not None and not weight.format.serves_columns
        turned = turned and capability is not None and dtype is torch.bfloat16
        self.rowwise = self.columnwise = None
        if (spec := self.quantized) is not None:
            self.rowwise = DirectionPlan(
                spec, shape, self.products, delayed=delayed, shared=self.shared, has_flag=has_flag,
                ready=not stored and is_ready(spec, shape, capability),
                decodes=num_transient >= 1 and (turned or products_read_values(spec, dtype, capability)),
            )  # fmt: skip
        if (spec := self.transposed) is not None:
            self.columnwise = DirectionPlan(
                spec, shape[::-1], self.products[1:], delayed=delayed, shared=False, has_flag=has_flag,
                ready=not stored and is_ready(spec, shape[::-1], capability),
                decodes=num_transient >= 2 and products_read_values(spec, dtype, capability),
            )  # fmt: skip
        directions = [direction for direction in (self.rowwise, self.columnwise) if direction is not None]
        self._plan_amaxes(directions, delayed)
        self.nan_flag = NanFlag.PRODUCTS if has_flag else None
        flags = [direction.nan_flag for direction in directions]
        if flags and None not in flags:  # the flag of one direction, or the scalar that the other one needs
            self.nan_flag = next((flag for flag in flags if flag is not NanFlag.AMAX), NanFlag.AMAX)
        self.has_scalar = self.nan_flag not in (None, NanFlag.AMAX)
        self.sets_flag = self.nan_flag is NanFlag.PRODUCTS or self.nan_flag is NanFlag.SCALE
        self.draws = any(direction.spec.scaling.stochastic_rounding for direction in directions)
        self.decodes = any(direction.kernel_spec.decoded for direction in directions)

    def _plan_amaxes(self, directions: Sequence[DirectionPlan], delayed: bool) -> None:
        blocks, transposed_blocks = (
            None if direction is None or (delayed and direction.kernel_spec.given) else direction.amax_blocks
            for direction in (self.rowwise, self.columnwise)
        )
        by_whole, by_whole_t = self.by_whole = blocks == _WHOLE, transposed_blocks == _WHOLE
        self.amax_blocks: BlocksOfBoth = blocks, None if all(self.by_whole) else transposed_blocks
        self.smaller_blocks: BlocksOfBoth = None if by_whole else blocks, None if by_whole_t else transposed_blocks
        (first, second), usage = self.specs, self.usage
        plain = (usage.for_first_gemm and first is None) or (usage.for_wgrad and second is None)
        specs = [direction.spec for direction in directions]
        measures = not delayed and needs_amax(*specs)
        self.by_amax = measures and not plain and scale_by_blocks(_WHOLE.block_shape, specs)
        self.by_rows = measures and not plain and all(direction.amax_blocks == _ROWS for direction in directions)
        self.keeps_values, self.reads_values = plain, plain or measures

    def measure(
        self, sources: Sequence[OperandProducer], past: Tensor | None, nan_flags: Sequence[Tensor | None]
    ) -> Sequence[BothAmaxes]:
        """The amaxes that both directions need, for several similar matrices. `past`: a known amax to scale by."""
        blocks, blocks_t = self.amax_blocks if sources[0].amax is None else self.smaller_blocks
        grids: Sequence[BothAmaxes] = [(None, None)] * len(sources)
        if sources[0].blocks is not None:
            grids = [(None, None) if item.blocks is None else item.blocks.grids for item in sources]
        elif blocks is not None or blocks_t is not None:
            grids = amax_kernels.block_amaxes([item.prototype for item in sources], blocks, blocks_t, nan_flags)
        by_whole, by_whole_t = self.by_whole
        results = list[BothAmaxes]()
        for item, (amax, amax_t) in zip(sources, grids, strict=True):
            if item.amax is None and (by_whole or by_whole_t):
                item.amax = amax if by_whole else amax_t
            results.append((
                item.amax if by_whole else past if blocks is None else amax,
                item.amax if by_whole_t else past if blocks_t is None else amax_t,
            ))  # fmt: skip
        return results

    def quantize(
        self, values: Sequence[Tensor], outputs: Sequence[KernelOutputs], weights: SwizzleRequest | None = None
    ) -> Sequence[Targets]:
        """Write the outputs of several similar matrices with one kernel, which may also lay out `weights`."""
        # random words have a key per matrix
        if self.draws and len(values) > KEYS:
            return [*self.quantize(values[:KEYS], outputs[:KEYS]), *self.quantize(values[KEYS:], outputs[KEYS:])]
        if not self.sets_flag and not self.usage.sums:
            if self.rowwise is not None:
                return quantize_kernels.quantize_matrices(values, outputs, weights)
            if self.columnwise is not None and outputs[0].amax is None:
                transposed = [KernelOutputs(item.columnwise) for item in outputs]
                results = quantize_kernels.quantize_matrices([x.t() for x in values], transposed)
                return [(None, output) for output, _ in results]
        return activation_kernels.quantize_gradients(values, outputs)

    def swizzle_request(self, weight_operands: WeightOperands | None) -> SwizzleRequest | None:
        """Swizzling of the first GEMM's weights that the quantizing kernel can do too, if they need no nan flag."""
        if weight_operands is None or not weight_operands.reads_together or self.nan_flag is NanFlag.PRODUCTS:
            return None
        if self.rowwise is None or self.rowwise.kernel_spec.decoded:
            return None
        return weight_operands.swizzle_request(self.rowwise.spec.format, self.rowwise.shard, self.products[0])


def read_by_columns(copy: OrientedCodes) -> bool:
    """True if products read the scales of a copy column by column: storing them in this way saves a copy."""
    eight = copy.codes.encoding.bits == 8
    return eight and copy.scale.encoding is FP32 and copy.block[0] == 1 and copy.block[1] != ALL
