"""Requests to the kernels that quantize, the tiles of their programs, and the layout of their results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import TensorWrapper

from quantshard.formats import ALL, OrientedCodes, Scaling
from quantshard.kernels import language as ql, scale_rule as sr
from quantshard.numerics import Pair, RandomBits


class TileShape(NamedTuple):
    """The tile that a program works on; a constant of a kernel. `together`: its row order, see `ql.row_order`."""

    rows: int
    cols: int
    together: int = 1

    @property
    def warps(self) -> int:
        return max(4, self.rows * self.cols // 2048)


Given = Literal["", "multipliers", "amaxes"]
"""Values that the caller passes for each block: none, multipliers, or amaxes."""


class KernelConfig(NamedTuple):
    """Constants of a kernel: the tile, the blocks within it, and the work to do; see `Rounding` and `QuantizeSpec`.

    `row_all`, `col_all`: blocks span the whole dim, beyond the tile. `together`: order of the rows in registers, see
    `ql.row_order`. `transposed`: registers hold the tile as its transpose [cols, rows]. `pairs`: block amaxes come from
    `ql.line_amax`. `swizzled`: scales are stored as by `numerics.swizzled`.
    """

    rows: int
    cols: int
    block_rows: int
    block_cols: int
    row_all: bool
    col_all: bool
    rule: sr.ScaleRule
    together: int = 1
    transposed: bool = False
    hadamard: bool = False
    stochastic: bool = False
    by_four: bool = False
    short_index: bool = False
    draw_loaded: bool = False
    words_transposed: bool = False
    words_shared: bool = False
    pairs: bool = False
    by_columns: bool = False
    swizzled: bool = False
    nan_from_amax: bool = False
    merges_scale: bool = False
    decoded: bool = False


class Region(NamedTuple):
    """A rectangle of the global matrix: shape, origin, and the columns with values, before Hadamard padding."""

    rows: int
    cols: int
    value_cols: int
    row_origin: int
    col_origin: int


class QuantizeSpec(NamedTuple):
    """How matrices [R, C] are quantized: the part that all calls share.

    With `scaling.random_hadamard` rows are transformed first, and C is padded to a multiple of 16.

    `origin`: position in the global matrix; the column is a multiple of 2 for packed codes and of 16 for the transform.
    `transposed`: also return the codes of the transpose, for square blocks or one scale for the whole matrix.
    `by_columns`: new scales are stored column by column, with strides (1, rows); see `gemm.producers.read_by_columns`.
    `given`: multipliers if blocks cross the edge of the rectangle; multipliers or amaxes if blocks exceed a tile.
    `nan_from_amax`: the scale of the whole matrix, or its second scale, is NaN if the caller's amax is not finite.
    `merges_scale`: other kernels can write NaN to the only scale, so it is stored by `tl.atomic_max` of its bits.
    `decoded`: return the dequantized values in the input's dtype, instead of codes and scales; excludes `transposed`.
    `ready`: return what PyTorch's scaled products take: codes and scales in PyTorch's dtypes, 8-bit scales flat and
    swizzled, and the second scale as well as its amax. Swizzled scales exclude `given`.
    """

    copy: OrientedCodes
    scaling: Scaling
    origin: Pair = (0, 0)
    transposed: bool = False
    by_columns: bool = False
    given: Given = ""
    nan_from_amax: bool = False
    merges_scale: bool = False
    decoded: bool = False
    ready: bool = False

    @property
    def swizzled(self) -> bool:
        return self.ready and self.copy.scale.encoding.bits == 8


class QuantizeRequest(NamedTuple):
    """How one matrix is quantized: the spec that all calls share, and the tensors of this call.

    `given`: float32 grid of touched blocks, see `spec.given`. `second_amax`: float32 scalar, the amax of the whole
    tensor, for formats with two scales, unless multipliers are given. `words`: random bits for the transformed and
    padded matrix. `scale`: zeroed memory for the scale, if `spec.merges_scale`. `nan_flag`: float32 scalar, 0 or NaN,
    that is added to the scales of blocks.
    """

    spec: QuantizeSpec
    given: Tensor | None = None
    second_amax: Tensor | None = None
    words: RandomBits | None = None
    scale: Tensor | None = None
    nan_flag: Tensor | None = None


class QuantizedOutput(NamedTuple):
    """One result of a kernel that quantizes, as the argument of the kernel; None for each part that was not requested.

    `codes`: uint8 [R, C], packed, with `codes_cols` bytes in a row; or values. `scale`: scales of the touched blocks,
    unless the caller passed multipliers. `given`: see `QuantizeRequest`. `grid_row`, `grid_col`: strides of that grid;
    for swizzled scales `grid_row` counts the tiles in a row. `second`: amax of the whole tensor. `second_scale`: its
    scale, if a product reads one. `transposed`: codes of the transpose, packed [C, R]. `next_amax`: float32 scalar,
    raised to the amax of the values. `nan_flag`: see `QuantizeRequest`.
    """

    codes: Any
    codes_cols: int
    scale: Any
    given: Any
    grid_row: int
    grid_col: int
    second: Any
    second_scale: Any
    transposed: Any
    transposed_cols: int
    next_amax: Any
    nan_flag: Any


class BlockAmaxes(NamedTuple):
    """The blocks of a matrix to measure; `hadamard`: measure its rows after `numerics.hadamard16`."""

    block_shape: Pair
    hadamard: bool = False


class AmaxRequest(NamedTuple):
    """Blocks to measure in a matrix (`rowwise`) and in its transpose (`columnwise`), and the grids to write."""

    rowwise: BlockAmaxes | None
    columnwise: BlockAmaxes | None
    grids: tuple[Tensor | None, Tensor | None]


class KernelOutputs(NamedTuple):
    """Everything that a kernel writes for one matrix of results [R, C], into tensors of the caller.

    `rowwise`, `columnwise`: quantization of the results and of their transpose; random words of both have one key and
    draw. `high`: the results themselves, with adjacent columns. `amax`: float32 scalar, raised to their amax; NaN wins.
    `nan_flag`: float32 scalar, not negative; NaN if any result is not finite. `sums`: [C], any float dtype: sum of the
    rounded results over rows, accumulated in float32. `measured`: amaxes of blocks; excludes quantization.
    """

    rowwise: QuantizeRequest | None = None
    columnwise: QuantizeRequest | None = None
    high: Tensor | None = None
    amax: Tensor | None = None
    nan_flag: Tensor | None = None
    sums: Tensor | None = None
    measured: AmaxRequest | None = None

    @property
    def specs(self) -> Specs:
        rowwise, columnwise = self.rowwise, self.columnwise
        return None if rowwise is None else rowwise.spec, None if columnwise is None else columnwise.spec


Specs = tuple[QuantizeSpec | None, QuantizeSpec | None]
Requests = tuple[QuantizeRequest | None, QuantizeRequest | None]
Targets = tuple[QuantizedOutput | None, QuantizedOutput | None]
"""Codes and scales of a matrix and of its transpose; None for what was not requested."""


class Rounding(NamedTuple):
    """Compile-time properties of random words; `words_transposed`: they are `RandomBits.transposed`.

    `by_four`: four neighbours share a call of the generator. `short_index`: element indices fit into 32 bits.
    `draw_loaded`: the draw is read from memory. `words_shared`: the other direction has drawn the words already.
    """

    by_four: bool = True
    short_index: bool = True
    draw_loaded: bool = False
    words_transposed: bool = False
    words_shared: bool = False


class QuantizeLayout(NamedTuple):
    """Shapes, dtypes and constants of the results of one spec for matrices of one shape.

    `codes`, `transposed`, `scale`: shapes; None if not requested. `coded`, `stored`: dtypes of codes and scales.
    `strides`: strides of the scales. `fills`: some swizzled scales belong to no block. `wraps`: Triton lacks one of the
    dtypes.
    """

    codes: Pair
    coded: torch.dtype
    transposed: Pair | None
    scale: tuple[int, ...] | None
    stored: torch.dtype
    strides: Pair
    fills: bool
    wraps: bool
    where: Region
    how: KernelConfig


class QuantizePlan(NamedTuple):
    """Launch parameters for matrices of one shape, without the tensors.

    `rowwise`, `columnwise`: layouts of the matrix and of its transpose. `where`: region that covers both.
    """

    rowwise: QuantizeLayout | None
    columnwise: QuantizeLayout | None
    where: Region
    programs: Pair
    constants: dict[str, Any]


MOST_PLANS: Final = 1024
"""Entries in each cache of plans: enough for 100 activation shapes with some 10 specs each."""


def finite(block: Pair) -> Pair:
    """Return a block with 1 for each dim that it spans, for the choice of a tile of whole blocks."""
    return 1 if block[0] == ALL else block[0], 1 if block[1] == ALL else block[1]


def whole_blocks(block: Pair | None, transposed_block: Pair | None) -> TileShape:
    """Return the smallest tile of whole blocks of a matrix and of its transpose."""
    (rows, cols), (other_cols, other_rows) = finite(block or (1, 1)), finite(transposed_block or (1, 1))
    return TileShape(max(rows, other_rows), max(cols, other_cols))


def one_way_tile(block: Pair) -> TileShape:
    """Choose the tile of a program that does not write the transpose."""
    rows, cols = finite(block)
    return TileShape(max(32, rows), max(128 if rows > 32 else 256, cols))


def tile(spec: QuantizeSpec, other: QuantizeSpec | None, dtype: torch.dtype) -> TileShape:
    """Choose the tile of a program: whole blocks, in a row order that suits the stores of the transpose.

    `dtype`: dtype of the values. If both directions have scales, other tiles are faster for bfloat16 on an H200: twice
    the size if no values are decoded (by 3 %), or four bytes of the transpose together for 4-bit codes (by 8 %).
    """
    if other is None and not spec.transposed:
        return one_way_tile(spec.copy.block)
    if other is not None and other.scaling.random_hadamard:
        return TileShape(128, 128, 16)
    narrow = spec.copy.codes.encoding.bits < 8
    if other is not None and dtype is torch.bfloat16 and (narrow or not spec.decoded):
        return BOTH_WAYS._replace(together=8) if narrow else LARGE_BOTH_WAYS
    return smallest_tile(whole_blocks(spec.copy.block, other and other.copy.block))


BOTH_WAYS: Final = TileShape(128, 64, 4)
"""The smallest tile of a kernel that also writes codes of the transpose, without a transform. Each store fills whole
lines of memory. A thread has four neighbouring rows: their codes are four neighbouring bytes of the transpose."""
LARGE_BOTH_WAYS: Final = BOTH_WAYS._replace(cols=128)
"""The tile for blocks of 128 columns, and for programs that need more work between two loads."""


def smallest_tile(blocks: TileShape) -> TileShape:
    return TileShape(*map(max, blocks, BOTH_WAYS))


@lru_cache(MOST_PLANS)
def plan_quantization(
    spec: QuantizeSpec, other: QuantizeSpec | None, shape: Pair, dtype: torch.dtype, device: torch.device,
    adjacent: bool = True, rounding: Rounding | None = None, other_rounding: Rounding | None = None,
) -> QuantizePlan:  # fmt: skip
    """Plan the launch for matrices of `shape` [R, C] and their transposes; `adjacent`: rows are contiguous."""
    shared_tile = tile(spec, other, dtype)
    if not adjacent and shared_tile.together < 16:  # neighbours in a column are read together already
        shared_tile = shared_tile._replace(together=1)
    rowwise = layout(spec, shape, dtype, device, shared_tile, rounding)
    columnwise = other and layout(other, shape[::-1], dtype, device, shared_tile, other_rounding, transposed=True)
    padded = shape[0] + padding(shape[0], other), shape[1] + padding(shape[1], spec)
    programs = touched(spec.origin, padded, shared_tile[:2])
    options = quantize_launch_options(shared_tile, rowwise.how, columnwise is not None, dtype)
    constants = {"H": rowwise.how, "T": columnwise and columnwise.how, **options}
    return QuantizePlan(rowwise, columnwise, rowwise.where, programs, constants)


def layout(
    spec: QuantizeSpec, shape: Pair, dtype: torch.dtype, device: torch.device, tile: TileShape,
    rounding: Rounding | None, transposed: bool = False,
) -> QuantizeLayout:  # fmt: skip
    """Lay out the results for matrices [R, C] = `shape`; `transposed`: registers hold the transposed tile."""
    copy, origin, hadamard = spec.copy, spec.origin, spec.scaling.random_hadamard
    rows, cols = shape[0], shape[1] + padding(shape[1], spec)
    packed = 1 if spec.decoded else 8 // copy.codes.encoding.bits
    down, across = touched(origin, (rows, cols), copy.block)
    by_columns, codes_dtype, scale_dtype = spec.by_columns and not spec.given, torch.uint8, copy.scale.encoding.storage
    scale: tuple[int, ...] = (down, across)
    strides = (1, down) if by_columns else (across, 1)
    if spec.decoded:
        codes_dtype = dtype
    elif spec.ready:
        codes_dtype, scale_dtype = copy.codes.encoding.gemm_dtype, copy.scale.encoding.gemm_dtype
        if spec.swizzled:
            scale, strides = (swizzled_size(down, across),), (-(across // -4), 0)
    words = rounding or Rounding()
    by_four = words.by_four and (transposed == words.words_transposed or tile.together % 4 == 0)
    config = tiling(
        copy.block,
        tile,
        sr.scale_rule(copy, spec.scaling, dtype, device),
        transposed,
        hadamard=hadamard,
        stochastic=rounding is not None,
        **words._replace(by_four=by_four)._asdict(),
        pairs=dtype is torch.bfloat16 and 1 in copy.block and not hadamard and ql.takes_pairs(device),
        by_columns=by_columns,
        swizzled=spec.swizzled,
        nan_from_amax=spec.nan_from_amax,
        merges_scale=spec.merges_scale,
        decoded=spec.decoded,
    )
    return QuantizeLayout(
        (rows, -(cols // -packed)), codes_dtype, (cols, -(rows // -packed)) if spec.transposed else None,
        None if spec.given == "multipliers" or spec.decoded else scale, scale_dtype, strides,
        spec.swizzled and scale != (down * across,), spec.ready and hides_from_kernels(copy),
        Region(rows, cols, shape[1], *origin), config,
    )  # fmt: skip


def swizzled_size(rows: int, cols: int) -> int:
    return (rows + -rows % 128) * (cols + -cols % 4)


class StoredBytes(TensorWrapper):  # type: ignore[misc]
    """A kernel argument for the bytes of a tensor, for dtypes that Triton does not support."""

    dtype = tl.uint8

    def __init__(self, base: Tensor) -> None:
        self.base = base

    data = property(lambda self: self.base.data)
    device = property(lambda self: self.base.device)
    shape = property(lambda self: self.base.shape)


_UNKNOWN = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def hides_from_kernels(copy: OrientedCodes) -> bool:
    return copy.codes.encoding.gemm_dtype in _UNKNOWN or copy.scale.encoding.gemm_dtype in _UNKNOWN


def as_known(x: Tensor | None) -> Any:
    """Wrap a tensor if Triton does not support its dtype."""
    return StoredBytes(x) if x is not None and x.dtype in _UNKNOWN else x


def base_of(x: Any) -> Any:
    return x.base if type(x) is StoredBytes else x


def padding(size: int, spec: QuantizeSpec | None) -> int:
    """Return how many columns the Hadamard transform adds to `size` columns."""
    return -size % 16 if spec is not None and spec.scaling.random_hadamard else 0


def tiling(block: Pair, tile: TileShape, rule: sr.ScaleRule, transposed: bool = False, **settings: Any) -> KernelConfig:
    """Return the constants of a kernel for a tile, or (`transposed`) for its transpose."""
    rows, cols = (tile.cols, tile.rows) if transposed else (tile.rows, tile.cols)
    all_rows, all_cols = (size == ALL for size in block)
    return KernelConfig(
        rows, cols, min(block[0], rows), min(block[1], cols), all_rows, all_cols, rule, tile.together, transposed,
        **settings,
    )  # fmt: skip


def tiles(where: Region, how: KernelConfig) -> Pair:
    return touched((where.row_origin, where.col_origin), where[:2], (how.rows, how.cols))


def touched(origin: Sequence[int], shape: Sequence[int], block: Sequence[int]) -> Pair:
    """Return how many blocks a rectangle touches along both dims."""
    rows, cols = (
        1 if cover == ALL else -((start + size) // -cover) - start // cover if size else 0
        for start, size, cover in zip(origin, shape, block, strict=True)
    )
    return rows, cols


WARPS = 8


def quantize_launch_options(shared: TileShape, how: KernelConfig, both: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Return warps and register limit, measured on an H200; `both`: each direction has its own scales.

    Large bfloat16 tiles run fastest with three programs at a time; one transformed direction, both decoded without
    random words, with two.
    """
    if both and dtype is torch.bfloat16 and shared == LARGE_BOTH_WAYS:
        return {"num_warps": 4, "maxnreg": registers(4, 3), "enable_fp_fusion": False}
    options = {"num_warps": shared.warps, "enable_fp_fusion": False}
    if both and shared.together == 16 and how.decoded and not how.stochastic:
        options["maxnreg"] = registers(shared.warps, 2)
    return options


def registers(warps: int, beside: int) -> int:
    """Return the registers per thread with which this many programs fit on a multiprocessor, which has 65536."""
    return 65536 // (beside * 32 * warps) // 8 * 8
