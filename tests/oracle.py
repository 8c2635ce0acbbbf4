"""Results of the oracle that tests compare with, and that the library itself never needs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantshard import numerics
from quantshard.formats import Format, Orientation


def scales(*arguments: Any) -> dict[str, Tensor]:
    """The stored SCALE and AMAX components of `numerics.scales_and_multipliers`."""
    return numerics.scales_and_multipliers(*arguments)[0]


def encode_scales(*arguments: Any) -> dict[str, Tensor]:
    """The multipliers of `numerics.scales_and_multipliers`."""
    return numerics.scales_and_multipliers(*arguments)[1]


def transpose_parts(fmt: Format, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The components of the transposed tensor, [C, R] from [R, C], of a format with square blocks."""
    assert fmt.transposable, fmt.name
    codes = fmt.copies[Orientation.ROWWISE].codes
    transposed = {name: part.t().contiguous() for name, part in parts.items() if name != codes.name}
    unpacked = numerics.unpack(parts[codes.name], codes.encoding, shape[1])
    return transposed | {codes.name: numerics.pack(unpacked.t().contiguous(), codes.encoding)}
