"""What kernels that quantize are asked for, the tiles that their programs work on, and where their results lie."""

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
from quantshard.kernels import workspace
from quantshard.numerics import Pair, RandomBits


class TileShape(NamedTuple):
    """Rows and columns that a program works on, and how they are held (see `ql.held`); a constant of a kernel."""

    rows: int
    cols: int
    together: int = 1

    @property
    def warps(self) -> int:
        """So many that a thread has 64 elements."""
        return max(4, self.rows * self.cols // 2048)


Given = Literal["", "multipliers", "amaxes"]
"""What is known of blocks before their values are read: nothing, what values are multiplied by, or their amaxes."""
Poison = Literal["", "amax", "apart", "given"]
"""What makes scales NaN: nothing; of a scale for the whole tensor, be it the second one, an amax that is given and not
finite, or others that write it too, by `tl.atomic_max` of its bits; or of others a scalar, 0 or NaN, that is added."""


class KernelConfig(NamedTuple):
    """Constants of a kernel: the tile, its blocks (within it; `row_all`: they reach beyond), and what is done.

    `transposed`: the tile is held as its transpose [cols, rows]. `together`: see `ql.held`; of rows as they are held.
    `words_transposed`: random words are `RandomBits.transposed`; `words_shared`: the other direction has drawn them.
    `pairs`: amaxes are taken by `ql.line_amax`. `by_columns`: scales lie column by column; `swizzled`: as
    `swizzling.swizzled` has them. `nan_flag`: see `Poison`. `decoded`: see `QuantizeSpec`.
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
    nan_flag: Poison = ""
    decoded: bool = False


class Region(NamedTuple):
    """Arguments of a kernel: shape of the rectangle, its origin in the global matrix, and how many columns have values.

    The other columns are what the Hadamard transform pads.
    """

    rows: int
    cols: int
    value_cols: int
    row_origin: int
    col_origin: int


class QuantizeSpec(NamedTuple):
    """How matrices [R, C] are quantized, as far as it is the same in each call.

    With `scaling.random_hadamard` they are transformed first, and C is padded to a multiple of 16.

    `origin`: in the global matrix; a multiple of 2 along columns for packed codes, of 16 for the transform.
    `transposed`: also give the codes of the transpose. Of square blocks, or of one scale for all, these are what
    quantizing the transpose gives.
    `by_columns`: scales that are made lie column by column, with strides (1, rows); see `producers.read_by_columns`.
    `given`: multipliers where blocks are not wholly inside, amaxes or these where a block is larger than a tile.
    `decoded`: give the values that the codes stand for, of the dtype of what is quantized, and no codes and scales.
    `ready`: codes and scales are as PyTorch's products take them: of its dtypes; scales of 8 bits, which then are not
    given, flat, as `swizzling.swizzled` has them; and the second scale itself beside its amax.
    """

    copy: OrientedCodes
    scaling: Scaling
    origin: Pair = (0, 0)
    transposed: bool = False
    by_columns: bool = False
    given: Given = ""
    nan_flag: Poison = ""
    decoded: bool = False
    ready: bool = False

    @property
    def swizzled(self) -> bool:
        """True if scales lie as `swizzling.swizzled` has them."""
        return self.ready and self.copy.scale.encoding.bits == 8

    @property
    def block(self) -> Pair:
        """Rows and columns that share a scale within one tile."""
        rows, cols = self.copy.block
        return (1 if rows == ALL else rows, 1 if cols == ALL else cols)


class QuantizeRequest(NamedTuple):
    """How one matrix is quantized: what is the same in each call, and the tensors of this one.

    `given`: float32, the touched grid of `numerics.encode_scales`, or of amaxes, as `spec.given` says.
    `second_amax`: float32 scalar, of the whole tensor, for formats with two scales, unless multipliers are given.
    `words`: for stochastic rounding; those of the transformed and padded matrix.
    `scale`: where the scale goes, which is zero, if others make it NaN. `nan_flag`: given as `spec.nan_flag` says.
    """

    spec: QuantizeSpec
    given: Tensor | None = None
    second_amax: Tensor | None = None
    words: RandomBits | None = None
    scale: Tensor | None = None
    nan_flag: Tensor | None = None


class QuantizedOutput(NamedTuple):
    """One result of a kernel that quantizes, and its arguments for it; None for what is not asked for.

    `codes`: uint8 [R, C], packed as stored, `codes_cols` in a row, or values. `scale`: of the blocks that they touch,
    unless multipliers are `given`. `grid_row` and `grid_col`: strides of either, or of swizzled scales the tiles of a
    row. `second`: amax of the whole tensor, and `second_scale` the scale that it makes, if a product is to read it.
    `transposed`: codes of the transpose, [C, R] and packed likewise. `next_amax`: float32 scalar, made the larger of
    itself and the amax of the values. `nan_flag`: of the request.
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
    """The blocks of a matrix that are measured; `hadamard`: of its rows after `numerics.hadamard16`."""

    block_shape: Pair
    hadamard: bool = False

    @property
    def finite(self) -> Pair:
        """Rows and columns of a block within one tile."""
        rows, cols = self.block_shape
        return 1 if rows == ALL else rows, 1 if cols == ALL else cols


class AmaxRequest(NamedTuple):
    """Whose amaxes are taken, of the blocks of a matrix and of its transpose, and where they go."""

    one: BlockAmaxes | None
    two: BlockAmaxes | None
    grids: tuple[Tensor | None, Tensor | None]


class KernelOutputs(NamedTuple):
    """What is asked for of one matrix of results [R, C]; the tensors are the caller's, and are written by the kernel.

    Args:
        request: how they are quantized.
        other: how their transpose is, with scales of its own. Words of both have one key and draw.
        high: the results themselves, [R, C] with adjacent columns, of the kernel's dtype.
        amax: float32 scalar, made the larger of itself and the amax of the results; NaN wins.
        poison: float32 scalar, not negative, made NaN if not all results are finite, else left as it is.
        sums: [C], any float dtype: the sum of the rounded results over rows, taken in float32.
        measured: amaxes of blocks, where nothing is quantized.
    """

    request: QuantizeRequest | None = None
    other: QuantizeRequest | None = None
    high: Tensor | None = None
    amax: Tensor | None = None
    nan_flag: Tensor | None = None
    sums: Tensor | None = None
    measured: AmaxRequest | None = None

    @property
    def specs(self) -> Specs:
        """How results and their transpose are quantized, as far as it is the same in each call."""
        return None if self.request is None else self.request.spec, None if self.other is None else self.other.spec


Specs = tuple[QuantizeSpec | None, QuantizeSpec | None]
Targets = tuple[QuantizedOutput | None, QuantizedOutput | None]
"""Codes and scales of a matrix and of its transpose, as far as asked for."""


class Rounding(NamedTuple):
    """Of random words, what a kernel is compiled for: whether four neighbours share a call of the generator, whether an
    index of them fits into 32 bits, whether their draw is read from memory, whether they are `RandomBits.transposed`,
    and whether they are so those of the other direction."""

    by_four: bool = True
    short_index: bool = True
    draw_loaded: bool = False
    words_transposed: bool = False
    words_shared: bool = False


class QuantizeLayout(NamedTuple):
    """What quantizing matrices of one shape by one spec makes: shapes of codes, of those of the transpose and of
    scales, where these are asked for, strides of the latter, whether some are of no block, and whether Triton lacks a
    dtype of theirs, and the kernel's constants."""

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

    def outputs(self, request: QuantizeRequest, device: torch.device, next_amax: Tensor | None) -> QuantizedOutput:
        """Allocate them."""
        given, scale, (grid_row, grid_col), transposed = request.given, request.scale, self.strides, None
        codes = torch.empty(self.codes, dtype=self.coded, device=device)
        if self.transposed is not None:
            transposed = torch.empty(self.transposed, dtype=self.coded, device=device)
        if request.spec.given == "multipliers" and given is not None:  # perhaps of a piece of a grid
            grid_row, grid_col = given.stride()
        elif self.scale is not None and scale is None:
            if 0 in self.codes:  # no kernel runs
                scale = torch.ones(self.scale, dtype=self.stored, device=device)
            elif self.scale == (1, 1) and self.stored is torch.float32:
                scale = workspace.zero(device, written=True)
            elif self.how.swizzled:
                scale = torch.empty(self.scale, dtype=self.stored, device=device)
                if self.fills:
                    scale.view(torch.uint8).zero_()  # E8M0 has no zero
            else:
                scale = torch.empty_strided(self.scale, self.strides, dtype=self.stored, device=device)
        second_scale = None
        if request.second_amax is not None and request.spec.ready:
            second_scale = workspace.zero(device, written=True)
        if self.wraps:
            codes, scale, transposed = as_known(codes), as_known(scale), as_known(transposed)
        return QuantizedOutput(
            codes, self.codes[1], scale, given, grid_row, grid_col, request.second_amax, second_scale, transposed,
            0 if self.transposed is None else self.transposed[1], next_amax, request.nan_flag,
        )  # fmt: skip


class QuantizePlan(NamedTuple):
    """What a launch that quantizes needs besides tensors, the same for all of one shape.

    `one`, `two`: of the matrix, and of its transpose. `where`: of both together. `constants`: keyword arguments of the
    launch.
    """

    one: QuantizeLayout | None
    two: QuantizeLayout | None
    where: Region
    programs: Pair
    constants: dict[str, Any]

    def outputs(
        self, one: QuantizeRequest | None, two: QuantizeRequest | None, device: torch.device, next_amax: Any = None
    ) -> tuple[QuantizedOutput | None, QuantizedOutput | None]:
        """Allocate the results of both."""
        return (
            None if one is None or self.one is None else self.one.outputs(one, device, next_amax),
            None if two is None or self.two is None else self.two.outputs(two, device, None),
        )


MOST_PLANS: Final = 1024
"""So many are kept of each kind: of a model with 100 shapes of activations, each under some 10 specs."""


def tiles(where: Region, how: KernelConfig) -> tuple[int, int]:
    """How many tiles of the global grid a rectangle touches along both dims."""
    return touched(where.row_origin, where.rows, how.rows), touched(where.col_origin, where.cols, how.cols)


def tile(spec: QuantizeSpec, other: QuantizeSpec | None, dtype: torch.dtype) -> TileShape:
    """The tile of a program: whole blocks; rows that lie together in a transpose that is written are held together.

    `dtype`: of the values. Where both directions have scales, bfloat16 is faster (by 3 and 8 % on an H200) in tiles of
    twice the size, where no values are decoded, or of 4 bits with four bytes of the transpose together.
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
"""The smallest tile of a kernel that writes codes of the transpose too, and transforms nothing: it writes whole lines
of memory, and a thread holds four neighbouring rows, whose codes are four neighbouring bytes of the transpose."""
LARGE_BOTH_WAYS: Final = BOTH_WAYS._replace(cols=128)
"""The tile for blocks of 128 columns, and where a program is to have more work between two loads."""


def smallest_tile(blocks: TileShape) -> TileShape:
    """The smallest tile of whole blocks that is no smaller than `BOTH_WAYS`."""
    return TileShape(*map(max, blocks, BOTH_WAYS))


@lru_cache(MOST_PLANS)
def plan_quantization(
    spec: QuantizeSpec, other: QuantizeSpec | None, shape: Pair, dtype: torch.dtype, device: torch.device,
    adjacent: bool = True, rounding: Rounding | None = None, other_rounding: Rounding | None = None,
) -> QuantizePlan:  # fmt: skip
    """For matrices of `shape` [R, C] and their transposes; `adjacent`: elements of a row lie together."""
    shared = tile(spec, other, dtype)
    if not adjacent and shared.together < 16:  # neighbours in a column are read together already
        shared = shared._replace(together=1)
    one = layout(spec, shape, dtype, device, shared, rounding)
    two = None
    programs = tiles(one.where, one.how)
    if other is not None:
        two = layout(other, shape[::-1], dtype, device, shared, other_rounding, transposed=True)
        down, across = tiles(two.where, two.how)
        programs = max(programs[0], across), max(programs[1], down)  # either may pad
    constants = {"H": one.how, "T": two and two.how, **quantize_launch_options(shared, one.how, two is not None, dtype)}
    return QuantizePlan(one, two, one.where, programs, constants)


def layout(
    spec: QuantizeSpec, shape: Pair, dtype: torch.dtype, device: torch.device, tile: TileShape,
    rounding: Rounding | None, transposed: bool = False,
) -> QuantizeLayout:  # fmt: skip
    """Of matrices of `shape` [R, C] and `dtype`; `transposed`: tiles are held as those of the transpose."""
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
    by_columns, coded, stored = spec.by_columns and not spec.given, torch.uint8, copy.scale.encoding.storage
    scale: tuple[int, ...] = (down, across)
    strides = (1, down) if by_columns else (across, 1)
    if spec.decoded:
        coded = dtype
    elif spec.ready:
        coded, stored = copy.codes.encoding.multiplied, copy.scale.encoding.multiplied
        if spec.swizzled:
            assert not spec.given, "swizzled scales are made here"
            scale, strides = (swizzled_size(down, across),), (-(across // -4), 0)
    drawn = rounding or Rounding()
    rule = sr.scale_rule(copy, spec.scaling, dtype, device)
    how = tiling(copy.block, (tile.cols, tile.rows) if transposed else (tile.rows, tile.cols), rule)._replace(
        together=tile.together,
        transposed=transposed,
        hadamard=hadamard,
        stochastic=rounding is not None,
        by_four=drawn.by_four and (transposed == drawn.words_transposed or tile.together % 4 == 0),
        short_index=drawn.short_index,
        draw_loaded=drawn.draw_loaded,
        words_transposed=drawn.words_transposed,
        words_shared=drawn.words_shared,
        pairs=dtype is torch.bfloat16 and 1 in copy.block and not hadamard and ql.takes_pairs(device),
        by_columns=by_columns,
        swizzled=spec.swizzled,
        nan_flag=spec.nan_flag,
        decoded=spec.decoded,
    )
    return QuantizeLayout(
        (rows, -(cols // -packed)), coded, (cols, -(rows // -packed)) if spec.transposed else None,
        None if spec.given == "multipliers" or spec.decoded else scale, stored, strides,
        spec.swizzled and scale != (down * across,), spec.ready and hides_from_kernels(copy),
        Region(rows, cols, shape[1], *origin), how,
    )  # fmt: skip


def swizzled_size(rows: int, cols: int) -> int:
    """How many entries a swizzled grid has."""
    return (rows + -rows % 128) * (cols + -cols % 4)


class StoredBytes(TensorWrapper):  # type: ignore[misc]
    """To a kernel, the bytes of a tensor whose dtype Triton does not know."""

    dtype = tl.uint8

    def __init__(self, base: Tensor) -> None:
        self.base = base

    data = property(lambda self: self.base.data)
    device = property(lambda self: self.base.device)
    shape = property(lambda self: self.base.shape)


_UNKNOWN = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def hides_from_kernels(copy: OrientedCodes) -> bool:
    """True if PyTorch's dtype of codes or scales is none that Triton knows."""
    return copy.codes.encoding.multiplied in _UNKNOWN or copy.scale.encoding.multiplied in _UNKNOWN


def as_known(x: Tensor | None) -> Any:
    """A tensor as kernels take it."""
    return StoredBytes(x) if x is not None and x.dtype in _UNKNOWN else x


def base_of(x: Any) -> Any:
    """Inverse of `as_known`."""
    return x.base if type(x) is StoredBytes else x


def padding(size: int, spec: QuantizeSpec | None) -> int:
    """How many columns the Hadamard transform adds to so many."""
    return -size % 16 if spec is not None and spec.scaling.random_hadamard else 0


def tiling(block: tuple[int, int], tile: tuple[int, int], rule: sr.ScaleRule) -> KernelConfig:
    """A tile and the blocks in it."""
    inside = (min(block[0], tile[0]), min(block[1], tile[1]))
    return KernelConfig(*tile, *inside, block[0] == ALL, block[1] == ALL, rule)


def touched(origin: int, size: int, block_shape: int) -> int:
    """How many entries of one dim of the grid the elements [origin, origin + size) touch."""
    if block_shape == ALL:
        return 1
    return -((origin + size) // -block_shape) - origin // block_shape if size else 0


WARPS = 8


def quantize_launch_options(shared: TileShape, how: KernelConfig, both: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of a launch; `both`: directions have scales of their own.

    Large tiles of bfloat16 then do best by four warps in three programs beside each other, and those of which one
    direction is transformed, and both are decoded without random words, by eight in two (measured on an H200).
    """
    if both and dtype is torch.bfloat16 and shared == LARGE_BOTH_WAYS:
        return {"num_warps": 4, "maxnreg": registers(4, 3), "enable_fp_fusion": False}
    options = {"num_warps": shared.warps, "enable_fp_fusion": False}
    if both and shared.together == 16 and how.decoded and not how.stochastic:
        options["maxnreg"] = registers(shared.warps, 2)
    return options


def registers(warps: int, beside: int) -> int:
    """Registers that each thread may have if so many programs are to run beside each other on a multiprocessor of an
    NVIDIA GPU, which has 65536."""
    return 65536 // (beside * 32 * warps) // 8 * 8
