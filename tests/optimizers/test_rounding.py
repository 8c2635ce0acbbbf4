"""Rounding to 16 bits: halves that make the whole again, exact probabilities, and words that no mesh changes."""

import pytest
import torch

from quantshard import numerics
from quantshard.formats import FP16
from quantshard.numerics import join_bfloat16, split_bfloat16
from quantshard.optimizers.state import TensorRegion, round_to

CPU = torch.device("cpu")


def every_kind_of_float32():
    """Random bits, every low half beside even and odd high halves of both signs, and the special values."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (1 << 18,), dtype=torch.int64, generator=generator)
    low = torch.arange(1 << 16)
    halves = [(high << 16) + low for high in (0, 1, 0x3F80, 0x3F81, 0x7F7F, -0x8000, -0x4080, -0x407F)]
    special = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001])
    return torch.cat([anything, *halves, special]).to(torch.int32).view(torch.float32)


def test_a_parameter_and_its_remainder_are_the_float32():
    values = every_kind_of_float32()
    high, low = split_bfloat16(values)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    again, nan = join_bfloat16(high, low), values.isnan()
    assert torch.equal(again.view(torch.int32)[~nan], values.view(torch.int32)[~nan])
    assert again[nan].isnan().all() and high[nan].isnan().all()


def test_the_high_half_is_the_nearest_bfloat16():
    """As torch rounds, but for ties, which go away from zero."""
    values = every_kind_of_float32()
    values = values[~values.isnan()]
    tie = values.view(torch.int32) & 0xFFFF == 0x8000
    high = split_bfloat16(values)[0]
    assert torch.equal(high[~tie].view(torch.int16), values[~tie].bfloat16().view(torch.int16))
    assert tie.sum() >= 8
    finite = tie & values.isfinite() & (values.abs() < torch.finfo(torch.bfloat16).max)
    assert (high[finite].double().abs() > values[finite].double().abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fraction", [0.0, 2.0**-13, 0.25, 0.5, 1 - 2.0**-13])
@pytest.mark.parametrize("at", [1.0, -3.5, 2.0**-14, 1 - 2.0**-11])
def test_stochastic_rounding_has_exact_probabilities(dtype, fraction, at):
    """The words that round up are `fraction` of all: counted over words at equal distances, not estimated."""
    below = torch.tensor(at).to(dtype)
    above = torch.nextafter(below, torch.tensor(float("inf")).to(dtype).copysign(below))
    value = below.float() + (above.float() - below.float()) * fraction
    assert value.double() == below.double() + (above.double() - below.double()) * fraction  # is a float32
    words = (torch.arange(1 << 16) << 16) + 0x1234
    found = round_to(value.expand(1 << 16).clone(), dtype, words)
    assert ((found == below) | (found == above)).all()
    assert (found == above).sum().item() == fraction * (1 << 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_keeps_what_fits_and_saturates(dtype):
    limits = torch.finfo(dtype)
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = bits[bits.isfinite()].float()
    for word in (0, 2**32 - 1):
        assert torch.equal(round_to(values, dtype, torch.full(values.shape, word)).float(), values)
    huge = torch.tensor([3.4e38, -3.4e38, float("inf")])
    assert round_to(huge, dtype, torch.zeros(3, dtype=torch.int64)).tolist() == [limits.max, -limits.max, limits.max]


def test_nan_stays_nan():
    """Those of all bits, too, as GPUs make them, whatever the word."""
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    for word in (0, 2**32 - 1):
        assert round_to(nans, torch.bfloat16, torch.full((4,), word)).isnan().all()


def test_float16_is_the_row_of_the_table():
    values, words = torch.randn(7, 9), torch.randint(0, 2**32, (7, 9))
    assert torch.equal(round_to(values, torch.float16, words), numerics.encode_stochastic(values, FP16, words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_without_words_it_is_a_cast(dtype):
    values = torch.randn(50)
    assert torch.equal(round_to(values, dtype, None), values.to(dtype))


@pytest.mark.parametrize("shape", [(), (11,), (7, 5), (7, 5, 3), (4, 3, 2, 5)], ids=str)
@pytest.mark.parametrize("dim", range(4))
def test_words_of_a_piece_are_those_of_the_whole(shape, dim):
    whole = TensorRegion(shape, (0,) * len(shape), shape).random_bits(123, 4, 5, False, CPU)
    assert whole.shape == shape and whole.unique().numel() == whole.numel()
    if dim >= len(shape):
        return
    for start, stop in ((0, 2), (1, shape[dim]), (2, 2)):
        origin, local = [0] * len(shape), list(shape)
        origin[dim], local[dim] = start, stop - start
        piece = TensorRegion(shape, tuple(origin), tuple(local)).random_bits(123, 4, 5, False, CPU)
        assert torch.equal(piece, whole.narrow(dim, start, stop - start))


def test_words_differ_with_each_part_of_a_draw():
    place = TensorRegion((6, 4), (0, 0), (6, 4))
    draws = ((1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1), (-1, 1, 0))
    seen = [place.random_bits(*draw, False, CPU) for draw in draws]
    assert len({tuple(words.flatten().tolist()) for words in seen}) == len(seen)


def test_the_step_may_be_a_tensor():
    place = TensorRegion((3, 70), (1, 5), (2, 33))
    assert torch.equal(place.random_bits(9, torch.tensor(77), 2, False, CPU), place.random_bits(9, 77, 2, False, CPU))
