"""Requests to the kernels that quantize, the tiles of their programs, and the layout of their results."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import TensorWrapper

from quantshard.formats import ALL, OrientedCodes, Scaling
from quantshard.kernels import language as ql
from quantshard.kernels import scale_rule as sr
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
    """Constants of a kernel: the tile, the blocks within it, and the work to do.

    `row_all`, `col_all`: blocks span the whole dim, beyond the tile. `together`: order of the rows in registers, see
    `ql.row_order`. `transposed`: registers hold the tile as its transpose [cols, rows]. `words_transposed`: random
    words are `RandomBits.transposed`. `words_shared`: the other direction has drawn the random words already. `pairs`:
    block amaxes come from `ql.line_amax`. `by_columns`: scales are stored column by column. `swizzled`: scales are
    stored as by `numerics.swizzled`. `nan_from_amax`, `merges_scale`, `decoded`: see `QuantizeSpec`.
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
    `transposed`: also return the codes of the transpose. For square blocks, or one scale for the whole matrix, these
    codes equal those from quantizing the transpose.
    `by_columns`: new scales are stored column by column, with strides (1, rows); see `gemm.producers.read_by_columns`.
    `given`: multipliers if blocks cross the edge of the rectangle; multipliers or amaxes if blocks exceed a tile.
    `nan_from_amax`: the scale of the whole matrix, or its second scale, is NaN if the caller's amax is not finite.
    `merges_scale`: other kernels can write NaN to the only scale, so it is stored by `tl.atomic_max` of its bits.
    `decoded`: return the dequantized values in the input's dtype, instead of codes and scales.
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

    @property
    def block(self) -> Pair:
        rows, cols = self.copy.block
        return (1 if rows == ALL else rows, 1 if cols == ALL else cols)


class QuantizeRequest(NamedTuple):
    """How one matrix is quantized: the spec that all calls share, and the tensors of this call.

    `given`: float32 grid of touched blocks, multipliers or amaxes; see `spec.given`.
    `second_amax`: float32 scalar, the amax of the whole tensor; for formats with two scales, unless multipliers are
    given.
    `words`: random bits for stochastic rounding, for the transformed and padded matrix.
    `scale`: zeroed memory for the scale, if `spec.merges_scale`. `nan_flag`: float32 scalar, 0 or NaN, that is added to
    the scales of blocks.
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

    @property
    def finite(self) -> Pair:
        """Rows and columns of a block within one tile."""
        rows, cols = self.block_shape
        return 1 if rows == ALL else rows, 1 if cols == ALL else cols


class AmaxRequest(NamedTuple):
    """Blocks to measure in a matrix (`rowwise`) and in its transpose (`columnwise`), and the grids to write."""

    rowwise: BlockAmaxes | None
    columnwise: BlockAmaxes | None
    grids: tuple[Tensor | None, Tensor | None]


class KernelOutputs(NamedTuple):
    """Everything that a kernel writes for one matrix of results [R, C], into tensors of the caller.

    Args:
        rowwise: quantization of the results.
        columnwise: quantization of their transpose, with scales of its own. Random words of both have one key and draw.
        high: memory for the results themselves, [R, C] with adjacent columns, in the kernel's dtype.
        amax: float32 scalar, raised to the amax of the results; NaN wins.
        nan_flag: float32 scalar, not negative; becomes NaN if any result is not finite, else unchanged.
        sums: [C], any float dtype: sum of the rounded results over rows, accumulated in float32.
        measured: amaxes of blocks; excludes quantization.
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
    """Compile-time properties of random words.

    `by_four`: four neighbours share a call of the generator. `short_index`: element indices fit into 32 bits.
    `draw_loaded`: the draw is read from memory. `words_transposed`: words are `RandomBits.transposed`. `words_shared`:
    the same, and equal to the words of the other direction.
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

    `rowwise`, `columnwise`: layouts of the matrix and of its transpose. `where`: region that covers both. `constants`:
    keyword arguments of the launch.
    """

    rowwise: QuantizeLayout | None
    columnwise: QuantizeLayout | None
    where: Region
    programs: Pair
    constants: dict[str, Any]


MOST_PLANS: Final = 1024
"""Entries in each cache of plans: enough for 100 activation shapes with some 10 specs each."""


def tiles(where: Region, how: KernelConfig) -> tuple[int, int]:
    return touched(where.row_origin, where.rows, how.rows), touched(where.col_origin, where.cols, how.cols)


