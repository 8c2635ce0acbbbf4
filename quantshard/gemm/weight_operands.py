"""Right operands of a layer's products, converted by one kernel: its own, or the one that quantizes the left
operand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels
from quantshard.formats import E8M0, Orientation
from quantshard.gemm import backend, scaled_products
from quantshard.gemm.operand_reader import OperandReader, ReadOperand, SwizzledOperands
from quantshard.gemm.operands import Operand, is_large
from quantshard.tensor.storage import GemmKey, QuantizedStorage

if kernels.USABLE:
    from quantshard.kernels.quantize.swizzle import SwizzleRequest


class WeightOperands:
    """Right operands of several products a @ op(b) with one output dtype.

    `reads_together`: whether the products may need another form of the operands than the stored one, which one kernel
    makes for all.
    """

    def __init__(self, operands: Sequence[Operand], out_dtype: torch.dtype, transpose_b: bool = False) -> None:
        self.operands, self.out_dtype, self.transpose_b = operands, out_dtype, transpose_b
        self.reads_together = False
        self._storages: list[QuantizedStorage] = []
        self._laid: tuple[SwizzledOperands, SwizzleRequest] | None = None
        first = operands[0]
        if isinstance(first, QuantizedStorage):  # otherwise products read the operands as they are, one at a time
            narrow = (first.layout or first.gemm_key()).narrow_scales
            if narrow or (len(operands) > 1 and not transpose_b):
                for operand in operands:
                    if isinstance(operand, QuantizedStorage):
                        self._storages.append(operand)
                self.reads_together = len(self._storages) == len(operands)

    def swizzle_request(self, left: GemmKey) -> SwizzleRequest | None:
        """Work for the kernel that quantizes left operands with the key `left`: swizzling these weights, for `read` to
        return.

        Requires products without a nan flag. None if the weights need no swizzling, or are so large that a separate
        launch is worth it.
        """
        readers = self._readers(None, left)
        if not readers or not readers[0].is_swizzled:
            return None
        for storage, reader in zip(self._storages, readers, strict=True):
            codes = storage.components.get(reader.codes)
            if codes is None or is_large(codes):
                return None
        operands = SwizzledOperands(readers, self._storages)
        self._laid = operands, SwizzleRequest(operands.copy, operands.matrices, operands.turned)
        return self._laid[1]

    def read(
        self,
        lefts: Sequence[Operand],
        nan_flags: Sequence[Tensor | None] | None = None,
        others: Sequence[Operand | None] | None = None,
    ) -> tuple[Sequence[ReadOperand | None], bool]:
        """Operands for `backend.matmul`, made by one kernel; a None per operand if one kernel cannot make all.

        The second result is True if the kernel also wrote the NaNs of `nan_flags`, one per gradient, into the scales
        of `others`, the operands of wgrad.
        """
        if self._laid is not None:
            operands, request = self._laid
            return operands.read(request.finish()), False
        readers, nones = self._readers(lefts), [None] * len(self.operands)
        if not readers:
            return nones, False
        if readers[0].is_swizzled:
            nan_targets = None if others is None else [_swizzled_scales(item) for item in others]
            swizzled = SwizzledOperands(readers, self._storages, nan_flags, nan_targets)
            outputs = kernel_dispatch.swizzle(swizzled.copy, swizzled.matrices, swizzled.turned)
            return swizzled.read(outputs), nan_targets is not None and None not in nan_targets
        flags = nan_flags or nones
        reader_flags = [nan_flag if item.takes_poison else None for item, nan_flag in zip(readers, flags, strict=True)]
        return OperandReader.transposed(readers, self._storages, reader_flags), False

    def _readers(self, lefts: Sequence[Operand] | None, alike: GemmKey | None = None) -> list[OperandReader]:
        """Readers of these operands in native products with the left operands `lefts`, or with left operands that all
        have the key `alike`. Empty if one kernel cannot make all operands."""
        readers, key = list[OperandReader](), alike
        capability = scaled_products.capability_of(self._storages[0].device)
        for index, right in enumerate(self._storages):
            if lefts is not None:
                a = lefts[index]
                key = (a.layout or a.gemm_key()) if isinstance(a, QuantizedStorage) else None
            if key is None:
                return []
            plan = backend.product_plan(
                key, True, right.layout or right.gemm_key(), self.transpose_b, capability, self.out_dtype, None, False
            )
            if not (isinstance(plan, backend.ProductPlan) and plan.right.is_made_at_once):
                return []
            if readers and plan.right.spec.copy is not readers[0].spec.copy:
                return []
            readers.append(plan.right)
        return readers


def _swizzled_scales(operand: Operand | None) -> Tensor | None:
    """The E8M0 scales of an operand that a kernel made for a product; None for other operands."""
    if not isinstance(operand, QuantizedStorage):
        return None
    scale = operand.components[operand.cell.format.copies[Orientation.ROWWISE].scale.name]
    return scale if scale.dtype is E8M0.multiplied else None
