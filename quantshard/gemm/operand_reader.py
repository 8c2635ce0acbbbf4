"""Reading operands for scaled products: transposition, padding and the layout of scales.

A scaled product reads both operands by rows, with the summed dim last and sizes that are multiples of 16. The steps to
that form depend only on format and shard, and an `OperandReader` computes them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernel_dispatch
from quantshard.formats import ALL, FP32, Component, Format, Orientation, OrientedCodes
from quantshard.gemm import scaled_products
from quantshard.gemm.scaled_products import Kind, ScaleLayout
from quantshard.sharding import Shard, ceil_div
from quantshard.tensor.storage import SECOND_SCALE, QuantizedStorage


class OperandSpec(NamedTuple):
    """Static facts about an operand of a product: its copy, and shape, blocks and origin with the summed dim last.

    `cuts`: slices of the resident codes and scales that the shard touches; None: all of them. `transposed`: relative
    to storage.
    """

    which: Orientation
    copy: OrientedCodes
    shape: tuple[int, int]
    block: tuple[int, int]
    origin: tuple[int, int]
    cuts: tuple[tuple[slice, slice] | None, tuple[slice, slice] | None]
    transposed: bool

    @staticmethod
    def of(fmt: Format, shard: Shard, as_stored: bool) -> OperandSpec | None:
        """Describe an operand that is summed over its last (`as_stored`) or first dim; None if no codes fit."""
        which = Orientation.ROWWISE if as_stored or Orientation.COLUMNWISE not in fmt.copies else Orientation.COLUMNWISE
        if not (as_stored or fmt.transposable or which is Orientation.COLUMNWISE):
            return None
        copy = fmt.copies[which]
        cuts = (_touched(shard, copy.codes), _touched(shard, copy.scale))
        (rows, cols), (high, wide), (first_row, first_col) = shard.shape, copy.block, shard.origin
        if as_stored:
            return OperandSpec(which, copy, (rows, cols), (high, wide), (first_row, first_col), cuts, False)
        return OperandSpec(which, copy, (cols, rows), (wide, high), (first_col, first_row), cuts, True)

    @property
    def kind(self) -> Kind:
        """Key of this operand in the table of scaled products."""
        return scaled_products.kind_of(self.copy, self.block)

    @property
    def is_aligned(self) -> bool:
        """True if all blocks are complete, except the last one of a dim."""
        return all(cover == ALL or start % cover == 0 for start, cover in zip(self.origin, self.block, strict=True))


def _touched(shard: Shard, component: Component) -> tuple[slice, slice] | None:
    cuts = shard.touched(component)
    sizes = shard.component_shape(component)
    return None if all(cut.start == 0 and cut.stop == size for cut, size in zip(cuts, sizes, strict=True)) else cuts


@cache
def _native_codes(native: torch.dtype, right: bool) -> Callable[[Tensor], Tensor]:
    """A view of codes in PyTorch's dtype; codes of a right operand are transposed."""
    if right:
        return lambda codes: codes.t() if codes.dtype is native else codes.view(native).t()
    return lambda codes: codes if codes.dtype is native else codes.view(native)


ReadOperand = tuple[Tensor, tuple[Tensor, ...]]
"""Codes and scales in the form of a scaled product."""


