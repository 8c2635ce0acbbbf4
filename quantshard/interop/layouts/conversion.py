"""Conversion between our components and the tensors of a layout. Bytes are copied; only second scales are computed.

An external weight consists of rows of one of our weights in some order (a fused weight is split). A block takes the
scale of the block that contains it, and a block that contains several must find the same scale in all of them.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.formats import ALL, E8M0, FP32, Encoding, Format, Orientation, Role
from quantshard.interop.layouts.table import Layout, ScaleShape, refines, said
from quantshard.sharding import ceil_div
from quantshard.tensor import component_loading, components


class InexactConversionError(Exception):
    """A weight cannot be converted without changing a value; the message states the reason."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """`length` consecutive rows of our weight, starting at row `ours`, stored at row `theirs` of an external weight."""

    ours: int
    theirs: int
    length: int


def our_rows(runs: list[RowRun]) -> Tensor:
    """Return our row index for each external row: int64 [external rows]."""
    ordered = sorted(runs, key=lambda run: run.theirs)
    return torch.cat([torch.arange(run.ours, run.ours + run.length, device="cpu") for run in ordered])


def shapes(layout: Layout, rows: int, cols: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of a weight's tensors, keyed by the name that replaces "weight"."""
    assert layout.element is not None
    codes_per_byte = 8 // layout.element.bits
    block_cols = min(layout.block[1], cols)
    if cols % codes_per_byte or (layout.whole_blocks and cols % layout.block[1]):
        raise ConfigurationError(f"{layout.name} needs multiples of {layout.block[1]} columns, not [{rows}, {cols}]")
    codes = torch.uint8 if layout.element.native is None else layout.element.native
    grid = (ceil_div(rows, layout.block[0]), ceil_div(cols, block_cols))
    sizes = {ScaleShape.GRID: grid, ScaleShape.ROWS: (rows,), ScaleShape.ONE: (1,), ScaleShape.SCALAR: ()}
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    tensors[layout.codes_key] = codes, (rows, cols // codes_per_byte)
    tensors[layout.scale_key] = layout.scale_dtype, sizes[layout.scale_shape]
    if layout.second is not None:
        tensors[layout.second.key] = torch.float32, sizes[layout.second.shape]
    return tensors


def to_layout(
    layout: Layout, fmt: Format, parts: Mapping[str, Tensor], shape: tuple[int, int], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Convert components to the tensors of a layout. `shape`: of our weight. `rows`: ours, in its order (None: all)."""
    codes = parts[fmt.copies[Orientation.ROWWISE].codes.name]
    tensors = {
        layout.codes_key: codes if rows is None else codes[rows],
        **layout_scales(layout, fmt, parts, shape, rows),
    }
    count = shape[0] if rows is None else len(rows)
    return {
        key: tensors[key].contiguous().view(dtype).reshape(tensor_shape)
        for key, (dtype, tensor_shape) in shapes(layout, count, shape[1]).items()
    }


def converter(
    layout: Layout, fmt: Format, shape: tuple[int, int], runs: list[RowRun], rows: Tensor | None
) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Return `to_layout` as a function of the components. One run of rows is a view, without an index from the host."""
    copy, run, cut_shape = fmt.copies[Orientation.ROWWISE], runs[0], (runs[0].length, shape[1])
    heights = [(part.name, part.block_shape[0]) for part in (copy.codes, copy.scale, copy.amax) if part is not None]
    cuts = {name: slice(run.ours // height, ceil_div(run.ours + run.length, height)) for name, height in heights}
    ends_inside = any(run.ours % height and cuts[name].stop - cuts[name].start > 1 for name, height in heights)
    if rows is None or len(runs) > 1 or ends_inside:
        return lambda parts: to_layout(layout, fmt, parts, shape, rows)
    return lambda parts: to_layout(layout, fmt, {name: parts[name][cut] for name, cut in cuts.items()}, cut_shape)


def layout_scales(
    layout: Layout, fmt: Format, parts: Mapping[str, Tensor], shape: tuple[int, int], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Convert only the scales, as a grid; `parts` needs no codes. See `to_layout`."""
    copy = fmt.copies[Orientation.ROWWISE]
    if copy.codes.encoding != layout.element:
        raise InexactConversionError(f"its codes are {copy.codes.encoding.name}")
    grid = parts[copy.scale.name]
    if rows is None and all(map(refines, layout.block, copy.block)):
        for dim, (size, ours, theirs) in enumerate(zip(shape, copy.block, layout.block, strict=True)):
            if ours != theirs:
                # without a check of values, for which the host would wait
                repeats, count = ceil_div(min(ours, size), theirs), ceil_div(size, theirs)
                grid = grid.repeat_interleave(repeats, dim).narrow(dim, 0, count)
    else:
        row_index = torch.arange(shape[0], device="cpu") if rows is None else rows
        grid = regrid(grid[row_index // copy.block[0]], copy.block, layout.block, shape[1])
    scales = {layout.scale_key: _encoded(grid, copy.scale.encoding, layout.scale)}
    if layout.second is not None:
        assert copy.amax is not None
        amaxes = parts[copy.amax.name].flatten()
        amaxes = amaxes if rows is None else amaxes[torch.unique(rows // copy.amax.block_shape[0])]
        if len(amaxes) > 1 and not torch.equal(amaxes, amaxes[:1].expand_as(amaxes)):
            raise InexactConversionError("its matrices have different second scales")
        scales[layout.second.key] = second_scale(amaxes[0], fmt, divides=layout.second.divides)
    return scales


def is_always_exact(layout: Layout, fmt: Format, runs: list[RowRun]) -> bool:
    """Return whether `layout_scales` succeeds for any values, given that `table.verdict` is exact."""
    copy, height = fmt.copies[Orientation.ROWWISE], layout.block[0]
    is_aligned = height in (1, ALL) or all(run.ours % height == run.theirs % height == 0 for run in runs)
    # a stack has an amax for each matrix, and can have one scale for each
    ends = {row // fmt.matrix_rows for run in runs for row in (run.ours, run.ours + run.length - 1) if fmt.matrix_rows}
    return copy.scale.encoding == layout.scale and is_aligned and len(ends) < 2


def regrid(by_row: Tensor, source: tuple[int, int], target: tuple[int, int], cols: int) -> Tensor:
    """Convert scales of `source` blocks to `target` blocks. Raises if a target block would need several scales.

    `by_row`: the scales of each row of elements, [rows, source blocks per row]. Row 0 is the first of a target block.
    """
    height = min(target[0], max(len(by_row), 1))
    source_width, target_width = (min(block[1], max(cols, 1)) for block in (source, target))
    target_starts = torch.arange(0, cols, target_width, device=by_row.device)
    grid = by_row[::height, target_starts // source_width]
    source_starts = torch.arange(0, cols, source_width, device=by_row.device)
    needed = grid.repeat_interleave(height, 0)[: len(by_row), source_starts // target_width]
    if not torch.equal(needed, by_row):
        raise InexactConversionError(f"blocks of {said(source)} have different scales inside one of {said(target)}")
    return grid


def _encoded(grid: Tensor, ours: Encoding, theirs: Encoding) -> Tensor:
    """Re-encode scales without changing their values."""
    if ours == theirs:
        return grid
    if (ours, theirs) == (E8M0, FP32):
        return numerics.decode(grid, E8M0)
    if (ours, theirs) != (FP32, E8M0):
        raise InexactConversionError(f"its scales are {ours.name}, not {theirs.name}")
    codes = (grid.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    if not torch.equal(numerics.decode(codes, E8M0), grid):
        raise InexactConversionError("its scales are not powers of two")
    return codes


def _largest(fmt: Format) -> Tensor:
    """Return the largest code times the largest scale of a block (NVFP4: 6 * 448)."""
    copy = fmt.copies[Orientation.ROWWISE]
    return torch.tensor(copy.codes.encoding.max * copy.scale.encoding.max, dtype=torch.float32, device="cpu")


def second_scale(amax: Tensor, fmt: Format, divides: bool) -> Tensor:
    """Return the second scale of a weight with this amax: amax / (6 * 448), or its inverse; 1 if the amax is 0."""
    # rounded as compressed-tensors rounds it
    scale = amax.float().reciprocal() * _largest(fmt) if divides else amax.float() / _largest(fmt)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def amax_of(second: Tensor, fmt: Format, divides: bool, noted: str | None = None) -> Tensor:
    """Return an amax [1, 1] that has this second scale: the recorded one (`float.hex`) if it fits, or the nearest."""
    scale = second.float().reshape(())
    # a damaged entry is ignored
    with suppress(ValueError, OverflowError):
        if noted is not None:
            amax = torch.tensor(float.fromhex(noted), dtype=torch.float32, device="cpu")
            if torch.isclose(second_scale(amax, fmt, divides), scale, rtol=2**-22, atol=0):
                return amax.view(1, 1)
    nearest = _largest(fmt) / scale if divides else scale * _largest(fmt)
    # a scale that was computed from an amax is restored by the quotient or by a neighbor of it
    neighbors = (torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (0, math.inf))
    exact = (amax for amax in (nearest, *neighbors) if torch.equal(second_scale(amax, fmt, divides), scale))
    return next(exact, nearest).view(1, 1)


def our_grid(
    by_row: Tensor, layout: Layout, fmt: Format, extents: tuple[tuple[int, int], tuple[int, int]], cols: int
) -> Tensor:
    """Convert external scales of each element row, [rows, blocks per row], to entries `extents` of our grid."""
    copy = fmt.copies[Orientation.ROWWISE]
    grid = regrid(by_row, layout.block, copy.block, cols)[:, slice(*extents[1])]
    return _encoded(grid, layout.scale, copy.scale.encoding)


def write_copy(param: Tensor, codes: Tensor, grid: Tensor, amaxes: Tensor | None) -> None:
    """Write the components of a weight with a single copy; `grid`: from `our_grid`; `amaxes`: one for each matrix."""
    storage, values = components.storage_of(param), {Role.CODES: codes, Role.SCALE: grid}
    if amaxes is not None:
        values[Role.AMAX] = amaxes
    pairs = [(storage.components[part.name], values[part.role]) for part in storage.spec.format.components]
    for live, value in pairs:
        if live.shape != value.shape:
            raise CheckpointError(f"its codes or scales are {list(value.shape)} in the files, not {list(live.shape)}")
    component_loading.write_components(param, pairs)
    storage.forget_amaxes()


def stored_scale(layout: Layout, scale: Tensor) -> Tensor:
    """Convert a tensor of scales from a file to [blocks along rows, along columns] in the encoding's storage dtype."""
    if layout.scale == FP32:
        scale = scale.float()
    elif scale.dtype != layout.scale.storage:
        scale = scale.view(layout.scale.storage)
    return scale.reshape(-1, 1) if scale.ndim < 2 else scale.reshape(*scale.shape[:2])
