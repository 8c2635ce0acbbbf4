"""The format table: every row says what is really stored, and keeps the promises that other code builds on."""

import dataclasses
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from quantshard import formats, numerics
from quantshard.formats import ALL, E2M1, E4M3, E5M2, E8M0, FORMATS, FP16, FP32, Component, Format, Orientation, Role
from quantshard.sharding import ceil_div
from tests import oracle

ENCODINGS = [E4M3, E5M2, E2M1, E8M0, FP16, FP32]

BYTES = {  # by hand, from the widths: codes + one scale per block
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_128x128": 1 + 4 / 16384,
    "fp8_1x128": 1 + 4 / 128,
    "ue5m3_1x128": 1 + 1 / 128,
    "fp16_1x128": 2 + 4 / 128,
    "fp8_1xrow": 1,  # and one scale for a row of any length
    "mxfp8_1x32": 1 + 1 / 32,
    "mxfp8_32x1": 1 + 1 / 32,
    "mxfp8_32x32": 1 + 1 / 1024,
    "mxfp8_both": 2 + 2 / 32,
    "mxfp4_1x32": 1 / 2 + 1 / 32,
    "mxfp4_32x32": 1 / 2 + 1 / 1024,
    "nvfp4_1x16": 1 / 2 + 1 / 16,
    "nvfp4_16x16": 1 / 2 + 1 / 256,
    "nvfp4_both": 1 + 2 / 16,
}

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)


def test_table_is_complete():
    """Each row stands under its own name, once, and is a constant of the module."""
    assert {name: row.name for name, row in FORMATS.items()} == {name: name for name in BYTES}
    constants = [value for value in vars(formats).values() if isinstance(value, Format)]
    assert len(constants) == len(FORMATS)
    assert {id(row) for row in constants} == {id(row) for row in FORMATS.values()}


@every_format
def test_names_fit_and_are_ascii(fmt):
    assert len(fmt.name.encode("ascii")) <= formats.FORMAT_NAME_BYTES < 16  # a tag of 16 bytes holds it


@every_format
def test_keys_are_unique(fmt):
    """Component names, and the suffixes that make them keys of a state dict, apart from those of other state too."""
    suffixes = [c.key_suffix for c in fmt.components]
    taken = {"_format", "_key", "_draws", "_amax_history"}
    assert len({*suffixes, *taken}) == len(suffixes) + len(taken)
    assert suffixes[0] == "" and list(fmt.by_name) == [c.name for c in fmt.components]


def test_keys_are_those_of_the_design():
    assert [c.key_suffix for c in formats.NVFP4_BOTH.components] == [
        *("", "_scale_inv", "_columnwise", "_columnwise_scale_inv", "_amax")
    ]


