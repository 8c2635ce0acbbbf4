"""Matrix products of quantized operands: the one place that decides between native and emulated products.

A native product is one of PyTorch's scaled matrix products (`scaled_products`): it multiplies codes and applies scales
to the sums. Without hardware for the formats the product is emulated: both operands are dequantized, or are values
already (`producers.OperandKind`), and multiplied in high precision. `product_plan` returns the reason, as does
`gemm_path` before there are operands; `explain` prints it. An `operand_reader.OperandReader` brings operands into the
form that a native product needs.
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

    A quantized operand of a two-copy format is read from the copy that was quantized along the summed dim.

    Args:
        nan_flag: float32 scalar, 0 or NaN; NaN makes every element of the result NaN.
        precision: the dtype of the layer, if it is not `out_dtype`. On a GPU, emulated products of 16-bit layers read
            operands rounded to bfloat16, which is exact for MXFP8.
        fast: allow sums in less than float32; see `recipe.MMParams`. Float32 results ignore it.
        read: codes and scales of b from `weight_operands.WeightOperands`.
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
    """Dequantize the right operands of several emulated products a @ b by one kernel.

    The operands are returned unchanged if one kernel cannot dequantize all of them, or if they are large: `matmul`
    then dequantizes each of them only while it is multiplied.
    """
    storages = [operand for operand in weight_operands if isinstance(operand, QuantizedStorage)]
    if len(storages) < max(len(weight_operands), 2) or len({operand.cell.format for operand in storages}) > 1:
        return weight_operands
    copies = storages[0].cell.format.copies
    which = Orientation.COLUMNWISE if Orientation.COLUMNWISE in copies else Orientation.ROWWISE
    if any(not operand.has(which) or is_large(operand.components[copies[which].codes.name]) for operand in storages):
        return weight_operands
    dtype = _read_dtype(a, storages[0], precision)
    parts = [(operand.touched(), operand.shard.shape, operand.shard.origin) for operand in storages]
    return kernel_dispatch.dequantize_together(copies[which], parts, dtype)


# Native products -----------------------------------------------------------------------------------------------------


class ProductPlan:
    """A native product: everything that follows from the operands' formats and shards, the dtypes and the GPU."""

    def __init__(
        self, product: ScaledProduct, left: OperandSpec, right: OperandSpec,
        out_dtype: torch.dtype, bias_dtype: torch.dtype | None, fast: bool,
    ) -> None:  # fmt: skip
        # the table has the product only for blocks of one row
        expands = (left.kind, right.kind) not in scaled_products.NATIVE
        self.left = OperandReader(left, product.left, product.rows, expands, False)
        self.right = OperandReader(right, product.right, 16, expands, True)
        self.rows, self.cols = left.shape[0], right.shape[0]
        self.more_cols = self.right.size - self.cols
        self.is_padded = (self.left.size, self.more_cols) != (self.rows, 0)
        self.out_dtype = out_dtype
        # PyTorch's product adds only such biases; others are added to its float32 sums before rounding
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
        """Compute the product, as `matmul` returns it."""
        left_reader, right_reader, fused_bias = self.left, self.right, None
        if bias is not None and self.fuses_bias:
            fused_bias, bias = F.pad(bias, (0, self.more_cols)) if self.more_cols else bias, None
        is_in_scales = right_reader.takes_poison and (
            read is not None or not (right_reader.is_swizzled and right_reader.is_ready(b))
        )
        a_codes, a_scales = left_reader.read(a, None)
        b_codes, b_scales = read or right_reader.read(b, nan_flag if is_in_scales else None)
        out: Tensor = private_torch.scaled_mm(
            a_codes, b_codes, a_scales, left_reader.scales.recipes, left_reader.scales.swizzle,
            b_scales, right_reader.scales.recipes, right_reader.scales.swizzle, fused_bias, self.sums, (), self.fast,
        )  # fmt: skip
        if self.is_padded:
            out = out[: self.rows, : self.cols]
        if bias is not None:
            out = (out + bias.float()).to(self.out_dtype)
        return out if nan_flag is None or is_in_scales else out + nan_flag.to(self.out_dtype)


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
    """The native product of two operands, or the reason why the product is emulated.

    `left_as_stored`, `right_as_stored`: whether the summed dim of the stored operand is the last one.
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


# Emulated products ---------------------------------------------------------------------------------------------------


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
    # reading codes adds the flag at no cost
    a_nan_flag, b_nan_flag = (nan_flag, None) if isinstance(a, QuantizedStorage) else (None, nan_flag)
    lhs = _values(a, Orientation.COLUMNWISE if transpose_a else Orientation.ROWWISE, dtype, a_nan_flag)
    rhs = _values(b, Orientation.ROWWISE if transpose_b else Orientation.COLUMNWISE, dtype, b_nan_flag)
    lhs, rhs = lhs.t() if transpose_a else lhs, rhs.t() if transpose_b else rhs
    # `torch.mm` rounds its sums to bf16; keep float32 sums if a bias or a cast follows (supported on GPUs only)
    sum_dtype = dtype if bias is None and out_dtype is dtype else torch.float32
    with _without_autocast(a.device.type):
        out = torch.mm(lhs, rhs) if sum_dtype is dtype else torch.mm(lhs, rhs, out_dtype=sum_dtype)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _read_dtype(a: Operand, b: Operand, precision: torch.dtype) -> torch.dtype:
    """The dtype in which an emulated product reads its operands."""
    # values in another dtype, such as float32, must not be rounded
    are_bfloat16 = all(x.dtype is torch.bfloat16 for x in (a, b) if isinstance(x, Tensor))
    kind = a.device.type
    on_gpu = kind == "cuda" or (kind == "meta" and scaled_products.META_CAPABILITY is not None)
    return torch.bfloat16 if on_gpu and precision.itemsize == 2 and are_bfloat16 else torch.float32


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disable `torch.autocast`, which would round operands and sums. The meta device has no autocast."""
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
"""Most multiplications in the fprop of an expert, averaged over experts, for which experts run in one kernel.

Beyond this, PyTorch's FP8 products save more time (1200 TFLOP/s instead of 350) than their launches cost: on an H200
and its host more than a millisecond per expert and step (benchmarks/experts.py).
"""


