"""Products without hardware for the operands' formats: operands are dequantized and multiplied in high precision."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.formats import Orientation
from quantshard.gemm import hardware
from quantshard.gemm.operands import Operand, is_large
from quantshard.tensor.storage import QuantizedStorage


def emulated_matmul(
    a: Operand, b: Operand, out_dtype: torch.dtype, transpose_a: bool, transpose_b: bool,
    bias: Tensor | None, nan_flag: Tensor | None, precision: torch.dtype,
) -> Tensor:  # fmt: skip
    dtype = _read_dtype(a, b, precision)
    if nan_flag is not None and isinstance(a, Tensor) and isinstance(b, Tensor):
        a = a + nan_flag.to(a.dtype)
    # reading codes adds the flag at no cost
    a_nan_flag, b_nan_flag = (nan_flag, None) if isinstance(a, QuantizedStorage) else (None, nan_flag)
    lhs = _values(a, Orientation.COLUMNWISE if transpose_a else Orientation.ROWWISE, dtype, a_nan_flag)
    rhs = _values(b, Orientation.ROWWISE if transpose_b else Orientation.COLUMNWISE, dtype, b_nan_flag)
    lhs, rhs = lhs.t() if transpose_a else lhs, rhs.t() if transpose_b else rhs
    # `torch.mm` rounds its sums to bf16; keep float32 sums if a bias or a cast follows (supported on GPUs only)
    sum_dtype = dtype if bias is None and out_dtype is dtype else torch.float32
    with _without_autocast(a.device.type):
        if kernels.tracing.on:
            out: Tensor = torch.ops.quantshard.emulated_product(lhs, rhs, bias, sum_dtype, out_dtype)
            return out
        return _emulated_product(lhs, rhs, bias, sum_dtype, out_dtype)


def _emulated_product(
    a: Tensor, b: Tensor, bias: Tensor | None, sum_dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    out = torch.mm(a, b) if sum_dtype is a.dtype else torch.mm(a, b, out_dtype=sum_dtype)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


# One operator of compiled graphs. Inductor may lay out the operands of `aten.mm` differently, which changes the order
# of its sums, and skips rounding between operations that it fuses.
private_torch.define_operator(
    "emulated_product", "(Tensor a, Tensor b, Tensor? bias, ScalarType sum_dtype, ScalarType out_dtype) -> Tensor",
    _emulated_product, lambda a, b, *others: a.new_empty((a.shape[0], b.shape[1]), dtype=others[-1]),
    torch.Tag.needs_exact_strides,
)  # fmt: skip


def _read_dtype(a: Operand, b: Operand, precision: torch.dtype) -> torch.dtype:
    """The dtype in which an emulated product reads its operands."""
    # values in another dtype, such as float32, must not be rounded
    for x in (a, b):
        if isinstance(x, Tensor) and x.dtype is not torch.bfloat16:
            return torch.float32
    on_gpu = a.device.type == "cuda" or (a.device.type == "meta" and hardware.META_CAPABILITY is not None)
    return torch.bfloat16 if on_gpu and precision.itemsize == 2 else torch.float32


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disable `torch.autocast`, which would round operands and sums. The meta device has no autocast."""
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _values(operand: Operand, wanted: Orientation, dtype: torch.dtype, nan_flag: Tensor | None = None) -> Tensor:
    if isinstance(operand, Tensor):
        return operand.to(dtype)
    which = wanted if wanted in operand.spec.format.copies else Orientation.ROWWISE
    return operand.dequantize(which, dtype, nan_flag)


def values_together(a: Tensor, weight_operands: Sequence[Operand], precision: torch.dtype) -> Sequence[Operand]:
    """Dequantize the right operands of several emulated products a @ b by one kernel, if it can, and none is large.

    Otherwise return them unchanged: `matmul` dequantizes each of them only while it is multiplied.
    """
    storages = [operand for operand in weight_operands if isinstance(operand, QuantizedStorage)]
    if len(storages) < max(len(weight_operands), 2) or len({operand.spec.format for operand in storages}) > 1:
        return weight_operands
    copies = storages[0].spec.format.copies
    which = Orientation.COLUMNWISE if Orientation.COLUMNWISE in copies else Orientation.ROWWISE
    if any(not operand.has(which) or is_large(operand.components[copies[which].codes.name]) for operand in storages):
        return weight_operands
    dtype = _read_dtype(a, storages[0], precision)
    parts = [(operand.touched(), operand.shard.shape, operand.shard.origin) for operand in storages]
    return kernel_dispatch.dequantize_together(copies[which], parts, dtype)
