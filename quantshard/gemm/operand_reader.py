"""How scaled products read operands: transposed, where one copy serves both directions, padded, scales laid out.

A scaled product takes both operands by rows, with the summed dim last, and sizes that are multiples of 16. How an
operand is brought into that form is the same for all of a format and a shard, and found out once (`OperandReader`).
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
    """What is known of an operand of a product before it is read: its copy, and shape, blocks and origin with the
    summed dim last.

    `cuts`: where the codes, and the scales, that a piece touches lie among those that are resident; None: it touches
    all. `transposed`: as against what is stored.
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
        """That of an operand whose summed dim is its last (`as_stored`) or its first; None if no codes can be read
        so."""
        which = Orientation.ROWWISE if as_stored or Orientation.COLUMNWISE not in fmt.copies else Orientation.COLUMNWISE
        if not (as_stored or fmt.transposable or which is Orientation.COLUMNWISE):
            return None
        copy = fmt.copies[which]
        cuts = (_touched(shard, copy.codes), _touched(shard, copy.scale))
        (rows, cols), (high, wide), (top, left) = shard.shape, copy.block, shard.origin
        if as_stored:
            return OperandSpec(which, copy, (rows, cols), (high, wide), (top, left), cuts, False)
        return OperandSpec(which, copy, (cols, rows), (wide, high), (left, top), cuts, True)

    @property
    def kind(self) -> Kind:
        """By which the table of scaled products finds this operand."""
        return scaled_products.kind_of(self.copy, self.block)

    @property
    def is_aligned(self) -> bool:
        """True if blocks are whole but for the last of a dim."""
        return all(cover == ALL or at % cover == 0 for at, cover in zip(self.origin, self.block, strict=True))


def _touched(shard: Shard, component: Component) -> tuple[slice, slice] | None:
    found = shard.touched(component)
    sizes = shard.component_shape(component)
    return None if all(at.start == 0 and at.stop == size for at, size in zip(found, sizes, strict=True)) else found


@cache
def _native_codes(native: torch.dtype, right: bool) -> Callable[[Tensor], Tensor]:
    """Codes as PyTorch's dtype; those of a right operand by columns."""
    if right:
        return lambda codes: codes.t() if codes.dtype is native else codes.view(native).t()
    return lambda codes: codes if codes.dtype is native else codes.view(native)


ReadOperand = tuple[Tensor, tuple[Tensor, ...]]
"""Codes and scales as a scaled product takes them."""


