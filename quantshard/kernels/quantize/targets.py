"""What kernels that quantize are asked for, the tiles that their programs work on, and where their results lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quantshard.formats import ALL, QuantizedCopy, Scaling
from quantshard.kernels import language as ql
from quantshard.numerics import RandomBits


class TileShape(NamedTuple):
    """Rows and columns that a program works on, and how they are held (see `ql.held`); a constant of a kernel."""

    rows: int
    cols: int
    together: int = 1

    @property
    def warps(self) -> int:
        """So many that a thread has 64 elements."""
        return max(4, self.rows * self.cols // 2048)


class KernelConfig(NamedTuple):
    """Constants of a kernel: the tile, its blocks (within it; `row_all`: they reach beyond), and what is done.

    `transposed`: the tile is held as its transpose [cols, rows]. `together`: see `ql.held`; of rows as they are held.
    `pairs`: amaxes are taken by `ql.line_amax`. `by_columns`: scales lie column by column.
    """

    rows: int
    cols: int
    block_rows: int
    block_cols: int
    row_all: bool
    col_all: bool
    rule: ql.ScaleRule
    together: int = 1
    transposed: bool = False
    hadamard: bool = False
    stochastic: bool = False
    by_four: bool = False
    short_index: bool = False
    draw_loaded: bool = False
    pairs: bool = False
    by_columns: bool = False


class OutputPointers(NamedTuple):
    """Arguments of a kernel: where its results lie; None for what is not asked for.

    `codes_cols`: stored, of a row. `given`: the multipliers, if they are not taken from the values. `grid_row` and
    `grid_col`: strides of these or of the scales. `second`: amax of the whole tensor.
    """

    codes: Any
    codes_cols: int
    scale: Any
    given: Any
    grid_row: int
    grid_col: int
    second: Any
    transposed: Any
    transposed_cols: int
    next_amax: Any


class Region(NamedTuple):
    """Arguments of a kernel: shape of the rectangle, its origin in the global matrix, and how many columns have values.

    The other columns are what the Hadamard transform pads.
    """

    rows: int
    cols: int
    value_cols: int
    row_origin: int
    col_origin: int


@dataclass(frozen=True)
class QuantizeRequest:
    """How a matrix [R, C] is quantized.

    With `scaling.random_hadamard` it is transformed first, and C is padded to a multiple of 16.

    `origin`: in the global matrix; a multiple of 2 along columns for packed codes, of 16 for the transform.
    `multipliers`: float32, the touched grid of `numerics.encode_scales`. Required where blocks are not wholly inside.
    `second_amax`: float32 scalar, of the whole tensor, for formats with two scales, if no multipliers are given.
    `words`: for stochastic rounding; those of the transformed and padded matrix.
    `transposed`: also give the codes of the transpose. Of square blocks, or of one scale for all, these are what
    quantizing the transpose gives.
    `by_columns`: scales that are made lie column by column, with strides (1, rows); see `producers.read_by_columns`.
    """

    copy: QuantizedCopy
    scaling: Scaling
    origin: tuple[int, int] = (0, 0)
    multipliers: Tensor | None = None
    second_amax: Tensor | None = None
    words: RandomBits | None = None
    transposed: bool = False
    by_columns: bool = False

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale within one tile."""
        rows, cols = self.copy.block
        return (1 if rows == ALL else rows, 1 if cols == ALL else cols)


class QuantizedOutput(NamedTuple):
    """One result of a kernel that quantizes, and what the kernel must be told of it.

    `codes`: uint8 [R, C], packed as stored. `scale`: of the blocks that they touch; None if multipliers were given.
    `transposed`: codes of the transpose, [C, R] and packed likewise, if asked for.
    """

    codes: Tensor
    scale: Tensor | None
    transposed: Tensor | None
    where: Region
    out: OutputPointers
    how: KernelConfig
    words: RandomBits

    @property
    def programs(self) -> tuple[int, int]:
        """Tiles along both dims."""
        return tiles(self.where, self.how)


def tiles(where: Region, how: KernelConfig) -> tuple[int, int]:
    """How many tiles of the global grid a rectangle touches along both dims."""
    return (
        touched(where.row_origin, where.rows, how.rows),
        touched(where.col_origin, where.cols, how.cols),
    )


def tile(request: QuantizeRequest, other: QuantizeRequest | None, dtype: torch.dtype) -> TileShape:
    """The tile of a program: whole blocks; rows that lie together in a transpose that is written are held together.

    `dtype`: of the values. Where both directions have scales, bfloat16 is faster (by 3 and 8 % on an H200) in tiles of
    twice the size, or of 4 bits with four bytes of the transpose together.
    """
    block_rows, block_cols = request.block
    if other is not None:
        block_rows, block_cols = max(block_rows, other.block[1]), max(block_cols, other.block[0])
    if not request.transposed and other is None:
        return TileShape(max(32, block_rows), max(128 if block_rows > 32 else 256, block_cols))
    if other is not None and other.scaling.random_hadamard:
        return TileShape(128, 128, 16)
    if other is not None and dtype is torch.bfloat16:
        return LARGE_BOTH_WAYS if request.copy.codes.encoding.bits == 8 else BOTH_WAYS._replace(together=8)
    return smallest_tile(TileShape(block_rows, block_cols))


