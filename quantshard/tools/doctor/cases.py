"""What the registry of kernels is made of: a row for each launcher, which makes cases, and when a result is right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import recipe

Shape = tuple[int, int]

U = 2.0**-24
"""Half a gap between float32 numbers beside 1."""
TINY = 2.0**-126
"""The smallest normal float32."""

OTHER_BITS = "other bits than the oracle's"
TOO_FAR = "further from the exact result than its bound"


class Bound(NamedTuple):
    """What a result must be near: the exact one, float64, and how far a kernel may be before it rounds once."""

    exact: Tensor
    error: Tensor


Expected = Tensor | Bound | None
"""What the oracle gives: bits, a bound, or nothing."""


class KernelCase(NamedTuple):
    """A launcher with its inputs: what it gives, what the oracle does, and the bytes that a launch must move.

    A second launch gives the same, but for steps of optimizers and histories, which go on.
    """

    launch: Callable[[], Sequence[Tensor | None]]
    oracle: Callable[[], Sequence[Expected]]
    moved: int

    def is_right(self) -> bool:
        """Whether each result of a launch is what the oracle's is."""
        found = self.launch()
        return all(agrees(one, other) for one, other in zip(found, self.oracle(), strict=True))


class KernelRow(NamedTuple):
    """A launcher in the registry of kernels.

    Args:
        kernels: names of the Triton kernels that its cases launch.
        make: gives the case of a matrix x, with the options of a case. The matrix says shape, dtype and device; values
            that need not have all of its magnitudes are drawn anew.
        cases: options by name, as the self-test prints it.
        timed: names of those that benchmarks measure.
        uneven: a small shape that takes each kernel several programs, of which the last ones are not full.
        otherwise: what is said of a case that is not right.
    """

    kernels: Collection[str]
    make: Callable[..., KernelCase]
    cases: Mapping[str, Mapping[str, Any]]
    timed: Sequence[str]
    uneven: Shape
    otherwise: str = OTHER_BITS


def recipe_names() -> list[str]:
    """Every recipe by its first name."""
    return list({kind: name for name, kind in reversed(recipe.NAMES.items())}.values())[::-1]


def agrees(found: Tensor | None, expected: Expected) -> bool:
    """Whether a result has the bits that are expected, or is within its bound; no bound holds for NaN."""
    if found is None or expected is None:
        return found is expected
    return is_near(found, expected) if isinstance(expected, Bound) else same_bits(found, expected)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, and of one shape and dtype."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (found, expected)))


def is_near(found: Tensor, bound: Bound) -> bool:
    """Within a bound after the one rounding to its dtype, which adds half a gap between neighbours.

    What is exactly beyond the largest number of the dtype may have become infinite.
    """
    exact, error = bound
    if found.shape != exact.shape:
        return False
    dtype = torch.finfo(found.dtype)
    smallest = max(TINY, dtype.smallest_normal * dtype.eps)
    room = error + dtype.eps / 2 * (exact.abs() + error) + U * exact.abs() + 2 * smallest
    overflown = (exact.abs() + room > dtype.max) & ~found.isnan()
    return bool((((found.double() - exact).abs() <= room) | overflown).all())


def random_like(x: Tensor, seed: int, shape: Sequence[int] | None = None) -> Tensor:
    """Random numbers about as large as 3, of x's dtype and device, and of its shape if no other is given."""
    generator = torch.Generator(x.device).manual_seed(seed)
    size = tuple(x.shape if shape is None else shape)
    return (torch.randn(size, dtype=torch.float32, device=x.device, generator=generator) * 3).to(x.dtype)
