"""Building blocks of the case table: rows, cases, and the comparison of results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, int]

U = 2.0**-24
"""Half a float32 ulp at 1: the unit roundoff."""
TINY = 2.0**-126
"""Smallest normal float32."""

OTHER_BITS = "other bits than the oracle's"
TOO_FAR = "further from the exact result than its bound"


class Bound(NamedTuple):
    """Expected result: the exact value in float64, and the largest error before the final rounding."""

    exact: Tensor
    error: Tensor


Expected = Tensor | Bound | None
"""Result of an oracle: exact bits, a bound, or no tensor."""


class KernelCase(NamedTuple):
    """A launcher with inputs, its oracle, and the bytes that a launch must move.

    Repeated launches return the same results, except for optimizer steps and histories, which advance.
    """

    launch: Callable[[], Sequence[Tensor | None]]
    oracle: Callable[[], Sequence[Expected]]
    moved: int

    def is_right(self) -> bool:
        """Whether each result of a launch agrees with the oracle."""
        results = self.launch()
        return all(agrees(result, expected) for result, expected in zip(results, self.oracle(), strict=True))


class KernelRow(NamedTuple):
    """One launcher in the case table.

    Args:
        kernels: names of the Triton kernels that its cases launch.
        make: builds a case from a matrix x and the options of the case. The matrix gives shape, dtype and device;
            makers that do not need its range of magnitudes draw their own values.
        cases: options by name.
        timed: names of the cases that benchmarks measure.
        uneven: a small shape that needs several programs per kernel, with partial last programs.
        otherwise: how a failed case differs.
    """

    kernels: Collection[str]
    make: Callable[..., KernelCase]
    cases: Mapping[str, Mapping[str, Any]]
    timed: Sequence[str]
    uneven: Shape
    otherwise: str = OTHER_BITS


def agrees(found: Tensor | None, expected: Expected) -> bool:
    """Whether a result has the expected bits, or is within its bound; NaN is within no bound."""
    if found is None or expected is None:
        return found is expected
    return is_near(found, expected) if isinstance(expected, Bound) else same_bits(found, expected)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether shapes, dtypes and bits are equal."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (found, expected)))


def is_near(found: Tensor, bound: Bound) -> bool:
    """Whether a result is within its bound after one rounding to its dtype, which adds half an ulp.

    A result can be infinite if its bound extends beyond the largest number of the dtype.
    """
    exact, error = bound
    if found.shape != exact.shape:
        return False
    dtype = torch.finfo(found.dtype)
    smallest = max(TINY, dtype.smallest_normal * dtype.eps)
    tolerance = error + dtype.eps / 2 * (exact.abs() + error) + U * exact.abs() + 2 * smallest
    overflown = (exact.abs() + tolerance > dtype.max) & ~found.isnan()
    return bool((((found.double() - exact).abs() <= tolerance) | overflown).all())


def random_like(x: Tensor, seed: int, shape: Sequence[int] | None = None) -> Tensor:
    """Random numbers with standard deviation 3 and x's dtype and device. `shape`: by default x's shape."""
    generator = torch.Generator(x.device).manual_seed(seed)
    size = tuple(x.shape if shape is None else shape)
    return (torch.randn(size, dtype=torch.float32, device=x.device, generator=generator) * 3).to(x.dtype)


def values_of(shape: Shape, device: torch.device) -> Tensor:
    """A new bfloat16 tensor with values of many magnitudes, zeros, and a row of zeros."""
    return _values(shape).to(device, copy=True)


@lru_cache(maxsize=4)
def _values(shape: Shape) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, exponents = (torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu") for _ in range(2))
    x *= torch.exp(3 * exponents)
    x[0, 0] = 0
    x[3:4] = 0
    return x.bfloat16()


def bytes_of(*tensors: Tensor | None) -> int:
    """Total bytes of plain tensors; None counts as 0."""
    return sum(t.numel() * t.itemsize for t in tensors if t is not None)
