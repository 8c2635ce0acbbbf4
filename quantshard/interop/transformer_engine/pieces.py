"""Quantized TransformerEngine tensors: their pickles, and their conversion to the components of a format.

DCP stores each shard by `torch.save` of TransformerEngine's tensor class, whose pickle calls one function per class.
Only the arguments are inspected; their order and layouts follow TransformerEngine 2.17 to 2.20 (`tensor/*_tensor.py`:
`__reduce_ex__` and `get_scale_shape`). It quantizes each shard separately, but a format's blocks belong to the whole
weight, so a shard must start on a block border, and the shards under one scale must have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.errors import CheckpointError
from quantshard.formats import ALL, E2M1, E4M3, E5M2, E8M0, FORMATS, FP32, Encoding, Format, Orientation, OrientedCodes
from quantshard.interop.layouts.conversion import InexactConversionError, regrid
from quantshard.interop.layouts.table import said
from quantshard.sharding import ceil_div

_PACKAGE = "transformer_engine.pytorch."
_ENUMS = (f"{_PACKAGE}constants.DType", "transformer_engine_torch.DType")
_ELEMENTS = {7: E4M3, 8: E5M2, 10: E2M1}
"""TransformerEngine's DType number -> element encoding (`common/include/transformer_engine.h`)."""


class RecordedCall:
    """A call of a function or class of TransformerEngine that was not executed. A subclass per name, `name`."""

    def __new__(cls, *args: Any) -> RecordedCall:
        call = super().__new__(cls)
        call.name, call.args = cls.__name__, args
        return call

    def __setstate__(self, state: object) -> None:
        """Ignore attributes, which only quantizers have."""

    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class CopyPiece:
    """One quantized copy of a rectangle: `codes` uint8 [rows, cols], one code per byte, and a grid of `scales`.

    `block`: rows and columns per scale, counted from the rectangle's origin. `amax`: float32 [1, 1], which determines
    the second scale.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    amax: Tensor | None = None


@dataclass(frozen=True, eq=False)
class WeightPiece:
    """A rectangle of a weight at `origin`, as quantized by TransformerEngine. `notes`: anything unusual about it."""

    kind: str
    origin: tuple[int, int]
    shape: tuple[int, int]
    element: Encoding
    scale: Encoding
    planes: Mapping[Orientation, CopyPiece]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _CopyLayout:
    """Layout of one copy: rows and columns of a block, and whether codes and scales are stored transposed."""

    which: Orientation
    block: tuple[int, int]
    codes_transposed: bool = False
    scales_transposed: bool = False


@dataclass(frozen=True, slots=True)
class _TensorClass:
    """A tensor class, the arguments of its pickle function in order, and a function from these to copies' layouts."""

    name: str
    module: str
    quantizers: tuple[str, ...]
    arguments: tuple[str, ...]
    scale: Encoding
    layouts: Callable[[dict[str, Any]], tuple[_CopyLayout, ...]]

    @property
    def call(self) -> str:
        return f"{_PACKAGE}tensor.{self.module}._make_{self.module}_in_reduce_ex"


def piece_of(call: RecordedCall, origin: tuple[int, ...], shape: tuple[int, ...]) -> WeightPiece:
    kind = _BY_CALL.get(call.name)
    if kind is None:
        raise CheckpointError(f"{call.name} is not a weight")
    if len(shape) != 2 or len(call.args) > len(kind.arguments):
        raise CheckpointError(f"unsupported {kind.name} of shape {list(shape)} with {len(call.args)} arguments")
    # older releases lack the last arguments
    fields = dict.fromkeys(kind.arguments) | dict(zip(kind.arguments, call.args, strict=False))
    if not isinstance(fields["shape"], tuple) or tuple(fields["shape"]) != tuple(shape):
        raise CheckpointError(f"its {kind.name} does not have the shape {list(shape)} of the metadata")
    try:
        return _piece(kind, fields, (origin[0], origin[1]), (shape[0], shape[1]))
    except CheckpointError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        # a forged or damaged pickle can have any argument
        raise CheckpointError(f"its {kind.name} is damaged ({type(error).__name__})") from error


