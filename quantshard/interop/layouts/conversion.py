"""From components to the tensors of a layout and back: bytes are moved, no value is computed but a second scale.

A weight of a layout is made of rows of one of ours in some order (a fused weight is cut), so a block there must lie in
one block here: its scale is that block's. On the way back several blocks of a layout may lie in one of ours: then they
must have one scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.errors import ConfigurationError
from quantshard.formats import E8M0, FP32, Encoding, Format, Orientation
from quantshard.interop.layouts.table import Layout, ScaleShape, refines, said
from quantshard.sharding import ceil_div


class InexactConversionError(Exception):
    """A weight cannot be converted without changing a value; the text says why, with the numbers."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """`length` successive rows of a weight of ours, from row `ours`, that are rows `theirs`... of one of theirs."""

    ours: int
    theirs: int
    length: int


def whole_run(rows: int) -> list[RowRun]:
    """All rows in their order."""
    return [RowRun(0, 0, rows)]


def our_rows(runs: list[RowRun]) -> Tensor:
    """The row of ours that each row of theirs is: int64 [rows of theirs]."""
    ordered = sorted(runs, key=lambda run: run.theirs)
    return torch.cat([torch.arange(run.ours, run.ours + run.length, device="cpu") for run in ordered])


def is_identity(runs: list[RowRun], rows: int) -> bool:
    """Whether theirs is ours, row by row."""
    return runs == whole_run(rows)


# Ours -> theirs


def shapes(layout: Layout, rows: int, cols: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each tensor of a quantized weight [rows, cols], by what stands in place of "weight".

    Raises:
        ConfigurationError: the layout is not defined for this number of columns.
    """
    assert layout.element is not None
    packed = 8 // layout.element.bits
    block_cols = min(layout.block[1], cols)
    if cols % packed or (layout.whole_blocks and cols % layout.block[1]):
        raise ConfigurationError(
            f"a weight [{rows}, {cols}] does not go into {layout.name}: its {cols} columns are not a multiple of the "
            f"{layout.block[1]} of a block; export it to another layout"
        )
    codes = torch.uint8 if layout.element.native is None else layout.element.native
    grid = (ceil_div(rows, layout.block[0]), ceil_div(cols, block_cols))
    scale = {ScaleShape.GRID: grid, ScaleShape.SCALAR: (), ScaleShape.ONE: (1,), ScaleShape.ROWS: (rows,)}[
        layout.scale_shape
    ]
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        layout.codes_key: (codes, (rows, cols // packed)),
        layout.scale_key: (layout.scale_dtype, scale),
    }
    if layout.second is not None:
        found[layout.second.key] = (torch.float32, () if layout.second.shape is ScaleShape.SCALAR else (1,))
    return found


def to_layout(
    layout: Layout, fmt: Format, parts: Mapping[str, Tensor], shape: tuple[int, int], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """The components of a weight `shape` -> the tensors of a layout, by what stands in place of "weight".

    `rows`: the rows of ours that the weight there consists of, in its order (None: all of them).

    Raises:
        InexactConversionError: a block there would need two scales, or a scale has no encoding there.
    """
    codes = parts[fmt.copies[Orientation.ROWWISE].codes.name]
    found = {layout.codes_key: codes if rows is None else codes[rows], **layout_scales(layout, fmt, parts, shape, rows)}
    count = shape[0] if rows is None else len(rows)
    return {
        key: found[key].contiguous().view(dtype).reshape(wanted)
        for key, (dtype, wanted) in shapes(layout, count, shape[1]).items()
    }


def layout_scales(
    layout: Layout, fmt: Format, parts: Mapping[str, Tensor], shape: tuple[int, int], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """The scales of `to_layout` alone, as a grid; of `parts` the codes are not needed.

    Raises:
        InexactConversionError: see `to_layout`.
    """
    copy = fmt.copies[Orientation.ROWWISE]
    if copy.codes.encoding != layout.element:
        raise InexactConversionError(f"its codes are {copy.codes.encoding.name}")
    taken = torch.arange(shape[0], device="cpu") if rows is None else rows
    grid = _grid(parts[copy.scale.name], taken, copy.block, layout.block, shape[1])
    found = {layout.scale_key: _encoded(grid, copy.scale.encoding, layout.scale)}
    if layout.second is not None:
        assert copy.amax is not None
        found[layout.second.key] = second_scale(parts[copy.amax.name].reshape(()), fmt, divides=layout.second.divides)
    return found


def _grid(scale: Tensor, rows: Tensor, ours: tuple[int, int], theirs: tuple[int, int], cols: int) -> Tensor:
    """Our grid of scales -> theirs."""
    if not all(refines(there, here) for there, here in zip(theirs, ours, strict=True)):
        raise InexactConversionError(f"its blocks of {said(ours)} do not hold whole blocks of {said(theirs)}")
    at = rows // ours[0]
    height = min(theirs[0], max(len(rows), 1))
    first = at[::height]
    crossing = (at != first.repeat_interleave(height)[: len(at)]).nonzero()
    if len(crossing):
        row = int(crossing[0])
        raise InexactConversionError(
            f"its rows are cut inside a block: row {row} of the part lies in another block of {said(ours)} than row "
            f"{row // height * height}, and a block of {said(theirs)} there has one scale"
        )
    width = min(theirs[1], max(cols, 1))
    return scale[first][:, torch.arange(0, cols, width, device="cpu") // ours[1]]


def _encoded(grid: Tensor, ours: Encoding, theirs: Encoding) -> Tensor:
    """Scales in another encoding, of the same values."""
    if ours == theirs:
        return grid
    if (ours, theirs) == (E8M0, FP32):
        return numerics.decode(grid, E8M0)
    if (ours, theirs) != (FP32, E8M0):
        raise InexactConversionError(f"its scales are {ours.name}, not {theirs.name}")
    codes = (grid.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    if not torch.equal(numerics.decode(codes, E8M0), grid):
        at = int((numerics.decode(codes, E8M0) != grid).flatten().to(torch.uint8).argmax())
        raise InexactConversionError(
            f"its scales are not powers of two, as E8M0 is (one is {grid.flatten()[at].item()!r})"
        )
    return codes


def second_scale(amax: Tensor, fmt: Format, divides: bool) -> Tensor:
    """The second scale, float32, of a weight with this amax: amax / (6 * 448), or, if it divides, the inverse; 1 for an
    amax of 0, whose codes are all zero."""
    copy = fmt.copies[Orientation.ROWWISE]
    largest = torch.tensor(copy.codes.encoding.max * copy.scale.encoding.max, dtype=torch.float32, device="cpu")
    found = largest / amax.float() if divides else amax.float() / largest
    return torch.where(amax == 0, torch.ones_like(found), found)


# Theirs -> ours


def amax_of(second: Tensor, fmt: Format, divides: bool, noted: float | None = None) -> Tensor:
    """The amax, float32 [1, 1], whose second scale this is: the noted one if it has this second scale, else the nearest
    float32."""
    stored = second.float().reshape(())
    if noted is not None:
        amax = torch.tensor(noted, dtype=torch.float32, device="cpu")
        if torch.equal(second_scale(amax, fmt, divides), stored):
            return amax.view(1, 1)
    copy = fmt.copies[Orientation.ROWWISE]
    largest = torch.tensor(copy.codes.encoding.max * copy.scale.encoding.max, dtype=torch.float32, device="cpu")
    return (largest / stored if divides else stored * largest).view(1, 1)


def our_grid(
    by_row: Tensor, layout: Layout, fmt: Format, extents: tuple[tuple[int, int], tuple[int, int]], cols: int
) -> Tensor:
    """Scales of theirs -> those of our grid's entries `extents` (rows, columns of entries).

    `by_row`: their scales of each element row of these entries, [rows, their blocks along a row].

    For a format and a layout whose `import_verdict` is not lossy.

    Raises:
        InexactConversionError: several blocks of theirs in one of ours have different scales, or a scale has no
            encoding here.
    """
    copy = fmt.copies[Orientation.ROWWISE]
    block = copy.block
    (r0, r1), (c0, c1) = extents
    height = min(block[0], max(len(by_row), 1))
    rows = by_row[::height]
    _check_same(by_row, rows.repeat_interleave(height, 0)[: len(by_row)], layout, fmt)
    assert len(rows) == r1 - r0 or not len(by_row), (len(rows), extents)
    starts = torch.arange(c0, c1, device="cpu") * min(block[1], max(cols, 1))
    found = rows[:, starts // layout.block[1]]
    if layout.block[1] < block[1]:
        stop = min(c1 * block[1], cols)
        theirs = torch.arange(c0 * block[1], stop, layout.block[1], device="cpu")
        of_ours = (theirs // block[1] - c0).clamp(min=0)
        _check_same(rows[:, theirs // layout.block[1]], found[:, of_ours], layout, fmt)
    return _encoded(found, layout.scale, copy.scale.encoding)


def _check_same(scales: Tensor, alike: Tensor, layout: Layout, fmt: Format) -> None:
    if not torch.equal(scales, alike):
        raise InexactConversionError(
            f"blocks of {said(layout.block)} have different scales where {fmt.name} has one, of "
            f"{said(fmt.copies[Orientation.ROWWISE].block)}"
        )


def stored_scale(layout: Layout, scale: Tensor) -> Tensor:
    """A tensor of scales as read from a file -> [blocks along rows, along columns], in the encoding's storage."""
    if layout.scale == FP32:
        scale = scale.float()
    elif scale.dtype != layout.scale.storage:
        scale = scale.view(layout.scale.storage)
    return scale.reshape(-1, 1) if scale.ndim < 2 else scale.reshape(*scale.shape[:2])
