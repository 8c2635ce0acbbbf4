"""The one place that asks "native or emulated?": matrix products of quantized operands.

A native product multiplies codes and applies scales as it sums, by one of PyTorch's scaled matrix products
(`scaled_products`). What no hardware here has is emulated, and says so: both operands are dequantized, unless they were
made as values at once (`producers.OperandKind`), and multiplied in high precision. `product_plan` and, before there are
operands, `gemm_path` give the reason; `explain` prints it.

A scaled product takes both operands by rows, with the summed dim last, and sizes that are multiples of 16. Operands are
brought into that form here: transposed, where one copy serves both directions, and padded with zeros. How is the same
for all operands of the same formats and shards, and found out once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernel_dispatch, private_torch
from quantshard.formats import ALL, E4M3, E5M2, FP32, Component, Copy, Format, QuantizedCopy
from quantshard.gemm import scaled_products
from quantshard.gemm.operands import Operand
from quantshard.gemm.scaled_products import Capability, Kind, ScaledProduct, ScaleLayout
from quantshard.recipe import Cell, Recipe, TensorRole
from quantshard.sharding import Shard, ceil_div
from quantshard.tensor.storage import QuantizedStorage


def matmul(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    poison: Tensor | None = None,
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
        read: what `transposed_together` has given for b.
    """
    if isinstance(a, QuantizedStorage) and isinstance(b, QuantizedStorage):
        plan = product_plan(
            a.cell.format, a.shard, not transpose_a, b.cell.format, b.shard, transpose_b,
            scaled_products.capability_of(a.device), out_dtype, None if bias is None else bias.dtype, fast,
        )  # fmt: skip
        if isinstance(plan, ProductPlan):
            return plan.run(a, b, bias, poison, read)
    return _emulated(a, b, out_dtype, transpose_a, transpose_b, bias, poison, precision or out_dtype)


def transposed_together(
    lefts: Sequence[Operand], rights: Sequence[Operand], poisons: Sequence[Tensor | None], out_dtype: torch.dtype
) -> Sequence[ReadOperand | None]:
    """The right operands of several products a @ b as these read them, for `matmul`, if one kernel can transpose them
    all; None for each if not."""
    readers, storages = [], []
    for a, b in zip(lefts, rights, strict=True):
        if isinstance(a, QuantizedStorage) and isinstance(b, QuantizedStorage):
            plan = product_plan(
                a.cell.format, a.shard, True, b.cell.format, b.shard, False,
                scaled_products.capability_of(a.device), out_dtype, None, False,
            )  # fmt: skip
            if isinstance(plan, ProductPlan) and plan.right.is_transposed:
                readers.append(plan.right)
                storages.append(b)
    kinds = {(each.native, each.lays_blocks) for each in readers}
    if len(readers) < len(rights) or len(kinds) != 1:
        return [None] * len(rights)
    return OperandReader.transposed(
        readers,
        storages,
        [poison if each.takes_poison else None for each, poison in zip(readers, poisons, strict=True)],
    )


# Native products -----------------------------------------------------------------------------------------------------