class OperandReader:
    """How the codes and scales of an operand are read and brought into the form that a scaled product demands.

    `rows`: what its rows are padded to a multiple of. `expands`: every row gets a scale of its own. `right`: it is the
    right operand, whose codes are given by columns.
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
        # what is stored is all that is read, and only looked at in another way
        self.is_viewed = is_whole and not (spec.transposed or any(spec.cuts))
        # nothing is done but to transpose it; of blocks of 128 x 128 the same pass lays the scales out
        self.is_transposed = is_whole and spec.transposed and bits == 8 and self.amax is None
        # of scales that lie as the left operand's are read, and need nothing
        self.strides = (1, 1) if scales.layout is scaled_products.by_rows else (1, self.size)
        self.lays_blocks = self.is_transposed and scales.layout is scaled_products.by_four
        self.turns_scales = scales.layout is not scaled_products.as_single
        # of blocks whose scales are swizzled one pass lays these out, and transposes the codes if need be
        self.is_swizzled = bool(scales.swizzle) and not (self.is_padded or self.size == 1 or any(spec.cuts))
        self.is_made_at_once = self.is_transposed or self.is_swizzled
        self.takes_poison = copy.scale.encoding is FP32 or self.is_swizzled

    def is_ready(self, storage: QuantizedStorage) -> bool:
        """True if a kernel has made the operand with scales that are swizzled already."""
        return self.scale in storage.components and storage.components[self.scale].ndim == 1

    def read(self, storage: QuantizedStorage, nan_flag: Tensor | None) -> ReadOperand:
        """Codes of a dtype that PyTorch multiplies, [rows, bytes] or for a right operand the transpose of that, and
        scales, to which `nan_flag` is added."""
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
            elif self.turns_scales and grid.stride() != self.strides:  # no weight's: kernels store it as it is read
                grid = self.scales.layout(grid)
        else:
            codes, grid = self._made(*self._touched(storage), nan_flag)
        return codes, (grid,) if self.amax is None else (grid, self._second(storage.components[self.amax]))

    @staticmethod
    def transposed(
        readers: Sequence[OperandReader], storages: Sequence[QuantizedStorage], nan_flags: Sequence[Tensor | None]
    ) -> list[ReadOperand]:
        """The same of several that are transposed (`is_transposed`) alike, by one kernel."""
        parts = [each._touched(storage) for each, storage in zip(readers, storages, strict=True)]
        lays = readers[0].lays_blocks
        found = kernel_dispatch.by_columns(
            [(codes, grid if lays else None, nan_flag if lays else None)
             for (codes, grid), nan_flag in zip(parts, nan_flags, strict=True)],
            readers[0].native,
        )  # fmt: skip
        results: list[ReadOperand] = []
        for each, (codes, laid), (_, grid), nan_flag in zip(readers, found, parts, nan_flags, strict=True):
            if laid is None:
                grid = grid.t() if each.turns_scales else grid
                laid = each.scales.layout(grid if nan_flag is None else grid + nan_flag)
            else:
                laid = scaled_products.strided(laid, (1, laid.shape[0]))
            results.append((codes if each.right else codes.t(), (laid,)))
        return results

    @staticmethod
    def swizzled(
        readers: Sequence[OperandReader],
        storages: Sequence[QuantizedStorage],
        nan_flags: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
    ) -> list[ReadOperand]:
        """The same of several of one copy whose scales are swizzled (`is_swizzled`), which are not so yet, by one
        kernel; `others`: scales E8M0 that are poisoned too."""
        operands = SwizzledOperands(readers, storages, nan_flags, others)
        return operands.read(kernel_dispatch.swizzle(operands.copy, operands.matrices, operands.turned))

    def _touched(self, storage: QuantizedStorage) -> tuple[Tensor, Tensor]:
        """Those of the stored codes and scales that are read."""
        if self.codes not in storage.components:
            storage = storage.with_copy(self.spec.which)
        codes, grid = storage.components[self.codes], storage.components[self.scale]
        of_codes, of_scales = self.spec.cuts
        return codes if of_codes is None else codes[of_codes], grid if of_scales is None else grid[of_scales]

    def _made(self, codes: Tensor, grid: Tensor, nan_flag: Tensor | None) -> tuple[Tensor, Tensor]:
        """New codes and scales."""
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
    """Several operands of one copy, with what `kernel_dispatch.swizzle` is to be told of them, as in
    `OperandReader.swizzled`."""

    def __init__(
        self,
        readers: Sequence[OperandReader],
        storages: Sequence[QuantizedStorage],
        nan_flags: Sequence[Tensor | None] | None = None,
        others: Sequence[Tensor | None] | None = None,
    ) -> None:
        nothing = [None] * len(storages)
        self.readers, self.copy, self.turned = readers, readers[0].spec.copy, readers[0].spec.transposed
        self.matrices = list[kernel_dispatch.StoredMatrix]()
        self._held = list[QuantizedStorage]()
        for each, storage, nan_flag, other in zip(
            readers, storages, nan_flags or nothing, others or nothing, strict=True
        ):
            stored = storage if each.codes in storage.components else storage.with_copy(each.spec.which)
            parts = stored.components
            amax = None if each.amax is None else parts[each.amax]
            self.matrices.append((stored.shard.shape, parts[each.codes], parts[each.scale], amax, nan_flag, other))
            self._held.append(stored)

    def read(self, made: Sequence[kernel_dispatch.SwizzledMatrix]) -> list[ReadOperand]:
        """The operands as scaled products take them, from what a kernel has made."""
        results = list[ReadOperand]()
        for each, stored, (codes, scale, second) in zip(self.readers, self._held, made, strict=True):
            if codes is None:
                codes = stored.view(each.codes, each.native_codes)
            elif each.right:
                codes = codes.t()
            results.append((codes, (scale,) if second is None else (scale, second)))
        return results
