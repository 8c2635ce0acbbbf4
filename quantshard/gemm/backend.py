"""The one place that asks "native or emulated?": matrix products of quantized operands, and which hardware has them.

A native product multiplies codes and applies scales as it sums, by PyTorch's scaled matrix products. What no hardware
here has is emulated, and says so: both operands are dequantized and multiplied in high precision. `gemm_path` gives the
reason, `explain` prints it.

A scaled product takes both operands by rows, with the summed dim last, and sizes that are multiples of 16. Operands are
brought into that form here: transposed, where one copy serves both directions, and padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernel_dispatch
from quantshard.formats import ALL, E2M1, E4M3, E5M2, E8M0, FP32, Copy, Format, QuantizedCopy
from quantshard.gemm.operands import Operand
from quantshard.recipe import Cell, Recipe, TensorRole
from quantshard.sharding import ceil_div
from quantshard.tensor.storage import QuantizedStorage

Capability = tuple[int, int]
NEVER: Capability = (99, 0)
Kind = tuple[str, str, int, int]
"""What one side of a scaled product is: the encodings of its codes and of its scales, and the rows and elements of a
row under one scale."""


class ScaleLayout(NamedTuple):
    """How PyTorch names a kind of scales, and how it wants them laid out, from a grid [rows, blocks of a row]."""

    recipes: tuple[F.ScalingType, ...]
    layout: Callable[[Tensor], Tensor]
    swizzle: tuple[F.SwizzleType, ...] = ()


@dataclass(frozen=True)
class ScaledProduct:
    """A scaled product: how scales of the left and right operand are given to it, and the GPUs that have it.

    `since`, `before`: compute capabilities. `seen`: the GPU that it was seen working on, or None. `rows`: what the rows
    of the left operand are a multiple of. `fast`: it can sum in the tensor cores alone; see `recipe.MMParams`.
    """

    left: ScaleLayout
    right: ScaleLayout
    since: Capability
    before: Capability = NEVER
    seen: str | None = None
    rows: int = 1
    fast: bool = False

    def is_on(self, device: torch.device) -> bool:
        """Whether the device has it."""
        capability = _capability(device)
        return capability is not None and self.is_of(capability)

    def is_of(self, capability: Capability) -> bool:
        """Whether devices of a compute capability have it."""
        return self.since <= capability < self.before

    @property
    def needs(self) -> str:
        """The compute capabilities that have it, in words."""
        return _dotted(self.since) + (f" up to {_dotted(self.before)}" if self.before < NEVER else " and newer")


@cache
def _capability(device: torch.device) -> Capability | None:
    """The compute capability of an NVIDIA GPU; None of any other device, and of a GPU that this machine lacks."""
    has_one = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None  # AMD's are "cuda" too
    return torch.cuda.get_device_capability(device) if has_one else None


# Layouts of scales ---------------------------------------------------------------------------------------------------


def _scalar(grid: Tensor) -> Tensor:
    return grid.view(())


def _strided(grid: Tensor, strides: tuple[int, int]) -> Tensor:
    """A grid whose entries lie in memory as these strides say, with these very strides: `contiguous` leaves a dim of
    one entry any stride, and PyTorch's scaled products check that one too."""
    return grid if grid.stride() == strides else grid.as_strided(grid.shape, strides)


def _row(grid: Tensor) -> Tensor:
    """Scales of the left operand's rows, [rows, 1]: strides (1, 1)."""
    return _strided(grid.contiguous(), (1, 1))


def _row_right(grid: Tensor) -> Tensor:
    """Scales of the right operand's rows, [1, rows]: strides (rows, 1)."""
    return _strided(grid.contiguous().t(), (grid.shape[0], 1))


def by_columns(grid: Tensor) -> Tensor:
    """Strides (1, rows): the scales of one block of all rows lie together, as kernels store them (`producers`)."""
    return _strided(grid.t().contiguous().t(), (1, grid.shape[0]))


