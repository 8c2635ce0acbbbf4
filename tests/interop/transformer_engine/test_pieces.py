"""TransformerEngine's tensors as it pickles them -> components, bit for bit what an H200 recorded, or why not."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from quantshard import formats, numerics
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS, Orientation
from quantshard.interop.layouts.conversion import InexactConversionError
from quantshard.interop.transformer_engine.pieces import RecordedCall, WeightPiece, components_of, piece_of, values_of
from tests.golden.make_compact import COMPACT, load
from tests.tensor.test_tensor import differing, same

SIZE = torch.Size([256, 128])
PADDING = 119


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return load(COMPACT)


def recorded(name: str, *args: object) -> RecordedCall:
    call: RecordedCall = type(name, (RecordedCall,), {})(*args)
    return call


def call(module: str, name: str, *args: object) -> RecordedCall:
    return recorded(f"transformer_engine.pytorch.tensor.{module}._make_{name}_tensor_in_reduce_ex", *args)


def dtype(number: int) -> RecordedCall:
    return recorded("transformer_engine.pytorch.constants.DType", number)


def per_tensor(data: Tensor | None, scale: Tensor, number: int = 7, transposed: Tensor | None = None) -> RecordedCall:
    held = data if data is not None else transposed.t()
    return call("float8_tensor", "float8", data, dtype(number), scale, torch.bfloat16, held.shape, transposed)


def blockwise(shape: torch.Size, planes: tuple[Tensor | None, ...], is_2d: bool) -> RecordedCall:
    return call(
        "float8_blockwise_tensor", "float8_blockwise", shape, *planes, dtype(7), torch.bfloat16, None, is_2d, None
    )


def padded(grid: Tensor, rows: int, cols: int) -> Tensor:
    return torch.nn.functional.pad(grid, (0, -grid.shape[1] % cols, 0, -grid.shape[0] % rows), value=PADDING)


def mxfp8(parts: dict[str, Tensor], swizzled: bool = False) -> RecordedCall:
    """Of the components of both copies, of which one may be missing."""
    planes = [parts.get(key) for key in ("codes", "scale_inv", "columnwise", "columnwise_scale_inv")]
    planes[1] = None if planes[1] is None else padded(planes[1], 128, 4)
    planes[3] = None if planes[3] is None else padded(planes[3], 4, 128)
    shape = next(plane.shape for plane in (planes[0], planes[2]) if plane is not None)
    return call("mxfp8_tensor", "mxfp8", *planes, dtype(7), torch.bfloat16, shape, None, swizzled)


def nvfp4(parts: dict[str, Tensor], **changed: object) -> RecordedCall:
    """Of the components of both copies."""
    rows, cols = parts["columnwise"].shape[0], parts["columnwise"].shape[1] * 2
    transposed = numerics.unpack(parts["columnwise"], formats.E2M1, cols).t().contiguous()
    given: dict[str, object] = {
        "shape": torch.Size([rows, cols]),
        "rowwise": parts["codes"],
        "rowwise scales": padded(parts["scale_inv"], 128, 4),
        "columnwise": numerics.pack(transposed, formats.E2M1),
        "columnwise scales": padded(parts["columnwise_scale_inv"].t(), 128, 4),
        "amax": parts["amax"].reshape(1),
        "columnwise amax": parts["amax"].reshape(1),
        "element": dtype(10),
        "dtype": torch.bfloat16,
        "quantizer": None,
        "swizzled": False,
        "row scaled": False,
        "4over6": False,
        "max": 448,
    }
    return call("nvfp4_tensor", "nvfp4", *(given | changed).values())


def whole(made: RecordedCall) -> WeightPiece:
    shape = next(arg for arg in made.args if isinstance(arg, torch.Size))
    return piece_of(made, (0, 0), tuple(shape))


def converted(made: RecordedCall, fmt: formats.Format) -> dict[str, Tensor]:
    piece = whole(made)
    return components_of([piece], fmt, piece.shape)[0]


# What an H200 recorded


@pytest.mark.parametrize("kind", ["randn", "zeros"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", ["current_{}", "current_{}_pow2", "delayed_{}"])
def test_per_tensor(golden: dict[str, Any], recipe: str, element: str, kind: str) -> None:
    found = golden["quantize"][recipe.format(element) + f"/{kind}"]
    number, fmt = {"e4m3": (7, formats.FP8_E4M3), "e5m2": (8, formats.FP8_E5M2)}[element]
    wanted = {"codes": found["data"], "scale_inv": found["scale_inv"].reshape(1, 1)}
    assert not differing(converted(per_tensor(found["data"], found["scale_inv"], number), fmt), wanted)
    if "transpose" in found:  # after a columnwise-only update there is nothing else
        transposed = per_tensor(None, found["scale_inv"], number, found["transpose"])
        assert not differing(converted(transposed, fmt), wanted)
    if element == "e5m2":
        with pytest.raises(InexactConversionError, match="its codes are E5M2, its scales FP32, unlike fp8_e4m3"):
            converted(per_tensor(found["data"], found["scale_inv"], number), formats.FP8_E4M3)


@pytest.mark.parametrize("kind", ["randn", "zeros"])
@pytest.mark.parametrize("pow2", [True, False])
def test_blocks(golden: dict[str, Any], pow2: bool, kind: str) -> None:
    found = golden["quantize"][f"block2d_pow2{pow2}/{kind}"]
    codes, columnwise = found["rowwise_data"], found.get("columnwise_data", found["rowwise_data"].t().contiguous())
    scales = [padded(found[f"{side}_scale_inv"], 1, 4) for side in ("rowwise", "columnwise")]
    wanted = {"codes": codes, "scale_inv": found["rowwise_scale_inv"]}
    made = blockwise(codes.shape, (codes, scales[0], columnwise, scales[1]), True)
    assert not differing(converted(made, formats.FP8_128X128), wanted)
    alone = blockwise(codes.shape, (None, None, columnwise, scales[1]), True)
    assert not differing(converted(alone, formats.FP8_128X128), wanted)
    other = columnwise.clone()
    other[3, 5] ^= 1
    with pytest.raises(InexactConversionError, match="its rowwise and columnwise copies have different codes"):
        converted(blockwise(codes.shape, (codes, scales[0], other, scales[1]), True), formats.FP8_128X128)


@pytest.mark.parametrize("kind", ["randn", "zeros"])
@pytest.mark.parametrize("pow2", [True, False])
def test_blocks_of_rows(golden: dict[str, Any], pow2: bool, kind: str) -> None:
    """Their scales are stored transposed; the columnwise copy has blocks that no format of ours has."""
    found = golden["quantize"][f"block1d_pow2{pow2}/{kind}"]
    planes = [found[f"{side}_{what}"] for side in ("rowwise", "columnwise") for what in ("data", "scale_inv")]
    shape = planes[0].shape
    piece = whole(blockwise(shape, tuple(planes), False))
    parts, left = components_of([piece], formats.FP8_1X128, piece.shape)
    assert not differing(parts, {"codes": planes[0], "scale_inv": planes[1].t()})
    assert left == ("its columnwise copy is omitted: fp8_1x128 has none",)
    exact = numerics.dequantize(formats.FP8_1X128.copies[Orientation.ROWWISE], parts, piece.shape)
    assert same(values_of([piece], piece.shape), exact)
    with pytest.raises(InexactConversionError, match="blocks of 1x128 have different scales inside one of 128x128"):
        components_of([piece], formats.FP8_128X128, piece.shape)
    columnwise = whole(blockwise(shape, (None, None, *planes[2:]), False))
    with pytest.raises(InexactConversionError, match="no rowwise copy is stored"):
        components_of([columnwise], formats.FP8_1X128, piece.shape)
    with pytest.raises(CheckpointError, match="no format has blocks of 128x1"):
        values_of([columnwise], piece.shape)


# What no GPU here makes, by the oracle


@pytest.fixture(scope="module")
def values() -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(2)).bfloat16()


def both(values: Tensor, fmt: formats.Format) -> dict[str, Tensor]:
    """The two copies that TransformerEngine stores of a format in square blocks: the same values, both ways."""
    parts = numerics.quantize(values, fmt)
    side = fmt.copies[Orientation.ROWWISE].block[0]
    scales = parts["scale_inv"]
    return {
        **parts,
        "scale_inv": scales.repeat_interleave(side, 0),
        "columnwise": parts["codes"],
        "columnwise_scale_inv": scales.repeat_interleave(side, 1),
    }


def test_mxfp8(values: Tensor) -> None:
    parts = numerics.quantize(values, formats.MXFP8_BOTH)
    assert not differing(converted(mxfp8(parts), formats.MXFP8_BOTH), parts)
    with pytest.raises(InexactConversionError, match="blocks of 1x32 have different scales inside one of 32x32"):
        converted(mxfp8(parts), formats.MXFP8_32X32)
    square = numerics.quantize(values, formats.MXFP8_32X32)
    made = both(values, formats.MXFP8_32X32)
    assert not differing(converted(mxfp8(made), formats.MXFP8_32X32), square)
    assert converted(mxfp8(made), formats.MXFP8_BOTH).keys() == parts.keys()
    one = {key: value for key, value in parts.items() if "columnwise" not in key}
    other = {key: value for key, value in parts.items() if "columnwise" in key}
    with pytest.raises(InexactConversionError, match="no columnwise copy is stored"):
        converted(mxfp8(one), formats.MXFP8_BOTH)
    assert not differing(converted(mxfp8(one), formats.MXFP8_1X32), one)
    alone = whole(mxfp8(other))
    exact = numerics.dequantize(formats.MXFP8_BOTH.copies[Orientation.COLUMNWISE], parts, tuple(SIZE))
    assert same(values_of([alone], SIZE), exact)


def test_nvfp4(values: Tensor) -> None:
    parts = numerics.quantize(values, formats.NVFP4_BOTH)
    assert not differing(converted(nvfp4(parts), formats.NVFP4_BOTH), parts)
    square = numerics.quantize(values, formats.NVFP4_16X16)
    made = nvfp4(both(values, formats.NVFP4_16X16))
    assert not differing(converted(made, formats.NVFP4_16X16), square)
    assert same(
        values_of([whole(made)], SIZE),
        numerics.dequantize(formats.NVFP4_16X16.copies[Orientation.ROWWISE], square, SIZE),
    )
    with pytest.raises(InexactConversionError, match="blocks of 1x16 have different scales inside one of 16x16"):
        converted(nvfp4(parts), formats.NVFP4_16X16)
    for fmt, source in ((formats.NVFP4_BOTH, parts), (formats.NVFP4_16X16, both(values, formats.NVFP4_16X16))):
        with pytest.raises(InexactConversionError, match="its rowwise and columnwise copies have different amax"):
            converted(nvfp4(source, **{"columnwise amax": torch.tensor([9.0])}), fmt)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_had_or_refused(values: Tensor, name: str) -> None:
    """Whatever a weight is to become: the same values, or a sentence."""
    parts, fmt = numerics.quantize(values, formats.MXFP8_BOTH), FORMATS[name]
    for made in (mxfp8(parts), nvfp4(both(values, formats.NVFP4_16X16)), per_tensor(parts["codes"], torch.ones(1))):
        piece = whole(made)
        try:
            found, _ = components_of([piece], fmt, piece.shape)
        except InexactConversionError as error:
            assert len(str(error)) > 20
            continue
        exact = numerics.dequantize(fmt.copies[Orientation.ROWWISE], found, piece.shape)
        assert same(exact, values_of([piece], piece.shape))


# Shards


def cut(values: Tensor, sizes: list[int], make: Any, origin: int = 0) -> list[WeightPiece]:
    """Each run of rows quantized for itself."""
    pieces = []
    for size in sizes:
        part = values[origin : origin + size]
        pieces.append(piece_of(make(part), (origin, 0), tuple(part.shape)))
        origin += size
    return pieces


def mx_of(part: Tensor) -> RecordedCall:
    return mxfp8(numerics.quantize(part, formats.MXFP8_BOTH))


def test_shards_are_joined_where_blocks_are(values: Tensor) -> None:
    wanted = numerics.quantize(values, formats.MXFP8_BOTH)
    assert not differing(components_of(cut(values, [32, 160, 64], mx_of), formats.MXFP8_BOTH, tuple(SIZE))[0], wanted)
    with pytest.raises(InexactConversionError, match="a shard begins at row 48, column 0, inside a block of 32x1"):
        components_of(cut(values, [48, 208], mx_of), formats.MXFP8_BOTH, tuple(SIZE))


def test_columns_are_joined(values: Tensor) -> None:
    """As tensor parallelism cuts them."""
    pieces = [piece_of(mx_of(values[:, at : at + 64]), (0, at), (SIZE[0], 64)) for at in (0, 64)]
    wanted = numerics.quantize(values, formats.MXFP8_BOTH)
    assert not differing(components_of(pieces, formats.MXFP8_BOTH, tuple(SIZE))[0], wanted)


def test_shards_with_scales_of_their_own_are_refused(values: Tensor) -> None:
    def current(part: Tensor) -> RecordedCall:
        parts = numerics.quantize(part, formats.FP8_E4M3)
        return per_tensor(parts["codes"], parts["scale_inv"].reshape(1))

    pieces = cut(values, [128, 128], current)
    with pytest.raises(InexactConversionError, match="its shards have different values of the one scale"):
        components_of(pieces, formats.FP8_E4M3, tuple(SIZE))
    every = values_of(pieces, SIZE)
    for piece in pieces:
        assert same(every[piece.origin[0] : piece.origin[0] + 128], values_of([whole_at_zero(piece)], piece.shape))

    def nv(part: Tensor) -> RecordedCall:
        return nvfp4(both(part, formats.NVFP4_16X16))

    with pytest.raises(InexactConversionError, match="its shards have different values of the one amax"):
        components_of(cut(values, [128, 128], nv), formats.NVFP4_16X16, tuple(SIZE))


def whole_at_zero(piece: WeightPiece) -> WeightPiece:
    return WeightPiece(piece.kind, (0, 0), piece.shape, piece.element, piece.scale, piece.planes)


def test_some_shards_in_high_precision(values: Tensor) -> None:
    """TransformerEngine dequantizes shards that it cannot quantize."""
    (first,) = cut(values, [128], mx_of)
    found = values_of([first, ((128, 0), values[128:])], SIZE)
    assert found.dtype == torch.float32
    assert same(found[128:], values[128:].float()) and same(found[:128], values_of([first], (128, 128)))


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: mxfp8(p, swizzled=True), "swizzled scales"),
        (lambda p: mxfp8({"codes": p["codes"], "scale_inv": p["scale_inv"][:100]}), "not [256, 4]"),
        (
            lambda p: mxfp8({"codes": p["codes"].short(), "scale_inv": p["scale_inv"]}),
            "are torch.int16 [256, 128], not",
        ),
        (lambda p: per_tensor(p["codes"], torch.ones(2)), "its Float8Tensor is damaged"),
        (lambda p: per_tensor(p["codes"], torch.ones(1), 9), "unknown TransformerEngine DType 9"),
        (lambda p: recorded("os.system"), "os.system is not a weight"),
        (lambda p: nvfp4(p["both"], **{"row scaled": True}), "it has row_scaled_nvfp4"),
        (
            lambda p: nvfp4(p["both"], max=256),
            "or e4m3_max is not 448",
        ),
        (lambda p: nvfp4(p["both"], amax=None), "its NVFP4Tensor has no amax"),
    ],
)
def test_refused(values: Tensor, change: Any, message: str) -> None:
    parts = numerics.quantize(values, formats.MXFP8_BOTH) | {"both": numerics.quantize(values, formats.NVFP4_BOTH)}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        piece_of(change(parts), (0, 0), tuple(SIZE))


@pytest.mark.parametrize("kind", range(5))
def test_whatever_the_arguments_are(values: Tensor, kind: int) -> None:
    """A forged pickle has any argument at any place, or fewer or more: it is read, or refused in a sentence."""
    parts = numerics.quantize(values, formats.MXFP8_BOTH)
    block = numerics.quantize(values, formats.FP8_128X128)
    planes = (block["codes"], padded(block["scale_inv"], 1, 4), None, None)
    made = (
        per_tensor(parts["codes"], torch.ones(1)),
        blockwise(SIZE, planes, True),
        blockwise(SIZE, (block["codes"], torch.ones(1, 256), None, None), False),
        mxfp8(parts),
        nvfp4(numerics.quantize(values, formats.NVFP4_BOTH)),
    )[kind]
    others = (
        None, True, 448, 1 << 50, -1.5, "text", b"bytes", (), [3], {}, torch.bfloat16, torch.Size([2]), dtype(7),
        dtype(99), recorded("os.system"), torch.ones(2, 2), torch.zeros(0), torch.ones(256, 128) > 0,
        torch.ones(512, 512, dtype=torch.float64), torch.ones(512, 512, dtype=torch.int16), torch.tensor(5),
    )  # fmt: skip
    read = 0
    for at in range(len(made.args)):
        for other in others:
            args = (*made.args[:at], other, *made.args[at + 1 :])
            for changed in (args, args[: at + 1], (*args, other)):
                try:
                    piece = piece_of(recorded(made.name, *changed), (0, 0), tuple(SIZE))
                except CheckpointError as error:
                    assert "\n" not in str(error)
                    continue
                with contextlib.suppress(CheckpointError):
                    values_of([piece], piece.shape)
                read += 1
    assert read > 10


def test_neither_copy(values: Tensor) -> None:
    empty = call("mxfp8_tensor", "mxfp8", None, None, None, None, dtype(7), torch.bfloat16, SIZE, None, False)
    with pytest.raises(CheckpointError, match="its MXFP8Tensor has no rowwise or columnwise copy"):
        whole(empty)
    with pytest.raises(CheckpointError, match=re.escape("does not have the shape [8, 8] of the metadata")):
        piece_of(empty, (0, 0), (8, 8))


def test_a_scale_that_was_not_saved_as_it_was_used(values: Tensor) -> None:
    """TransformerEngine's own test knows of it: current scaling's scale can be saved in the parameter's dtype."""
    parts = numerics.quantize(values, formats.FP8_E4M3)
    piece = whole(per_tensor(parts["codes"], parts["scale_inv"].reshape(1).bfloat16()))
    assert piece.notes == ("its scales were saved as torch.bfloat16",)
