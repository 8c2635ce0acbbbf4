"""Triton's interpreter, as tests make it faster, reduces as it does alone: elements in their order, several tensors."""

from functools import reduce

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles kernels, and chooses the order")


@triton.jit
def _later_counts_more(a, b):
    return a * 0.5 + b


@triton.jit
def _first_of_the_largest(a, i, b, j):
    return tl.where(a >= b, a, b), tl.where(a >= b, i, j)


@triton.jit
def _kernel(x_ptr, sums_ptr, where_ptr, ROWS: tl.constexpr, COLS: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    x = tl.load(x_ptr + at)
    left = tl.arange(0, ROWS if AXIS == 1 else COLS)
    sums = tl.reduce(x, AXIS, _later_counts_more)
    tl.store(sums_ptr + left, sums)
    tl.store(sums_ptr + (ROWS if AXIS == 1 else COLS), tl.reduce(sums, 0, _later_counts_more))
    _, where = tl.reduce((x, at), AXIS, _first_of_the_largest)
    tl.store(where_ptr + left, where)


@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_with_functions_of_our_own(axis: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    x[5], x[:, 3] = x[2], x[:, 1]  # of equal ones the first
    left = x.shape[1 - axis]
    sums, where = torch.zeros(left + 1), torch.zeros(left, dtype=torch.int32)
    _kernel[(1,)](x, sums, where, 8, 16, axis)
    wanted = reduce(lambda a, b: a * 0.5 + b, x.unbind(axis))
    assert torch.equal(sums[:-1], wanted)
    assert sums[-1] == reduce(lambda a, b: a * 0.5 + b, wanted.unbind())
    largest, first = x.max(axis).values, torch.arange(128).view(8, 16)
    is_largest = x == largest.unsqueeze(axis)
    assert torch.equal(where.long(), torch.where(is_largest, first, 128).amin(axis))
