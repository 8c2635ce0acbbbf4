"""Requests to kernels that quantize, by the tensors that are given."""

from __future__ import annotations

from torch import Tensor

from quantshard.formats import OrientedCodes, Scaling
from quantshard.kernels.quantize.targets import Given, QuantizeRequest, QuantizeSpec
from quantshard.numerics import Pair, RandomBits


def request_of(
    copy: OrientedCodes,
    scaling: Scaling,
    *,
    origin: Pair = (0, 0),
    multipliers: Tensor | None = None,
    amaxes: Tensor | None = None,
    second_amax: Tensor | None = None,
    words: RandomBits | None = None,
    transposed: bool = False,
    by_columns: bool = False,
) -> QuantizeRequest:
    """Of multipliers and amaxes one is given at most."""
    given: Given = "multipliers" if multipliers is not None else "amaxes" if amaxes is not None else ""
    spec = QuantizeSpec(copy, scaling, origin, transposed, by_columns, given)
    return QuantizeRequest(spec, amaxes if multipliers is None else multipliers, second_amax, words)
