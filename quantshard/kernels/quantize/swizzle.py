"""Stored weights in the layout that tensor cores of compute capability 10 read: a swizzled block scale for every row.

A program works on a tile of 128 x 128 elements; the scales of a tile fill one or two swizzle tiles
(`numerics.swizzled`). If products sum along the other dim, the program also transposes the codes, of 8 or 4 bits. NaN
flags are merged into the scales in the same pass: into these scales, or into the second scale, and into the scales of
another operand of the same gradient.

`matrix.quantize_matrices` can process these tiles in the launch that quantizes the other operand.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quantshard.formats import OrientedCodes
from quantshard.kernels import language as ql, workspace
from quantshard.kernels.graph_launch import writes
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.targets import MOST_PLANS, as_known, swizzled_size
from quantshard.numerics import Pair
from quantshard.numerics.gemm_layouts import StoredMatrix, SwizzledMatrix

TILE = 128


class SwizzleConfig(NamedTuple):
    """Constants of a kernel for `parts` matrices. `turned`: transpose their codes, of `bits` bits.

    `high`, `wide`: rows and columns of the result that share a scale. `unit`: factor from the amax to the second scale.
    """

    parts: int
    turned: bool
    bits: int
    high: int
    wide: int
    unit: float
    tile: int = TILE


@triton.jit
def swizzled(i, j, tiles):
    """Return the offsets of rows i and columns j in `numerics.swizzled`, with `tiles` tiles in a row."""
    return (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4


@triton.jit
def swizzle_kernel(matrices, S: tl.constexpr):
    swizzle_tile(tl.program_id(0), matrices, S)


writes(swizzle_kernel, "matrices.*.2.2", "matrices.*.3.3", "matrices.*.4.1", "matrices.*.6")


@triton.jit
def swizzle_tile(at, matrices, S: tl.constexpr):
    """Lay out tile number `at`, counted over all matrices. Numbers beyond the last tile are ignored."""
    PARTS: tl.constexpr = S.parts
    for part in tl.static_range(PARTS):
        across = (matrices[part][1] + S.tile - 1) // S.tile
        count = (matrices[part][0] + S.tile - 1) // S.tile * across
        if (at >= 0) & (at < count):
            _swizzle(matrices[part], at // across, at % across, S)
        at -= count


@triton.jit
def _swizzle(matrix, row, col, S: tl.constexpr):
    rows, cols, codes, scales, second, nan_flag_ptr, other_ptr, other_tiles = matrix
    scale_ptr, scale_row, scale_col, swizzled_ptr = scales
    if S.turned:
        _transpose(codes, row, col, rows, cols, S.bits, S.tile)
        down, across, result_rows, result_cols = col, row, cols, rows
    else:
        down, across, result_rows, result_cols = row, col, rows, cols
    is_nan = tl.load(ql.as_bits(nan_flag_ptr)) != 0 if nan_flag_ptr is not None else False  # NaN, else 0
    blocks = (result_cols + S.wide - 1) // S.wide
    tiles = (blocks + 3) // 4
    i = down * S.tile + tl.arange(0, S.tile)
    j = across * (S.tile // S.wide) + tl.arange(0, S.tile // S.wide)
    inside = (i < result_rows)[:, None] & (j < blocks)[None, :]
    scale = tl.load(scale_ptr + (i // S.high)[:, None] * scale_row + j[None, :] * scale_col, mask=inside, other=0)
    if second is None and nan_flag_ptr is not None:
        scale = tl.where(inside & is_nan, 0xFF, scale).to(tl.uint8)
    swizzled_ptr = swizzled_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(swizzled_ptr + swizzled(i[:, None], j[None, :], tiles), scale, mask=(j < 4 * tiles)[None, :])
    if second is not None:
        second_scale = tl.load(second[0]) * S.unit
        tl.store(second[1], tl.where(is_nan, float("nan"), second_scale), mask=(row == 0) & (col == 0))
    if other_ptr is not None:  # NaN in the first block of each row is enough
        offsets = (row * other_tiles).to(tl.int64) * 512 + 4 * tl.arange(0, S.tile)
        first = ql.mask_where(is_nan & (col == 0), tl.full((S.tile,), True, tl.int1))
        tl.store(other_ptr + offsets, tl.full((S.tile,), 0xFF, tl.uint8), mask=first)


@triton.jit
def _transpose(codes, row, col, rows, cols, BITS: tl.constexpr, TILE: tl.constexpr):
    x_ptr, x_stride, out_ptr = codes
    PACKED: tl.constexpr = 8 // BITS
    WIDE: tl.constexpr = TILE // PACKED
    i, j = row * TILE + tl.arange(0, TILE), col * WIDE + tl.arange(0, WIDE)
    valued = (i < rows)[:, None] & (j < (cols + PACKED - 1) // PACKED)[None, :]
    x = tl.load(x_ptr + i.to(tl.int64)[:, None] * x_stride + j[None, :], mask=valued, other=0)
    if BITS == 4:
        x = ql.pack(tl.trans(ql.unpack(x, TILE, TILE)).to(tl.uint32) << 28, TILE, TILE)
    else:
        x = tl.trans(x)
    width = (rows + PACKED - 1) // PACKED
    i, j = col * TILE + tl.arange(0, TILE), row * WIDE + tl.arange(0, WIDE)
    out_ptr = out_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    offsets = i.to(tl.int64)[:, None] * width + j[None, :]
    tl.store(out_ptr + offsets, x, mask=(i < cols)[:, None] & (j < width)[None, :])


class SwizzleRequest:
    """Several matrices on one device to lay out: in another launch, which sets `launched`, or by `finish`."""

    def __init__(self, copy: OrientedCodes, matrices: Sequence[StoredMatrix], turned: bool) -> None:
        self.device, self.launched, self.tiles = matrices[0][1].device, False, 0
        self.results: list[SwizzledMatrix] = []
        arguments = []
        for shape, codes, scales, amax, nan_flag, other_scales in matrices:
            size, transposed, tiles = _plan(copy, shape, turned)
            transposed_codes = None
            if turned:
                transposed_codes = torch.empty(transposed, dtype=copy.codes.encoding.gemm_dtype, device=self.device)
            swizzled_scales = torch.empty(size, dtype=copy.scale.encoding.gemm_dtype, device=self.device)
            second = None if amax is None else workspace.zero(self.device, written=True)
            self.results.append((transposed_codes, swizzled_scales, second))
            strides = scales.stride()
            arguments.append((
                *shape, (codes, codes.stride(0), as_known(transposed_codes)) if turned else None,
                (scales, *(strides[::-1] if turned else strides), as_known(swizzled_scales)),
                None if second is None else (amax, second), nan_flag, as_known(other_scales),
                0 if other_scales is None else other_scales.numel() // 512 // -(shape[0] // -TILE),
            ))  # fmt: skip
            self.tiles += tiles
        self.arguments, self.config = tuple(arguments), _config(copy, len(arguments), turned)

    def finish(self) -> list[SwizzledMatrix]:
        """Return the results, after a separate launch if no other launch has included them."""
        if not self.launched:
            launch_kernel(
                swizzle_kernel, (self.tiles,), self.device, self.arguments,
                S=self.config, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            self.launched = True
        return self.results


@lru_cache(MOST_PLANS)
def _plan(copy: OrientedCodes, shape: Pair, turned: bool) -> tuple[int, Pair, int]:
    """Number of scales, shape of the transposed codes, and number of tiles."""
    rows, cols = shape[::-1] if turned else shape
    size = swizzled_size(rows, -(cols // -(copy.block[0] if turned else copy.block[1])))
    packed = 8 // copy.codes.encoding.bits
    return size, (rows, -(cols // -packed)), (rows // -TILE) * (cols // -TILE)


@lru_cache(MOST_PLANS)
def _config(copy: OrientedCodes, parts: int, turned: bool) -> SwizzleConfig:
    encoding, (high, wide) = copy.codes.encoding, copy.block[::-1] if turned else copy.block
    return SwizzleConfig(parts, turned, encoding.bits, high, wide, 1.0 / (encoding.max * copy.scale.encoding.max))
