"""The oracle against independent references: ml_dtypes, gfloat, torchao, Python's integers and fractions, numpy loops.

TransformerEngine's own outputs are in test_golden.py.
"""

import itertools
import math
import statistics
from dataclasses import replace
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3, format_info_ocp_e5m2, format_info_ocp_e8m0
from hypothesis import given, settings, strategies as st

from quantshard import numerics
from quantshard.formats import (
    ALL,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP8_1X128,
    FP8_128X128,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    MXFP4_1X32,
    MXFP8_1X32,
    NVFP4_1X16,
    Encoding,
    Orientation,
    Role,
    Scaling,
)
from quantshard.numerics import distributions
from tests import oracle
from tests.covering import by_turns

ELEMENTS = [E4M3, E5M2, E2M1]
ML_DTYPES = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E8M0": ml_dtypes.float8_e8m0fnu,
}
GFLOAT = {
    "E4M3": format_info_ocp_e4m3,
    "E5M2": format_info_ocp_e5m2,
    "E2M1": format_info_ocp_e2m1,
    "E8M0": format_info_ocp_e8m0,
}
NAN_CODE = {"E4M3": 0x7F, "E5M2": 0x7F, "E2M1": 0x07}  # E2M1 has no NaN; CUDA's conversion gives +max
FLOAT32_MAX = torch.finfo(torch.float32).max
INF, NAN = math.inf, math.nan

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
elements = pytest.mark.parametrize("encoding", ELEMENTS, ids=lambda e: e.name)
encodings = pytest.mark.parametrize("encoding", [*ELEMENTS, E8M0], ids=lambda e: e.name)
devices = pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


def by_arithmetic(encoding: Encoding) -> Encoding:
    """The same encoding without PyTorch's cast, so that the general arithmetic of E2M1 rounds it."""
    return replace(encoding, native=None)


def floats32(values):
    return torch.tensor(values, dtype=torch.float32)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def all_codes(encoding):
    return torch.arange(1 << encoding.bits, dtype=torch.uint8)


def magnitudes(encoding):
    """The finite non-negative values, ascending, float32; index = code."""
    values = numerics.decode(torch.arange(1 << (encoding.bits - 1), dtype=torch.uint8), encoding)
    return values[torch.isfinite(values)]


def probes(encoding):
    """Every value, every tie between two, the float32 neighbours of each, with both signs; and the extremes."""
    values = magnitudes(encoding).numpy()
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [encoding.max * 1.03125, encoding.max * 1.0625]])
    points = points.astype(np.float32)
    above, below = (np.nextafter(points, np.float32(to), dtype=np.float32) for to in (INF, -INF))
    extremes = np.array([2.0**-149, 2.0**-126, FLOAT32_MAX, INF], dtype=np.float32)
    points = np.concatenate([points, above, below, extremes])
    return torch.from_numpy(np.concatenate([points, -points]))


def saturated(x, encoding):
    """What ml_dtypes says, after saturation: its casts overflow to NaN or infinity."""
    clipped = np.clip(x.float().numpy(), -encoding.max, encoding.max)
    return torch.from_numpy(clipped.astype(ML_DTYPES[encoding.name]).view(np.uint8))


# Encodings


@encodings
def test_decode_every_code(encoding):
    codes = all_codes(encoding)
    mine = numerics.decode(codes, encoding)
    theirs = codes.numpy().view(ML_DTYPES[encoding.name]).astype(np.float32)
    np.testing.assert_array_equal(mine.numpy(), theirs)
    number = ~mine.isnan()
    assert torch.equal(mine.signbit()[number], torch.from_numpy(np.signbit(theirs))[number])  # of zeros, too
    also = [gfloat.decode_float(GFLOAT[encoding.name], code).fval for code in codes.tolist()]
    np.testing.assert_array_equal(mine.double().numpy(), also)


@encodings
def test_decoded_values_are_float32_whatever_the_default_dtype(encoding):
    torch.set_default_dtype(torch.float64)
    try:
        assert numerics.decode(all_codes(encoding), encoding).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@elements
def test_decode_by_definition(encoding):
    """The formula that decodes E2M1 holds for finite codes of the others too."""
    codes = all_codes(encoding)
    wanted = numerics.decode(codes, encoding)
    finite = torch.isfinite(wanted)
    assert torch.equal(numerics.decode(codes, by_arithmetic(encoding))[finite], wanted[finite])


@encodings
def test_every_code_survives(encoding):
    codes = all_codes(encoding)
    values = numerics.decode(codes, encoding)
    again = numerics.encode(values, encoding)
    finite = torch.isfinite(values)
    assert torch.equal(again[finite], codes[finite])
    if encoding is E8M0:
        assert again[~finite].tolist() == [0xFF]
    else:
        assert (again[values.isnan()] == NAN_CODE[encoding.name]).all()
        top = numerics.encode(floats32([encoding.max, -encoding.max]), encoding)
        assert torch.equal(again[values.isinf()], top[: values.isinf().sum()])


@elements
@pytest.mark.parametrize("path", [lambda e: e, by_arithmetic], ids=["as_is", "by_arithmetic"])
def test_encode_ties_subnormals_and_extremes(encoding, path):
    x = probes(encoding)
    mine = numerics.encode(x, path(encoding))
    assert torch.equal(mine, saturated(x, encoding))
    info = GFLOAT[encoding.name]
    rounded = [gfloat.round_float(info, v, gfloat.RoundMode.TiesToEven, sat=True) for v in x.tolist()]
    assert mine.tolist() == [gfloat.encode_float(info, v) for v in rounded]


@elements
@pytest.mark.parametrize("path", [lambda e: e, by_arithmetic], ids=["as_is", "by_arithmetic"])
def test_encode_every_bfloat16(encoding, path):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    mine = numerics.encode(x, path(encoding))
    assert torch.equal(mine[~x.isnan()], saturated(x[~x.isnan()], encoding))
    assert (mine[x.isnan()] == NAN_CODE[encoding.name]).all()  # of either sign, any payload


@elements
@settings(max_examples=50)
@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_encode_any_float32(encoding, values):
    x = floats32(values)
    for path in (encoding, by_arithmetic(encoding)):
        assert torch.equal(numerics.encode(x, path), saturated(x, encoding))


