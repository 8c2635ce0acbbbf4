"""Masters of 16 bits of which an FP8 weight's codes are the high byte: what is kept beside them, and read of both."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import numerics
from quantshard.formats import E4M3, E5M2, Encoding, Orientation
from quantshard.numerics import split_codes
from quantshard.optimizers import FusedAdam
from quantshard.recipe import resolve
from quantshard.tensor.quantized_tensor import QuantizedTensor
from tests.optimizers.test_states import MASTERS
from tests.tensor.test_tensor import same

EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
encodings = pytest.mark.parametrize("encoding", [E4M3, E5M2], ids=lambda each: each.name)


def finite(encoding: Encoding) -> Tensor:
    """All codes of 16 bits up to the largest."""
    top = numerics.encode(torch.tensor([encoding.extended.max]), encoding.extended).int()
    return EVERY[(EVERY.int() & 0x7FFF) <= top]


def built(recipe: str, **options: object) -> tuple[nn.Parameter, FusedAdam]:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = qs.Linear(150, 70, bias=False, params_dtype=torch.bfloat16)
    return layer.weight, FusedAdam([layer.weight], lr=1e-3, **MASTERS["split"], **options)  # type: ignore[arg-type]


def components(weight: nn.Parameter) -> dict[str, Tensor]:
    held = weight.data
    assert isinstance(held, QuantizedTensor)
    return {name: part.clone() for name, part in held.quantized_storage.components.items()}


@encodings
def test_the_halves_make_the_whole_again(encoding: Encoding) -> None:
    codes = finite(encoding)
    high, low = split_codes.split(codes)
    assert (high.dtype, low.dtype) == (torch.uint8, torch.uint8)
    assert torch.equal(split_codes.join(high, low).to(torch.int16), codes)
    values = split_codes.decode(high, low, encoding)
    assert torch.equal(numerics.encode(values, encoding.extended), codes) and values.isfinite().all()


@encodings
def test_the_high_byte_is_the_nearest_code(encoding: Encoding) -> None:
    """As codes are rounded, but for ties, which go away from zero; nothing is beyond the largest."""
    high, low = split_codes.split(finite(encoding))
    nearest = numerics.encode(split_codes.decode(high, low, encoding), encoding)
    tie = low == 0x80
    assert torch.equal(high[~tie], nearest[~tie])
    assert (high.int() - nearest.int())[tie].unique().tolist() == [0, 1]
    assert (high.int() & 0x7F).max().item() == numerics.encode(torch.tensor([encoding.max]), encoding).item()
    exact = numerics.decode(torch.arange(256).to(torch.uint8), encoding)
    alone = split_codes.decode(torch.arange(256).to(torch.uint8), torch.zeros(256, dtype=torch.uint8), encoding)
    kept = exact.isfinite()
    assert torch.equal(alone[kept], exact[kept])


@encodings
@pytest.mark.parametrize("words", [None, 0, 0xFFFFFFFF])
def test_what_does_not_fit(encoding: Encoding, words: int | None) -> None:
    """Too large a value is the largest, and NaN stays one in the weight and in the master."""
    copy = resolve("current").weight.format.copies[Orientation.ROWWISE]
    encoding_of = copy.codes.encoding
    if encoding is not encoding_of:
        pytest.skip("no weight has these codes")
    x = torch.tensor([[math.inf, -1e30, math.nan, 464.0, -0.0]])
    drawn = None if words is None else torch.full(x.shape, words)
    high, low = split_codes.quantize(x, copy, {copy.scale.name: torch.ones(1, 1)}, words=drawn)
    values = split_codes.decode(high, low, encoding)
    assert values[0, 2].isnan() and numerics.decode(high, encoding)[0, 2].isnan()
    assert torch.equal(values[0, [0, 1, 3]], torch.tensor([1.0, -1.0, 1.0]) * encoding.extended.max)
    assert torch.equal(numerics.decode(high, encoding)[0, [0, 1, 3]], torch.tensor([1.0, -1.0, 1.0]) * encoding.max)
    assert values[0, 4] == 0 and math.copysign(1, values[0, 4].item()) == -1


@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "rowwise", "mxfp8"])
def test_a_master_begins_with_what_the_weight_was_given(recipe: str) -> None:
    """To 12 bits, or half of the last of the smallest; beside a tie, of which the weight took the other side, to twice
    that. The weight, its scales and histories stay."""
    weight, optimizer = built(recipe)
    held = weight.data
    assert isinstance(held, QuantizedTensor)
    given = held.get_high_precision_init_val()
    assert given is not None
    before, storage = components(weight), held.quantized_storage
    master = optimizer.get_unscaled_state(weight, "master_param")
    copy = storage.spec.format.copies[Orientation.ROWWISE]
    scales = numerics.expand(numerics.stored_scales(copy, storage.touched()), copy.block, (70, 150), (0, 0))
    gap = (given.float().abs() * 2.0**-11).clamp(min=2.0**-17 * scales)
    off = (master - given.float()).abs() / gap
    assert (off <= 1.01).all() and (off > 0.51).float().mean() < 0.1 and (master != storage.dequantize()).any()
    optimizer.reseed_masters()
    assert same(optimizer.get_unscaled_state(weight, "master_param"), master)
    assert all(same(part, before[name]) for name, part in components(weight).items())
    held.clear_high_precision_init_val()
    optimizer.reseed_masters()
    assert same(optimizer.get_unscaled_state(weight, "master_param"), storage.dequantize())
    assert not optimizer.state[weight]["master_param_low"].any()


@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "rowwise", "mxfp8"])
def test_small_updates_add_up(recipe: str) -> None:
    """An update of a hundredth of the gap between two codes moves masters in each step, and weights on the whole; it is
    also less than the last of a master's bits, of large elements, where chance decides."""
    weight, optimizer = built(recipe)
    optimizer.param_groups[0].update(lr=2e-5, weight_decay=0.0)
    first, start = optimizer.get_unscaled_state(weight, "master_param"), components(weight)
    for _ in range(100):
        weight.grad = torch.ones_like(weight, dtype=weight.dtype)
        optimizer.step()
    moved = first - optimizer.get_unscaled_state(weight, "master_param")
    assert moved.mean().item() == pytest.approx(100 * 2e-5, rel=0.02)
    assert (components(weight)["codes"] != start["codes"]).float().mean() > 0.2
    # the weight is the master, rounded: nowhere further off than half a gap of its codes
    master, codes = optimizer.get_unscaled_state(weight, "master_param"), weight.dequantize().float()
    assert ((master - codes).abs() <= codes.abs() / 16 + 1e-3 * codes.abs().max()).all()


