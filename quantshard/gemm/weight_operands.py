"""The right operands of products that are about to be made: several by one kernel, which may be the one that quantizes
what they are multiplied with."""

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
    """Those of several products a @ op(b) of one dtype.

    `reads_together`: products may read them otherwise than they are stored, in a form that one kernel makes of all.
    """

    def __init__(self, operands: Sequence[Operand], out_dtype: torch.dtype, transpose_b: bool = False) -> None:
        self.operands, self.out_dtype, self.transpose_b = operands, out_dtype, transpose_b
        self.reads_together = False
        self._storages: list[QuantizedStorage] = []
        self._laid: tuple[SwizzledOperands, SwizzleRequest] | None = None
        first = operands[0]
        if isinstance(first, QuantizedStorage):  # else they are read as they stand, or alone
            narrow = (first.layout or first.gemm_key()).narrow_scales
            if narrow or (len(operands) > 1 and not transpose_b):
                for each in operands:
                    if isinstance(each, QuantizedStorage):
                        self._storages.append(each)
                self.reads_together = len(self._storages) == len(operands)

    def swizzle_request(self, left: GemmKey) -> SwizzleRequest | None:
        """What a kernel that makes left operands of this layout, whose products need no poison, is to lay out besides;
        `read` then gives it. None if there is nothing, or so much that it is worth a launch of its own."""
        readers = self._readers(None, left)
        if not readers or not readers[0].is_swizzled:
            return None
        for each, reader in zip(self._storages, readers, strict=True):
            codes = each.components.get(reader.codes)
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
        """For `backend.matmul`, if one kernel can make them all; None for each if not.

        And whether of each gradient, whose poison is given, the operand of wgrad in `others` is poisoned now, too.
        """
        if self._laid is not None:
            operands, request = self._laid
            return operands.read(request.finish()), False
        readers, nothing = self._readers(lefts), [None] * len(self.operands)
        if not readers:
            return nothing, False
        if readers[0].is_swizzled:
            has_nan = None if others is None else [_swizzled_scales(each) for each in others]
            swizzled = SwizzledOperands(readers, self._storages, nan_flags, has_nan)
            made = kernel_dispatch.swizzle(swizzled.copy, swizzled.matrices, swizzled.turned)
            return swizzled.read(made), has_nan is not None and None not in has_nan
        given = nan_flags or nothing
        taken = [nan_flag if each.takes_poison else None for each, nan_flag in zip(readers, given, strict=True)]
        return OperandReader.transposed(readers, self._storages, taken), False

    def _readers(self, lefts: Sequence[Operand] | None, alike: GemmKey | None = None) -> list[OperandReader]:
        """How native products with such left operands, which may be `alike`, read these, if one kernel can make them
        all; else none."""
        readers, left = list[OperandReader](), alike
        capability = scaled_products.capability_of(self._storages[0].device)
        for place, right in enumerate(self._storages):
            if lefts is not None:
                a = lefts[place]
                left = (a.layout or a.gemm_key()) if isinstance(a, QuantizedStorage) else None
            if left is None:
                return []
            plan = backend.product_plan(
                left, True, right.layout or right.gemm_key(), self.transpose_b, capability, self.out_dtype, None, False
            )
            if not (isinstance(plan, backend.ProductPlan) and plan.right.is_made_at_once):
                return []
            if readers and plan.right.spec.copy is not readers[0].spec.copy:
                return []
            readers.append(plan.right)
        return readers


def _swizzled_scales(operand: Operand | None) -> Tensor | None:
    """The scales E8M0 of an operand that a kernel has made for a product."""
    if not isinstance(operand, QuantizedStorage):
        return None
    scale = operand.components[operand.cell.format.copies[Orientation.ROWWISE].scale.name]
    return scale if scale.dtype is E8M0.multiplied else None