@elements
def test_encode_keeps_shape_and_takes_any_layout(encoding):
    x = normal(6, 10)
    wanted = numerics.encode(x, encoding)
    assert torch.equal(numerics.encode(x.t(), encoding), wanted.t())
    assert torch.equal(numerics.encode(x[::2, 1::3], encoding), wanted[::2, 1::3])
    assert torch.equal(numerics.decode(wanted.t(), encoding), numerics.decode(wanted, encoding).t())
    assert numerics.encode(x[:0], encoding).shape == numerics.decode(wanted[:0], encoding).shape == (0, 10)
    assert numerics.encode(x[0, 0], encoding).shape == ()


@elements
def test_encode_in_chunks(encoding):
    """Large inputs are worked on in pieces: same codes, and the input is not changed."""
    x = normal(2, 3, 50_000)
    kept = x.clone()
    words = numerics.random_words(1, 0, 0, (6, 50_000)).view(x.shape)
    wanted = torch.stack([numerics.encode(row, encoding) for row in x.flatten(0, 1)[:, :]])
    assert torch.equal(numerics.encode(x, encoding), wanted.view(x.shape))
    random = numerics.encode_stochastic(x, encoding, words)
    for i, j in itertools.product(range(2), range(3)):
        part = numerics.encode_stochastic(x[i, j, :20_000], encoding, words[i, j, :20_000])
        assert torch.equal(random[i, j, :20_000], part)
    assert torch.equal(x, kept)


def test_float32_entries_are_stored_as_they_are():
    x = normal(4, 4)
    assert numerics.encode(x, FP32) is x and numerics.decode(x, FP32) is x
    assert numerics.encode(x.double(), FP32).dtype == torch.float32


def test_e8m0_rounds_up():
    """Over every exponent, the smallest power of two not below x, found by search over all of them."""
    powers = floats32([2.0**e for e in range(-149, 128)])
    near = [torch.nextafter(powers, floats32(to)) for to in (0.0, INF)]
    x = torch.cat([powers, *near, powers * 1.5, floats32([0.0, FLOAT32_MAX])])
    x = x[torch.isfinite(x)]
    scale = [Fraction(2) ** (e - 127) for e in range(255)]
    wanted = [next((e for e in range(255) if scale[e] >= Fraction(v)), 254) for v in x.tolist()]
    assert numerics.encode_e8m0_round_up(x).tolist() == wanted
    assert numerics.encode(x, E8M0).tolist() == wanted
    assert numerics.encode_e8m0_round_up(floats32([0.0, INF, NAN])).tolist() == [0x00, 0xFE, 0xFF]
    assert numerics.encode_e8m0_round_up(-floats32([NAN])).tolist() == [0xFF]


# Stochastic rounding


def neighbours(x, encoding):
    """Codes below and above |x| <= max, and how far it is from the lower to the upper one, exactly."""
    values = [Fraction(v) for v in magnitudes(encoding).tolist()]
    exact = abs(Fraction(x))
    below = max(code for code, v in enumerate(values) if v <= exact)
    above = min(below + 1, len(values) - 1)
    gap = values[above] - values[below]
    return below, above, (exact - values[below]) / gap if gap else Fraction(0)


@elements
def test_stochastic_threshold(encoding):
    """Of the 2**32 words exactly f * 2**32 round away from zero, f the distance in the bits that the encoding lacks.

    In the normal range that is the exact distance, so unbiased; below it is the nearest of so many bits. It is the
    whole distribution, not a sample: the words on both sides of the threshold are tried.
    """
    lacking = 23 - encoding.mantissa_bits
    x = torch.cat([probes(encoding), encoding.max * normal(100) / 3, normal(100, seed=1) * magnitudes(encoding)[1]])
    x = x[x.abs() <= encoding.max]
    sign_bit = 1 << (encoding.bits - 1)
    cases = []  # value, word, code
    for value in x.tolist():
        below, above, distance = neighbours(value, encoding)
        if abs(value) >= 2.0 ** (1 - encoding.bias):
            assert (distance * 2**lacking).denominator == 1
        first = 2**32 - (round(distance * 2**lacking) << (32 - lacking))  # and all words above; `round` ties to even
        sign = sign_bit if math.copysign(1, value) < 0 else 0
        sides = {
            0: below if first else above,
            first - 1: below,
            first: above,
            2**32 - 1: above if first < 2**32 else below,
        }
        cases += [(value, word, sign + code) for word, code in sides.items() if 0 <= word < 2**32]
    values, words, wanted = zip(*cases, strict=True)
    mine = numerics.encode_stochastic(floats32(values), encoding, torch.tensor(words))
    assert mine.tolist() == list(wanted)


@elements
def test_stochastic_mean(encoding):
    """Under real random words the mean comes out: by Hoeffding off by more than the bound once in 1e9 runs."""
    count = 40_000
    values = magnitudes(encoding)
    for i, x in enumerate([*(floats32([0.3, 0.77, 0.5]) * values[1]).tolist(), 1.1, 2.9, -2.2, 4.99]):
        words = numerics.random_words(99, 0, i, (1, count))[0]
        codes = numerics.encode_stochastic(torch.full((count,), x), encoding, words)
        below, above, _ = neighbours(floats32([x]).item(), encoding)
        gap = (values[above] - values[below]).item()
        mean = numerics.decode(codes, encoding).double().mean().item()
        assert abs(mean - x) <= gap * math.sqrt(math.log(2e9) / (2 * count)), x


@elements
def test_stochastic_is_symmetric_and_saturates(encoding):
    x = torch.cat([probes(encoding), normal(4096)])
    words = numerics.random_words(5, 0, 0, (1, len(x)))[0]
    sign_bit = 1 << (encoding.bits - 1)
    one = numerics.encode_stochastic(x, encoding, words)
    assert torch.equal(numerics.encode_stochastic(-x, encoding, words), one ^ sign_bit)
    top = numerics.encode(floats32([encoding.max]), encoding)
    assert (one[x >= encoding.max] == top).all() and (one[x <= -encoding.max] == top + sign_bit).all()
    for word in (0, 2**32 - 1):  # representable values stay, whatever the word
        codes = all_codes(encoding)
        values = numerics.decode(codes, encoding)
        kept = numerics.encode_stochastic(values, encoding, torch.full(values.shape, word))
        assert torch.equal(kept[torch.isfinite(values)], codes[torch.isfinite(values)])
    nan = numerics.encode_stochastic(floats32([NAN, -NAN]), encoding, torch.tensor([0, 7]))
    assert nan.tolist() == [NAN_CODE[encoding.name]] * 2


# Packing


