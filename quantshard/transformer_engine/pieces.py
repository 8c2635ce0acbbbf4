"""One quantized tensor of TransformerEngine, as its pickle describes it: codes and scales, without padding.

DCP stores each shard of a weight by `torch.save` of TransformerEngine's tensor class, whose pickle is a call of one
function by class, with the inner tensors and a few numbers. Nothing is called here: the arguments are looked at. Their
order and the layouts are those of TransformerEngine 2.17 to 2.20 (`tensor/*_tensor.py`: `__reduce_ex__` and
`get_scale_shape`); earlier releases pickle a method instead, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.checkpoints.entries import Call
from quantshard.errors import CheckpointError
from quantshard.formats import ALL, E2M1, E4M3, E5M2, E8M0, FP32, Copy, Encoding
from quantshard.sharding import ceil_div

_PACKAGE = "transformer_engine.pytorch."
_ENUMS = (f"{_PACKAGE}constants.DType", "transformer_engine_torch.DType")
_ELEMENTS = {7: E4M3, 8: E5M2, 10: E2M1}
"""Element encodings by their number in TransformerEngine's DType (`common/include/transformer_engine.h`)."""

_E4M3_MAX = 448


@dataclass(frozen=True, eq=False)
class Plane:
    """One quantized copy of a rectangle: `codes` uint8 [rows, cols], one per byte, and a grid of `scales`.

    Each scale is for a `block` of rows and columns, counted from the rectangle's first. `amax`: float32 [1, 1], from
    which a second scale derives.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    amax: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangle of a weight, at `origin`, as TransformerEngine quantized it. `notes`: what is odd about it."""

    kind: str
    origin: tuple[int, int]
    shape: tuple[int, int]
    element: Encoding
    scale: Encoding
    planes: Mapping[Copy, Plane]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Side:
    """How one copy is laid out: the rows and columns of a block; whether codes, scales are stored transposed."""

    which: Copy
    block: tuple[int, int]
    codes_turned: bool = False
    scales_turned: bool = False


@dataclass(frozen=True, slots=True)
class _Kind:
    """A tensor class: the arguments of its function in their order, of which older releases lack the last ones."""

    name: str
    module: str
    function: str
    quantizers: tuple[str, ...]
    arguments: tuple[str, ...]
    read: Callable[[Mapping[str, Any], tuple[int, int], tuple[int, int]], Piece]

    @property
    def call(self) -> str:
        """What the pickle names."""
        return f"{_PACKAGE}tensor.{self.module}.{self.function}"


