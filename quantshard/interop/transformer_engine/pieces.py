"""Parses one quantized TransformerEngine tensor from its pickle: codes and scales, without padding.

DCP stores each shard of a weight by `torch.save` of TransformerEngine's tensor class. Its pickle calls one function per
class, with the inner tensors and a few numbers. Here, only the arguments are inspected, and nothing is called. Their
order and layouts follow TransformerEngine 2.17 to 2.20 (`tensor/*_tensor.py`: `__reduce_ex__` and `get_scale_shape`).
Earlier releases pickle a method instead and are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.errors import CheckpointError
from quantshard.formats import ALL, E2M1, E4M3, E5M2, E8M0, FP32, Encoding, Orientation
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
    """A tensor class and the arguments of its pickle function, in order. Older releases lack the last arguments."""

    name: str
    module: str
    function: str
    quantizers: tuple[str, ...]
    arguments: tuple[str, ...]
    read: Callable[[Mapping[str, Any], tuple[int, int], tuple[int, int]], WeightPiece]

    @property
    def call(self) -> str:
        """Full name of the function in this class's pickle."""
        return f"{_PACKAGE}tensor.{self.module}.{self.function}"


def piece_of(call: RecordedCall, origin: tuple[int, ...], shape: tuple[int, ...]) -> WeightPiece:
    """Parse a pickled TransformerEngine tensor that holds a rectangle of a weight.

    Raises:
        CheckpointError: the tensor is not a matrix, is inconsistent, or has an unknown layout.
    """
    kind = _BY_CALL.get(call.name)
    if kind is None:
        raise CheckpointError(f"it is a {call.name}, which is no weight")
    if len(shape) != 2 or len(call.args) > len(kind.arguments):
        raise CheckpointError(f"it is a {kind.name} of shape {list(shape)} with {len(call.args)} arguments")
    fields = dict.fromkeys(kind.arguments) | dict(zip(kind.arguments, call.args, strict=False))
    if not isinstance(fields["shape"], tuple) or tuple(fields["shape"]) != tuple(shape):
        raise CheckpointError(f"its {kind.name} has not the shape {list(shape)}, which the metadata say")
    return kind.read(fields, (origin[0], origin[1]), (shape[0], shape[1]))


def _element(fields: Mapping[str, Any]) -> Encoding:
    code = fields["element"]
    number = code.args[0] if isinstance(code, RecordedCall) and code.name in _ENUMS and len(code.args) == 1 else code
    encoding = _ELEMENTS.get(number) if type(number) is int else None
    if encoding is None:
        label = number if type(number) is int else type(number).__name__
        raise CheckpointError(f"its codes are of TransformerEngine's DType {label}, which is not known here")
    return encoding


def _tensor(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(f"its {what} is no tensor")
    return value


def _one(value: Any, what: str) -> Tensor:
    """Return a one-element tensor as [1, 1]."""
    tensor = _tensor(value, what)
    if tensor.numel() != 1:
        raise CheckpointError(f"its {what} has {tensor.numel()} numbers, not one")
    return tensor.reshape(1, 1)


def _flag(value: Any, what: str) -> bool:
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"its {what} is neither true nor false")
    return bool(value)


