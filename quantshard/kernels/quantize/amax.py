"""The amax of every block of a matrix, from one read of the values: `numerics.block_amax`, and scales from amaxes.

    amax[block] = max |x|
    (stored scale, multiplier of values) = rule(amax)               (`scale_rule.scales`)

Needed where one tile does not hold a whole block: one scale for the tensor or for a row, and blocks shared by ranks.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import OrientedCodes, Scaling
from quantshard.kernels import language as ql, scale_rule as sr, tracing, workspace
from quantshard.kernels.graph_launch import writes
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize import targets as kt
from quantshard.kernels.quantize.matrix import NAN, grid_of_tile, tile_of, transformed
from quantshard.numerics import Pair

SCALES = 1024
"""Scales per program of `scales_kernel`."""


@triton.jit
def amax_kernel(
    x_ptrs, row_stride, col_stride, where, grids, shape, other_where, other_grids, other_shape, nan_flags,
    PARTS: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    for part in tl.static_range(PARTS):
        if tl.program_id(2) == part:
            row, col, i, j, valued = tile_of(where, T if H is None else H, H is None)
            offsets = i.to(tl.int64)[:, None] * row_stride + j.to(tl.int64)[None, :] * col_stride
            values = tl.load(x_ptrs[part] + offsets, mask=valued, other=0.0)
            x = ql.widen(values)
            if nan_flags[part] is not None:
                infinite = ql.largest_bits(x) >= 0x7F800000
                tl.atomic_max(ql.as_bits(nan_flags[part]), NAN, mask=infinite, sem="relaxed")
            measure(
                x, row, col, where, grids[part], shape, other_where, other_grids[part], other_shape, values.dtype, H, T
            )  # fmt: skip


writes(amax_kernel, "grids.*", "other_grids.*", "nan_flags.*")


@triton.jit
def measure(
    x, row, col, where, grid_ptr, shape, other_where, other_ptr, other_shape, dtype: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Write the amaxes of the blocks of a float32 tile of values of `dtype`, and of its transpose, into grids of the
    given shapes. H: config of the tile; T: of its transpose. H or T can be None."""
    if H is not None:
        _measure(transformed(x, dtype, H), row, col, where, grid_ptr, shape, H)
    if T is not None:
        _measure(transformed(x, dtype, T), col, row, other_where, other_ptr, other_shape, T)


@triton.jit
def _measure(x, row, col, where, grid_ptr, shape, H: tl.constexpr):
    """Write the amaxes of the blocks of a tile at a row and column of the matrix that H describes."""
    if H.transposed:
        amaxes = ql.block_amax(x, H.cols, H.rows, H.block_cols, H.block_rows, H.together)
    else:
        amaxes = ql.block_amax(x, H.rows, H.cols, H.block_rows, H.block_cols, H.together)
    entries, inside = grid_of_tile(row, col, where, shape[1], 1, shape[0], shape[1], H)
    if H.row_all or H.col_all:  # several tiles share an entry
        tl.atomic_max(ql.as_bits(grid_ptr + entries), amaxes.to(tl.int32, bitcast=True), mask=inside, sem="relaxed")
    else:
        tl.store(grid_ptr + entries, amaxes, mask=inside)


def block_amax(
    x: Tensor, block_shape: tuple[int, int], origin: tuple[int, int] = (0, 0), *, hadamard: bool = False
) -> Tensor:
    """Return the largest |x| of each block that x [R, C] touches, float32; `hadamard`: after `numerics.hadamard16`."""
    ((amax, _),) = block_amaxes([x], kt.BlockAmaxes(block_shape, hadamard), origin=origin)
    assert amax is not None
    return amax