@every_format
def test_copies(fmt):
    """Every format has a rowwise copy; codes are packed along dim 1; the second scale is shared by the copies."""
    assert Orientation.ROWWISE in fmt.copies
    seen = set()
    for which, copy in fmt.copies.items():
        assert copy.codes.copy is copy.scale.copy is which
        assert copy.codes.block_shape == (1, max(1, 8 // copy.codes.encoding.bits))
        assert copy.block == copy.scale.block_shape
        seen |= {copy.codes, copy.scale} | ({copy.amax} if copy.amax else set())
    assert seen == set(fmt.components)
    assert all(copy.amax == fmt.copies[Orientation.ROWWISE].amax for copy in fmt.copies.values())


@every_format
def test_bytes_per_element_are_what_is_stored(fmt):
    """The formula, the widths counted by hand, and the bytes of a quantized tensor agree."""
    assert fmt.bytes_per_element == pytest.approx(BYTES[fmt.name], rel=1e-12, abs=1e-30)
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    parts = numerics.quantize(x, fmt)
    assert parts.keys() == fmt.by_name.keys()
    stored = sum(part.numel() * part.element_size() for part in parts.values())
    few = [c.block_shape[0] for c in fmt.components if ALL in c.block_shape]  # a float32 for the tensor or for each row
    assert stored == BYTES[fmt.name] * x.numel() + sum(4 * ceil_div(256, rows) for rows in few)
    for name, part in parts.items():
        component = fmt.by_name[name]
        assert part.dtype == component.encoding.storage
        assert part.shape == tuple(math.ceil(n / c) for n, c in zip(x.shape, component.block_shape, strict=True))


@every_format
def test_transposable_means_what_it_says(fmt):
    """Exactly the formats marked so give the same parts for transpose-then-quantize and quantize-then-transpose."""
    x = torch.randn(96, 160, generator=torch.Generator().manual_seed(0))
    if fmt.transposable:
        turned = oracle.transpose_parts(fmt, numerics.quantize(x, fmt), (96, 160))
        wanted = numerics.quantize(x.t().contiguous(), fmt)
        assert turned.keys() == wanted.keys()
        assert all(torch.equal(turned[name], wanted[name]) for name in wanted)
    else:
        with pytest.raises(AssertionError):
            oracle.transpose_parts(fmt, numerics.quantize(x, fmt), (96, 160))


def test_which_are_transposable():
    assert [name for name, fmt in FORMATS.items() if fmt.transposable] == [
        *("fp8_e4m3", "fp8_e5m2", "fp8_128x128", "mxfp8_32x32", "mxfp4_32x32", "nvfp4_16x16")
    ]


def test_all_covers_any_dim():
    """The arithmetic of grids needs no special case: one entry for any dim that torch can have."""
    largest = torch.iinfo(torch.int64).max // 4
    assert -(-largest // ALL) == 1 and largest // ALL == 0


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
def test_encoding_fields_agree(encoding):
    """Widths add up (E8M0 has no sign), and `max` is the largest finite value of the dtype of the same bits."""
    sign = 0 if encoding is E8M0 else 1
    assert encoding.bits == sign + encoding.exponent_bits + encoding.mantissa_bits
    reference = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", E2M1: "float4_e2m1fn", E8M0: "float8_e8m0fnu"}
    if encoding in (FP16, FP32):
        info = np.finfo(f"float{encoding.bits}")
        assert (encoding.max, encoding.mantissa_bits) == (info.max, info.nmant) and 1 - encoding.bias == info.minexp
        return
    info = ml_dtypes.finfo(getattr(ml_dtypes, reference[encoding]))
    assert encoding.max == float(info.max)
    assert 2.0 ** (1 - encoding.bias) == float(info.smallest_normal) or encoding is E8M0
    assert encoding.bits == info.bits
    if encoding.native is not None:
        assert encoding.max == torch.finfo(encoding.native).max


def test_rows_survive_pickling():
    """Rows and encodings go through `deepcopy` and process boundaries: equal ones must behave as the same one."""
    for fmt in FORMATS.values():
        again = pickle.loads(pickle.dumps(fmt))
        assert again == fmt and hash(again) == hash(fmt)
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        one, two = numerics.quantize(x, fmt), numerics.quantize(x, again)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_rows_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        formats.FP8_E4M3.name = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        formats.FP8_E4M3.components[0].name = "other"  # type: ignore[misc]
    assert isinstance(formats.FP8_E4M3.components, tuple)


def test_a_new_row_needs_no_code():
    """Idea 2: a row that nobody thought of, E5M2 in 4x8 blocks with E8M0 scales, quantizes like any other."""
    codes = Component("codes", Orientation.ROWWISE, Role.CODES, E5M2, (1, 1))
    scale = Component("scale_inv", Orientation.ROWWISE, Role.SCALE, E8M0, (4, 8))
    fmt = Format("e5m2_4x8", (codes, scale))
    x = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    parts = numerics.quantize(x, fmt)
    assert parts["scale_inv"].shape == (3, 3)
    error = (numerics.dequantize(fmt.copies[Orientation.ROWWISE], parts, (10, 20)) - x).abs()
    assert (error <= x.abs() * 2**-3).all()  # half of E5M2's ulp; no element is near the subnormals
