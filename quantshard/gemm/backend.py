"""The one place that asks "native or emulated?": matrix products of quantized operands.

A native product multiplies codes and applies scales as it sums, by one of PyTorch's scaled matrix products
(`scaled_products`). What no hardware here has is emulated, and says so: both operands are dequantized, unless they were
made as values at once (`producers.OperandKind`), and multiplied in high precision. `product_plan` and, before there are
operands, `gemm_path` give the reason; `explain` prints it.

Operands are brought into the form that a product demands by an `operand_reader.OperandReader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernel_dispatch, private_torch
from quantshard.formats import ALL, E4M3, E5M2, Orientation
from quantshard.gemm import scaled_products
from quantshard.gemm.operand_reader import OperandReader, OperandSpec, ReadOperand
from quantshard.gemm.operands import Operand, is_large
from quantshard.gemm.scaled_products import Capability, ScaledProduct
from quantshard.recipe import OPERANDS, Gemm, QuantSpec, Recipe, TensorRole
from quantshard.tensor.storage import GemmKey, QuantizedStorage


def matmul(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    nan_flag: Tensor | None = None,
    precision: torch.dtype | None = None,
    fast: bool = False,
    read: ReadOperand | None = None,
) -> Tensor:
    """op(a) @ op(b) + bias, accumulated in float32 and rounded once to `out_dtype`.

    A quantized operand is read from the copy that was quantized along the summed dim, where its format keeps two.

    Args:
        poison: float32 scalar, 0 or NaN; if NaN, every element of the result is.
        precision: the dtype of the layer, if it is not `out_dtype`. On a GPU, what is emulated for layers of 16 bits
            reads operands rounded to bfloat16, which MXFP8 is exactly.
        fast: sums need not be in float32; see `recipe.MMParams`. For a float32 result they are.
        read: what `weight_operands.WeightOperands` has given for b.
    """
    if isinstance(a, QuantizedStorage) and isinstance(b, QuantizedStorage):
        plan = product_plan(
            a.layout or a.gemm_key(), not transpose_a, b.layout or b.gemm_key(), transpose_b,
            scaled_products.capability_of(next(iter(a.components.values())).device),
            out_dtype, None if bias is None else bias.dtype, fast,
        )  # fmt: skip
        if isinstance(plan, ProductPlan):
            return plan.run(a, b, bias, nan_flag, read)
    return _emulated(a, b, out_dtype, transpose_a, transpose_b, bias, nan_flag, precision or out_dtype)


def values_together(a: Tensor, weight_operands: Sequence[Operand], precision: torch.dtype) -> Sequence[Operand]:
    """The right operands of several emulated products a @ b as values, by one kernel; as they are if one cannot make
    them all, and if they are large: then each is there only while it is multiplied."""
    stored = [each for each in weight_operands if isinstance(each, QuantizedStorage)]
    if len(stored) < max(len(weight_operands), 2) or len({each.cell.format for each in stored}) > 1:
        return weight_operands
    copies = stored[0].cell.format.copies
    which = Orientation.COLUMNWISE if Orientation.COLUMNWISE in copies else Orientation.ROWWISE
    if any(not each.has(which) or is_large(each.components[copies[which].codes.name]) for each in stored):
        return weight_operands
    dtype = _read_dtype(a, stored[0], precision)
    parts = [(each.touched(), each.shard.shape, each.shard.origin) for each in stored]
    return kernel_dispatch.dequantize_together(copies[which], parts, dtype)


# Native products -----------------------------------------------------------------------------------------------------


class ProductPlan:
    """A native product of two operands: all that follows from their formats and shards, from dtypes and the GPU."""

    def __init__(
        self, product: ScaledProduct, left: OperandSpec, right: OperandSpec,
        out_dtype: torch.dtype, bias_dtype: torch.dtype | None, fast: bool,
    ) -> None:  # fmt: skip
        expands = (left.kind, right.kind) not in scaled_products.NATIVE  # it was found by blocks of one row
        self.left = OperandReader(left, product.left, product.rows, expands, False)
        self.right = OperandReader(right, product.right, 16, expands, True)
        self.rows, self.cols = left.shape[0], right.shape[0]
        self.more_cols = self.right.size - self.cols
        self.is_padded = (self.left.size, self.more_cols) != (self.rows, 0)
        self.out_dtype = out_dtype
        # the only biases that PyTorch's product adds by itself; others are added to its float32 sums, and rounded with
        # them
        self.fuses_bias = bias_dtype == out_dtype and out_dtype in (torch.bfloat16, torch.float16)
        self.sums = out_dtype if bias_dtype is None or self.fuses_bias else torch.float32
        self.fast = fast and product.fast and out_dtype.itemsize == 2

    def run(
        self,
        a: QuantizedStorage,
        b: QuantizedStorage,
        bias: Tensor | None,
        nan_flag: Tensor | None,
        read: ReadOperand | None,
    ) -> Tensor:
        """The product, as `matmul` gives it."""
        left, right, fused = self.left, self.right, None
        if bias is not None and self.fuses_bias:
            fused, bias = F.pad(bias, (0, self.more_cols)) if self.more_cols else bias, None
        takes_poison = right.takes_poison and (read is not None or not (right.is_swizzled and right.is_ready(b)))
        a_codes, a_scales = left.read(a, None)
        b_codes, b_scales = read or right.read(b, nan_flag if takes_poison else None)
        out: Tensor = private_torch.scaled_mm(
            a_codes, b_codes, a_scales, left.scales.recipes, left.scales.swizzle,
            b_scales, right.scales.recipes, right.scales.swizzle, fused, self.sums, (), self.fast,
        )  # fmt: skip
        if self.is_padded:
            out = out[: self.rows, : self.cols]
        if bias is not None:
            out = (out + bias.float()).to(self.out_dtype)
        return out if nan_flag is None or takes_poison else out + nan_flag.to(self.out_dtype)


@lru_cache(maxsize=1024)
def product_plan(
    left: GemmKey,
    left_as_stored: bool,
    right: GemmKey,
    right_as_stored: bool,
    capability: Capability | None,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    fast: bool,
) -> ProductPlan | str:
    """How two operands are multiplied by the hardware, or why they are not, and the product is emulated.

    `left_as_stored`, `right_as_stored`: the summed dim of what is stored is the last one, else the first.
    """
    a = OperandSpec.of(left.format, left.shard, left_as_stored)
    b = OperandSpec.of(right.format, right.shard, right_as_stored)
    if a is None or b is None:
        return "an operand has no codes that were quantized along the summed dim"
    if 0 in (*a.shape, *b.shape):
        return "an operand has no elements"
    if not (a.is_aligned and b.is_aligned):
        return "a cut crosses blocks of an operand"
    product = scaled_products.product_of_kinds(a.kind, b.kind)
    if product is None or not product.is_of(capability):
        return "the hardware has no product of these formats"
    return ProductPlan(product, a, b, out_dtype, bias_dtype, fast)


# Emulated ones -------------------------------------------------------------------------------------------------------


def _emulated(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    transpose_a: bool,
    transpose_b: bool,
    bias: Tensor | None,
    nan_flag: Tensor | None,
    precision: torch.dtype,
) -> Tensor:
    dtype = _read_dtype(a, b, precision)
    if nan_flag is not None and isinstance(a, Tensor) and isinstance(b, Tensor):
        a = a + nan_flag.to(a.dtype)
    # where codes are read it is taken in by the way
    of_a, of_b = (nan_flag, None) if isinstance(a, QuantizedStorage) else (None, nan_flag)
    left = _values(a, Orientation.COLUMNWISE if transpose_a else Orientation.ROWWISE, dtype, of_a)
    right = _values(b, Orientation.ROWWISE if transpose_b else Orientation.COLUMNWISE, dtype, of_b)
    left, right = left.t() if transpose_a else left, right.t() if transpose_b else right
    # `torch.mm` rounds its sums to bf16 itself; where more follows it is asked for them, which works on GPUs alone
    sums = dtype if bias is None and out_dtype is dtype else torch.float32
    with _without_autocast(a.device.type):
        out = torch.mm(left, right) if sums is dtype else torch.mm(left, right, out_dtype=sums)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _read_dtype(a: Operand, b: Operand, precision: torch.dtype) -> torch.dtype:
    """In which an emulated product reads operands."""
    lasts = all(x.dtype is torch.bfloat16 for x in (a, b) if isinstance(x, Tensor))  # else float32 would be rounded
    kind = a.device.type
    on_gpu = kind == "cuda" or (kind == "meta" and scaled_products.META_CAPABILITY is not None)
    return torch.bfloat16 if on_gpu and precision.itemsize == 2 and lasts else torch.float32


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turn `torch.autocast` off where it is on: it would round operands and sums. The meta device has none."""
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _values(operand: Operand, wanted: Orientation, dtype: torch.dtype, nan_flag: Tensor | None = None) -> Tensor:
    if isinstance(operand, Tensor):
        return operand.to(dtype)
    which = wanted if wanted in operand.cell.format.copies else Orientation.ROWWISE
    return operand.dequantize(which, dtype, nan_flag)