BOTH_WAYS: Final = TileShape(128, 64, 4)
"""The smallest tile of a kernel that writes codes of the transpose too, and transforms nothing: it writes whole lines
of memory, and a thread holds four neighbouring rows, whose codes are four neighbouring bytes of the transpose."""
LARGE_BOTH_WAYS: Final = BOTH_WAYS._replace(cols=128)
"""The tile for blocks of 128 columns, and where a program is to have more work between two loads."""


def smallest_tile(blocks: TileShape) -> TileShape:
    """The smallest tile of whole blocks that is no smaller than `BOTH_WAYS`."""
    return TileShape(*map(max, blocks, BOTH_WAYS))


def target(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    request: QuantizeRequest,
    tile: TileShape,
    next_amax: Tensor | None = None,
    held_transposed: bool = False,
) -> QuantizedOutput:
    """Allocate what quantizing `shape` [R, C] of `dtype` gives; `held_transposed`: tiles are of its transpose."""
    copy, origin, words = request.copy, request.origin, request.words or NO_WORDS
    rows, cols = shape[0], shape[1] + (-shape[1] % 16 if request.scaling.random_hadamard else 0)
    packed = 8 // copy.codes.encoding.bits
    codes = torch.empty((rows, -(cols // -packed)), dtype=torch.uint8, device=device)
    transposed = (
        torch.empty((cols, -(rows // -packed)), dtype=torch.uint8, device=device) if request.transposed else None
    )
    given, scale = request.multipliers, None
    if given is None:
        assert ALL not in copy.block, "a block larger than a tile needs a multiplier"
        spans = [touched(o, n, covers) for o, n, covers in zip(origin, (rows, cols), copy.block, strict=True)]
        scale = torch.empty(spans[:: -1 if request.by_columns else 1], dtype=copy.scale.encoding.storage, device=device)
        scale = scale.t() if request.by_columns else scale
    grid = scale if given is None else given
    assert grid is not None
    out = OutputPointers(
        codes, codes.shape[1], scale, given, grid.stride(0), grid.stride(1), request.second_amax,
        transposed, 0 if transposed is None else transposed.shape[1],
        None if next_amax is None else next_amax.view(torch.int32),
    )  # fmt: skip
    how = kernel_config(
        copy, request.scaling, dtype, device, tile, held_transposed, request.words is not None,
        words.global_shape[1] % 4 == 0, words.global_shape[0] * words.global_shape[1] < 1 << 32,
        isinstance(words.draw, Tensor), request.by_columns,
    )  # fmt: skip
    return QuantizedOutput(codes, scale, transposed, Region(rows, cols, shape[1], *origin), out, how, words)


@lru_cache
def kernel_config(
    copy: QuantizedCopy,
    scaling: Scaling,
    dtype: torch.dtype,
    device: torch.device,
    tile: TileShape,
    transposed: bool,
    stochastic: bool,
    by_four: bool,
    short_index: bool,
    draw_loaded: bool,
    by_columns: bool,
) -> KernelConfig:
    """Constants of a kernel that quantizes tiles, or their transposes."""
    rule = ql.scale_rule(copy, scaling, dtype, device)
    return tiling(copy.block, (tile.cols, tile.rows) if transposed else (tile.rows, tile.cols), rule)._replace(
        together=tile.together,
        transposed=transposed,
        hadamard=scaling.random_hadamard,
        stochastic=stochastic,
        by_four=by_four and (not transposed or tile.together % 4 == 0),
        short_index=short_index,
        draw_loaded=draw_loaded,
        pairs=dtype is torch.bfloat16 and 1 in copy.block and not scaling.random_hadamard and ql.takes_pairs(device),
        by_columns=by_columns,
    )


def tiling(block: tuple[int, int], tile: tuple[int, int], rule: ql.ScaleRule) -> KernelConfig:
    """A tile and the blocks in it."""
    inside = (min(block[0], tile[0]), min(block[1], tile[1]))
    return KernelConfig(*tile, *inside, block[0] == ALL, block[1] == ALL, rule)


def halves(key: int) -> tuple[int, int]:
    """The low and the high half of a 64-bit key."""
    return key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF


def touched(origin: int, size: int, covers: int) -> int:
    """How many entries of one dim of the grid the elements [origin, origin + size) touch."""
    if covers == ALL:
        return 1
    return -((origin + size) // -covers) - origin // covers if size else 0


WARPS = 8
NO_WORDS: Final = RandomBits(0, 0, 0, (1, 1))


def quantize_launch_options(shared: TileShape, both: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of a launch; `both`: directions have scales of their own.

    Large tiles of bfloat16 then do best by four warps in three programs beside each other (measured on an H200).
    """
    if both and dtype is torch.bfloat16 and shared == LARGE_BOTH_WAYS:
        return {"num_warps": 4, "maxnreg": registers(4, 3), "enable_fp_fusion": False}
    return {"num_warps": shared.warps, "enable_fp_fusion": False}


def registers(warps: int, beside: int) -> int:
    """Registers that each thread may have if so many programs are to run beside each other on a multiprocessor of an
    NVIDIA GPU, which has 65536."""
    return 65536 // (beside * 32 * warps) // 8 * 8


def programs(one: QuantizedOutput, two: QuantizedOutput | None) -> tuple[int, int]:
    """Tiles along both dims of a matrix of which `two` quantizes the transpose: either may pad."""
    if two is None:
        return one.programs
    return max(one.programs[0], two.programs[1]), max(one.programs[1], two.programs[0])
