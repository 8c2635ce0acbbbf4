"""Matrix products of quantized operands: native if the hardware has them, otherwise emulated (`gemm.emulated`).

A native product is one of PyTorch's scaled matrix products (`hardware`): it multiplies codes and applies scales to the
sums. It reads both operands by rows, with the summed dim last and sizes that are multiples of 16. An
`OperandReader` brings an operand into that form, and `WeightOperands` several weights with one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.formats import ALL, E8M0, FP32, Component, Format, Orientation
from quantshard.gemm import emulated, hardware
from quantshard.gemm.hardware import Kind, ScaledProduct, ScaleLayout
from quantshard.gemm.operands import Operand, is_large
from quantshard.sharding import Shard, ceil_div
from quantshard.tensor.storage import SECOND_SCALE, QuantizedStorage

if kernels.USABLE:
    from quantshard.kernels.quantize import transpose as transpose_kernel
    from quantshard.kernels.quantize.swizzle import SwizzleRequest

ReadOperand = tuple[Tensor, tuple[Tensor, ...]]  # codes and scales in the form of a scaled product


def matmul(
    a: Operand, b: Operand, out_dtype: torch.dtype, *, transpose_a: bool = False, transpose_b: bool = False,
    bias: Tensor | None = None, nan_flag: Tensor | None = None, precision: torch.dtype | None = None,
    fast: bool = False, read: ReadOperand | None = None,
) -> Tensor:  # fmt: skip
    """op(a) @ op(b) + bias, accumulated in float32 and rounded once to `out_dtype`.

    A quantized operand of a two-copy format is read from the copy that was quantized along the summed dim.

    Args:
        nan_flag: float32 scalar, 0 or NaN; NaN makes every element of the result NaN.
        precision: dtype of the layer, if not `out_dtype`. Emulated products of 16-bit layers read bfloat16 on a GPU.
        fast: allow sums in less than float32; see `recipe.MMParams`. Float32 results ignore it.
        read: codes and scales of b from `WeightOperands`.
    """
    if isinstance(a, QuantizedStorage) and isinstance(b, QuantizedStorage):
        facts = (
            a.spec.format, a.shard, not transpose_a, b.spec.format, b.shard, transpose_b,
            next(iter(a.components.values())).device, out_dtype, None if bias is None else bias.dtype, fast,
        )  # fmt: skip
        # mostly the first one, of the same objects: cheaper than a call of `find_product`
        product = a.products[0][1] if a.products and a.products[0][0] == facts else find_product(a.products, *facts)
        if product is not None:
            return product.run(a, b, bias, nan_flag, read)
    return emulated.emulated_matmul(a, b, out_dtype, transpose_a, transpose_b, bias, nan_flag, precision or out_dtype)


class ProductPlan:
    """A native product: everything that follows from the operands' formats and shards, the dtypes and the GPU."""

    def __init__(
        self, product: ScaledProduct, left: OperandReader, right: OperandReader,
        out_dtype: torch.dtype, bias_dtype: torch.dtype | None, fast: bool,
    ) -> None:  # fmt: skip
        # the table has the product only for blocks of one row
        expands = (left.kind, right.kind) not in hardware.NATIVE
        self.left, self.right = left, right
        left.lay_out(product.left, product.rows, expands, False)
        right.lay_out(product.right, 16, expands, True)
        self.rows, self.cols = left.shape[0], right.shape[0]
        self.more_cols = right.size - self.cols
        self.is_padded = (left.size, self.more_cols) != (self.rows, 0)
        self.out_dtype = out_dtype
        # PyTorch's product adds only such biases; others are added to its float32 sums before rounding
        self.fuses_bias = bias_dtype == out_dtype and out_dtype in (torch.bfloat16, torch.float16)
        self.sums = out_dtype if bias_dtype is None or self.fuses_bias else torch.float32
        self.fast = fast and product.fast and out_dtype.itemsize == 2

    def run(
        self, a: QuantizedStorage, b: QuantizedStorage,
        bias: Tensor | None, nan_flag: Tensor | None, read: ReadOperand | None,
    ) -> Tensor:  # fmt: skip
        """Compute the product, as `matmul` returns it."""
        left_reader, right_reader, fused_bias = self.left, self.right, None
        if bias is not None and self.fuses_bias:
            fused_bias, bias = F.pad(bias, (0, self.more_cols)) if self.more_cols else bias, None
        is_in_scales = right_reader.takes_nan_flag and (
            read is not None or not (right_reader.is_swizzled and right_reader.is_ready(b))
        )
        a_codes, a_scales = left_reader.read(a, None)
        b_codes, b_scales = read or right_reader.read(b, nan_flag if is_in_scales else None)
        scaled_mm = private_torch.traced_scaled_mm if kernels.tracing.on else private_torch.scaled_mm
        out: Tensor = scaled_mm(
            a_codes, b_codes, a_scales, left_reader.scales.recipes, left_reader.scales.swizzle,
            b_scales, right_reader.scales.recipes, right_reader.scales.swizzle, fused_bias, self.sums, (), self.fast,
        )  # fmt: skip
        if self.is_padded:
            out = out[: self.rows, : self.cols]
        if bias is not None:
            out = kernel_dispatch.rounded(out + bias.float(), self.out_dtype)
        return out if nan_flag is None or is_in_scales else out + nan_flag.to(self.out_dtype)