def test_setting_a_master_sets_the_weight() -> None:
    weight, optimizer = built("current")
    new = torch.randn(70, 150)
    optimizer.set_scaled_state(weight, "master_param", new)
    assert ((optimizer.get_unscaled_state(weight, "master_param") - new).abs() <= new.abs() * 2.0**-11 + 1e-6).all()
    cell = resolve("current").weight
    wanted = numerics.quantize(new, cell.format, cell.scaling)
    high = components(weight)
    assert same(high["scale_inv"], wanted["scale_inv"]) and (high["codes"] != wanted["codes"]).float().mean() < 0.01


def test_states_by_hand() -> None:
    """A step from known states: the formula on what codes and low bytes stand for, rounded to 16 bits by its words."""
    weight, optimizer = built("block", exp_avg_dtype=torch.bfloat16)
    before = optimizer.get_unscaled_state(weight, "master_param")
    weight.grad = torch.randn(70, 150).to(weight.dtype)
    optimizer.step()
    update = weight.grad.float() / (weight.grad.float().abs() + optimizer.param_groups[0]["eps"])
    decay = 1 - optimizer.param_groups[0]["weight_decay"] * 1e-3
    wanted = before * decay - 1e-3 * update
    found = optimizer.get_unscaled_state(weight, "master_param")
    off = (found - wanted).abs() / (wanted.abs() * 2.0**-11 + 1e-6)
    assert off.max() <= 1 and 0.1 < off.mean() < 0.3  # of the last bit, by chance up or down