def test_pack_order():
    """The element of even index lies in the low nibble."""
    assert numerics.pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8), E2M1).tolist() == [[0x21, 0x03]]
    stored = torch.tensor([[0x21, 0xF3]], dtype=torch.uint8)
    assert numerics.unpack(stored, E2M1, 4).tolist() == [[1, 2, 3, 15]]
    assert numerics.unpack(stored, E2M1, 3).tolist() == [[1, 2, 3]]


@settings(max_examples=50)
@given(rows=st.integers(0, 4), cols=st.integers(0, 9), seed=st.integers(0, 99))
def test_unpack_undoes_pack(rows, cols, seed):
    for encoding in ELEMENTS:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(1 << encoding.bits, (rows, cols), generator=generator, dtype=torch.uint8)
        stored = numerics.pack(codes, encoding)
        assert stored.shape == (rows, -(-cols * encoding.bits // 8))
        assert torch.equal(numerics.unpack(stored, encoding, cols), codes)


# Amaxes and rectangles


def touched(origin, size, block_shape):
    """First entry and the one after the last, per dim, empty dims included."""
    if block_shape == ALL:
        return 0, 1
    return origin // block_shape, -(-(origin + size) // block_shape) if size else origin // block_shape


@st.composite
def rectangles(draw, limit=300):
    """A global shape, and origin and shape of a rectangle in it; dims may be empty."""
    whole = draw(st.tuples(st.integers(1, limit), st.integers(1, limit)))
    origin = tuple(draw(st.integers(0, n)) for n in whole)
    shape = tuple(draw(st.integers(0, n - o)) for n, o in zip(whole, origin, strict=True))
    return whole, origin, shape


block_shape = st.sampled_from([1, 2, 3, 16, 32, 128, ALL])


@given(
    place=rectangles(limit=80),
    block=st.tuples(block_shape, block_shape),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_block_amax(place, block, dtype):
    """Every entry against a loop over the blocks that the rectangle touches."""
    _, origin, shape = place
    x = normal(*shape).to(dtype)
    (r0, r1), (c0, c1) = (touched(*args) for args in zip(origin, shape, block, strict=True))
    wanted = torch.zeros(r1 - r0, c1 - c0)
    for i, j in itertools.product(range(r0, r1), range(c0, c1)):
        here = [
            slice(max(b * c - o, 0), max((b + 1) * c - o, 0)) for b, c, o in zip((i, j), block, origin, strict=True)
        ]
        if (part := x[here[0], here[1]]).numel():
            wanted[i - r0, j - c0] = part.abs().max()
    mine = numerics.block_amax(x, block, origin)
    assert mine.dtype == torch.float32
    assert torch.equal(mine, wanted)


@given(
    place=rectangles(limit=80),
    block=st.tuples(block_shape, block_shape),
    at=st.tuples(st.integers(0, 79), st.integers(0, 79)),
)
def test_block_amax_passes_nan_on(place, block, at):
    _, origin, shape = place
    x = normal(*shape)
    if 0 in shape:
        return
    at = tuple(a % n for a, n in zip(at, shape, strict=True))
    x[at] = NAN
    entry = tuple((a + o) // c - (0 if c == ALL else o // c) for a, o, c in zip(at, origin, block, strict=True))
    found = numerics.block_amax(x, block, origin).isnan().nonzero().tolist()
    assert found == [list(entry)]


def rectangle_of(grid, component, origin, shape):
    (r0, r1), (c0, c1) = (touched(*args) for args in zip(origin, shape, component.block_shape, strict=True))
    return grid[r0:r1, c0:c1]


SCALINGS = [Scaling(), Scaling(power_of_two=True), Scaling(margin=2, epsilon=1e-3)]


@every_format
@given(place=rectangles(), scaling=st.sampled_from(SCALINGS), stochastic=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_rectangle_is_a_slice_of_the_whole(fmt, place, scaling, stochastic, seed):
    """Idea 1: quantize(shard(x)) == shard(quantize(x)), codes and values, given the touched amaxes of the whole."""
    whole, origin, shape = place
    x = normal(*whole, seed=seed) * normal(whole[0], 1, seed=seed + 1).exp()
    rows, cols = (slice(o, o + n) for o, n in zip(origin, shape, strict=True))
    grids = numerics.amaxes(x, fmt)
    mine = {name: rectangle_of(grid, fmt.by_name[name], origin, shape) for name, grid in grids.items()}
    stored, stored_part = (oracle.scales(g, fmt, scaling) for g in (grids, mine))
    factors, factors_part = (oracle.encode_scales(g, fmt, scaling) for g in (grids, mine))
    words = numerics.random_words(7, 1, seed, whole) if stochastic else None
    words_part = numerics.random_words(7, 1, seed, whole, origin, shape) if stochastic else None
    for copy in fmt.copies.values():
        encoding = copy.codes.encoding
        stored["codes"] = numerics.quantize_codes(x, copy, factors, (0, 0), words)
        part = numerics.quantize_codes(x[rows, cols], copy, factors_part, origin, words_part)
        assert part.shape == (shape[0], -(-shape[1] // copy.codes.block_shape[1]))
        codes = numerics.unpack(stored["codes"], encoding, whole[1])
        assert torch.equal(numerics.unpack(part, encoding, shape[1]), codes[rows, cols])
        if origin[1] % copy.codes.block_shape[1] == 0 == shape[1] % copy.codes.block_shape[1]:
            packed = slice(*(n // copy.codes.block_shape[1] for n in (cols.start, cols.stop)))
            assert torch.equal(part, stored["codes"][rows, packed])
        values = numerics.dequantize(copy, {**stored, copy.codes.name: stored["codes"]}, whole)
        values_part = numerics.dequantize(copy, {**stored_part, copy.codes.name: part}, shape, origin)
        assert torch.equal(values_part, values[rows, cols])


@every_format
@given(
    whole=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    cuts=st.tuples(st.lists(st.integers(0, 300), max_size=3), st.lists(st.integers(0, 300), max_size=3)),
)
@settings(max_examples=12)
def test_amaxes_of_pieces_reduce_to_those_of_the_whole(fmt, whole, cuts):
    """MAX over the pieces of any cut, each in its touched entries, is the amax of the whole: what ranks do."""
    x = normal(*whole)
    wanted = numerics.amaxes(x, fmt)
    reduced = {name: torch.zeros_like(grid) for name, grid in wanted.items()}
    edges = [sorted({0, n, *(c for c in cut if c < n)}) for n, cut in zip(whole, cuts, strict=True)]
    for (r0, r1), (c0, c1) in itertools.product(*(list(itertools.pairwise(e)) for e in edges)):
        for name, grid in numerics.amaxes(x[r0:r1, c0:c1], fmt, (r0, c0)).items():
            entries = rectangle_of(reduced[name], fmt.by_name[name], (r0, c0), (r1 - r0, c1 - c0))
            torch.maximum(entries, grid, out=entries)
    assert all(torch.equal(reduced[name], wanted[name]) for name in wanted)


def test_wrong_grid_is_refused():
    copy = FP8_128X128.copies[Orientation.ROWWISE]
    with pytest.raises(AssertionError):
        numerics.quantize_codes(normal(10, 10), copy, {"scale_inv": torch.ones(1, 1)}, origin=(120, 0))


# Scale rules


def representable(x, fmt):
    """x, zero where it is negative and codes of the format have no sign."""
    return x if fmt.copies[Orientation.ROWWISE].codes.encoding.is_signed else torch.where(x > 0, x, x.new_zeros(()))


@every_format
def test_zero_tensor(fmt):
    x = torch.zeros(40, 70)
    x[::2] = -0.0
    parts = numerics.quantize(x, fmt)
    for copy in fmt.copies.values():
        values = numerics.dequantize(copy, parts, (40, 70))
        assert torch.equal(values, x) and torch.equal(values.signbit(), representable(x, fmt).signbit())
        stored = {FP32: 1.0, E8M0: 0x00, E4M3: 0x00}[copy.scale.encoding]
        assert (parts[copy.scale.name] == stored).all()
    if "amax" in parts:
        assert parts["amax"].tolist() == [[0.0]]


@by_turns(2, fmt=FORMATS, bad=[INF, -INF, NAN])
def test_nonfinite_amax(fmt, bad):
    """FP32 scales become 1, E8M0 0xFE for infinity and 0xFF for NaN; NVFP4 keeps the amax, so nothing reads finite.

    Only the block with the bad element changes, and in NVFP4 the whole tensor.
    """
    x = normal(256, 256)
    clean = numerics.quantize(x, fmt)
    x[3, 5] = bad
    parts = numerics.quantize(x, fmt)
    for copy in fmt.copies.values():
        component, (rows, cols) = copy.scale, (min(c, 256) for c in copy.block)
        entry = parts[component.name][3 // rows, 5 // cols]
        if component.encoding == FP32:
            assert entry == 1
        elif component.encoding == E8M0:
            assert entry == (0xFF if math.isnan(bad) else 0xFE)
        else:
            assert not torch.isfinite(parts["amax"]).any()
            if math.isinf(bad):  # S_enc is 1
                amax = numerics.amaxes(x, fmt)[component.name]
                assert torch.equal(parts[component.name], saturated(amax * (1 / 6), E4M3))
        values = numerics.dequantize(copy, parts, (256, 256))
        if component.encoding == E4M3:
            assert not torch.isfinite(values[3, 5])
            continue
        outside = torch.ones(256, 256, dtype=torch.bool)
        outside[3 // rows * rows :, 5 // cols * cols :][:rows, :cols] = False
        assert torch.equal(values[outside], numerics.dequantize(copy, clean, (256, 256))[outside])
        at, signed = values[3, 5].item(), representable(floats32([bad]), fmt).item()
        assert math.isnan(at) if math.isnan(bad) else math.copysign(1, at) == math.copysign(1, signed)


def fp32_scale(amax, fmt, scaling=Scaling(), dtype=torch.float32):  # noqa: B008
    """(encode scale, stored) of one block."""
    grids = {"scale_inv": floats32([[amax]])}
    encode, stored = (f(grids, fmt, scaling, dtype)["scale_inv"] for f in (oracle.encode_scales, oracle.scales))
    return encode.item(), stored.item()


@pytest.mark.parametrize(("fmt", "largest"), [(FP8_E4M3, 448.0), (FP8_E5M2, 57344.0), (FP8_1X128, 448.0)])
def test_fp32_scale_rules(fmt, largest):
    for amax in (0.0, INF, NAN):
        assert fp32_scale(amax, fmt) == fp32_scale(amax, fmt, Scaling(power_of_two=True)) == (1.0, 1.0)
    assert fp32_scale(0.0, fmt, Scaling(epsilon=2.0**-10))[0] == largest * 2**10
    assert fp32_scale(2.0, fmt, Scaling(epsilon=2.0**-10))[0] == largest / 2
    assert fp32_scale(NAN, fmt, Scaling(epsilon=2.0**-10))[0] == 1
    for amax in (0.7, 3.0, 447.0, 1e-30, 1e30):
        amax = floats32([amax]).item()
        scale, stored = fp32_scale(amax, fmt)
        assert scale == float(np.float32(largest) / np.float32(amax))
        assert stored == float(np.float32(1) / np.float32(scale))
        power, _ = fp32_scale(amax, fmt, Scaling(power_of_two=True))
        assert math.frexp(power)[0] == 0.5 and power <= scale < 2 * power
        assert fp32_scale(amax, fmt, Scaling(margin=3))[0] == scale / 8


def test_overflowing_scale():
    """max / amax beyond float32: the largest float32 per tensor, the largest of the input's dtype per block."""
    tiny = 2.0**-149
    assert fp32_scale(tiny, FP8_E4M3, dtype=torch.bfloat16)[0] == FLOAT32_MAX
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert fp32_scale(tiny, FP8_1X128, dtype=dtype)[0] == torch.finfo(dtype).max
    assert fp32_scale(tiny, FP8_1X128, dtype=torch.float64)[0] == FLOAT32_MAX
    power = fp32_scale(tiny, FP8_1X128, Scaling(power_of_two=True), torch.bfloat16)
    assert power == (2.0**127, 2.0**-127)
    x = torch.full((1, 128), 2.0**-130, dtype=torch.bfloat16)
    parts = numerics.quantize(x, FP8_1X128)  # the dtype reaches the rule
    assert parts["scale_inv"].item() == float(np.float32(1) / np.float32(torch.finfo(torch.bfloat16).max))


def test_stored_scale_alone_would_not_do():
    """Why quantizing takes encode scales: 1 / (1 / scale) is another float for some, and rounds other codes."""
    amax = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    grids = {"scale_inv": amax}
    scale = oracle.encode_scales(grids, FP8_1X128, Scaling())["scale_inv"]
    again = 1 / oracle.scales(grids, FP8_1X128, Scaling())["scale_inv"]
    assert 0 < (scale != again).sum() < 1000


def blocks_of(x, block):
    rows, cols = (n if c == ALL else c for n, c in zip(x.shape, block, strict=True))
    for r, c in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], cols)):
        yield (r // rows, c // cols), (slice(r, r + rows), slice(c, c + cols))


def spread(rows, cols, seed=0):
    """Normal values of very different magnitude from row to row, some blocks zero."""
    x = normal(rows, cols, seed=seed) * torch.exp2(torch.arange(rows, dtype=torch.float32) % 40 - 25)[:, None]
    x[5:7] = 0
    return x


@by_turns(2, name=[name for name in FORMATS if name.startswith("mx")], dtype=[torch.float32, torch.bfloat16])
def test_mx_by_loops(name, dtype):
    """Against numpy and ml_dtypes, block by block: e = ceil(log2(amax / max)), code = x * 2**-e."""
    fmt, x = FORMATS[name], spread(100, 70).to(dtype)
    parts = numerics.quantize(x, fmt)
    for copy in fmt.copies.values():
        element = copy.codes.encoding
        stored = numerics.unpack(parts[copy.codes.name], element, 70)
        for entry, place in blocks_of(x, copy.block):
            part = x[place].float().numpy()
            scaled = Fraction(float(np.abs(part).max() * np.float32(1 / element.max)))
            exponent = next(e for e in range(-127, 128) if Fraction(2) ** e >= scaled)
            assert parts[copy.scale.name][entry] == exponent + 127
            codes = saturated(torch.from_numpy(part * np.float32(2.0**-exponent)), element)
            assert torch.equal(stored[place], codes)
            values = numerics.decode(codes, element) * 2.0**exponent
            assert torch.equal(numerics.dequantize(copy, parts, (100, 70))[place], values)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("nvfp4")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_by_loops(name, dtype):
    """Against numpy float32 scalars and ml_dtypes, operation by operation in TransformerEngine's order."""
    fmt, x, one = FORMATS[name], spread(48, 40).to(dtype), np.float32(1)
    parts = numerics.quantize(x, fmt)
    amax = np.abs(x.float().numpy()).max()
    s_enc = np.float32(448 * 6) / amax
    assert parts["amax"].item() == amax
    for copy in fmt.copies.values():
        codes = numerics.unpack(parts[copy.codes.name], E2M1, 40)
        values = numerics.dequantize(copy, parts, (48, 40))
        for entry, place in blocks_of(x, copy.block):
            part = x[place].float().numpy()
            s_dec = (np.abs(part).max() * (s_enc * (one / np.float32(6)))).astype(ml_dtypes.float8_e4m3fn)
            assert parts[copy.scale.name][entry].item() == s_dec.view(np.uint8)
            s_dec = s_dec.astype(np.float32)
            scale = one / (s_dec * (one / s_enc)) if s_dec else np.float32(FLOAT32_MAX)
            with np.errstate(over="ignore"):
                wanted = saturated(torch.from_numpy(part * scale), E2M1)
            assert torch.equal(codes[place], wanted)
            factor = s_dec * amax * np.float32(1 / (6 * 448))
            assert torch.equal(values[place], numerics.decode(wanted, E2M1) * torch.tensor(factor))


@pytest.mark.parametrize("element", [448.0, 6.0, 57344.0, 6 * 448.0])
def test_reciprocal_constants(element):
    """1 / max as a Python float, rounded to float32 where it is used, is the float32 quotient that CUDA uses."""
    assert np.float32(1.0 / element) == np.float32(1) / np.float32(element)


def test_nvfp4_scale_order():
    """amax * (S_enc * (1 / 6)), not (amax / 6) * S_enc: over all pairs of bfloat16 amaxes some differ in E4M3."""
    one, six = np.float32(1), np.float32(6)
    whole = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16).float()  # [1, 2)
    block = torch.arange(0x3B00, 0x3F80, dtype=torch.int16).view(torch.bfloat16).float()  # [2**-9, 1)
    found, wanted, other = [], [], []
    for amax in whole:
        grids = {"amax": amax.reshape(1, 1), "scale_inv": block.reshape(1, -1)}
        found.append(oracle.scales(grids, NVFP4_1X16, Scaling())["scale_inv"])
        s_enc = np.float32(448 * 6) / amax.numpy()
        wanted.append(saturated(block * torch.tensor(s_enc * (one / six)), E4M3))
        other.append(saturated(torch.from_numpy(block.numpy() / six * s_enc), E4M3))
    assert torch.equal(torch.cat(found).view(-1), torch.cat(wanted))
    assert (torch.cat(wanted) != torch.cat(other)).any()


@every_format
def test_float64_is_rounded_to_float32_first(fmt):
    x = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, two = numerics.quantize(x, fmt), numerics.quantize(x.float(), fmt)
    assert all(torch.equal(one[name], two[name]) for name in one)


@every_format
def test_error_is_within_half_a_gap(fmt):
    """Values come back within what the scale and the element's gaps allow, from the definition of the format."""
    given = normal(130, 150)
    parts, x = numerics.quantize(given, fmt), representable(given, fmt)
    for copy in fmt.copies.values():
        values = numerics.dequantize(copy, parts, (130, 150))
        encoding = copy.codes.encoding
        _, amax = torch.broadcast_tensors(x, x.abs().amax())
        for _, place in blocks_of(x, copy.block):
            amax = given[place].abs().max()
            # The scale that maps amax on max, up to a power of two (E8M0), or 2**-4 of rounding in E4M3.
            loose = {FP32: 1.0, E8M0: 2.0, E4M3: 1 + 2.0**-4}[copy.scale.encoding]
            smallest = loose * amax / encoding.max * 2.0 ** (1 - encoding.bias - encoding.mantissa_bits)
            allowed = torch.maximum(x[place].abs() * 2.0 ** -(encoding.mantissa_bits + 1), smallest / 2)
            clipped = amax * 2.0**-4 if copy.scale.encoding == E4M3 else 0  # S_dec may be rounded down
            assert (
                (values[place] - x[place]).abs() <= allowed * (1 + 2**-4 * (loose != 1)) + clipped + 1e-6 * amax
            ).all()


# Quantizing again


@by_turns(2, fmt=FORMATS, power_of_two=[False, True])
def test_requantize_under_the_same_scales(fmt, power_of_two):
    """quantize(dequantize(q)) == q under the scales of q, for every format.

    Code * scale * (1 / scale) differs from the code by a few float32 roundings, far less than half a gap. It does not
    hold for a block of NVFP4 whose scale rounded to zero: its values are zero, whatever its codes.
    """
    x = spread(130, 150)
    scaling = Scaling(power_of_two=power_of_two)
    factors = oracle.encode_scales(numerics.amaxes(x, fmt), fmt, scaling)
    parts = numerics.quantize(x, fmt, scaling)
    for copy in fmt.copies.values():
        values = numerics.dequantize(copy, parts, (130, 150))
        again = numerics.quantize_codes(values, copy, factors)
        a, b = (numerics.unpack(codes, copy.codes.encoding, 150) for codes in (again, parts[copy.codes.name]))
        differ = a != b
        if copy.scale.encoding == E4M3:
            assert differ.any()  # the exception is seen
            for entry, place in blocks_of(x, copy.block):
                assert not differ[place].any() or parts[copy.scale.name][entry] == 0
        else:
            assert not differ.any()


@every_format
@given(seed=st.integers(0, 999), rows=st.integers(1, 140), cols=st.integers(1, 140), pow2=st.booleans())
@settings(max_examples=15)
def test_requantize_with_its_own_amaxes(fmt, seed, rows, cols, pow2):
    """What is left when the amaxes are taken again, from the quantized values.

    Scales that are powers of two: the values are a fixed point; codes are not, where an amax was rounded down to
    half of the largest code and the exponent falls by one. Other FP32 scales: the same codes; the scale may
    differ by an ulp or two, as the new amax is 448 * (1 / (448 / amax)). NVFP4: nothing, since an E4M3 scale rounds
    anew.
    """
    scaling = Scaling(power_of_two=pow2)
    x = normal(rows, cols, seed=seed)
    parts = numerics.quantize(x, fmt, scaling)
    for which, copy in fmt.copies.items():
        values = numerics.dequantize(copy, parts, (rows, cols))
        again = numerics.quantize(values, fmt, scaling)
        if copy.scale.encoding == E8M0 or (copy.scale.encoding == FP32 and pow2):
            assert torch.equal(numerics.dequantize(copy, again, (rows, cols)), values), which
        elif copy.scale.encoding == FP32:
            assert torch.equal(again[copy.codes.name], parts[copy.codes.name]), which
            ratio = again[copy.scale.name] / parts[copy.scale.name]
            assert ((ratio - 1).abs() <= 2.0**-22).all()


def test_stochastic_and_hadamard_options():
    """`quantize` with both options is `hadamard16`, then rounding with the words given."""
    x = normal(24, 40)
    scaling = Scaling(stochastic_rounding=True, random_hadamard=True)
    words = numerics.random_words(3, 0, 1, (24, 48))
    parts = numerics.quantize(x, NVFP4_1X16, scaling, words={Orientation.ROWWISE: words})
    turned = numerics.hadamard16(x)
    grids = numerics.amaxes(turned, NVFP4_1X16)
    factors = oracle.encode_scales(grids, NVFP4_1X16, scaling)
    codes = numerics.quantize_codes(turned, NVFP4_1X16.copies[Orientation.ROWWISE], factors, words=words)
    assert torch.equal(parts["codes"], codes) and torch.equal(parts["amax"], grids["amax"])
    nearest = numerics.quantize(turned, NVFP4_1X16, words={Orientation.ROWWISE: words})[
        "codes"
    ]  # unasked, they are not used
    assert torch.equal(nearest, numerics.quantize(turned, NVFP4_1X16)["codes"])
    assert not torch.equal(codes, nearest)
    with pytest.raises(AssertionError, match="words"):
        numerics.quantize(x, NVFP4_1X16, Scaling(stochastic_rounding=True))


# Hadamard


def hadamard_matrix():
    """diag(signs) @ H16 / 4 with H16 by Sylvester's recursion and the signs copied from TransformerEngine."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    return torch.diag(torch.tensor(signs, dtype=torch.float64)) @ h / 4


def test_hadamard_is_the_matrix():
    matrix = hadamard_matrix()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    assert torch.equal(numerics.hadamard16(torch.eye(16)).double(), matrix)
    x = torch.randint(-128, 128, (3, 5, 64), generator=torch.Generator().manual_seed(0)).float()  # exact sums
    wanted = (x.double().unflatten(-1, (4, 16)) @ matrix).flatten(-2)
    assert torch.equal(numerics.hadamard16(x).double(), wanted)


def test_hadamard_rounds_once_to_the_dtype():
    x = normal(7, 48).bfloat16()
    mine = numerics.hadamard16(x)
    assert mine.dtype == torch.bfloat16
    exact = (x.double().unflatten(-1, (3, 16)) @ hadamard_matrix()).flatten(-2)
    # Half a bf16 ulp, and four float32 additions.
    assert ((mine.double() - exact).abs() <= exact.abs() * 2.0**-8 + 4 * 2.0**-24 * x.abs().double().max() * 4).all()
    assert torch.equal(mine, numerics.hadamard16(x.float()).bfloat16())


@given(cols=st.integers(0, 50), rows=st.integers(0, 3))
def test_hadamard_keeps_dot_products(rows, cols):
    """Padded to whole groups of 16: a @ b.T is kept, so a wgrad GEMM over transformed operands is the same GEMM."""
    a, b = normal(rows, cols), normal(2, cols, seed=1)
    ta, tb = numerics.hadamard16(a), numerics.hadamard16(b)
    assert ta.shape == (rows, -(-cols // 16) * 16)
    bound = 16 * 2.0**-24 * (a.abs().double() @ b.abs().double().t() + cols * 16)
    assert ((ta.double() @ tb.double().t() - a.double() @ b.double().t()).abs() <= bound).all()


# Random words


def philox_by_definition(counter, key):
    """Philox4x32-10 in Python's integers, from the paper's definition."""
    mask = 2**32 - 1
    k = [key & mask, key >> 32]
    c = list(counter)
    for _ in range(10):
        (h0, l0), (h1, l1) = (divmod(m * v, 2**32) for m, v in ((0xD2511F53, c[0]), (0xCD9E8D57, c[2])))
        c = [h1 ^ c[1] ^ k[0], l1, h0 ^ c[3] ^ k[1], l0]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_philox_published_vectors():
    """Known-answer vectors of the authors' Random123 library (kat_vectors, philox4x32 10)."""
    vectors = [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]
    for texts in vectors:
        counter, (k0, k1), wanted = ([int(h, 16) for h in text.split()] for text in texts)
        assert numerics.philox(counter, k0 | k1 << 32).tolist() == wanted
        assert numerics.philox(torch.tensor([counter]), k0 | k1 << 32).tolist() == [wanted]


word = st.integers(0, 2**32 - 1)


@settings(max_examples=50)
@given(counters=st.lists(st.tuples(word, word, word, word), min_size=1, max_size=5), key=st.integers(0, 2**64 - 1))
def test_philox_by_definition(counters, key):
    wanted = [philox_by_definition(c, key) for c in counters]
    assert numerics.philox(torch.tensor(counters), key).tolist() == wanted
    assert numerics.philox(torch.tensor(counters), key - 2**64).tolist() == wanted  # an int64 key, negative


@given(
    key=st.integers(0, 2**64 - 1),
    draw=st.integers(0, 2**33),
    stream=word,
    place=rectangles(limit=40),
    scale=st.sampled_from([1, 2**18]),
)
def test_random_words_by_definition(key, draw, stream, place, scale):
    """Word i % 4 of the call numbered i // 4, i the row-major index in the whole; also beyond 2**34 elements."""
    whole, origin, shape = place
    whole, origin = tuple(n * scale for n in whole), tuple(o * scale for o in origin)
    mine = numerics.random_words(key, draw, stream, whole, origin, shape)
    assert mine.dtype == torch.int64 and mine.shape == shape
    for r, c in {(0, 0), (shape[0] - 1, 0), (shape[0] // 2, shape[1] - 1), (shape[0] - 1, shape[1] // 3)}:
        if 0 in shape:
            break
        i = (origin[0] + r) * whole[1] + origin[1] + c
        counter = (i // 4 % 2**32, i // 4 // 2**32, draw % 2**32, stream)
        assert mine[r, c] == philox_by_definition(counter, key)[i % 4]


@given(place=rectangles(limit=60), key=st.integers(0, 2**64 - 1))
def test_random_words_of_a_rectangle_are_a_slice(place, key):
    whole, (r, c), (rows, cols) = place
    every = numerics.random_words(key, 3, 4, whole)
    assert torch.equal(numerics.random_words(key, 3, 4, whole, (r, c), (rows, cols)), every[r : r + rows, c : c + cols])
    assert torch.equal(numerics.random_words(key, 3, 4, whole, (r, c)), every[r:, c:])


@given(place=rectangles(limit=60), key=st.integers(0, 2**64 - 1))
def test_words_of_a_transpose(place, key):
    """Those of the matrix, halves exchanged; a rectangle's are a slice."""
    whole, (r, c), (rows, cols) = place
    bits = numerics.RandomBits(key, 3, 4, whole, transposed=True)
    every = numerics.random_words(key, 3, 4, whole[::-1]).t()
    assert torch.equal(bits.tensor(), (every >> 16) + (every % 2**16) * 2**16)
    piece = bits._replace(origin=(r, c), shape=(rows, cols)).tensor()
    assert torch.equal(piece, bits.tensor()[r : r + rows, c : c + cols])
    assert torch.equal(bits._replace(origin=(r, c)).tensor(), bits.tensor()[r:, c:])


def test_random_words_in_chunks():
    whole = (300, 1001)
    every = numerics.random_words(1, 2, 3, whole)
    rows = [numerics.random_words(1, 2, 3, whole, (r, 0), (1, 1001)) for r in range(300)]
    assert torch.equal(every, torch.cat(rows))
    assert torch.equal(numerics.random_words(1, 2, 3, whole, (5, 7), (290, 900)), every[5:295, 7:907])


def test_keys_draws_and_streams_are_independent():
    """No two agree in more than the few places that chance gives (0.0002 expected), and bits are balanced."""
    sets = [
        numerics.random_words(*kds, (1, 1000)) for kds in ((0, 0, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    for a, b in itertools.combinations(sets, 2):
        assert (a == b).sum() <= 1
    ones = sum((words >> bit & 1).sum().item() for words in sets for bit in range(32))
    assert abs(ones - 80_000) < 6 * math.sqrt(160_000) / 2  # six standard deviations


# Initialization

EXTREME_WORDS = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, int(0.075 * 2**32), int(0.075 * 2**32) + 1]


def test_uniform():
    words = torch.tensor(EXTREME_WORDS)
    assert [Fraction(u) for u in distributions.uniform(words).tolist()] == [
        (Fraction(w) + Fraction(1, 2)) / 2**32 for w in EXTREME_WORDS
    ]


def test_sqrt_is_correctly_rounded():
    """Against numpy's, which uses the processor's instruction, and torch.sqrt is not the way to it."""
    x = torch.cat([torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 4, probes(E5M2).abs()])
    x = torch.cat([x, x.square(), torch.nextafter(x.square(), floats32(INF)), x * 2.0**-140])
    assert torch.equal(numerics.sqrt(x), torch.from_numpy(np.sqrt(x.numpy())))
    assert numerics.sqrt(floats32([-1.0])).isnan().all()


def test_log():
    """Within two float64 ulps of the true logarithm."""
    x = torch.cat(
        [torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64), floats32([1, 2]).double()]
    )
    x = torch.cat(
        [x, x * 2.0**-33, x * 1e6, torch.tensor([0.5**0.5, math.nextafter(0.5**0.5, 0)], dtype=torch.float64)]
    )
    for value, mine in zip(x.tolist(), distributions._log(x).tolist(), strict=True):
        assert abs(mine - math.log(value)) <= 2 * math.ulp(math.log(value)), value


def test_normal_quantile():
    """In float64 a few ulps from Python's inv_cdf, and from a different algorithm (Cephes' ndtri)."""
    words = torch.cat([torch.tensor(EXTREME_WORDS), numerics.random_words(1, 0, 0, (1, 20_000))[0]])
    p = distributions.uniform(words)
    mine = distributions._normal_quantile(p)
    inverse = statistics.NormalDist().inv_cdf
    wanted = torch.tensor([inverse(u) for u in p.tolist()], dtype=torch.float64)
    assert ((mine - wanted).abs() <= wanted.abs() * 8 * 2.0**-52).all()
    # An error of p's last bit, 2**-53, is one of 2**-53 / density in z; ndtri subtracts from 1 near the centre.
    density = (-wanted.square() / 2).exp() / math.sqrt(2 * math.pi)
    assert ((mine - torch.special.ndtri(p)).abs() <= wanted.abs() * 16 * 2.0**-52 + 2.0**-52 / density).all()
    assert torch.equal(distributions.normal(words), mine.float())
    assert distributions.normal(words).abs().max() < 6.4


def test_normal_is_odd_and_monotone():
    words = numerics.random_words(2, 0, 0, (1, 100_000))[0].sort().values
    z = distributions.normal(words)
    assert (z[1:] >= z[:-1]).all()
    assert torch.equal(distributions.normal(2**32 - 1 - words), -z)


def test_normal_moments():
    """Over equally spaced words: the moments are those of the distribution, up to the missing tails."""
    z = distributions.normal(torch.arange(0, 2**32, 2**13)).double()
    assert abs(z.mean().item()) < 1e-4 and abs(z.square().mean().item() - 1) < 1e-4
    assert abs(z.pow(4).mean().item() - 3) < 1e-2


# Devices


@devices
@every_format
def test_same_bits_on_every_device(device, fmt):
    """The CPU's bits, recomputed on the device; on a machine without a GPU this only shows that it runs twice alike."""
    x = spread(96, 160)
    copies = list(fmt.copies)
    for scaling in (*SCALINGS, Scaling(stochastic_rounding=True)):
        results = []
        for where in ("cpu", device):
            words = {c: numerics.random_words(11, 0, i, (96, 160), device=where) for i, c in enumerate(copies)}
            y = x.to(where)
            parts = numerics.quantize(y, fmt, scaling, words=words)
            values = [numerics.dequantize(copy, parts, (96, 160)) for copy in fmt.copies.values()]
            quantiles = distributions._normal_quantile(
                distributions.uniform(words[Orientation.ROWWISE])
            )  # float64 shows what float32 hides
            others = quantiles, numerics.sqrt(y.abs()), numerics.hadamard16(y.bfloat16())
            results.append([*parts.values(), *values, *words.values(), *others])
        assert all(torch.equal(a, b.cpu()) for a, b in zip(*results, strict=True))


# torchao


@pytest.mark.parametrize(
    ("fmt", "element"), [(MXFP8_1X32, torch.float8_e4m3fn), (MXFP4_1X32, torch.float4_e2m1fn_x2)], ids=["8 bits", "4"]
)
def test_torchao_mx(fmt, element):
    """Bit for bit. Amaxes are bfloat16: torchao divides by the largest code where TransformerEngine multiplies.

    Scales are rounded up (RCEIL), so that no amax saturates; those of the OCP specification's simplest rule (FLOOR) are
    half as large where the amax is beyond the largest code times a power of two.
    """
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", exc_type=ImportError)
    x = spread(64, 128).bfloat16()
    scale, codes = mx.to_mx(x, element, 32, mx.ScaleCalculationMode.RCEIL)
    parts = numerics.quantize(x, fmt)
    live = parts["scale_inv"] > 0  # for a zero block torchao's smallest scale is another
    assert torch.equal(parts["scale_inv"][live], scale.view(torch.uint8)[live])
    assert torch.equal(parts["codes"], codes.view(torch.uint8))
    floor, _ = mx.to_mx(x, element, 32, mx.ScaleCalculationMode.FLOOR)
    mantissa = 2 * torch.frexp(numerics.amaxes(x, fmt)["scale_inv"]).mantissa
    beyond = mantissa > 2 * math.frexp(fmt.by_name["codes"].encoding.max)[0]
    assert torch.equal((parts["scale_inv"] - floor.view(torch.uint8))[live], beyond[live].to(torch.uint8))
    assert 0 < beyond.sum() < beyond.numel()


def test_torchao_nvfp4():
    """Scales exact; codes differ only where x lies within a few roundings of a tie, and then by one step."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", exc_type=ImportError)
    x = normal(128, 256).bfloat16()
    parts = numerics.quantize(x, NVFP4_1X16)
    scale, packed = nvfp4.nvfp4_quantize(x, 16, parts["amax"] / (448 * 6))
    assert torch.equal(parts["scale_inv"], scale.view(torch.uint8))
    mine, theirs = (numerics.unpack(p.view(torch.uint8), E2M1, 256) for p in (parts["codes"], packed))
    factors = oracle.encode_scales(numerics.amaxes(x, NVFP4_1X16), NVFP4_1X16, Scaling())["scale_inv"]
    scaled = (x.float() * factors.repeat_interleave(16, 1)).abs()
    ties = (magnitudes(E2M1)[1:] + magnitudes(E2M1)[:-1]) / 2
    near = ((scaled[..., None] - ties).abs() <= 8 * 2.0**-24 * ties).any(-1)
    assert not ((mine != theirs) & ~near).any()
    assert ((mine.int() - theirs.int()).abs() <= 1).all()


def test_roles_of_amaxes():
    """`amaxes` has a grid for each scale and each second scale, nothing for codes."""
    for fmt in FORMATS.values():
        assert numerics.amaxes(normal(3, 3), fmt).keys() == {
            c.name for c in fmt.components if c.role in (Role.SCALE, Role.AMAX)
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_torchao_rowwise(dtype, power_of_two):
    """Bit for bit, but for the scale of a row of zeros."""
    utils = pytest.importorskip("torchao.float8.float8_utils", exc_type=ImportError)
    by_row = pytest.importorskip("torchao.float8.config", exc_type=ImportError).ScalingGranularity.AXISWISE
    x = (torch.randn(57, 300) * torch.logspace(-6, 6, 57).unsqueeze(1)).to(dtype)
    x[3] = 0
    scale = utils.tensor_to_scale(x, torch.float8_e4m3fn, None, False, by_row, -1, power_of_two)
    parts = numerics.quantize(x, FORMATS["fp8_1xrow"], Scaling(power_of_two=power_of_two))
    codes = utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(parts["codes"], codes)
    assert torch.equal(parts["scale_inv"] == 1 / scale, (torch.arange(57) != 3).unsqueeze(1))


# ----------------------------------------------------------------------------------------------------------------- FP16


def test_float16_codes_are_torchs_cast_after_a_clamp():
    """Of every float16, of what lies between two of them, and beyond; NaN is the positive one."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()]
    between = finite.float() * (1 + 2.0**-11 * torch.rand(finite.shape))
    for x in (finite.float(), between, torch.tensor([1e5, -1e9, float("inf"), 1e-9, -1e-7])):
        expected = x.clamp(-65504, 65504).half()
        found = numerics.encode(x, FP16)
        assert found.dtype == torch.float16 and torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(numerics.decode(finite, FP16), finite.float())
    assert numerics.encode(torch.tensor([float("nan")]), FP16).view(torch.int16).item() == 0x7FFF
