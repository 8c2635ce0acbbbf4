"""What quantizing did to a matrix: against a case by hand, and against float64 by other means."""

import math

import pytest
import torch

from quantshard import formats, numerics
from quantshard.formats import FORMATS, Orientation, Scaling
from quantshard.numerics import quantization_error
from quantshard.numerics.quantization_error import EMPTY, EXTREMES, SUMS, add_error, add_values, beyond


def rows():
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    return sums, torch.tensor(EMPTY, dtype=torch.float32)


def named(sums, extremes):
    return dict(zip(SUMS, sums.tolist(), strict=True)) | dict(zip(EXTREMES, extremes.tolist(), strict=True))


def test_a_case_by_hand():
    """E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6. Under a scale of 2: 12 is 6, exactly; 13 is the same, off by 1, as rounding
    has it up to 14; 15 saturates. 0.4 is 0.2 in codes, and becomes 0; 3 is 1.5, exactly."""
    fmt = formats.MXFP4_1X32
    x = torch.tensor([[12.0, 13.0, -15.0, 0.4, 3.0, 0.0, math.nan, -math.inf]])
    copy = fmt.copies[Orientation.ROWWISE]
    parts = {
        copy.scale.name: torch.tensor([[128]], dtype=torch.uint8),  # E8M0: 2**(128 - 127)
        copy.codes.name: numerics.pack(numerics.encode(x / 2, formats.E2M1), formats.E2M1),
    }
    sums, extremes = rows()
    add_error(sums[None], extremes[None], x, copy, parts)
    assert named(sums, extremes) == {
        "elements": 8, "nonfinite": 2, "nonzero": 5, "quantized": 6, "saturated": 1, "underflowed": 1,
        "signal": pytest.approx(144 + 169 + 225 + 0.16 + 9), "noise": pytest.approx(1 + 9 + 0.16),
        "amax": 15, "scale": 2, "smallest_scale": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("encoding", "limit"), [(formats.E4M3, 464), (formats.E5M2, 61440), (formats.E2M1, 7), (formats.FP16, 65520)]
)
def test_saturation_begins_beyond_rounding(encoding, limit):
    assert beyond(encoding) == limit


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_squares_are_those_of_float64(fmt):
    """By the definition, in two pieces as in one; rounding to the nearest of a block is never saturation."""
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)) * 3
    parts, copy = numerics.quantize(x, fmt), fmt.copies[Orientation.ROWWISE]
    q = numerics.dequantize(copy, parts, (40, 70)).double()
    sums, extremes = rows()
    add_error(sums[None], extremes[None], x, copy, parts)
    found = named(sums, extremes)
    exact = x.double()
    assert found["signal"] == pytest.approx(float((exact**2).sum()), rel=2800 * 2.0**-53)
    assert found["noise"] == pytest.approx(float(((exact - q) ** 2).sum()), rel=2800 * 2.0**-53)
    assert found["underflowed"] == int(((q == 0) & (x != 0)).sum())
    assert (found["elements"], found["saturated"], found["nonfinite"]) == (2800, 0, 0)
    assert found["amax"] == float(x.abs().max()) and found["smallest_scale"] <= found["scale"]


def test_large_and_small_values_neither_overflow_nor_vanish():
    fmt = formats.FP8_1X128
    for size in (1e30, 1e-30):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) * size
        sums, extremes = rows()
        add_error(sums[None], extremes[None], x, fmt.copies[Orientation.ROWWISE], numerics.quantize(x, fmt, Scaling()))
        ratio = 10 * math.log10(float(sums[6] / sums[7]))
        assert 25 < ratio < 45, ratio


def test_counts_above_what_float32_holds():
    """Of 2**24 + 1 elements none is lost; the largest counts are integers in float64."""
    sums, extremes = rows()
    add_values(sums[None], extremes[None], torch.ones(1, 1).expand(4097, 4096))
    add_values(sums[None], extremes[None], torch.ones(1, 1))
    assert sums[:3].tolist() == [4097 * 4096 + 1, 0, 4097 * 4096 + 1]


def test_nothing_is_added_of_an_empty_shard():
    fmt = formats.FP8_E4M3
    sums, extremes = rows()
    x = torch.empty(0, 8)
    add_error(sums[None], extremes[None], x, fmt.copies[Orientation.ROWWISE], numerics.quantize(x, fmt))
    assert sums.tolist() == [0] * len(SUMS) and tuple(extremes.tolist()) == quantization_error.EMPTY
