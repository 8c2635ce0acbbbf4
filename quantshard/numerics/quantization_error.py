"""Statistics of quantizing a matrix: how many values saturated or became zero, and the size of the error.

Results accumulate in a row of sums and a row of extremes, so that several matrices count as one.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from quantshard.formats import Encoding, OrientedCodes
from quantshard.numerics import Pair, dequantize, expand, hadamard16, stored_scales

SUMS: Final = ("elements", "nonfinite", "nonzero", "quantized", "saturated", "underflowed", "signal", "noise")
"""Columns of the sums, float64.

    nonzero: finite elements other than zero.
    quantized: finite elements that were quantized to a finite value. The columns below count only these.
    saturated: elements beyond the largest code by more than rounding.
    underflowed: nonzero elements that became zero.
    signal, noise: sums of squares and of squared errors.
"""

EXTREMES: Final = ("amax", "scale", "smallest_scale")
"""Columns of the extremes, float32: largest finite magnitude, largest and smallest scale of decoded codes."""

EMPTY: Final = (0.0, 0.0, math.inf)
"""Extremes before any matrix is added."""


def beyond(encoding: Encoding) -> float:
    """Return the magnitude, in units of codes, above which a value would round to a code larger than the largest."""
    exponent = math.floor(math.log2(encoding.max))
    return float(encoding.max + 2.0 ** (exponent - encoding.mantissa_bits - 1))


def add_values(sums: Tensor, extremes: Tensor, x: Tensor) -> None:
    """Add a matrix that is not quantized: its elements, nonfinite and nonzero elements, and its amax."""
    sums, extremes = sums[0], extremes[0]
    finite = x.isfinite()
    count = finite.sum()
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    sums[:3] += torch.stack([zero + x.numel(), x.numel() - count.double(), (finite & (x != 0)).sum().double()])
    if x.numel():
        top = torch.where(finite, x, 0).abs().amax().float()
        extremes[0] = torch.maximum(extremes[0], top)


def add_error(
    sums: Tensor, extremes: Tensor, x: Tensor, copy: OrientedCodes, parts: Mapping[str, Tensor],
    origin: Pair = (0, 0), hadamard: bool = False, partial: bool = False,
) -> None:  # fmt: skip
    """Add a matrix x [R, C] and its quantized components of one copy that the rectangle touches.

    `sums`, `extremes`: [copies, columns]. The first row is updated in place; the other rows are for kernels.
    `hadamard`: x was quantized after `hadamard16`. `partial`: kernels sample a part of x.
    """
    x = hadamard16(x) if hadamard else x
    add_values(sums, extremes, x)
    sums, extremes = sums[0], extremes[0]
    if not x.numel():
        return
    shape = (x.shape[0], x.shape[1])
    q = dequantize(copy, parts, shape, origin)
    grid = stored_scales(copy, parts)
    scales, usable = expand(grid, copy.block, shape, origin), grid.isfinite()
    extremes[1] = torch.maximum(extremes[1], torch.where(usable, grid, 0.0).amax())
    extremes[2] = torch.minimum(extremes[2], torch.where(usable, grid, math.inf).amin())
    values = x.float()
    is_finite = values.isfinite() & q.isfinite()
    exact, error = torch.where(is_finite, x, 0).double(), torch.where(is_finite, x.double() - q.double(), 0.0)
    sums[3:] += torch.stack(
        [
            is_finite.sum().double(),
            (is_finite & (values.abs() > scales * beyond(copy.codes.encoding)) & (q != 0)).sum().double(),
            (is_finite & (x != 0) & (q == 0)).sum().double(),
            exact.square().sum(),
            error.square().sum(),
        ]
    )
