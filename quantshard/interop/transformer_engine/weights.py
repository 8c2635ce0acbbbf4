"""Converts TransformerEngine's shards of a weight to the components of a format, by copying bytes.

TransformerEngine quantizes each shard separately, but a format's blocks belong to the whole weight. So a shard must
start on a block border, and the shards of a weight with a single scale must all have the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.errors import CheckpointError
from quantshard.formats import ALL, FORMATS, Encoding, Format, Orientation, OrientedCodes
from quantshard.interop.layouts.conversion import InexactConversionError
from quantshard.interop.layouts.table import said
from quantshard.interop.transformer_engine.pieces import CopyPiece, WeightPiece
from quantshard.sharding import ceil_div


def components_of(
    pieces: Sequence[WeightPiece], fmt: Format, shape: tuple[int, int]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Convert a weight to a format's components without changing values. Returns components by name and notes.

    `shape`: the whole weight's shape. The notes list what the format cannot hold.

    Raises:
        InexactConversionError: the values would change; the message states why.
    """
    _check_encodings(pieces, fmt)
    tensors: dict[str, Tensor] = {}
    planes = {
        orientation: plane for orientation in Orientation if (plane := _whole(pieces, orientation, shape)) is not None
    }
    for orientation, copy in fmt.copies.items():
        plane = planes.get(orientation) or (next(iter(planes.values()), None) if fmt.transposable else None)
        if plane is None:
            raise InexactConversionError(
                f"no {orientation.value} copy is stored (of all its shards), and {fmt.name} has one"
            )
        tensors[copy.codes.name] = numerics.pack(plane.codes, copy.codes.encoding)
        tensors[copy.scale.name] = _regrid(plane.scales, plane.block, copy.block, shape)
        if copy.amax is not None:
            assert plane.amax is not None
            if not torch.equal(tensors.setdefault(copy.amax.name, plane.amax), plane.amax):
                raise InexactConversionError("its two copies have different amaxes, and a format has one")
    unused = tuple(orientation for orientation in planes if orientation not in fmt.copies)
    if fmt.transposable and len(planes) == 2:
        _check_copies_agree(tensors, planes, fmt, shape)
        return tensors, ()
    return tensors, tuple(f"its {orientation.value} copy is left out: {fmt.name} has none" for orientation in unused)


def _check_encodings(pieces: Sequence[WeightPiece], fmt: Format) -> None:
    copy = fmt.copies[Orientation.ROWWISE]
    for piece in pieces:
        for theirs, ours, component in (
            (piece.element, copy.codes.encoding, "codes"),
            (piece.scale, copy.scale.encoding, "scales"),
        ):
            if theirs != ours:
                raise InexactConversionError(
                    f"its {component} are {theirs.name} ({piece.kind}), those of {fmt.name} {ours.name}"
                )


def _check_copies_agree(
    found: dict[str, Tensor], planes: dict[Orientation, CopyPiece], fmt: Format, shape: tuple[int, int]
) -> None:
    """Check that the second copy is the first one transposed, because a format with square blocks stores only one."""
    copy, second = fmt.copies[Orientation.ROWWISE], planes[Orientation.COLUMNWISE]
    scales = _regrid(second.scales, second.block, copy.block, shape)
    amax_differs = copy.amax is not None and not torch.equal(found[copy.amax.name], second.amax)  # type: ignore[arg-type]
    if not torch.equal(planes[Orientation.ROWWISE].codes, second.codes) or not torch.equal(
        scales, found[copy.scale.name]
    ):
        raise InexactConversionError(f"its columnwise copy has other codes or scales, and {fmt.name} has one copy")
    if amax_differs:
        raise InexactConversionError("its two copies have different amaxes, and a format has one")