# Many experts at once ------------------------------------------------------------------------------------------------

LARGEST_GROUPED: Final = 1 << 35
"""If the fprop of an expert, in the mean over experts, has more multiplications than this, experts go one by one:
PyTorch's FP8 products then save more time (1200 TFLOP/s in place of 350) than it takes to launch them, which on an H200
and its host is more than a millisecond an expert and step (benchmarks/experts.py)."""


def block_together(recipe: Recipe) -> int | None:
    """Whether a recipe lets all experts be multiplied at once, told as the number of elements along the summed dim that
    are under one scale: 0 if each expert's input, weight and gradient has one scale. None: the recipe does not.

    A recipe that does has one format for a role, of 8 bits, rounded to nearest, in all its GEMMs: all of a tensor under
    one scale, or squares of 32 or 128 of a weight and as many elements of a row of an activation or gradient.
    """
    if any((role, gemm) not in recipe.table for gemm, roles in OPERANDS.items() for role in roles):
        return None  # an operand stays in high precision
    cells = [{cell for (role, _), cell in recipe.table.items() if role is of} for of in TensorRole]
    if any(len(found) != 1 or not _is_plain(*found) for found in cells):
        return None
    weight, *others = (
        (*cell.format.copies[Orientation.ROWWISE].block, bool(cell.scaling.history)) for (cell,) in cells
    )
    if {weight[:2], *(other[:2] for other in others)} == {(ALL, ALL)}:
        return 0
    block = weight[0]
    fits = block in (32, 128) and weight == (block, block, False) and set(others) == {(1, block, False)}
    return block if fits else None