def by_four(grid: Tensor) -> Tensor:
    """Scales of square blocks, transposed: strides (1, n), n the blocks of a row, filled up to a multiple of 4."""
    more = -grid.shape[1] % 4
    padded = F.pad(grid, (0, more)) if more else grid
    return _strided(padded.contiguous().t(), (1, padded.shape[1]))


def swizzled(grid: Tensor) -> Tensor:
    """Bytes [R, C] -> tiles of 128 x 4, in each of which rows i, i + 32, i + 64 and i + 96 lie together, flat.

    The layout of block scales that tensor cores of compute capability 10 read (cuBLAS, "1D block scaling factors
    layout").
    """
    rows, cols = (ceil_div(size, unit) for size, unit in zip(grid.shape, (128, 4), strict=True))
    padded = F.pad(grid, (0, 4 * cols - grid.shape[1], 0, 128 * rows - grid.shape[0]))  # of any strides
    return padded.reshape(rows, 4, 32, cols, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def _e8m0(grid: Tensor) -> Tensor:
    return swizzled(grid).view(torch.float8_e8m0fnu)


def _e4m3(grid: Tensor) -> Tensor:
    return swizzled(grid).view(torch.float8_e4m3fn)


_TYPES, _SWIZZLE = F.ScalingType, F.SwizzleType
_WHOLE = ScaleLayout((_TYPES.TensorWise,), _scalar)
_ROW = ScaleLayout((_TYPES.RowWise,), _row)
_ROW_RIGHT = ScaleLayout((_TYPES.RowWise,), _row_right)
_VECTOR = ScaleLayout((_TYPES.BlockWise1x128,), by_columns)
_SQUARE = ScaleLayout((_TYPES.BlockWise128x128,), by_four)
_MX = ScaleLayout((_TYPES.BlockWise1x32,), _e8m0, (_SWIZZLE.SWIZZLE_32_4_4,))
_NV = ScaleLayout((_TYPES.BlockWise1x16, _TYPES.TensorWise), _e4m3, (_SWIZZLE.SWIZZLE_32_4_4, _SWIZZLE.NO_SWIZZLE))

_FP8, _FP8_WIDE = (E4M3.name, FP32.name, ALL, ALL), (E5M2.name, FP32.name, ALL, ALL)
_1XROW, _1X128, _128X128 = ((E4M3.name, FP32.name, *block) for block in ((1, ALL), (1, 128), (128, 128)))
_MXFP8, _NVFP4 = (E4M3.name, E8M0.name, 1, 32), (E2M1.name, E4M3.name, 1, 16)
_PER_TENSOR = ScaledProduct(_WHOLE, _WHOLE, (8, 9), seen="H200", fast=True)

# cuBLAS multiplies no E5M2 by E5M2. After Hopper TransformerEngine emulates blocks of 1x128 and 128x128 by MXFP8 (it
# pads scales of 1x128 to 4 rows, as `rows` does here), and it has MXFP8 in all directions on 10.x alone.
NATIVE: Final[dict[tuple[Kind, Kind], ScaledProduct]] = {
    (_FP8, _FP8): _PER_TENSOR,
    (_FP8_WIDE, _FP8): _PER_TENSOR,
    (_FP8, _FP8_WIDE): _PER_TENSOR,
    (_1XROW, _1XROW): ScaledProduct(_ROW, _ROW_RIGHT, (9, 0), (10, 0), seen="H200", fast=True),
    (_1X128, _128X128): ScaledProduct(_VECTOR, _SQUARE, (9, 0), (10, 0), seen="H200", rows=4),
    (_1X128, _1X128): ScaledProduct(_VECTOR, _VECTOR, (9, 0), (10, 0), seen="H200", rows=4),
    (_MXFP8, _MXFP8): ScaledProduct(_MX, _MX, (10, 0), (11, 0)),
    (_NVFP4, _NVFP4): ScaledProduct(_NV, _NV, (10, 0), (11, 0)),
}
"""Hardware support: the scaled products that there are, by the kinds of the left and the right operand."""


# Products ------------------------------------------------------------------------------------------------------------


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
) -> Tensor:
    """op(a) @ op(b) + bias, accumulated in float32 and rounded once to `out_dtype`.

    A quantized operand is read from the copy that was quantized along the summed dim, where its format keeps two.

    Args:
        poison: float32 scalar, 0 or NaN, that is added to every element of the result.
        precision: the dtype of the layer, if it is not `out_dtype`. On a GPU, what is emulated for layers of 16 bits
            reads operands rounded to bfloat16, which MXFP8 is exactly.
        fast: sums need not be in float32; see `recipe.MMParams`. For a float32 result they are.
    """
    native = _native(_side(a, not transpose_a), _side(b, transpose_b))
    if native is None:
        out = _emulated(a, b, out_dtype, transpose_a, transpose_b, bias, precision or out_dtype)
        return out if poison is None else out + poison.to(out_dtype)
    assert isinstance(a, QuantizedStorage) and isinstance(b, QuantizedStorage)
    fast = fast and native.fast and out_dtype.itemsize == 2
    return _scaled(native, _rows(a, not transpose_a), _rows(b, transpose_b), out_dtype, bias, poison, fast)