def _piece(kind: _TensorClass, fields: dict[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> WeightPiece:
    element, scale = _element(fields), kind.scale
    if fields.get("swizzled"):
        raise CheckpointError(f"its {kind.name} has swizzled scales; save it with optimize_for_gemm=False")
    by_orientation = {side.which: _plane(fields, side, shape, element, scale) for side in kind.layouts(fields)}
    planes = {orientation: plane for orientation, plane in by_orientation.items() if plane is not None}
    if not planes:
        raise CheckpointError(f"its {kind.name} has no rowwise or columnwise copy")
    if scale == E4M3 and any(plane.amax is None for plane in planes.values()):
        raise CheckpointError(f"its {kind.name} has no amax")
    dtypes = {fields[f"{orientation.value}_scale_inv"].dtype for orientation in planes} if scale == FP32 else set()
    notes = tuple(f"its scales were saved as {dtype}" for dtype in dtypes if dtype != torch.float32)
    return WeightPiece(kind.name, origin, shape, element, scale, planes, notes)


def _element(fields: Mapping[str, Any]) -> Encoding:
    code = fields["element"]
    number = code.args[0] if isinstance(code, RecordedCall) and code.name in _ENUMS and len(code.args) == 1 else code
    if number not in _ELEMENTS:
        raise CheckpointError("unknown TransformerEngine DType" + (f" {number}" if type(number) is int else ""))
    return _ELEMENTS[number]


def _plane(
    fields: Mapping[str, Any], side: _CopyLayout, shape: tuple[int, int], element: Encoding, scale: Encoding
) -> CopyPiece | None:
    prefix = side.which.value
    if fields[f"{prefix}_data"] is None:
        return None
    codes, scales = fields[f"{prefix}_data"], fields[f"{prefix}_scale_inv"]
    data_shape = (shape[1], shape[0]) if side.codes_transposed else shape
    width = ceil_div(data_shape[1], max(1, 8 // element.bits))
    if codes.itemsize != 1 or tuple(codes.shape) != (data_shape[0], width):
        raise CheckpointError(f"its {prefix} data are {codes.dtype} {list(codes.shape)}, not {[data_shape[0], width]}")
    codes = numerics.unpack(codes.view(torch.uint8), element, data_shape[1])
    rows, cols = (ceil_div(size, block) for size, block in zip(shape, side.block, strict=True))
    grid = (cols, rows) if side.scales_transposed else (rows, cols)
    if scales.ndim != 2 or scales.shape[0] < grid[0] or scales.shape[1] < grid[1]:
        raise CheckpointError(f"its {prefix} scales are {list(scales.shape)}, not {list(grid)}")
    # drop the padding
    scales = scales[: grid[0], : grid[1]]
    if scale.bits == 8 and scales.itemsize == 1:
        scales = scales.contiguous().view(scale.storage)
    elif scale == FP32 and scales.is_floating_point():
        scales = scales.float()
    if scales.dtype != scale.storage:
        raise CheckpointError(f"its {prefix} scales are {scales.dtype}, not {scale.storage}")
    amax = fields.get(f"{prefix}_amax")
    return CopyPiece(
        codes.t() if side.codes_transposed else codes,
        scales.t() if side.scales_transposed else scales,
        side.block,
        None if amax is None else amax.reshape(1, 1).float(),
    )


def _per_tensor(fields: dict[str, Any]) -> tuple[_CopyLayout, ...]:
    fields["rowwise_scale_inv"] = fields["rowwise_scale_inv"].reshape(1, 1)
    is_transposed = fields["rowwise_data"] is None
    if is_transposed:
        fields["rowwise_data"] = fields["transposed_data"]
    return (_CopyLayout(Orientation.ROWWISE, (ALL, ALL), codes_transposed=is_transposed),)


def _blockwise(fields: dict[str, Any]) -> tuple[_CopyLayout, ...]:
    if fields["is_2d"]:
        square = (128, 128)
        return _CopyLayout(Orientation.ROWWISE, square), _CopyLayout(Orientation.COLUMNWISE, square, True, True)
    rowwise = _CopyLayout(Orientation.ROWWISE, (1, 128), scales_transposed=True)
    return rowwise, _CopyLayout(Orientation.COLUMNWISE, (128, 1), codes_transposed=True)


def _mxfp8(fields: dict[str, Any]) -> tuple[_CopyLayout, ...]:
    return _CopyLayout(Orientation.ROWWISE, (1, 32)), _CopyLayout(Orientation.COLUMNWISE, (32, 1))


def _nvfp4(fields: dict[str, Any]) -> tuple[_CopyLayout, ...]:
    if fields["row_scaled"] or fields["e4m3_max"] not in (None, E4M3.max):
        raise CheckpointError(f"unsupported NVFP4Tensor: it has row_scaled_nvfp4, or e4m3_max is not {E4M3.max:g}")
    return _CopyLayout(Orientation.ROWWISE, (1, 16)), _CopyLayout(Orientation.COLUMNWISE, (16, 1), True, True)


_COPIES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
_KINDS = (
    _TensorClass(
        "Float8Tensor", "float8_tensor", ("Float8Quantizer", "Float8CurrentScalingQuantizer"),
        ("rowwise_data", "element", "rowwise_scale_inv", "dtype", "shape", "transposed_data"), FP32, _per_tensor,
    ),
    _TensorClass(
        "Float8BlockwiseQTensor", "float8_blockwise_tensor", ("Float8BlockQuantizer",),
        ("shape", *_COPIES, "element", "dtype", "quantizer", "is_2d", "data_format"), FP32, _blockwise,
    ),
    _TensorClass(
        "MXFP8Tensor", "mxfp8_tensor", ("MXFP8Quantizer",),
        (*_COPIES, "element", "dtype", "shape", "quantizer", "swizzled"), E8M0, _mxfp8,
    ),
    _TensorClass(
        "NVFP4Tensor", "nvfp4_tensor", ("NVFP4Quantizer",),
        ("shape", *_COPIES, "rowwise_amax", "columnwise_amax", "element", "dtype", "quantizer", "swizzled",
         "row_scaled", "four_over_six", "e4m3_max"), E4M3, _nvfp4,
    ),
)  # fmt: skip
_BY_CALL = {kind.call: kind for kind in _KINDS}

CALLS = frozenset(
    {*_BY_CALL, *_ENUMS, *(f"{_PACKAGE}tensor.{kind.module}.{name}" for kind in _KINDS for name in kind.quantizers)}
)
"""All names, other than tensors, that can occur in a weight's pickle. A quantizer's content is ignored."""


def recorded_calls() -> AbstractContextManager[None]:
    """Let `torch.load(weights_only=True)` record calls of `CALLS` in the block, instead of rejecting them."""
    stand_ins: list[Any] = [(type(name, (RecordedCall,), {}), name) for name in sorted(CALLS)]
    return torch.serialization.safe_globals(stand_ins)  # type: ignore[no-untyped-call, no-any-return]


PlainPiece = tuple[tuple[int, ...], Tensor]
"""Origin and values of a shard in high precision."""


def components_of(
    pieces: Sequence[WeightPiece], fmt: Format, shape: tuple[int, int]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Convert a weight of `shape` to a format's components, values unchanged, with notes on what it cannot hold."""
    encodings = fmt.copies[Orientation.ROWWISE].codes.encoding, fmt.copies[Orientation.ROWWISE].scale.encoding
    for piece in pieces:
        if (piece.element, piece.scale) != encodings:
            text = f"its codes are {piece.element.name}, its scales {piece.scale.name}, unlike {fmt.name}"
            raise InexactConversionError(text)
    tensors: dict[str, Tensor] = {}
    planes = {
        orientation: plane for orientation in Orientation if (plane := _whole(pieces, orientation, shape)) is not None
    }
    for orientation, copy in fmt.copies.items():
        plane = planes.get(orientation) or (next(iter(planes.values()), None) if fmt.transposable else None)
        if plane is None:
            raise InexactConversionError(f"no {orientation.value} copy is stored (of all its shards) for {fmt.name}")
        _add_copy(tensors, plane, copy, shape)
    if fmt.transposable and len(planes) == 2:
        # square blocks are stored once, so the second copy must be the first one transposed
        _add_copy(tensors, planes[Orientation.COLUMNWISE], fmt.copies[Orientation.ROWWISE], shape)
        return tensors, ()
    unused = tuple(orientation for orientation in planes if orientation not in fmt.copies)
    return tensors, tuple(f"its {orientation.value} copy is omitted: {fmt.name} has none" for orientation in unused)


def _add_copy(tensors: dict[str, Tensor], plane: CopyPiece, copy: OrientedCodes, shape: tuple[int, int]) -> None:
    """Add a copy's components to `tensors`. Components that are already there must be the same."""
    by_row = plane.scales.repeat_interleave(min(plane.block[0], shape[0]), 0)[: shape[0]]
    added = {
        copy.codes.name: numerics.pack(plane.codes, copy.codes.encoding),
        copy.scale.name: regrid(by_row, plane.block, copy.block, shape[1]),
    }
    if copy.amax is not None:
        assert plane.amax is not None
        added[copy.amax.name] = plane.amax
    for name, tensor in added.items():
        if not torch.equal(tensors.setdefault(name, tensor), tensor):
            raise InexactConversionError(f"its rowwise and columnwise copies have different {name}")


def _whole(pieces: Sequence[WeightPiece], which: Orientation, shape: tuple[int, int]) -> CopyPiece | None:
    shards = [(piece.origin, piece.planes[which]) for piece in pieces if which in piece.planes]
    if len(shards) < len(pieces):
        return None
    first = shards[0][1]
    block = first.block
    if any(plane.block != block for _, plane in shards):
        raise InexactConversionError("its shards have blocks of different shapes")
    codes = torch.empty(shape, dtype=torch.uint8, device="cpu")
    scales = first.scales.new_empty([ceil_div(size, side) for size, side in zip(shape, block, strict=True)])
    for (row, col), plane in shards:
        if any(start % side for start, side in zip((row, col), block, strict=True) if side != ALL):
            raise InexactConversionError(f"a shard begins at row {row}, column {col}, inside a block of {said(block)}")
        first_row, first_col = row // block[0], col // block[1]
        height, width = plane.scales.shape
        scales[first_row : first_row + height, first_col : first_col + width] = plane.scales
        codes[row : row + plane.codes.shape[0], col : col + plane.codes.shape[1]] = plane.codes
    _check_equal("scale", [plane.scales for _, plane in shards] if ALL in block else [])
    _check_equal("amax", [plane.amax for _, plane in shards if plane.amax is not None])
    return CopyPiece(codes, scales, block, first.amax)


def _check_equal(what: str, values: Sequence[Tensor]) -> None:
    if any(not torch.equal(value, values[0]) for value in values):
        raise InexactConversionError(f"its shards have different values of the one {what}")


def rows_of(pieces: Sequence[WeightPiece | PlainPiece], start: int, stop: int) -> list[WeightPiece | PlainPiece]:
    """Return the pieces of rows start...stop - 1, relative to `start`; pieces cut inside a block are dequantized."""
    selected: list[WeightPiece | PlainPiece] = []
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


def values_of(pieces: Sequence[WeightPiece | PlainPiece], shape: tuple[int, ...]) -> Tensor:
    """Return the values of a tensor from its pieces: float32, or the common dtype of all pieces."""
    dtypes = {torch.float32 if isinstance(piece, WeightPiece) else piece[1].dtype for piece in pieces}
    whole = torch.empty(shape, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32, device="cpu")
    for piece in pieces:
        origin, values = (piece.origin, _dequantized(piece)) if isinstance(piece, WeightPiece) else piece
        whole[tuple(slice(o, o + n) for o, n in zip(origin, values.shape, strict=True))] = values
    return whole


def _dequantized(piece: WeightPiece) -> Tensor:
    plane = piece.planes.get(Orientation.ROWWISE) or piece.planes[Orientation.COLUMNWISE]
    copies = (copy for fmt in FORMATS.values() for copy in fmt.copies.values())
    kind = piece.element, piece.scale, plane.block
    copy = next((c for c in copies if (c.codes.encoding, c.scale.encoding, c.block) == kind), None)
    if copy is None:
        raise CheckpointError(f"no format has blocks of {said(plane.block)}, as the one copy of its {piece.kind}")
    parts = {copy.codes.name: numerics.pack(plane.codes, piece.element), copy.scale.name: plane.scales}
    if copy.amax is not None:
        assert plane.amax is not None
        parts[copy.amax.name] = plane.amax
    return numerics.dequantize(copy, parts, piece.shape)