class OperandSpec(NamedTuple):
    """What is known of an operand of a product before it is read: its copy, and shape, blocks and origin with the
    summed dim last.

    `cuts`: where the codes, and the scales, that a piece touches lie among those that are resident; None: it touches
    all. `transposed`: as against what is stored.
    """

    which: Copy
    copy: QuantizedCopy
    shape: tuple[int, int]
    block: tuple[int, int]
    origin: tuple[int, int]
    cuts: tuple[tuple[slice, slice] | None, tuple[slice, slice] | None]
    transposed: bool

    @staticmethod
    def of(fmt: Format, shard: Shard, as_stored: bool) -> OperandSpec | None:
        """That of an operand whose summed dim is its last (`as_stored`) or its first; None if no codes can be read
        so."""
        which = Copy.ROWWISE if as_stored or Copy.COLUMNWISE not in fmt.copies else Copy.COLUMNWISE
        if not (as_stored or fmt.transposable or which is Copy.COLUMNWISE):
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
        self.native = torch.float4_e2m1fn_x2 if self.encoding.native is None else self.encoding.native
        self.amax = None if copy.amax is None else copy.amax.name
        self.unit = 1.0 / (self.encoding.max * copy.scale.encoding.max)
        self.takes_poison = copy.scale.encoding is FP32
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
        self.lays_blocks = self.is_transposed and scales.layout is scaled_products.by_four
        self.turns_scales = scales.layout is not scaled_products.as_single

    def read(self, storage: QuantizedStorage, poison: Tensor | None) -> ReadOperand:
        """Codes of a dtype that PyTorch multiplies, [rows, bytes] or for a right operand the transpose of that, and
        scales, to which `poison` is added."""
        if self.is_transposed:
            return OperandReader.transposed([self], [storage], [poison])[0]
        if self.codes not in storage.components:
            storage = storage.with_copy(self.spec.which)
        if self.is_viewed:
            codes, grid = storage.view(self.codes, self.native_codes), storage.components[self.scale]
            if poison is not None:
                grid = self.scales.layout(grid + poison)
            elif self.right and self.turns_scales:
                grid = storage.view(self.scale, self.scales.layout)
            elif self.turns_scales:  # no weight's: kernels store it as it is read
                grid = self.scales.layout(grid)
        else:
            codes, grid = self._made(*self._touched(storage), poison)
        return codes, (grid,) if self.amax is None else (grid, self._second(storage.components[self.amax]))

    @staticmethod
    def transposed(
        readers: Sequence[OperandReader], storages: Sequence[QuantizedStorage], poisons: Sequence[Tensor | None]
    ) -> list[ReadOperand]:
        """The same of several that are transposed (`is_transposed`) alike, by one kernel."""
        parts = [each._touched(storage) for each, storage in zip(readers, storages, strict=True)]
        lays = readers[0].lays_blocks
        found = kernel_dispatch.by_columns(
            [(codes, grid if lays else None, poison if lays else None)
             for (codes, grid), poison in zip(parts, poisons, strict=True)],
            readers[0].native,
        )  # fmt: skip
        results: list[ReadOperand] = []
        for each, (codes, laid), (_, grid), poison in zip(readers, found, parts, poisons, strict=True):
            if laid is None:
                grid = grid.t() if each.turns_scales else grid
                laid = each.scales.layout(grid if poison is None else grid + poison)
            else:
                laid = scaled_products.strided(laid, (1, laid.shape[0]))
            results.append((codes if each.right else codes.t(), (laid,)))
        return results

    def _touched(self, storage: QuantizedStorage) -> tuple[Tensor, Tensor]:
        """Those of the stored codes and scales that are read."""
        if self.codes not in storage.components:
            storage = storage.with_copy(self.spec.which)
        codes, grid = storage.components[self.codes], storage.components[self.scale]
        of_codes, of_scales = self.spec.cuts
        return codes if of_codes is None else codes[of_codes], grid if of_scales is None else grid[of_scales]

    def _made(self, codes: Tensor, grid: Tensor, poison: Tensor | None) -> tuple[Tensor, Tensor]:
        """New codes and scales."""
        spec = self.spec
        if spec.transposed:
            codes, grid = kernel_dispatch.transpose_codes(codes, self.encoding, spec.shape[0]), grid.t()
        if self.repeats:
            grid = grid.repeat_interleave(self.repeats, 0)[: spec.shape[0]]
        if poison is not None:
            grid = grid + poison
        if self.is_padded:
            codes, grid = F.pad(codes, self.more_codes), F.pad(grid, self.more_scales)
        if self.size == 1:  # a transposed column may have any stride here
            codes = scaled_products.strided(codes.contiguous(), (self.width, 1))
        return self.native_codes(codes), self.scales.layout(grid)

    def _second(self, amax: Tensor) -> Tensor:
        return (amax * self.unit).view(())


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
        poison: Tensor | None,
        read: ReadOperand | None,
    ) -> Tensor:
        """The product, as `matmul` gives it."""
        left, right, fused = self.left, self.right, None
        if bias is not None and self.fuses_bias:
            fused, bias = F.pad(bias, (0, self.more_cols)) if self.more_cols else bias, None
        a_codes, a_scales = left.read(a, None)
        b_codes, b_scales = read or right.read(b, poison if right.takes_poison else None)
        out: Tensor = private_torch.scaled_mm(
            a_codes, b_codes, a_scales, left.scales.recipes, left.scales.swizzle,
            b_scales, right.scales.recipes, right.scales.swizzle, fused, self.sums, (), self.fast,
        )  # fmt: skip
        if self.is_padded:
            out = out[: self.rows, : self.cols]
        if bias is not None:
            out = (out + bias.float()).to(self.out_dtype)
        return out if poison is None or right.takes_poison else out + poison.to(self.out_dtype)