def piece_of(call: Call, origin: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    """What a pickled tensor of TransformerEngine holds of a weight's rectangle.

    Raises:
        CheckpointError: it is no matrix, contradicts itself, or has a layout that is not known.
    """
    kind = _BY_CALL.get(call.name)
    if kind is None:
        raise CheckpointError(f"it is a {call.name}, which is no weight")
    if len(shape) != 2 or len(call.args) > len(kind.arguments):
        raise CheckpointError(f"it is a {kind.name} of shape {list(shape)} with {len(call.args)} arguments")
    fields = dict.fromkeys(kind.arguments) | dict(zip(kind.arguments, call.args, strict=False))
    if fields["shape"] is None or tuple(fields["shape"]) != tuple(shape):
        raise CheckpointError(f"its {kind.name} has the shape {fields['shape']}, the metadata say {list(shape)}")
    return kind.read(fields, (origin[0], origin[1]), (shape[0], shape[1]))


def _element(fields: Mapping[str, Any]) -> Encoding:
    code = fields["element"]
    number = code.args[0] if isinstance(code, Call) and code.name in _ENUMS and len(code.args) == 1 else code
    found = _ELEMENTS.get(number) if type(number) is int else None
    if found is None:
        raise CheckpointError(f"its codes are of TransformerEngine's DType {number!r}, which is not known here")
    return found


def _tensor(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(f"its {what} is no tensor")
    return value


def _plane(fields: Mapping[str, Any], side: _Side, shape: tuple[int, int], element: Encoding) -> Plane | None:
    """One copy, in the order of the weight's rows and columns; None if it is not stored."""
    prefix = side.which.value
    if fields[f"{prefix}_data"] is None:
        return None
    codes = _tensor(fields[f"{prefix}_data"], f"{prefix} data")
    scales = _tensor(fields[f"{prefix}_scale_inv"], f"{prefix} scale")
    stored = (shape[1], shape[0]) if side.codes_turned else shape
    width = ceil_div(stored[1], max(1, 8 // element.bits))
    if codes.itemsize != 1 or tuple(codes.shape) != (stored[0], width):
        raise CheckpointError(
            f"its {prefix} data are {codes.dtype} {list(codes.shape)}, not bytes {[stored[0], width]}"
        )
    codes = numerics.unpack(codes.view(torch.uint8), element, stored[1])
    rows, cols = (ceil_div(size, block) for size, block in zip(shape, side.block, strict=True))
    kept = (cols, rows) if side.scales_turned else (rows, cols)
    if scales.ndim != 2 or scales.shape[0] < kept[0] or scales.shape[1] < kept[1]:
        raise CheckpointError(f"its {prefix} scales are {list(scales.shape)}, of which {list(kept)} are needed")
    scales = scales[: kept[0], : kept[1]]  # the rest is padding
    amax = fields.get(f"{prefix}_amax")
    return Plane(
        codes.t() if side.codes_turned else codes,
        scales.t() if side.scales_turned else scales,
        side.block,
        None if amax is None else _tensor(amax, f"{prefix} amax").float().reshape(1, 1),
    )


def _planes(
    kind: str, fields: Mapping[str, Any], shape: tuple[int, int], element: Encoding, *sides: _Side
) -> dict[Copy, Plane]:
    if fields.get("swizzled"):
        raise CheckpointError(
            f"its {kind} has scales in the order of a GEMM ('swizzled'); save with optimize_for_gemm=False"
        )
    found = {side.which: _plane(fields, side, shape, element) for side in sides}
    there = {which: plane for which, plane in found.items() if plane is not None}
    if not there:
        raise CheckpointError(f"its {kind} has neither a rowwise nor a columnwise copy")
    return there


def _per_tensor(fields: Mapping[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> Piece:
    element, scale = _element(fields), _tensor(fields["scale_inv"], "scale")
    notes = () if scale.dtype == torch.float32 else (f"its scale was saved as {scale.dtype}, not as it was used",)
    if scale.numel() != 1:
        raise CheckpointError(f"its Float8Tensor has {scale.numel()} scales")
    turned = fields["data"] is None
    data = _tensor(fields["columnwise_data" if turned else "data"], "data")
    scale = scale.float().reshape(1, 1)
    given = {"rowwise_data": data, "rowwise_scale_inv": scale}
    plane = _plane(given, _Side(Copy.ROWWISE, (ALL, ALL), codes_turned=turned), shape, element)
    assert plane is not None
    return Piece("Float8Tensor", origin, shape, element, FP32, {Copy.ROWWISE: plane}, notes)


def _blockwise(fields: Mapping[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> Piece:
    sides = (
        (_Side(Copy.ROWWISE, (128, 128)), _Side(Copy.COLUMNWISE, (128, 128), True, True))
        if fields["is_2d"]
        else (_Side(Copy.ROWWISE, (1, 128), False, True), _Side(Copy.COLUMNWISE, (128, 1), True, False))
    )
    element, kind = _element(fields), "Float8BlockwiseQTensor"
    return Piece(kind, origin, shape, element, FP32, _planes(kind, fields, shape, element, *sides))


def _mxfp8(fields: Mapping[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> Piece:
    sides = (_Side(Copy.ROWWISE, (1, 32)), _Side(Copy.COLUMNWISE, (32, 1)))
    element, kind = _element(fields), "MXFP8Tensor"
    return Piece(kind, origin, shape, element, E8M0, _planes(kind, fields, shape, element, *sides))


def _nvfp4(fields: Mapping[str, Any], origin: tuple[int, int], shape: tuple[int, int]) -> Piece:
    kind = "NVFP4Tensor"
    if fields["row_scaled"] or fields["e4m3_max"] not in (None, _E4M3_MAX):
        raise CheckpointError(
            f"its {kind} has a second scale for each row, or one for block scales up to {fields['e4m3_max']}; formats "
            f"here have one for the tensor, for block scales up to {_E4M3_MAX}"
        )
    sides = (_Side(Copy.ROWWISE, (1, 16)), _Side(Copy.COLUMNWISE, (16, 1), True, True))
    element = _element(fields)
    planes = _planes(kind, fields, shape, element, *sides)
    if any(plane.amax is None for plane in planes.values()):
        raise CheckpointError(f"its {kind} has no amax, without which its scales mean nothing")
    return Piece(kind, origin, shape, element, E4M3, planes)


_COPIES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
_KINDS = (
    _Kind(
        "Float8Tensor", "float8_tensor", "_make_float8_tensor_in_reduce_ex",
        ("Float8Quantizer", "Float8CurrentScalingQuantizer"),
        ("data", "element", "scale_inv", "dtype", "shape", "columnwise_data"), _per_tensor,
    ),
    _Kind(
        "Float8BlockwiseQTensor", "float8_blockwise_tensor", "_make_float8_blockwise_tensor_in_reduce_ex",
        ("Float8BlockQuantizer",),
        ("shape", *_COPIES, "element", "dtype", "quantizer", "is_2d", "data_format"), _blockwise,
    ),
    _Kind(
        "MXFP8Tensor", "mxfp8_tensor", "_make_mxfp8_tensor_in_reduce_ex", ("MXFP8Quantizer",),
        (*_COPIES, "element", "dtype", "shape", "quantizer", "swizzled"), _mxfp8,
    ),
    _Kind(
        "NVFP4Tensor", "nvfp4_tensor", "_make_nvfp4_tensor_in_reduce_ex", ("NVFP4Quantizer",),
        ("shape", *_COPIES, "rowwise_amax", "columnwise_amax", "element", "dtype", "quantizer", "swizzled",
         "row_scaled", "four_over_six", "e4m3_max"), _nvfp4,
    ),
)  # fmt: skip
_BY_CALL = {kind.call: kind for kind in _KINDS}

CALLS = frozenset(
    {*_BY_CALL, *_ENUMS, *(f"{_PACKAGE}tensor.{kind.module}.{name}" for kind in _KINDS for name in kind.quantizers)}
)
"""All that a weight's pickle names beside tensors; a quantizer's content is not looked at."""