def tile(spec: QuantizeSpec, other: QuantizeSpec | None, dtype: torch.dtype) -> TileShape:
    """Choose the tile of a program: whole blocks, in a row order that suits the stores of the transpose.

    `dtype`: dtype of the values. If both directions have scales, other tiles are faster for bfloat16 on an H200: twice
    the size if no values are decoded (by 3 %), or four bytes of the transpose together for 4-bit codes (by 8 %).
    """
    block_rows, block_cols = spec.block
    if other is not None:
        block_rows, block_cols = max(block_rows, other.block[1]), max(block_cols, other.block[0])
    if not spec.transposed and other is None:
        return TileShape(max(32, block_rows), max(128 if block_rows > 32 else 256, block_cols))
    if other is not None and other.scaling.random_hadamard:
        return TileShape(128, 128, 16)
    narrow = spec.copy.codes.encoding.bits < 8
    if other is not None and dtype is torch.bfloat16 and (narrow or not spec.decoded):
        return BOTH_WAYS._replace(together=8) if narrow else LARGE_BOTH_WAYS
    return smallest_tile(TileShape(block_rows, block_cols))


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
    columnwise = None
    programs = tiles(rowwise.where, rowwise.how)
    if other is not None:
        columnwise = layout(other, shape[::-1], dtype, device, shared_tile, other_rounding, transposed=True)
        down, across = tiles(columnwise.where, columnwise.how)
        programs = max(programs[0], across), max(programs[1], down)  # either may pad
    constants = {
        "H": rowwise.how,
        "T": columnwise and columnwise.how,
        **quantize_launch_options(shared_tile, rowwise.how, columnwise is not None, dtype),
    }
    return QuantizePlan(rowwise, columnwise, rowwise.where, programs, constants)


def layout(
    spec: QuantizeSpec, shape: Pair, dtype: torch.dtype, device: torch.device, tile: TileShape,
    rounding: Rounding | None, transposed: bool = False,
) -> QuantizeLayout:  # fmt: skip
    """Lay out the results for matrices [R, C] = `shape`; `transposed`: registers hold the transposed tile."""
    copy, origin, hadamard = spec.copy, spec.origin, spec.scaling.random_hadamard
    assert spec.given or ALL not in copy.block, "a block larger than a tile needs a multiplier or an amax"
    assert copy.amax is None or spec.given != "amaxes", "a multiplier under a second scale depends on that one too"
    assert not (spec.decoded and spec.transposed), "values are made one way"
    assert not (spec.decoded and spec.given == "multipliers"), "values are made of codes and scales"
    rows, cols = shape[0], shape[1] + padding(shape[1], spec)
    packed = 1 if spec.decoded else 8 // copy.codes.encoding.bits
    down, across = (
        touched(o, n, block_shape) for o, n, block_shape in zip(origin, (rows, cols), copy.block, strict=True)
    )
    by_columns, codes_dtype, scale_dtype = spec.by_columns and not spec.given, torch.uint8, copy.scale.encoding.storage
    scale: tuple[int, ...] = (down, across)
    strides = (1, down) if by_columns else (across, 1)
    if spec.decoded:
        codes_dtype = dtype
    elif spec.ready:
        codes_dtype, scale_dtype = copy.codes.encoding.gemm_dtype, copy.scale.encoding.gemm_dtype
        if spec.swizzled:
            assert not spec.given, "swizzled scales are made here"
            scale, strides = (swizzled_size(down, across),), (-(across // -4), 0)
    words = rounding or Rounding()
    by_four = words.by_four and (transposed == words.words_transposed or tile.together % 4 == 0)
    rule = sr.scale_rule(copy, spec.scaling, dtype, device)
    config = tiling(copy.block, (tile.cols, tile.rows) if transposed else (tile.rows, tile.cols), rule)._replace(
        together=tile.together,
        transposed=transposed,
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


def tiling(block: tuple[int, int], tile: tuple[int, int], rule: sr.ScaleRule) -> KernelConfig:
    inside = (min(block[0], tile[0]), min(block[1], tile[1]))
    return KernelConfig(*tile, *inside, block[0] == ALL, block[1] == ALL, rule)


def touched(origin: int, size: int, block_shape: int) -> int:
    if block_shape == ALL:
        return 1
    return -((origin + size) // -block_shape) - origin // block_shape if size else 0


WARPS = 8


def quantize_launch_options(shared: TileShape, how: KernelConfig, both: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Return the keyword arguments of a launch; `both`: each direction has its own scales. Measured on an H200.

    Large bfloat16 tiles run fastest with four warps, three programs at a time; one transformed direction, both decoded
    without random words, with eight warps, two programs.
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