def find_product(products: list[Any] | None, *facts: Any) -> ProductPlan | None:
    """Call `plan_product`, or return its result for equal arguments from `products`, to which new ones are added."""
    product: ProductPlan | None
    for planned_for, product in products or ():
        if planned_for == facts:
            return product
    product = plan_product(*facts)
    if products is not None:
        products.append((facts, product))
    return product


def plan_product(
    left: Format, left_shard: Shard, left_as_stored: bool, right: Format, right_shard: Shard, right_as_stored: bool,
    device: torch.device, out_dtype: torch.dtype, bias_dtype: torch.dtype | None, fast: bool,
) -> ProductPlan | None:  # fmt: skip
    """The native product of two operands, or None if the product is emulated; see `OperandReader` for `as_stored`."""
    a, b = OperandReader(left, left_shard, left_as_stored), OperandReader(right, right_shard, right_as_stored)
    product = None if out_dtype is torch.float64 else hardware.product_of_kinds(a.kind, b.kind)
    if product is None or not product.is_of(hardware.capability_of(device)) or not (a.is_readable and b.is_readable):
        return None
    a.has_kernels = b.has_kernels = kernel_dispatch.kernels_on(device)
    return ProductPlan(product, a, b, out_dtype, bias_dtype, fast)


class OperandReader:
    """Reads the codes and scales of operands of one format and shard in the form of a scaled product.

    `as_stored`: whether operands are summed over their last dim, otherwise over the first one. Shape, block and origin
    have the summed dim last.
    """

    def __init__(self, fmt: Format, shard: Shard, as_stored: bool) -> None:
        rowwise = as_stored or Orientation.COLUMNWISE not in fmt.copies
        self.which = Orientation.ROWWISE if rowwise else Orientation.COLUMNWISE
        self.copy = copy = fmt.copies[self.which]
        self.transposed = not as_stored
        pairs = shard.shape, copy.block, shard.origin
        self.shape, self.block, self.origin = pairs if as_stored else (pair[::-1] for pair in pairs)
        # slices of the resident codes and scales that the shard touches; None: all of them
        self.cuts = _touched(shard, copy.codes), _touched(shard, copy.scale)
        self.kind: Kind = hardware.kind_of(copy, self.block)
        # all blocks are complete, except the last one of a dim
        is_aligned = all(size == ALL or start % size == 0 for start, size in zip(self.origin, self.block, strict=True))
        # there are codes that were quantized along the summed dim, from entire blocks
        self.is_readable = is_aligned and 0 not in self.shape and (as_stored or fmt.transposable or not rowwise)
        self.codes, self.scale, self.encoding = copy.codes.name, copy.scale.name, copy.codes.encoding
        self.native = self.encoding.gemm_dtype
        self.amax = None if copy.amax is None else copy.amax.name
        self.has_kernels = False
        self.unit = 1.0 / (self.encoding.max * copy.scale.encoding.max)

    def lay_out(self, scales: ScaleLayout, rows: int, expands: bool, right: bool) -> None:
        """Plan the steps to the form of a product.

        `rows`: the row count is padded to a multiple of it. `expands`: every row gets its own scale. `right`: this is
        the right operand, with transposed codes.
        """
        self.scales, self.right, self.native_codes = scales, right, _native_codes(self.native, right)
        (size, cols), block, bits = self.shape, self.block, self.encoding.bits
        self.repeats = block[0] if expands and block[0] > 1 else 0
        if self.repeats:
            block = (1, block[1])
        self.size = size + -size % rows
        self.width = (cols + -cols % (128 // bits)) * bits // 8
        entries = [
            [1 if cover == ALL else ceil_div(length, cover) for length, cover in zip(shape, block, strict=True)]
            for shape in (self.shape, (self.size, self.width * 8 // bits))
        ]
        self.more_codes = (0, self.width - ceil_div(cols * bits, 8), 0, self.size - size)
        self.more_scales = (0, entries[1][1] - entries[0][1], 0, entries[1][0] - entries[0][0])
        self.is_padded = any(self.more_codes)
        is_whole = not (self.repeats or self.is_padded or self.size == 1)
        # a view of the stored tensors is enough
        self.is_viewed = is_whole and not (self.transposed or any(self.cuts))
        # only the codes are transposed; for blocks of 128 x 128 the same kernel lays out the scales
        self.is_transposed = is_whole and self.transposed and bits == 8 and self.amax is None
        self.lays_blocks = self.is_transposed and scales.layout is hardware.by_four
        self.turns_scales = scales.layout is not hardware.as_single
        # one kernel swizzles the scales and, if needed, transposes the codes
        self.is_swizzled = bool(scales.swizzle) and not (self.is_padded or self.size == 1 or any(self.cuts))
        self.takes_nan_flag = self.copy.scale.encoding is FP32 or self.is_swizzled

    def is_ready(self, storage: QuantizedStorage) -> bool:
        """True if the kernel that made the operand has swizzled its scales."""
        return self.scale in storage.components and storage.components[self.scale].ndim == 1

    def read(self, storage: QuantizedStorage, nan_flag: Tensor | None) -> ReadOperand:
        """Codes in PyTorch's dtype, [rows, bytes] (transposed for a right operand), and scales plus `nan_flag`."""
        if self.is_swizzled:
            if not self.is_ready(storage):
                return read_swizzled([self], [storage], [nan_flag])[0]
            parts = storage.components
            codes = parts[self.codes]
            scales = (parts[self.scale],) if self.amax is None else (parts[self.scale], parts[SECOND_SCALE])
            return codes.t() if self.right else codes, scales
        if self.is_transposed:
            return read_transposed([self], [storage], [nan_flag])[0]
        parts = storage.components
        if self.is_viewed and self.codes in parts:
            codes, grid = parts[self.codes], parts[self.scale]
            if self.right or codes.dtype is not self.native:
                codes = _view(storage, self.codes, self.native_codes)
            if nan_flag is not None:
                grid = self.scales.layout(grid + nan_flag)
            elif self.right and self.turns_scales:
                grid = _view(storage, self.scale, self.scales.layout)
            elif self.turns_scales:
                grid = self.scales.layout(grid)
        else:
            codes, grid = self._made(*self.touched(storage), nan_flag)
        if self.amax is None:
            return codes, (grid,)
        return codes, (grid, (parts[self.amax] * self.unit).view(()))

    def touched(self, storage: QuantizedStorage) -> tuple[Tensor, Tensor]:
        """Codes and scales that the shard touches, as stored."""
        if self.codes not in storage.components:
            storage = storage.with_copy(self.which)
        codes, grid = storage.components[self.codes], storage.components[self.scale]
        of_codes, of_scales = self.cuts
        return codes if of_codes is None else codes[of_codes], grid if of_scales is None else grid[of_scales]

    def _made(self, codes: Tensor, grid: Tensor, nan_flag: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.transposed:
            codes, grid = kernel_dispatch.transpose_codes(codes, self.encoding, self.shape[0]), grid.t()
        if self.repeats:
            grid = grid.repeat_interleave(self.repeats, 0)[: self.shape[0]]
        if nan_flag is not None:
            grid = grid + nan_flag
        if self.is_padded:
            codes, grid = F.pad(codes, self.more_codes), F.pad(grid, self.more_scales)
        if self.size == 1:  # a transposed column may have any stride here
            codes = hardware.strided(codes.contiguous(), (self.width, 1))
        return self.native_codes(codes), self.scales.layout(grid)


@cache
def _native_codes(dtype: torch.dtype, right: bool) -> Callable[[Tensor], Tensor]:
    """A view of codes in PyTorch's dtype; codes of a right operand are transposed."""
    if right:
        return lambda codes: codes.t() if codes.dtype is dtype else codes.view(dtype).t()
    return lambda codes: codes if codes.dtype is dtype else codes.view(dtype)


def _view(storage: QuantizedStorage, name: str, layout: Callable[[Tensor], Tensor]) -> Tensor:
    """`layout` of a component, kept while the component stays at its address: every GEMM would make the same."""
    part, key = storage.components[name], (name, layout)
    if kernels.tracing.on:
        return layout(part)
    view, address = storage.gemm_views.get(key), part.data_ptr()
    if view is None or view.data_ptr() != address:
        view = layout(part)
        if view.data_ptr() == address:
            storage.gemm_views[key] = view
    return view


def _touched(shard: Shard, component: Component) -> tuple[slice, slice] | None:
    cuts = shard.touched(component)
    return None if cuts == tuple(slice(0, size) for size in shard.component_shape(component)) else cuts


def read_transposed(
    readers: Sequence[OperandReader], storages: Sequence[QuantizedStorage], nan_flags: Sequence[Tensor | None]
) -> list[ReadOperand]:
    """Read several operands of the same kind with one kernel. Requires `is_transposed`."""
    parts = [reader.touched(storage) for reader, storage in zip(readers, storages, strict=True)]
    lays_scales = readers[0].lays_blocks
    # tensors of other classes can have no values, or be traced
    has_kernel = readers[0].has_kernels and type(parts[0][0]) is Tensor
    by_columns = transpose_kernel.by_columns if has_kernel else kernel_dispatch.by_columns
    outputs = by_columns(
        [(codes, grid if lays_scales else None, nan_flag if lays_scales else None)
         for (codes, grid), nan_flag in zip(parts, nan_flags, strict=True)],
        readers[0].native,
    )  # fmt: skip
    results: list[ReadOperand] = []
    for reader, (codes, scales), (_, grid), nan_flag in zip(readers, outputs, parts, nan_flags, strict=True):
        if scales is None:
            scales = grid if nan_flag is None else grid + nan_flag
            if reader.turns_scales:
                scales = reader.scales.layout(scales.t())
        else:
            scales = hardware.strided(scales, (1, scales.shape[0]))
        results.append((codes if reader.right else codes.t(), (scales,)))
    return results


def read_swizzled(
    readers: Sequence[OperandReader], storages: Sequence[QuantizedStorage],
    nan_flags: Sequence[Tensor | None], others: Sequence[Tensor | None] = (),
) -> list[ReadOperand]:  # fmt: skip
    """Read several operands of the same copy with one kernel. Requires `is_swizzled`, and scales that are not yet.
    `others`: per operand, E8M0 scales of another operand that also become NaN if its flag is NaN."""
    storages, matrices = _swizzle_arguments(readers, storages, nan_flags, others)
    outputs = kernel_dispatch.swizzle(readers[0].copy, matrices, readers[0].transposed)
    return _from_swizzled(readers, storages, outputs)


def _swizzle_arguments(
    readers: Sequence[OperandReader], storages: Sequence[QuantizedStorage], nan_flags: Sequence[Tensor | None] = (),
    others: Sequence[Tensor | None] = (),
) -> tuple[list[QuantizedStorage], list[kernel_dispatch.StoredMatrix]]:  # fmt: skip
    """Storages that have the copy that is read, and the arguments of `kernel_dispatch.swizzle`."""
    nones = [None] * len(storages)
    with_copies, matrices = list[QuantizedStorage](), list[kernel_dispatch.StoredMatrix]()
    for reader, storage, *more in zip(readers, storages, nan_flags or nones, others or nones, strict=True):
        operand = storage if reader.codes in storage.components else storage.with_copy(reader.which)
        parts = operand.components
        amax = None if reader.amax is None else parts[reader.amax]
        matrices.append((operand.shard.shape, parts[reader.codes], parts[reader.scale], amax, more[0], more[1]))
        with_copies.append(operand)
    return with_copies, matrices


def _from_swizzled(
    readers: Sequence[OperandReader], storages: Sequence[QuantizedStorage],
    outputs: Sequence[kernel_dispatch.SwizzledMatrix],
) -> list[ReadOperand]:  # fmt: skip
    """Convert the outputs of the kernel to operands of scaled products."""
    results = list[ReadOperand]()
    for reader, storage, (codes, scale, second) in zip(readers, storages, outputs, strict=True):
        if codes is None:
            codes = _view(storage, reader.codes, reader.native_codes)
        elif reader.right:
            codes = codes.t()
        results.append((codes, (scale,) if second is None else (scale, second)))
    return results


class WeightOperands:
    """Weights as right operands of several products a @ op(b) with one output dtype.

    `reads_together`: whether the products may need another form of the operands than the stored one, which one kernel
    makes for all: its own, or the one that quantizes the left operands (`swizzle_request`).
    """

    def __init__(self, operands: Sequence[Operand], out_dtype: torch.dtype, transpose_b: bool = False) -> None:
        self.operands, self.out_dtype, self.transpose_b = operands, out_dtype, transpose_b
        self._laid: tuple[list[OperandReader], SwizzleRequest] | None = None
        first = operands[0]
        # otherwise products read the operands as they are, one at a time
        self.reads_together = (
            isinstance(first, QuantizedStorage)
            and (
                (len(operands) > 1 and not transpose_b)
                or first.spec.format.copies[Orientation.ROWWISE].scale.encoding.bits == 8
            )
            and all([isinstance(operand, QuantizedStorage) for operand in operands])
        )
        self._storages = cast(Sequence[QuantizedStorage], operands)

    def swizzle_request(self, left: Format, shard: Shard, products: list[Any]) -> SwizzleRequest | None:
        """Swizzling of the weights for the kernel that quantizes such left operands; None if it cannot help."""
        readers = self._readers([(left, shard, products)] * len(self._storages))
        if not readers or not readers[0].is_swizzled:
            return None
        codes = [storage.components.get(readers[0].codes) for storage in self._storages]
        if any(part is None or is_large(part) for part in codes):
            return None
        _, matrices = _swizzle_arguments(readers, self._storages)
        request = SwizzleRequest(readers[0].copy, matrices, readers[0].transposed)
        self._laid = readers, request
        return request

    def read(
        self, lefts: Sequence[Operand], nan_flags: Sequence[Tensor | None] = (), others: Sequence[Operand] = ()
    ) -> tuple[Sequence[ReadOperand | None], bool]:
        """Operands for `matmul`, made by one kernel; a None per operand if one kernel cannot make all.

        The second result is True if the kernel also wrote the NaNs of `nan_flags`, one per gradient, into the scales
        of `others`, the operands of wgrad.
        """
        if self._laid is not None:
            readers, request = self._laid
            return _from_swizzled(readers, self._storages, request.finish()), False
        readers = self._readers([
            (left.spec.format, left.shard, left.products) if isinstance(left, QuantizedStorage) else None
            for left in lefts
        ])  # fmt: skip
        if not readers:
            return [None] * len(lefts), False
        if readers[0].is_swizzled:
            nan_targets = [_swizzled_scales(item) for item in others]
            reads = read_swizzled(readers, self._storages, nan_flags, nan_targets)
            return reads, bool(nan_targets) and None not in nan_targets
        pairs = zip(readers, nan_flags or [None] * len(readers), strict=True)
        added_flags = [flag if reader.takes_nan_flag else None for reader, flag in pairs]
        return read_transposed(readers, self._storages, added_flags), False

    def _readers(self, lefts: Sequence[tuple[Format, Shard, list[Any] | None] | None]) -> list[OperandReader]:
        """Readers of the weights in native products with `lefts`. Empty if one kernel cannot make all operands."""
        readers = list[OperandReader]()
        device = self._storages[0].device
        for left, right in zip(lefts, self._storages, strict=True):
            if left is None:
                return []
            fmt, shard, products = left
            product = find_product(
                products, fmt, shard, True, right.spec.format, right.shard, self.transpose_b, device,
                self.out_dtype, None, False,
            )  # fmt: skip
            if product is None or not (product.right.is_transposed or product.right.is_swizzled):
                return []
            readers.append(product.right)
        return readers if all([reader.copy is readers[0].copy for reader in readers]) else []


def _swizzled_scales(operand: Operand) -> Tensor | None:
    """The E8M0 scales of an operand that a kernel made for a product; None for other operands."""
    if not isinstance(operand, QuantizedStorage):
        return None
    scale = operand.components[operand.spec.format.copies[Orientation.ROWWISE].scale.name]
    return scale if scale.dtype is E8M0.gemm_dtype else None
