"""What quantizing a matrix did to its values: how many saturated or became zero, and how large the error is.

It is added to a row of sums and a row of extremes, so that matrices seen one after the other count as one. Counts and
squares are kept in float64, which has integers up to 2**53 exactly, and whose squares neither overflow nor vanish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from quantshard.formats import Encoding, OrientedCodes
from quantshard.numerics import Pair, dequantize, expand, stored_scales

SUMS: Final = ("elements", "nonfinite", "nonzero", "quantized", "saturated", "underflowed", "signal", "noise")
"""Columns of the sums, float64: elements; those infinite or NaN; finite ones other than zero; then of the finite ones
that were quantized: how many; those beyond the largest code by more than rounding; those not zero that became zero; the
sum of their squares, and of the squares of their errors."""

EXTREMES: Final = ("amax", "scale", "smallest_scale")
"""Columns of the extremes, float32: the largest finite magnitude, and the largest and the smallest of the scales that
decoded codes are multiplied by."""

EMPTY: Final = (0.0, 0.0, math.inf)
"""The extremes of nothing."""


def beyond(encoding: Encoding) -> float:
    """The magnitude in codes above which a value saturates: it would get a larger code, if there were one."""
    exponent = math.floor(math.log2(encoding.max))
    return float(encoding.max + 2.0 ** (exponent - encoding.mantissa_bits - 1))


def add_values_(sums: Tensor, extremes: Tensor, x: Tensor) -> None:
    """Add a matrix that is not quantized: its elements, those not finite, those not zero, and its amax."""
    finite = x.isfinite()
    count = finite.sum()
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    sums[:3] += torch.stack([zero + x.numel(), x.numel() - count.double(), (finite & (x != 0)).sum().double()])
    if x.numel():
        top = torch.where(finite, x, 0).abs().amax().float()
        extremes[0] = torch.maximum(extremes[0], top)


def add_error_(
    sums: Tensor,
    extremes: Tensor,
    x: Tensor,
    copy: OrientedCodes,
    parts: Mapping[str, Tensor],
    origin: Pair = (0, 0),
) -> None:
    """Add a matrix x [R, C] and what it was quantized to, the touched components of one copy.

    Args:
        sums: float64 [len(SUMS)], in place.
        extremes: float32 [len(EXTREMES)], in place.
    """
    add_values_(sums, extremes, x)
    if not x.numel():
        return
    shape = (x.shape[0], x.shape[1])
    q = dequantize(copy, parts, shape, origin)
    grid = stored_scales(copy, parts)
    scales, usable = expand(grid, copy.block, shape, origin), grid.isfinite()
    extremes[1] = torch.maximum(extremes[1], torch.where(usable, grid, 0.0).amax())
    extremes[2] = torch.minimum(extremes[2], torch.where(usable, grid, math.inf).amin())
    values = x.float()
    known = values.isfinite() & q.isfinite()
    exact, error = torch.where(known, x, 0).double(), torch.where(known, x.double() - q.double(), 0.0)
    sums[3:] += torch.stack(
        [
            known.sum().double(),
            (known & (values.abs() > scales * beyond(copy.codes.encoding)) & (q != 0)).sum().double(),
            (known & (x != 0) & (q == 0)).sum().double(),
            exact.square().sum(),
            error.square().sum(),
        ]
    )
