"""Sums of several tensors equal those of PyTorch's additions one after the other, rounded at the end, to the bit."""

import pytest
import torch

pytest.importorskip("triton")

from quantshard import kernel_dispatch
from quantshard.kernels.fused.rounded_sum import SIZE, rounded_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1,), (3, 7), (1, SIZE), (SIZE // 8 + 1, 9)]


def summands(count, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    made = [torch.randn(shape, generator=generator) * 10.0**i for i in range(count)]
    for i, edge in enumerate((float("inf"), float("nan"), 3e38, -0.0)):
        made[i % count].view(-1)[i % made[0].numel()] = edge
    return [x.to(dtype).to(DEVICE) for x in made]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sums_are_those_of_additions(count, dtype):
    for shape in SHAPES:
        parts = summands(count, shape)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        found = rounded_sum(parts, dtype)
        assert found.dtype == dtype and torch.equal(found.isnan(), total.isnan())
        wanted = total.to(dtype).nan_to_num()
        assert torch.equal(found.nan_to_num(), wanted) and torch.equal(found.nan_to_num().signbit(), wanted.signbit())


def test_parts_of_few_bits_and_with_gaps_between_rows():
    parts = [part[:, :5] for part in summands(3, (6, 8), torch.bfloat16)]
    with kernel_dispatch.kernels_only_on():
        wanted = kernel_dispatch.rounded_sum(parts, torch.bfloat16)
    found = rounded_sum(parts, torch.bfloat16)
    assert wanted.dtype == torch.bfloat16 and torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert rounded_sum([torch.empty(0, 3, device=DEVICE)] * 2, torch.bfloat16).shape == (0, 3)


def test_float64_is_added_up_as_it_is():
    parts = [torch.full((3,), 2.0**-40, dtype=torch.float64, device=DEVICE), torch.ones(3, device=DEVICE).double()]
    assert torch.equal(kernel_dispatch.rounded_sum([x.clone() for x in parts], torch.float64), parts[0] + parts[1])