class OperandSpec(NamedTuple):
    """What is known of an operand of a product before it is read: its copy, and shape, blocks and origin with the
    summed dim last."""

    copy: QuantizedCopy
    shape: tuple[int, int]
    block: tuple[int, int]
    origin: tuple[int, int]
    device: torch.device

    @property
    def kind(self) -> Kind:
        """By which `NATIVE` finds this operand."""
        return _kind(self.copy, self.block)

    @property
    def aligned(self) -> bool:
        """True if blocks are whole but for the last of a dim."""
        return all(cover == ALL or at % cover == 0 for at, cover in zip(self.origin, self.block, strict=True))


def _side(operand: Operand, as_stored: bool) -> OperandSpec | None:
    """Describe an operand whose summed dim is its last (`as_stored`) or its first; None if no codes can be read so."""
    if isinstance(operand, Tensor):
        return None
    wanted, fmt, shard = Copy.ROWWISE if as_stored else Copy.COLUMNWISE, operand.cell.format, operand.shard
    if wanted not in fmt.copies and not (as_stored or fmt.transposable):
        return None
    copy = fmt.copies[wanted if wanted in fmt.copies else Copy.ROWWISE]
    if as_stored:
        return OperandSpec(copy, shard.shape, copy.block, shard.origin, operand.device)
    return OperandSpec(copy, shard.shape[::-1], copy.block[::-1], shard.origin[::-1], operand.device)