@lru_cache(maxsize=1024)
def product_plan(
    left: Format,
    left_shard: Shard,
    left_as_stored: bool,
    right: Format,
    right_shard: Shard,
    right_as_stored: bool,
    capability: Capability | None,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    fast: bool,
) -> ProductPlan | str:
    """How two operands are multiplied by the hardware, or why they are not, and the product is emulated.

    `left_as_stored`, `right_as_stored`: the summed dim of what is stored is the last one, else the first.
    """
    a, b = OperandSpec.of(left, left_shard, left_as_stored), OperandSpec.of(right, right_shard, right_as_stored)
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
    poison: Tensor | None,
    precision: torch.dtype,
) -> Tensor:
    lasts = all(x.dtype is torch.bfloat16 for x in (a, b) if isinstance(x, Tensor))  # else float32 would be rounded
    kind = a.device.type
    on_gpu = kind == "cuda" or (kind == "meta" and scaled_products.META_CAPABILITY is not None)
    halves = on_gpu and precision.itemsize == 2 and lasts
    dtype = torch.bfloat16 if halves else torch.float32
    if poison is not None and isinstance(a, Tensor) and isinstance(b, Tensor):
        a = a + poison.to(a.dtype)
    # where codes are read it is taken in by the way
    of_a, of_b = (poison, None) if isinstance(a, QuantizedStorage) else (None, poison)
    left = _values(a, Copy.COLUMNWISE if transpose_a else Copy.ROWWISE, dtype, of_a)
    right = _values(b, Copy.ROWWISE if transpose_b else Copy.COLUMNWISE, dtype, of_b)
    left, right = left.t() if transpose_a else left, right.t() if transpose_b else right
    # `torch.mm` rounds its sums to bf16 itself; where more follows it is asked for them, which works on GPUs alone
    sums = dtype if bias is None and out_dtype is dtype else torch.float32
    with _without_autocast(a.device.type):
        out = torch.mm(left, right) if sums is dtype else torch.mm(left, right, out_dtype=sums)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turn `torch.autocast` off where it is on: it would round operands and sums. The meta device has none."""
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _values(operand: Operand, wanted: Copy, dtype: torch.dtype, poison: Tensor | None = None) -> Tensor:
    if isinstance(operand, Tensor):
        return operand.to(dtype)
    which = wanted if wanted in operand.cell.format.copies else Copy.ROWWISE
    return operand.dequantize(which, dtype, poison)


# Many experts at once ------------------------------------------------------------------------------------------------

LARGEST_GROUPED: Final = 1 << 35
"""If the fprop of an expert, in the mean over experts, has more multiplications than this, experts go one by one:
PyTorch's FP8 products then save more time (1200 TFLOP/s in place of 350) than it takes to launch them, which on an H200
and its host is more than a millisecond an expert and step (benchmarks/experts.py)."""


def block_together(recipe: Recipe) -> int | None:
    """Whether a recipe lets all experts be multiplied at once, told as the number of elements along the summed dim that
    are under one scale: 0 if each expert's input, weight and gradient has one scale. None: the recipe does not.

    A recipe that does has one format for a role, of 8 bits, rounded to nearest: all of a tensor under one scale, or
    squares of 32 or 128 of a weight and as many elements of a row of an activation or gradient.
    """
    cells = [{cell for (role, _), cell in recipe.table.items() if role is of} for of in TensorRole]
    if any(len(found) != 1 or not _is_plain(*found) for found in cells):
        return None
    weight, *others = ((*cell.format.copies[Copy.ROWWISE].block, bool(cell.scaling.history)) for (cell,) in cells)
    if {weight[:2], *(other[:2] for other in others)} == {(ALL, ALL)}:
        return 0
    block = weight[0]
    fits = block in (32, 128) and weight == (block, block, False) and set(others) == {(1, block, False)}
    return block if fits else None


def _is_plain(cell: Cell) -> bool:
    scaling, copies = cell.scaling, cell.format.copies
    nearest = not (scaling.stochastic_rounding or scaling.random_hadamard)
    return nearest and len(copies) == 1 and copies[Copy.ROWWISE].codes.encoding in (E4M3, E5M2)


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
    taken = ["emulated"] if gemm_path(cell, device)[0] == "emulated" else []
    if cell is not None and kernel_dispatch.lacks_kernels(device):
        taken.append("no kernels")
    if stored is None:
        return (*taken, "quantized each forward") if cell is not None else ()
    fmt = stored.cell.format
    if not fmt.transposable and Copy.COLUMNWISE not in fmt.copies:
        taken.append("turned")
    if stored.gathered and not stored.has(Copy.ROWWISE):
        taken.append("fetched")
    return tuple(taken)


def gemm_path(cell: Cell | None, device: torch.device) -> tuple[str, str]:
    """How a weight's GEMMs run on a device, and why: ("native" or "emulated", reason)."""
    if cell is None:
        return "native", "high precision"
    name = cell.format.copies[Copy.ROWWISE].codes.encoding.name
    capability = scaled_products.capability_of(device)
    if capability is None:
        where = "a CPU has" if device.type == "cpu" else f"{device.type}, where there is one: quantshard knows"
        return "emulated", f"{where} no {name} matrix product"
    here, products = scaled_products.dotted(capability), scaled_products.products_of(cell)
    for native in products:
        if native.is_on(device):
            seen = "" if native.seen else ", not yet run on this hardware"
            return "native", f"{name} matrix product of compute capability {here}{seen}"
    with_scales = f"{name} matrix product with the scales of {cell.format.name}"
    if not products:
        return "emulated", f"PyTorch has no {with_scales}"
    needs = ", ".join(native.needs for native in products)
    return "emulated", f"compute capability {here} has no {with_scales} (such products: {needs})"