class OperandReader:
    """Reads the codes and scales of an operand in the form of a scaled product.

    `rows`: the row count is padded to a multiple of it. `expands`: every row gets its own scale. `right`: this is the
    right operand, with transposed codes.
    """

    def __init__(self, spec: OperandSpec, scales: ScaleLayout, rows: int, expands: bool, right: bool) -> None:
        self.spec, self.scales, self.right = spec, scales, right
        copy, (size, cols), block = spec.copy, spec.shape, spec.block
        self.codes, self.scale, self.encoding = copy.codes.name, copy.scale.name, copy.codes.encoding
        self.native = self.encoding.multiplied
        self.amax = None if copy.amax is None else copy.amax.name
        self.unit = 1.0 / (self.encoding.max * copy.scale.encoding.max)
        self.repeats = block[0] if expands and block[0] > 1 else 0
        if self.repeats:
            block = (1, block[1])
        bits = self.encoding.bits
        self.size = size + -size % rows
        self.width = (cols + -cols % (128 // bits)) * bits // 8
        entries = [
            [1 if cover == ALL else ceil_div(length, cover) for length, cover in zip(shape, block, strict=True)]
            for shape in (spec.shape, (self.size, self.width * 8 // bits))
        ]
        self.more_codes = (0, self.width - ceil_div(cols * bits, 8), 0, self.size - size)
        self.more_scales = (0, entries[1][1] - entries[0][1], 0, entries[1][0] - entries[0][0])
        self.is_padded = any(self.more_codes)
        self.native_codes = _native_codes(self.native, right)
        is_whole = not (self.repeats or self.is_padded or self.size == 1)
        # a view of the stored tensors is enough
        self.is_viewed = is_whole and not (spec.transposed or any(spec.cuts))
        # only the codes are transposed; for blocks of 128 x 128 the same kernel lays out the scales
        self.is_transposed = is_whole and spec.transposed and bits == 8 and self.amax is None
        # strides of scales that a left operand needs no copy of
        self.strides = (1, 1) if scales.layout is scaled_products.by_rows else (1, self.size)
        self.lays_blocks = self.is_transposed and scales.layout is scaled_products.by_four
        self.turns_scales = scales.layout is not scaled_products.as_single
        # one kernel swizzles the scales and, if needed, transposes the codes
        self.is_swizzled = bool(scales.swizzle) and not (self.is_padded or self.size == 1 or any(spec.cuts))
        self.is_made_at_once = self.is_transposed or self.is_swizzled
        self.takes_poison = copy.scale.encoding is FP32 or self.is_swizzled

    def is_ready(self, storage: QuantizedStorage) -> bool:
        """True if the kernel that made the operand has swizzled its scales."""
        return self.scale in storage.components and storage.components[self.scale].ndim == 1

    def read(self, storage: QuantizedStorage, nan_flag: Tensor | None) -> ReadOperand:
        """Codes in PyTorch's dtype, [rows, bytes] (transposed for a right operand), and scales plus `nan_flag`."""
        if self.is_swizzled:
            if not self.is_ready(storage):
                return OperandReader.swizzled([self], [storage], [nan_flag], [None])[0]
            parts = storage.components
            codes = parts[self.codes]
            scales = (parts[self.scale],) if self.amax is None else (parts[self.scale], parts[SECOND_SCALE])
            return codes.t() if self.right else codes, scales
        if self.is_transposed:
            return OperandReader.transposed([self], [storage], [nan_flag])[0]
        if self.codes not in storage.components:
            storage = storage.with_copy(self.spec.which)
        if self.is_viewed:
            codes, grid = storage.components[self.codes], storage.components[self.scale]
            if self.right or codes.dtype is not self.native:
                codes = storage.view(self.codes, self.native_codes)
            if nan_flag is not None:
                grid = self.scales.layout(grid + nan_flag)
            elif self.right and self.turns_scales:
                grid = storage.view(self.scale, self.scales.layout)
            elif self.turns_scales and grid.stride() != self.strides:  # weights' scales are viewed above
                grid = self.scales.layout(grid)
        else:
            codes, grid = self._made(*self._touched(storage), nan_flag)
        return codes, (grid,) if self.amax is None else (grid, self._second(storage.components[self.amax]))

    @staticmethod
    def transposed(
        readers: Sequence[OperandReader], storages: Sequence[QuantizedStorage], nan_flags: Sequence[Tensor | None]
    ) -> list[ReadOperand]:
        """`read` several operands of the same kind with one kernel. Requires `is_transposed`."""
        parts = [reader._touched(storage) for reader, storage in zip(readers, storages, strict=True)]
        lays_scales = readers[0].lays_blocks
        outputs = kernel_dispatch.by_columns(
            [(codes, grid if lays_scales else None, nan_flag if lays_scales else None)
             for (codes, grid), nan_flag in zip(parts, nan_flags, strict=True)],
            readers[0].native,
        )  # fmt: skip
        results: list[ReadOperand] = []
        for reader, (codes, scales), (_, grid), nan_flag in zip(readers, outputs, parts, nan_flags, strict=True):
            if scales is None:
                grid = grid.t() if reader.turns_scales else grid
                scales = reader.scales.layout(grid if nan_flag is None else grid + nan_flag)
            else:
                scales = scaled_products.strided(scales, (1, scales.shape[0]))
            results.append((codes if reader.right else codes.t(), (scales,)))
        return results

    @staticmethod
    def swizzled(
        readers: Sequence[OperandReader],
        storages: Sequence[QuantizedStorage],
        nan_flags: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
    ) -> list[ReadOperand]:
        """`read` several operands of the same copy with one kernel. Requires `is_swizzled`, and scales that are not
        swizzled yet.

        `others`: per operand, E8M0 scales of another operand that also become NaN if its flag is NaN.
        """
        operands = SwizzledOperands(readers, storages, nan_flags, others)
        return operands.read(kernel_dispatch.swizzle(operands.copy, operands.matrices, operands.turned))

    def _touched(self, storage: QuantizedStorage) -> tuple[Tensor, Tensor]:
        """Codes and scales that the shard touches, as stored."""
        if self.codes not in storage.components:
            storage = storage.with_copy(self.spec.which)
        codes, grid = storage.components[self.codes], storage.components[self.scale]
        of_codes, of_scales = self.spec.cuts
        return codes if of_codes is None else codes[of_codes], grid if of_scales is None else grid[of_scales]

    def _made(self, codes: Tensor, grid: Tensor, nan_flag: Tensor | None) -> tuple[Tensor, Tensor]:
        """New codes and scales, transposed and padded."""
        spec = self.spec
        if spec.transposed:
            codes, grid = kernel_dispatch.transpose_codes(codes, self.encoding, spec.shape[0]), grid.t()
        if self.repeats:
            grid = grid.repeat_interleave(self.repeats, 0)[: spec.shape[0]]
        if nan_flag is not None:
            grid = grid + nan_flag
        if self.is_padded:
            codes, grid = F.pad(codes, self.more_codes), F.pad(grid, self.more_scales)
        if self.size == 1:  # a transposed column may have any stride here
            codes = scaled_products.strided(codes.contiguous(), (self.width, 1))
        return self.native_codes(codes), self.scales.layout(grid)

    def _second(self, amax: Tensor) -> Tensor:
        return (amax * self.unit).view(())


class SwizzledOperands:
    """Several operands of one copy as arguments of `kernel_dispatch.swizzle`; see `OperandReader.swizzled`."""

    def __init__(
        self,
        readers: Sequence[OperandReader],
        storages: Sequence[QuantizedStorage],
        nan_flags: Sequence[Tensor | None] | None = None,
        others: Sequence[Tensor | None] | None = None,
    ) -> None:
        nones = [None] * len(storages)
        self.readers, self.copy, self.turned = readers, readers[0].spec.copy, readers[0].spec.transposed
        self.matrices = list[kernel_dispatch.StoredMatrix]()
        self._held = list[QuantizedStorage]()
        for reader, storage, nan_flag, extra_scales in zip(
            readers, storages, nan_flags or nones, others or nones, strict=True
        ):
            operand = storage if reader.codes in storage.components else storage.with_copy(reader.spec.which)
            parts = operand.components
            amax = None if reader.amax is None else parts[reader.amax]
            self.matrices.append(
                (operand.shard.shape, parts[reader.codes], parts[reader.scale], amax, nan_flag, extra_scales)
            )
            self._held.append(operand)

    def read(self, made: Sequence[kernel_dispatch.SwizzledMatrix]) -> list[ReadOperand]:
        """Convert the outputs of the kernel to operands of scaled products."""
        results = list[ReadOperand]()
        for reader, storage, (codes, scale, second) in zip(self.readers, self._held, made, strict=True):
            if codes is None:
                codes = storage.view(reader.codes, reader.native_codes)
            elif reader.right:
                codes = codes.t()
            results.append((codes, (scale,) if second is None else (scale, second)))
        return results