class ScaledOperand(NamedTuple):
    """A quantized operand of a scaled product, before layout: codes uint8 [rows, bytes], the summed dim last.

    `grid`: its scales. `amax`: of the whole tensor, where the format has a second scale. `shape`: in elements. `block`:
    that of its scales here.
    """

    codes: Tensor
    grid: Tensor
    amax: Tensor | None
    copy: QuantizedCopy
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def kind(self) -> Kind:
        """By which `NATIVE` finds this operand."""
        return _kind(self.copy, self.block)

    def expanded(self) -> ScaledOperand:
        """This operand with its scales repeated, so that every row has its own."""
        rows = self.block[0]  # perhaps ALL
        grid = self.grid.repeat_interleave(min(rows, self.shape[0]), 0)[: self.shape[0]]
        return self._replace(grid=grid, block=(1, self.block[1]))

    def padded(self, rows: int) -> ScaledOperand:
        """This operand with zeros appended, so that rows are a multiple of `rows`, and the bytes of a row one of 16."""
        bits = self.copy.codes.encoding.bits
        more_rows, more_cols = -self.shape[0] % rows, -self.shape[1] % (128 // bits)
        if more_rows == more_cols == 0:
            return self
        width = (self.shape[1] + more_cols) * bits // 8
        codes = F.pad(self.codes, (0, width - self.codes.shape[1], 0, more_rows))
        spans = (self.shape[0] + more_rows, self.shape[1] + more_cols)
        entries = [1 if cover == ALL else ceil_div(size, cover) for size, cover in zip(spans, self.block, strict=True)]
        grid = F.pad(self.grid, (0, entries[1] - self.grid.shape[1], 0, entries[0] - self.grid.shape[0]))
        return self._replace(codes=codes, grid=grid, shape=spans)


def _rows(operand: QuantizedStorage, as_stored: bool) -> ScaledOperand:
    """Read the codes and scales that `_side` describes."""
    wanted, fmt = Copy.ROWWISE if as_stored else Copy.COLUMNWISE, operand.cell.format
    storage = operand.with_copy(wanted) if wanted in fmt.copies else operand
    copy = fmt.copies[wanted if wanted in fmt.copies else Copy.ROWWISE]
    parts = storage.touched()
    amax = None if copy.amax is None else parts[copy.amax.name]
    found = ScaledOperand(parts[copy.codes.name], parts[copy.scale.name], amax, copy, storage.shard.shape, copy.block)
    return found if as_stored else _transposed(found)


def _transposed(rows: ScaledOperand) -> ScaledOperand:
    codes = kernel_dispatch.transpose_codes(rows.codes, rows.copy.codes.encoding, rows.shape[1])
    return rows._replace(codes=codes, grid=rows.grid.t(), shape=rows.shape[::-1], block=rows.block[::-1])


def _native(left: OperandSpec | None, right: OperandSpec | None) -> ScaledProduct | None:
    """The scaled product for two operands, if the hardware and their blocks allow one."""
    if left is None or right is None or 0 in (*left.shape, *right.shape) or not (left.aligned and right.aligned):
        return None
    found = _product(left.kind, right.kind)
    return found if found is not None and found.is_on(left.device) else None


def _kind(copy: QuantizedCopy, block: tuple[int, int]) -> Kind:
    return (copy.codes.encoding.name, copy.scale.encoding.name, *block)


def _product(left: Kind, right: Kind) -> ScaledProduct | None:
    """The scaled product of two kinds, or else that of blocks of one row, as which blocks of several can be read."""
    return NATIVE.get((left, right)) or NATIVE.get((_flat(left), _flat(right)))


def _flat(kind: Kind) -> Kind:
    return kind if ALL in kind else (*kind[:2], 1, kind[3])


def _scaled(
    native: ScaledProduct,
    left: ScaledOperand,
    right: ScaledOperand,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    poison: Tensor | None,
    fast: bool,
) -> Tensor:
    if (left.kind, right.kind) not in NATIVE:  # `_product` found them by blocks of one row
        left, right = left.expanded(), right.expanded()
    rows, cols = left.shape[0], right.shape[0]
    left, right = left.padded(native.rows), right.padded(16)  # PyTorch leaves the left operand's rows free
    # the only biases that PyTorch's product adds by itself; others are added to its float32 sums, and rounded with them
    fused = bias is not None and bias.dtype == out_dtype and out_dtype in (torch.bfloat16, torch.float16)
    if poison is not None and right.copy.scale.encoding is FP32:
        right, poison = right._replace(grid=right.grid + poison), None  # spares a pass over the result
    a, b = (_codes(side) for side in (left, right))
    out = F.scaled_mm(
        a, b.t(),
        _scales(left, native.left), list(native.left.recipes), _scales(right, native.right), list(native.right.recipes),
        list(native.left.swizzle) or None, list(native.right.swizzle) or None,
        bias=F.pad(bias, (0, len(right.codes) - cols)) if fused and bias is not None else None,
        output_dtype=torch.float32 if bias is not None and not fused else out_dtype, use_fast_accum=fast,
    )[:rows, :cols]  # fmt: skip
    if bias is not None and not fused:
        out = (out + bias.float()).to(out_dtype)
    return out if poison is None else out + poison.to(out_dtype)


def _codes(rows: ScaledOperand) -> Tensor:
    encoding, codes = rows.copy.codes.encoding, rows.codes
    if codes.shape[0] == 1:  # a transposed column may have any stride here
        codes = _strided(codes.contiguous(), (codes.shape[1], 1))
    return codes.view(torch.float4_e2m1fn_x2 if encoding.native is None else encoding.native)


def _scales(rows: ScaledOperand, kind: ScaleLayout) -> list[Tensor]:
    found = [kind.layout(rows.grid)]
    if rows.amax is not None:
        largest = rows.copy.codes.encoding.max * rows.copy.scale.encoding.max
        found.append((rows.amax * (1.0 / largest)).view(()))
    return found


def _emulated(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    transpose_a: bool,
    transpose_b: bool,
    bias: Tensor | None,
    precision: torch.dtype,
) -> Tensor:
    lasts = all(x.dtype is torch.bfloat16 for x in (a, b) if isinstance(x, Tensor))  # else float32 would be rounded
    halves = a.device.type == "cuda" and precision.itemsize == 2 and lasts
    dtype = torch.bfloat16 if halves else torch.float32
    left = _values(a, Copy.COLUMNWISE if transpose_a else Copy.ROWWISE, dtype)
    right = _values(b, Copy.ROWWISE if transpose_b else Copy.COLUMNWISE, dtype)
    left, right = left.t() if transpose_a else left, right.t() if transpose_b else right
    # `torch.mm` rounds its sums to bf16 itself; where more follows it is asked for them, which works on GPUs alone
    sums = dtype if bias is None and out_dtype is dtype else torch.float32
    with _without_autocast(a.device.type):
        out = torch.mm(left, right) if sums is dtype else torch.mm(left, right, out_dtype=sums)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turn `torch.autocast` off, which would round operands and sums; the meta device has none."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _values(operand: Operand, wanted: Copy, dtype: torch.dtype = torch.float32) -> Tensor:
    if isinstance(operand, Tensor):
        return operand.to(dtype)
    which = wanted if wanted in operand.cell.format.copies else Copy.ROWWISE
    return operand.dequantize(which, dtype)


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


def products_of(cell: Cell) -> list[ScaledProduct]:
    """The scaled products that a weight can be the right operand of, on any hardware."""
    kind = _stored(cell.format)
    found = [native for (_, right), native in NATIVE.items() if right in (kind, _flat(kind))]
    return list(dict.fromkeys(found))


def scaled_product(left: Format, right: Format) -> ScaledProduct | None:
    """The scaled product of operands that were quantized along their rows, on any hardware; None if there is none."""
    return _product(_stored(left), _stored(right))


def _stored(fmt: Format) -> Kind:
    copy = fmt.copies[Copy.ROWWISE]
    return _kind(copy, copy.block)


def gemm_path(cell: Cell | None, device: torch.device) -> tuple[str, str]:
    """How a weight's GEMMs run on a device, and why: ("native" or "emulated", reason)."""
    if cell is None:
        return "native", "high precision"
    name = cell.format.copies[Copy.ROWWISE].codes.encoding.name
    capability = _capability(device)
    if capability is None:
        where = "a CPU has" if device.type == "cpu" else f"{device.type}, where there is one: quantshard knows"
        return "emulated", f"{where} no {name} matrix product"
    products = products_of(cell)
    for native in products:
        if native.is_on(device):
            seen = "" if native.seen else ", not yet run on this hardware"
            return "native", f"{name} matrix product of compute capability {_dotted(capability)}{seen}"
    with_scales = f"{name} matrix product with the scales of {cell.format.name}"
    if not products:
        return "emulated", f"PyTorch has no {with_scales}"
    needs = ", ".join(native.needs for native in products)
    return "emulated", f"compute capability {_dotted(capability)} has no {with_scales} (such products: {needs})"


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