def _whole(pieces: Sequence[WeightPiece], which: Orientation, shape: tuple[int, int]) -> CopyPiece | None:
    """Join one copy of all shards; None if a shard lacks it."""
    shards = [(piece.origin, piece.planes[which]) for piece in pieces if which in piece.planes]
    if len(shards) < len(pieces):
        return None
    first = shards[0][1]
    block = first.block
    if any(plane.block != block for _, plane in shards):
        raise InexactConversionError(f"its shards have blocks of different shapes, among them {said(block)}")
    codes = torch.empty(shape, dtype=torch.uint8, device="cpu")
    scales = first.scales.new_empty([ceil_div(size, side) for size, side in zip(shape, block, strict=True)])
    for (row, col), plane in shards:
        if any(start % side for start, side in zip((row, col), block, strict=True) if side != ALL):
            raise InexactConversionError(
                f"a shard begins at row {row}, column {col}, inside a block of {said(block)} of the whole weight"
            )
        grid_origin = (row // block[0], col // block[1])
        part = scales[
            grid_origin[0] : grid_origin[0] + plane.scales.shape[0],
            grid_origin[1] : grid_origin[1] + plane.scales.shape[1],
        ]
        part.copy_(plane.scales)
        codes[row : row + plane.codes.shape[0], col : col + plane.codes.shape[1]] = plane.codes
    _check_one(shards, "scale", [plane.scales for _, plane in shards] if ALL in block else [])
    _check_one(shards, "amax", [plane.amax for _, plane in shards if plane.amax is not None])
    return CopyPiece(codes, scales, block, first.amax)


def _check_one(found: Sequence[object], what: str, values: Sequence[Tensor]) -> None:
    """Check that all shards agree on a value that the whole weight has only once."""
    if any(not torch.equal(value, values[0]) for value in values):
        unique = sorted({float(value.float().max()) for value in values})
        raise InexactConversionError(
            f"its {len(found)} shards have {len(unique)} values of the one {what}, {unique[0]:g} to {unique[-1]:g}"
        )


def _regrid(grid: Tensor, theirs: tuple[int, int], ours: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Convert a grid of scales to other blocks: repeat for smaller blocks; larger blocks need equal scales inside
    each."""
    for dim in (0, 1):
        size, old, new = grid.shape[dim], min(theirs[dim], shape[dim]), min(ours[dim], shape[dim])
        count = ceil_div(shape[dim], new)
        if count <= size and (new % old == 0 or count == 1):
            step = min(ceil_div(new, old), size)
            merged = grid.index_select(dim, torch.arange(0, size, step, device="cpu"))
            if not torch.equal(merged.repeat_interleave(step, dim).narrow(dim, 0, size), grid):
                raise InexactConversionError(
                    f"blocks of {said(theirs)} have different scales inside one of {said(ours)}"
                )
            grid = merged
        elif old % new == 0 or size == 1:
            grid = grid.repeat_interleave(ceil_div(old, new), dim).narrow(dim, 0, count)
        else:
            raise InexactConversionError(f"its blocks are {said(theirs)}, not {said(ours)}")
    return grid.contiguous()


def rows_of(
    pieces: Sequence[WeightPiece | tuple[tuple[int, ...], Tensor]], start: int, stop: int
) -> list[WeightPiece | tuple[tuple[int, ...], Tensor]]:
    """Return the pieces of a weight's rows start...stop - 1, with origins relative to `start`.

    A quantized piece that would be cut inside a block is dequantized.
    """
    selected: list[WeightPiece | tuple[tuple[int, ...], Tensor]] = []
    for piece in pieces:
        origin, shape = (piece.origin, piece.shape) if isinstance(piece, WeightPiece) else (piece[0], piece[1].shape)
        low, high = max(start - origin[0], 0), min(stop - origin[0], shape[0])
        if low >= high:
            continue
        new_origin = (origin[0] + low - start, *origin[1:])
        if isinstance(piece, WeightPiece) and _can_cut(piece, low, high):
            planes = {orientation: _rows_of_plane(plane, low, high) for orientation, plane in piece.planes.items()}
            selected.append(
                replace(piece, origin=(new_origin[0], new_origin[1]), shape=(high - low, shape[1]), planes=planes)
            )
        else:
            values = _dequantized(piece) if isinstance(piece, WeightPiece) else piece[1]
            selected.append((new_origin, values[low:high]))
    return selected


def _can_cut(piece: WeightPiece, low: int, high: int) -> bool:
    heights = [plane.block[0] for plane in piece.planes.values() if plane.block[0] != ALL]
    return all(low % height == 0 and (high % height == 0 or high == piece.shape[0]) for height in heights)


def _rows_of_plane(plane: CopyPiece, low: int, high: int) -> CopyPiece:
    height = plane.block[0]
    scales = plane.scales if height == ALL else plane.scales[low // height : ceil_div(high, height)]
    return replace(plane, codes=plane.codes[low:high], scales=scales)


def values_of(pieces: Sequence[WeightPiece | tuple[tuple[int, ...], Tensor]], shape: tuple[int, ...]) -> Tensor:
    """Return the values of a tensor from quantized pieces and (origin, values) pieces: float32, or the common dtype of
    all pieces.

    Raises:
        CheckpointError: a piece has only one copy, in blocks that no format has.
    """
    dtypes = {torch.float32 if isinstance(piece, WeightPiece) else piece[1].dtype for piece in pieces}
    whole = torch.empty(shape, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32, device="cpu")
    for piece in pieces:
        origin, values = (piece.origin, _dequantized(piece)) if isinstance(piece, WeightPiece) else piece
        whole[tuple(slice(o, o + n) for o, n in zip(origin, values.shape, strict=True))] = values
    return whole


def _dequantized(piece: WeightPiece) -> Tensor:
    plane = piece.planes.get(Orientation.ROWWISE) or piece.planes[Orientation.COLUMNWISE]
    copy = _copy_of(piece.element, piece.scale, plane.block)
    if copy is None:
        raise CheckpointError(f"its {piece.kind} has one copy, in blocks of {said(plane.block)}, which no format has")
    parts = {copy.codes.name: numerics.pack(plane.codes, piece.element), copy.scale.name: plane.scales}
    if copy.amax is not None:
        assert plane.amax is not None
        parts[copy.amax.name] = plane.amax
    return numerics.dequantize(copy, parts, piece.shape)


def _copy_of(element: Encoding, scale: Encoding, block: tuple[int, int]) -> OrientedCodes | None:
    """Find a copy in any format with these encodings and blocks."""
    copies = (copy for fmt in FORMATS.values() for copy in fmt.copies.values())
    return next((c for c in copies if (c.codes.encoding, c.scale.encoding, c.block) == (element, scale, block)), None)