def _plane(
    fields: Mapping[str, Any], side: _CopyLayout, shape: tuple[int, int], element: Encoding, scale: Encoding
) -> CopyPiece | None:
    """Read one copy, in the weight's row and column order; None if it is not stored."""
    prefix = side.which.value
    if fields[f"{prefix}_data"] is None:
        return None
    codes = _tensor(fields[f"{prefix}_data"], f"{prefix} data")
    scales = _tensor(fields[f"{prefix}_scale_inv"], f"{prefix} scale")
    data_shape = (shape[1], shape[0]) if side.codes_transposed else shape
    width = ceil_div(data_shape[1], max(1, 8 // element.bits))
    if codes.itemsize != 1 or tuple(codes.shape) != (data_shape[0], width):
        raise CheckpointError(
            f"its {prefix} data are {codes.dtype} {list(codes.shape)}, not bytes {[data_shape[0], width]}"
        )
    codes = numerics.unpack(codes.view(torch.uint8), element, data_shape[1])
    rows, cols = (ceil_div(size, block) for size, block in zip(shape, side.block, strict=True))
    grid = (cols, rows) if side.scales_transposed else (rows, cols)
    if scales.ndim != 2 or scales.shape[0] < grid[0] or scales.shape[1] < grid[1]:
        raise CheckpointError(f"its {prefix} scales are {list(scales.shape)}, of which {list(grid)} are needed")
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
        None if amax is None else _one(amax, f"{prefix} amax").float(),
    )


def _piece(
    kind: str,
    fields: Mapping[str, Any],
    origin: tuple[int, int],
    shape: tuple[int, int],
    scale: Encoding,
    *sides: _CopyLayout,
) -> WeightPiece:
    element = _element(fields)
    if _flag(fields.get("swizzled"), "with_gemm_swizzled_scales"):
        raise CheckpointError(
            f"its {kind} has scales in the order of a GEMM ('swizzled'); save with optimize_for_gemm=False"
        )
    by_orientation = {side.which: _plane(fields, side, shape, element, scale) for side in sides}
    planes = {orientation: plane for orientation, plane in by_orientation.items() if plane is not None}
    if not planes:
        raise CheckpointError(f"its {kind} has neither a rowwise nor a columnwise copy")
    dtypes = {fields[f"{orientation.value}_scale_inv"].dtype for orientation in planes} if scale == FP32 else set()
    notes = tuple(f"its scales were saved as {dtype}, not as used" for dtype in dtypes if dtype != torch.float32)
    return WeightPiece(kind, origin, shape, element, scale, planes, notes)


def _per_tensor(fields: Mapping[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> WeightPiece:
    scale, transposed = _one(fields["scale_inv"], "scale"), fields["data"] is None
    rowwise_fields = {
        "element": fields["element"],
        "rowwise_data": fields["columnwise_data" if transposed else "data"],
        "rowwise_scale_inv": scale,
    }
    return _piece(
        "Float8Tensor",
        rowwise_fields,
        origin,
        shape,
        FP32,
        _CopyLayout(Orientation.ROWWISE, (ALL, ALL), codes_transposed=transposed),
    )


def _blockwise(fields: Mapping[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> WeightPiece:
    sides = (
        (_CopyLayout(Orientation.ROWWISE, (128, 128)), _CopyLayout(Orientation.COLUMNWISE, (128, 128), True, True))
        if _flag(fields["is_2d"], "is_2D_scaled")
        else (
            _CopyLayout(Orientation.ROWWISE, (1, 128), False, True),
            _CopyLayout(Orientation.COLUMNWISE, (128, 1), True, False),
        )
    )
    return _piece("Float8BlockwiseQTensor", fields, origin, shape, FP32, *sides)


def _mxfp8(fields: Mapping[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> WeightPiece:
    sides = (_CopyLayout(Orientation.ROWWISE, (1, 32)), _CopyLayout(Orientation.COLUMNWISE, (32, 1)))
    return _piece("MXFP8Tensor", fields, origin, shape, E8M0, *sides)


def _nvfp4(fields: Mapping[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> WeightPiece:
    kind = "NVFP4Tensor"
    largest = fields["e4m3_max"]
    if _flag(fields["row_scaled"], "row_scaled_nvfp4") or not (
        largest is None or (type(largest) is int and largest == E4M3.max)
    ):
        raise CheckpointError(
            f"its {kind} has a second scale for each row, or one for block scales up to another number; formats "
            f"here have one for the tensor, for block scales up to {E4M3.max:g}"
        )
    sides = (_CopyLayout(Orientation.ROWWISE, (1, 16)), _CopyLayout(Orientation.COLUMNWISE, (16, 1), True, True))
    piece = _piece(kind, fields, origin, shape, E4M3, *sides)
    if any(plane.amax is None for plane in piece.planes.values()):
        raise CheckpointError(f"its {kind} has no amax, without which its scales mean nothing")
    return piece


_COPIES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
_KINDS = (
    _TensorClass(
        "Float8Tensor", "float8_tensor", "_make_float8_tensor_in_reduce_ex",
        ("Float8Quantizer", "Float8CurrentScalingQuantizer"),
        ("data", "element", "scale_inv", "dtype", "shape", "columnwise_data"), _per_tensor,
    ),
    _TensorClass(
        "Float8BlockwiseQTensor", "float8_blockwise_tensor", "_make_float8_blockwise_tensor_in_reduce_ex",
        ("Float8BlockQuantizer",),
        ("shape", *_COPIES, "element", "dtype", "quantizer", "is_2d", "data_format"), _blockwise,
    ),
    _TensorClass(
        "MXFP8Tensor", "mxfp8_tensor", "_make_mxfp8_tensor_in_reduce_ex", ("MXFP8Quantizer",),
        (*_COPIES, "element", "dtype", "shape", "quantizer", "swizzled"), _mxfp8,
    ),
    _TensorClass(
        "NVFP4Tensor", "nvfp4_tensor", "_make_nvfp4_tensor_in_reduce_ex", ("NVFP4Quantizer",),
        ("shape", *_COPIES, "rowwise_amax", "columnwise_amax", "element", "dtype", "quantizer", "swizzled",
         "row_scaled", "four_over_six", "e4m3_max"), _nvfp4,
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
