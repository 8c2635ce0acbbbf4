"""A stored weight as tensor cores of compute capability 10 read it: the scales of its blocks for every row, swizzled.

A program takes a tile of 128 x 128 elements, whose scales are one or two tiles of the swizzle (`swizzling.swizzled`).
If products sum along the other dim it transposes the codes too, of 8 bits or of 4. What makes results NaN goes into the
scales by the way: into these, or into the second scale, and into those of another operand of the same gradient.

The kernel that quantizes what weights are multiplied with takes such tiles too: `matrix.quantize_matrices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import OrientedCodes
from quantshard.kernels import language as ql
from quantshard.kernels import workspace
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.targets import MOST_PLANS, as_known, swizzled_size
from quantshard.numerics import Pair

TILE = 128


class SwizzleConfig(NamedTuple):
    """Constants of a kernel: how many matrices it lays out, whether it transposes their codes, of how many bits, which
    rows and columns of the result share a scale, and what a second scale is of its amax."""

    parts: int
    turned: bool
    bits: int
    high: int
    wide: int
    unit: float
    tile: int = TILE


@triton.jit
def swizzled(i, j, tiles):
    """Where `swizzling.swizzled` has the entries of rows i and columns j, of so many tiles in a row."""
    return (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4


@triton.jit
def swizzle_kernel(matrices, S: tl.constexpr):
    swizzle_tile(tl.program_id(0), matrices, S)


@triton.jit
def swizzle_tile(at, matrices, S: tl.constexpr):
    """One tile, counted over those of all matrices; beyond the last one there is nothing to do."""
    PARTS: tl.constexpr = S.parts
    for part in tl.static_range(PARTS):
        across = (matrices[part][1] + S.tile - 1) // S.tile
        count = (matrices[part][0] + S.tile - 1) // S.tile * across
        if (at >= 0) & (at < count):
            _swizzle(matrices[part], at // across, at % across, S)
        at -= count


@triton.jit
def _swizzle(matrix, row, col, S: tl.constexpr):
    rows, cols, codes, scales, second, poison_ptr, other_ptr, other_tiles = matrix
    scale_ptr, scale_row, scale_col, laid_ptr = scales
    if S.turned:
        _transpose(codes, row, col, rows, cols, S.bits, S.tile)
        down, across, of_rows, of_cols = col, row, cols, rows
    else:
        down, across, of_rows, of_cols = row, col, rows, cols
    bad = tl.load(ql.as_bits(poison_ptr)) != 0 if poison_ptr is not None else False  # NaN, else 0
    blocks = (of_cols + S.wide - 1) // S.wide
    tiles = (blocks + 3) // 4
    i = down * S.tile + tl.arange(0, S.tile)
    j = across * (S.tile // S.wide) + tl.arange(0, S.tile // S.wide)
    there = (i < of_rows)[:, None] & (j < blocks)[None, :]
    scale = tl.load(scale_ptr + (i // S.high)[:, None] * scale_row + j[None, :] * scale_col, mask=there, other=0)
    if second is None and poison_ptr is not None:
        scale = tl.where(there & bad, 0xFF, scale).to(tl.uint8)
    laid_ptr = laid_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(laid_ptr + swizzled(i[:, None], j[None, :], tiles), scale, mask=(j < 4 * tiles)[None, :])
    if second is not None:
        whole = tl.load(second[0]) * S.unit
        tl.store(second[1], tl.where(bad, float("nan"), whole), mask=(row == 0) & (col == 0))
    if other_ptr is not None:  # the first block of each of its rows
        at = (row * other_tiles).to(tl.int64) * 512 + 4 * tl.arange(0, S.tile)
        first = ql.mask_where(bad & (col == 0), tl.full((S.tile,), True, tl.int1))
        tl.store(other_ptr + at, tl.full((S.tile,), 0xFF, tl.uint8), mask=first)


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
    at = i.to(tl.int64)[:, None] * width + j[None, :]
    tl.store(out_ptr + at, x, mask=(i < cols)[:, None] & (j < width)[None, :])


SwizzleResult = tuple[Tensor | None, Tensor, Tensor | None]
"""`kernel_dispatch.SwizzledMatrix`."""


class SwizzleRequest:
    """Several matrices on one device that one kernel is to lay out: one that quantizes something, or one of their own.

    `results`: the memory for them, which `finish` fills. `tiles`: how many there are. `arguments`, `config`: those of
    `swizzle_tile`. `launched`: a kernel has been told of them.
    """

    def __init__(
        self,
        copy: OrientedCodes,
        matrices: Sequence[tuple[Pair, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]],
        turned: bool,
    ) -> None:
        self.device, self.launched, self.tiles = matrices[0][1].device, False, 0
        self.results: list[SwizzleResult] = []
        arguments = []
        for shape, codes, scales, amax, nan_flag, other in matrices:
            size, transposed, tiles = _plan(copy, shape, turned)
            made = None
            if turned:
                made = torch.empty(transposed, dtype=copy.codes.encoding.multiplied, device=self.device)
            laid = torch.empty(size, dtype=copy.scale.encoding.multiplied, device=self.device)
            second = None if amax is None else workspace.zero(self.device, written=True)
            self.results.append((made, laid, second))
            strides = scales.stride()
            arguments.append((
                *shape, (codes, codes.stride(0), as_known(made)) if turned else None,
                (scales, *(strides[::-1] if turned else strides), as_known(laid)),
                None if second is None else (amax, second), nan_flag, as_known(other),
                0 if other is None else other.numel() // 512 // -(shape[0] // -TILE),
            ))  # fmt: skip
            self.tiles += tiles
        self.arguments, self.config = tuple(arguments), _config(copy, len(arguments), turned)

    def finish(self) -> list[SwizzleResult]:
        """The results, from a launch of their own if there was none."""
        if not self.launched:
            launch_kernel(
                swizzle_kernel, (self.tiles,), self.device, self.arguments,
                S=self.config, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            self.launched = True
        return self.results


@lru_cache(MOST_PLANS)
def _plan(copy: OrientedCodes, shape: Pair, turned: bool) -> tuple[int, Pair, int]:
    """How many scales there are, the shape of the transposed codes, and how many tiles there are."""
    rows, cols = shape[::-1] if turned else shape
    size = swizzled_size(rows, -(cols // -(copy.block[0] if turned else copy.block[1])))
    packed = 8 // copy.codes.encoding.bits
    return size, (rows, -(cols // -packed)), (rows // -TILE) * (cols // -TILE)


@lru_cache(MOST_PLANS)
def _config(copy: OrientedCodes, parts: int, turned: bool) -> SwizzleConfig:
    encoding, (high, wide) = copy.codes.encoding, copy.block[::-1] if turned else copy.block
    return SwizzleConfig(parts, turned, encoding.bits, high, wide, 1.0 / (encoding.max * copy.scale.encoding.max))
