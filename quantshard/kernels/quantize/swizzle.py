"""A stored weight as tensor cores of compute capability 10 read it: the scales of its blocks for every row, swizzled.

A program takes a tile of 128 x 128 elements, whose scales are one or two tiles of the swizzle (`swizzling.swizzled`).
If products sum along the other dim it transposes the codes too, of 8 bits or of 4. What makes results NaN goes into the
scales by the way: into these, or into the second scale, and into those of another operand of the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import QuantizedCopy
from quantshard.kernels import language as ql
from quantshard.kernels import workspace
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.matrix import swizzled
from quantshard.kernels.quantize.targets import MOST_PLANS, as_known, swizzled_size
from quantshard.numerics import Pair

TILE = 128


@triton.jit
def swizzle_kernel(
    matrices, PARTS: tl.constexpr, TURNED: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            _swizzle(matrices[part], TURNED, BITS, HIGH, WIDE, UNIT, TILE)


@triton.jit
def _swizzle(
    matrix, TURNED: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    rows, cols, codes, scales, second, poison_ptr, other_ptr, other_tiles = matrix
    scale_ptr, scale_row, scale_col, laid_ptr = scales
    row, col = tl.program_id(0), tl.program_id(1)
    if TURNED:
        _transpose(codes, row, col, rows, cols, BITS, TILE)
        down, across, of_rows, of_cols = col, row, cols, rows
    else:
        down, across, of_rows, of_cols = row, col, rows, cols
    bad = tl.load(ql.as_bits(poison_ptr)) != 0 if poison_ptr is not None else False  # NaN, else 0
    inside = (row * TILE < rows) & (col * TILE < cols)
    blocks = (of_cols + WIDE - 1) // WIDE
    tiles = (blocks + 3) // 4
    i = down * TILE + tl.arange(0, TILE)
    j = across * (TILE // WIDE) + tl.arange(0, TILE // WIDE)
    there = (i < of_rows)[:, None] & (j < blocks)[None, :]
    scale = tl.load(scale_ptr + (i // HIGH)[:, None] * scale_row + j[None, :] * scale_col, mask=there, other=0)
    if second is None and poison_ptr is not None:
        scale = tl.where(there & bad, 0xFF, scale).to(tl.uint8)
    laid_ptr = laid_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    laid = ql.mask_where(inside, (j < 4 * tiles)[None, :])
    tl.store(laid_ptr + swizzled(i[:, None], j[None, :], tiles), scale, mask=laid)
    if second is not None:
        whole = tl.load(second[0]) * UNIT
        tl.store(second[1], tl.where(bad, float("nan"), whole), mask=(row == 0) & (col == 0))
    if other_ptr is not None:  # the first block of each of its rows
        at = (row * other_tiles).to(tl.int64) * 512 + 4 * tl.arange(0, TILE)
        first = ql.mask_where(bad & inside & (col == 0), tl.full((TILE,), True, tl.int1))
        tl.store(other_ptr + at, tl.full((TILE,), 0xFF, tl.uint8), mask=first)


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


def swizzle(
    copy: QuantizedCopy,
    matrices: Sequence[tuple[Pair, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]],
    turned: bool,
) -> list[tuple[Tensor | None, Tensor, Tensor | None]]:
    """Several matrices on one device by one kernel: `kernel_dispatch.swizzle`."""
    results: list[tuple[Tensor | None, Tensor, Tensor | None]] = []
    arguments, grid, device = [], [0, 0], matrices[0][1].device
    for shape, codes, scales, amax, poison, other in matrices:
        size, transposed, programs = _plan(copy, shape, turned)
        made = None
        if turned:
            made = torch.empty(transposed, dtype=copy.codes.encoding.multiplied, device=device)
        laid = torch.empty(size, dtype=copy.scale.encoding.multiplied, device=device)
        second = None if amax is None else workspace.zero(device, written=True)
        results.append((made, laid, second))
        strides = scales.stride()
        arguments.append((
            *shape, (codes, codes.stride(0), as_known(made)) if turned else None,
            (scales, *(strides[::-1] if turned else strides), as_known(laid)),
            None if second is None else (amax, second), poison, as_known(other),
            0 if other is None else other.numel() // 512 // -(shape[0] // -TILE),
        ))  # fmt: skip
        grid = [max(grid[0], programs[0]), max(grid[1], programs[1])]
    high, wide = copy.block[::-1] if turned else copy.block
    launch_kernel(
        swizzle_kernel, (*grid, len(arguments)), device, tuple(arguments),
        PARTS=len(arguments), TURNED=turned, BITS=copy.codes.encoding.bits, HIGH=high, WIDE=wide,
        UNIT=1.0 / (copy.codes.encoding.max * copy.scale.encoding.max), TILE=TILE, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return results


@lru_cache(MOST_PLANS)
def _plan(copy: QuantizedCopy, shape: Pair, turned: bool) -> tuple[int, Pair, tuple[Any, ...]]:
    """How many scales there are, the shape of the transposed codes, and the programs."""
    rows, cols = shape[::-1] if turned else shape
    size = swizzled_size(rows, -(cols // -(copy.block[0] if turned else copy.block[1])))
    packed = 8 // copy.codes.encoding.bits
    return size, (rows, -(cols // -packed)), (-(shape[0] // -TILE), -(shape[1] // -TILE))