def block_together(recipe: Recipe) -> int | None:
    """Number of elements along the summed dim under one scale, if a recipe lets one kernel multiply all experts.

    It is 0 if each expert's input, weight and gradient has one scale. It is None if experts must run one at a time:
    only recipes with one 8-bit format per role, rounded to nearest in all GEMMs, qualify. These have one scale per
    tensor, or square blocks of 32 or 128 in weights and as many elements of a row in activations and gradients.
    """
    if any((role, gemm) not in recipe.table for gemm, roles in OPERANDS.items() for role in roles):
        return None  # an operand stays in high precision
    specs_by_role = [
        {cell for (role, _), cell in recipe.table.items() if role is tensor_role} for tensor_role in TensorRole
    ]
    if any(len(specs) != 1 or not _is_plain(*specs) for specs in specs_by_role):
        return None
    weight, *activation_blocks = (
        (*cell.format.copies[Orientation.ROWWISE].block, bool(cell.scaling.history)) for (cell,) in specs_by_role
    )
    if {weight[:2], *(blocks[:2] for blocks in activation_blocks)} == {(ALL, ALL)}:
        return 0
    block = weight[0]
    fits = block in (32, 128) and weight == (block, block, False) and set(activation_blocks) == {(1, block, False)}
    return block if fits else None


def _is_plain(cell: QuantSpec) -> bool:
    scaling, copies = cell.scaling, cell.format.copies
    nearest = not (scaling.stochastic_rounding or scaling.random_hadamard)
    return nearest and len(copies) == 1 and copies[Orientation.ROWWISE].codes.encoding in (E4M3, E5M2)


def is_faster_together(rows: int, experts: int, shape: tuple[int, int]) -> bool:
    """Whether one kernel multiplies `rows` rows of `experts` experts with weights of `shape` faster than a product per
    expert.

    Kernels index the elements of a weight in 32 bits, so larger weights return False.
    """
    return experts > 1 and rows * shape[0] * shape[1] <= experts * LARGEST_GROUPED and shape[0] * shape[1] < 1 << 31


# Predictions ---------------------------------------------------------------------------------------------------------


def fallbacks(stored: QuantizedStorage | None, recipe: Recipe | None, device: torch.device) -> tuple[str, ...]:
    """The `limits.FALLBACKS` that the GEMMs of one linear layer take.

    `stored`: the weight; None if it is stored in high precision. `recipe`: autocast's recipe; None if it is unknown,
    which assumes one that fits the weight.
    """
    if recipe is not None and not recipe.table:
        return () if stored is None else ("dequantized",)
    cell = stored.cell if stored is not None else recipe.weight if recipe is not None else None
    names = ["emulated"] if gemm_path(cell, device, recipe)[0] == "emulated" else []
    if cell is not None and kernel_dispatch.lacks_kernels(device):
        names.append("no kernels")
    if stored is None:
        return (*names, "quantized each forward") if cell is not None else ()
    fmt = stored.cell.format
    if not fmt.serves_columns:
        names.append("turned")
    if stored.gathered and not stored.has(Orientation.ROWWISE):
        names.append("fetched")
    return tuple(names)


@lru_cache(maxsize=256)
def emulated_gemms(recipe: Recipe, capability: Capability) -> tuple[Gemm, ...]:
    """GEMMs without a native product of their two quantized formats on this hardware.

    Dgrad with a weight that has one copy along its rows is not listed: it is another fallback ("turned").
    """
    gemms = []
    for gemm, roles in OPERANDS.items():
        left_spec, right_spec = (recipe.table.get((role, gemm)) for role in roles)
        if left_spec is None or right_spec is None or (gemm is Gemm.DGRAD and not right_spec.format.serves_columns):
            continue
        product = scaled_products.product_of_formats(left_spec.format, right_spec.format)
        if product is None or not product.is_of(capability):
            gemms.append(gemm)
    return tuple(gemms)


def gemm_path(cell: QuantSpec | None, device: torch.device, recipe: Recipe | None = None) -> tuple[str, str]:
    """How a weight's GEMMs run on a device, and why: ("native" or "emulated", reason).

    If `recipe` is given and stores such weights, "native" means that all of its products are native.
    """
    if cell is None:
        return "native", "high precision"
    name = cell.format.copies[Orientation.ROWWISE].codes.encoding.name
    capability = scaled_products.capability_of(device)
    if capability is None:
        where = "a CPU has" if device.type == "cpu" else f"{device.type}, where there is one: quantshard knows"
        return "emulated", f"{where} no {name} matrix product"
    version, products = scaled_products.dotted(capability), scaled_products.products_of(cell)
    for native in products:
        if native.is_on(device):
            emulated = () if recipe is None or recipe.weight != cell else emulated_gemms(recipe, capability)
            if emulated:
                names = " and ".join(gemm.value for gemm in emulated)
                return "emulated", f"compute capability {version} has no product of the formats of {names}"
            note = "" if native.seen else ", not yet run on this hardware"
            return "native", f"{name} matrix product of compute capability {version}{note}"
    with_scales = f"{name} matrix product with the scales of {cell.format.name}"
    if not products:
        return "emulated", f"PyTorch has no {with_scales}"
    needs = ", ".join(native.needs for native in products)
    return "emulated", f"compute capability {version} has no {with_scales} (such products: {needs})"