def block_amaxes(
    xs: Sequence[Tensor], one: kt.BlockAmaxes | None, two: kt.BlockAmaxes | None = None,
    nan_flags: Sequence[Tensor | None] | None = None, origin: Pair = (0, 0),
) -> list[tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """Measure several matrices of one shape, strides, dtype and device, and (`two`) their transposes, with one kernel.

    Grids with more than one entry can be flat. `nan_flags`: float32 scalars; NaN if any value is not finite.
    """
    x = xs[0]
    plan = plan_amaxes(x.shape, one, two, origin)
    targets = plan.grids(x, len(xs))
    grids, transposed_grids = zip(*targets, strict=True)
    if x.numel() > 0:
        launch_kernel(
            amax_kernel, (*plan.programs, len(xs)), x.device,
            tuple(xs), *x.stride(), plan.where, grids, plan.spans, plan.other, transposed_grids, plan.other_spans,
            (None,) * len(xs) if nan_flags is None else tuple(nan_flags),
            PARTS=len(xs), **plan.kinds, num_warps=kt.WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return targets


class AmaxPlan(NamedTuple):
    """Launch parameters without the tensors: regions and grid shapes of the matrix and of its transpose.

    `zeroed`: grids must start at zero. `kinds`: configs of both directions, as constants of the kernel.
    """

    where: kt.Region
    spans: Pair | None
    other: kt.Region | None
    other_spans: Pair | None
    programs: Pair
    tile: kt.TileShape
    zeroed: bool
    kinds: dict[str, Any]

    def grids(self, x: Tensor, parts: int) -> list[tuple[Tensor | None, Tensor | None]]:
        if self.spans == (1, 1) and self.other_spans is None:
            return [(workspace.zero(x.device), None) for _ in range(parts)]
        # zeros: several programs share an entry, or none runs
        allocate = torch.zeros if self.zeroed or x.numel() == 0 else torch.empty
        large_spans = [spans for spans in (self.spans, self.other_spans) if spans is not None and spans != (1, 1)]
        pieces: Sequence[Tensor] = ()
        if len(large_spans) * parts == 1:
            pieces = [allocate(large_spans[0], dtype=torch.float32, device=x.device)]
        elif large_spans:
            # each grid starts at a multiple of 16 bytes
            sizes = [-(rows * cols // -4) * 4 for rows, cols in large_spans] * parts
            if tracing.on:  # Inductor must be able to place each tensor that a kernel writes
                pieces = [allocate(size, dtype=torch.float32, device=x.device) for size in sizes]
            else:
                pieces = allocate(sum(sizes), dtype=torch.float32, device=x.device).split(sizes)
        remaining = iter(pieces)

        def grid(spans: Pair | None) -> Tensor | None:
            if spans is None:
                return None
            return workspace.zero(x.device) if spans == (1, 1) else next(remaining)

        return [(grid(self.spans), grid(self.other_spans)) for _ in range(parts)]


@lru_cache(kt.MOST_PLANS)
def plan_amaxes(shape: Pair, one: kt.BlockAmaxes | None, two: kt.BlockAmaxes | None, origin: Pair = (0, 0)) -> AmaxPlan:
    tile = _tile(one, two)
    region, spans, first = _measured(shape, one, origin, tile, False)
    transposed_region, transposed_spans, second = _measured(shape[::-1], two, origin[::-1], tile, True)
    programs = kt.touched(origin, (transposed_region.cols, region.cols), tile[:2])  # either may pad
    shares_entries = [config.row_all or config.col_all for config in (first, second) if config is not None]
    kinds = {"H": first, "T": second}
    return AmaxPlan(region, spans, transposed_region, transposed_spans, programs, tile, any(shares_entries), kinds)


def _measured(
    shape: Pair, blocks: kt.BlockAmaxes | None, origin: Pair, tile: kt.TileShape, transposed: bool
) -> tuple[kt.Region, Pair | None, kt.KernelConfig | None]:
    if blocks is None:
        return kt.Region(*shape, shape[1], *origin), None, None
    rows, cols = shape[0], shape[1] + (-shape[1] % 16 if blocks.hadamard else 0)
    spans = kt.touched(origin, (rows, cols), blocks.block_shape)
    config = kt.tiling(blocks.block_shape, tile, NO_RULE, transposed, hadamard=blocks.hadamard)
    return kt.Region(rows, cols, shape[1], *origin), spans, config


def _tile(one: kt.BlockAmaxes | None, two: kt.BlockAmaxes | None) -> kt.TileShape:
    blocks = kt.whole_blocks(one and one.block_shape, two and two.block_shape)
    if two is None:
        return kt.one_way_tile(blocks[:2])
    return kt.TileShape(max(128, blocks.rows), max(128, blocks.cols), 16 if two.hadamard else 1)


_NOTHING = ql.KernelEncoding(0.0, 0, 0, 0, 0, True, 0)
NO_RULE = sr.ScaleRule(0, _NOTHING, _NOTHING, 0.0, 0.0, False, 0.0)
"""Placeholder rule for tiles that are only measured."""


@triton.jit
def scales_kernel(amax_ptr, stored_ptr, multiplier_ptr, numel, R: tl.constexpr, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    valued = index < numel
    stored_scale, multiplier = sr.scales(tl.load(amax_ptr + index, mask=valued, other=0.0), 0.0, R)
    tl.store(stored_ptr + index, stored_scale, mask=valued)
    tl.store(multiplier_ptr + index, multiplier, mask=valued)


writes(scales_kernel, "stored_ptr", "multiplier_ptr")


def scales(amax: Tensor, copy: OrientedCodes, scaling: Scaling, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `numerics.scales_and_multipliers` of a grid for values of `dtype`, for copies with one scale."""
    assert copy.amax is None, "a scale under a second one"
    amax = amax.contiguous()
    stored_scales = torch.empty(amax.shape, dtype=copy.scale.encoding.storage, device=amax.device)
    multiplier = torch.empty_like(amax)
    if amax.numel() > 0:
        rule = sr.scale_rule(copy, scaling, dtype, amax.device)
        launch_kernel(
            scales_kernel, (-(amax.numel() // -SCALES),), amax.device,
            amax, stored_scales, multiplier, amax.numel(), rule, SCALES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return stored_scales, multiplier