def _is_plain(cell: QuantSpec) -> bool:
    scaling, copies = cell.scaling, cell.format.copies
    nearest = not (scaling.stochastic_rounding or scaling.random_hadamard)
    return nearest and len(copies) == 1 and copies[Orientation.ROWWISE].codes.encoding in (E4M3, E5M2)


def is_faster_together(rows: int, experts: int, shape: tuple[int, int]) -> bool:
    """Whether `rows` of that many experts are multiplied faster at once, with weights of this shape (whose elements the
    kernels number in 32 bits)."""
    return experts > 1 and rows * shape[0] * shape[1] <= experts * LARGEST_GROUPED and shape[0] * shape[1] < 1 << 31


# What is said of them ------------------------------------------------------------------------------------------------


def fallbacks(stored: QuantizedStorage | None, recipe: Recipe | None, device: torch.device) -> tuple[str, ...]:
    """Which of `limits.FALLBACKS` the GEMMs of one linear layer take.

    `stored`: the weight, None where it is stored in high precision. `recipe`: of autocast; None if it is not known, and
    taken to be one that fits the weight.
    """
    if recipe is not None and not recipe.table:
        return () if stored is None else ("dequantized",)
    cell = stored.cell if stored is not None else recipe.weight if recipe is not None else None
    taken = ["emulated"] if gemm_path(cell, device, recipe)[0] == "emulated" else []
    if cell is not None and kernel_dispatch.lacks_kernels(device):
        taken.append("no kernels")
    if stored is None:
        return (*taken, "quantized each forward") if cell is not None else ()
    fmt = stored.cell.format
    if not fmt.serves_columns:
        taken.append("turned")
    if stored.gathered and not stored.has(Orientation.ROWWISE):
        taken.append("fetched")
    return tuple(taken)


@lru_cache(maxsize=256)
def emulated_gemms(recipe: Recipe, capability: Capability) -> tuple[Gemm, ...]:
    """GEMMs of whose two quantized formats such hardware has no product; those that read a weight of one copy along its
    rows aside, which is a fallback of its own ("turned")."""
    found = []
    for gemm, roles in OPERANDS.items():
        left, right = (recipe.table.get((role, gemm)) for role in roles)
        if left is None or right is None or (gemm is Gemm.DGRAD and not right.format.serves_columns):
            continue
        product = scaled_products.product_of_formats(left.format, right.format)
        if product is None or not product.is_of(capability):
            found.append(gemm)
    return tuple(found)


def gemm_path(cell: QuantSpec | None, device: torch.device, recipe: Recipe | None = None) -> tuple[str, str]:
    """How a weight's GEMMs run on a device, and why: ("native" or "emulated", reason). By a recipe,
    if it is known and stores such weights: native are those all of whose products are."""
    if cell is None:
        return "native", "high precision"
    name = cell.format.copies[Orientation.ROWWISE].codes.encoding.name
    capability = scaled_products.capability_of(device)
    if capability is None:
        where = "a CPU has" if device.type == "cpu" else f"{device.type}, where there is one: quantshard knows"
        return "emulated", f"{where} no {name} matrix product"
    here, products = scaled_products.dotted(capability), scaled_products.products_of(cell)
    for native in products:
        if native.is_on(device):
            others = () if recipe is None or recipe.weight != cell else emulated_gemms(recipe, capability)
            if others:
                which = " and ".join(gemm.value for gemm in others)
                return "emulated", f"compute capability {here} has no product of the formats of {which}"
            seen = "" if native.seen else ", not yet run on this hardware"
            return "native", f"{name} matrix product of compute capability {here}{seen}"
    with_scales = f"{name} matrix product with the scales of {cell.format.name}"
    if not products:
        return "emulated", f"PyTorch has no {with_scales}"
    needs = ", ".join(native.needs for native in products)
    return "emulated", f"compute capability {here} has no {with_scales} (such products: {needs})"
