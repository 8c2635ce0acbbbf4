"""From TransformerEngine's pieces of a weight to the components of a format: bytes are moved, and no value is computed.

Pieces are shards, each quantized for itself: a format's grid is that of the whole weight, so a shard must begin on a
border of blocks, and shards of a weight with one scale must have the same.
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
    """The components of a weight `shape` in a format, by their names, with the same values; and what was left out.

    Raises:
        InexactConversionError: they cannot be; the text says why.
    """
    _check_encodings(pieces, fmt)
    found: dict[str, Tensor] = {}
    planes = {which: plane for which in Orientation if (plane := _whole(pieces, which, shape)) is not None}
    for which, copy in fmt.copies.items():
        plane = planes.get(which) or (next(iter(planes.values()), None) if fmt.transposable else None)
        if plane is None:
            raise InexactConversionError(f"no {which.value} copy is stored (of all its shards), and {fmt.name} has one")
        found[copy.codes.name] = numerics.pack(plane.codes, copy.codes.encoding)
        found[copy.scale.name] = _regrid(plane.scales, plane.block, copy.block, shape)
        if copy.amax is not None:
            assert plane.amax is not None
            if not torch.equal(found.setdefault(copy.amax.name, plane.amax), plane.amax):
                raise InexactConversionError("its two copies have different amaxes, and a format has one")
    left = tuple(which for which in planes if which not in fmt.copies)
    if fmt.transposable and len(planes) == 2:
        _check_copies_agree(found, planes, fmt, shape)
        return found, ()
    return found, tuple(f"its {which.value} copy is left out: {fmt.name} has none" for which in left)


def _check_encodings(pieces: Sequence[WeightPiece], fmt: Format) -> None:
    copy = fmt.copies[Orientation.ROWWISE]
    for piece in pieces:
        for theirs, ours, what in (
            (piece.element, copy.codes.encoding, "codes"),
            (piece.scale, copy.scale.encoding, "scales"),
        ):
            if theirs != ours:
                raise InexactConversionError(
                    f"its {what} are {theirs.name} ({piece.kind}), those of {fmt.name} {ours.name}"
                )


def _check_copies_agree(
    found: dict[str, Tensor], planes: dict[Orientation, CopyPiece], fmt: Format, shape: tuple[int, int]
) -> None:
    """Square blocks are kept once, so the second copy must be the first one transposed."""
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
    """One copy of all shards together; None if a shard lacks it."""
    found = [(piece.origin, piece.planes[which]) for piece in pieces if which in piece.planes]
    if len(found) < len(pieces):
        return None
    first = found[0][1]
    block = first.block
    if any(plane.block != block for _, plane in found):
        raise InexactConversionError(f"its shards have blocks of different shapes, among them {said(block)}")
    codes = torch.empty(shape, dtype=torch.uint8, device="cpu")
    scales = first.scales.new_empty([ceil_div(size, side) for size, side in zip(shape, block, strict=True)])
    for (row, col), plane in found:
        if any(start % side for start, side in zip((row, col), block, strict=True) if side != ALL):
            raise InexactConversionError(
                f"a shard begins at row {row}, column {col}, inside a block of {said(block)} of the whole weight"
            )
        at = (row // block[0], col // block[1])
        part = scales[at[0] : at[0] + plane.scales.shape[0], at[1] : at[1] + plane.scales.shape[1]]
        part.copy_(plane.scales)
        codes[row : row + plane.codes.shape[0], col : col + plane.codes.shape[1]] = plane.codes
    _check_one(found, "scale", [plane.scales for _, plane in found] if ALL in block else [])
    _check_one(found, "amax", [plane.amax for _, plane in found if plane.amax is not None])
    return CopyPiece(codes, scales, block, first.amax)


def _check_one(found: Sequence[object], what: str, values: Sequence[Tensor]) -> None:
    """Check that all shards of a weight have the same value of what the whole has once."""
    if any(not torch.equal(value, values[0]) for value in values):
        every = sorted({float(value.float().max()) for value in values})
        raise InexactConversionError(
            f"its {len(found)} shards have {len(every)} values of the one {what}, {every[0]:g} to {every[-1]:g}"
        )


def _regrid(grid: Tensor, theirs: tuple[int, int], ours: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """A grid of scales for other blocks: repeated for smaller ones; for larger ones all in one must be equal."""
    for dim in (0, 1):
        size, there, here = grid.shape[dim], min(theirs[dim], shape[dim]), min(ours[dim], shape[dim])
        wanted = ceil_div(shape[dim], here)
        if wanted <= size and (here % there == 0 or wanted == 1):
            step = min(ceil_div(here, there), size)
            kept = grid.index_select(dim, torch.arange(0, size, step, device="cpu"))
            if not torch.equal(kept.repeat_interleave(step, dim).narrow(dim, 0, size), grid):
                raise InexactConversionError(
                    f"blocks of {said(theirs)} have different scales inside one of {said(ours)}"
                )
            grid = kept
        elif there % here == 0 or size == 1:
            grid = grid.repeat_interleave(ceil_div(there, here), dim).narrow(dim, 0, wanted)
        else:
            raise InexactConversionError(f"its blocks are {said(theirs)}, not {said(ours)}")
    return grid.contiguous()


def rows_of(
    pieces: Sequence[WeightPiece | tuple[tuple[int, ...], Tensor]], start: int, stop: int
) -> list[WeightPiece | tuple[tuple[int, ...], Tensor]]:
    """The pieces of a weight's rows start...stop - 1, counted from `start`.

    A quantized piece that is cut inside a block becomes values in high precision.
    """
    found: list[WeightPiece | tuple[tuple[int, ...], Tensor]] = []
    for piece in pieces:
        origin, shape = (piece.origin, piece.shape) if isinstance(piece, WeightPiece) else (piece[0], piece[1].shape)
        low, high = max(start - origin[0], 0), min(stop - origin[0], shape[0])
        if low >= high:
            continue
        place = (origin[0] + low - start, *origin[1:])
        if isinstance(piece, WeightPiece) and _can_cut(piece, low, high):
            planes = {which: _rows_of_plane(plane, low, high) for which, plane in piece.planes.items()}
            found.append(replace(piece, origin=(place[0], place[1]), shape=(high - low, shape[1]), planes=planes))
        else:
            values = _dequantized(piece) if isinstance(piece, WeightPiece) else piece[1]
            found.append((place, values[low:high]))
    return found


def _can_cut(piece: WeightPiece, low: int, high: int) -> bool:
    heights = [plane.block[0] for plane in piece.planes.values() if plane.block[0] != ALL]
    return all(low % height == 0 and (high % height == 0 or high == piece.shape[0]) for height in heights)


def _rows_of_plane(plane: CopyPiece, low: int, high: int) -> CopyPiece:
    height = plane.block[0]
    scales = plane.scales if height == ALL else plane.scales[low // height : ceil_div(high, height)]
    return replace(plane, codes=plane.codes[low:high], scales=scales)


def values_of(pieces: Sequence[WeightPiece | tuple[tuple[int, ...], Tensor]], shape: tuple[int, ...]) -> Tensor:
    """The values of a tensor, of which some pieces may be in high precision at a place: float32, or the one dtype that
    all of them have.

    Raises:
        CheckpointError: a piece has but one copy, in blocks that no format has.
    """
    dtypes = {torch.float32 if isinstance(piece, WeightPiece) else piece[1].dtype for piece in pieces}
    found = torch.empty(shape, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32, device="cpu")
    for piece in pieces:
        origin, values = (piece.origin, _dequantized(piece)) if isinstance(piece, WeightPiece) else piece
        found[tuple(slice(o, o + n) for o, n in zip(origin, values.shape, strict=True))] = values
    return found


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
    """A copy of some format that has these encodings and blocks."""
    every = (copy for fmt in FORMATS.values() for copy in fmt.copies.values())
    return next((c for c in every if (c.codes.encoding, c.scale.encoding, c.block) == (element, scale, block)), None)
