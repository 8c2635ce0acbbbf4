"""Storage formats of tensors other than weights: optimizer states, and inputs that activations save for backward."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import torch

from quantshard.formats import FP8_1X128, FP16_1X128, UE5M3_1X128, Orientation, Scaling
from quantshard.recipe_table import QuantSpec

FP8_STATE = QuantSpec(FP8_1X128, Scaling(power_of_two=True))
"""8-bit format of a moment: E4M3 with one float32 scale per 128 elements of a row.

FSDP cuts no row, so these scales need a reduction only under tensor parallelism along the columns. The scale is a power
of two, so that an unchanged value keeps its bits when the scale changes.
"""

FP16_STATE = QuantSpec(FP16_1X128, Scaling(power_of_two=True))
"""FP16 format of a state, with the same scales, because squares of small gradients are below FP16's range."""

FP8_NONNEGATIVE_STATE = QuantSpec(UE5M3_1X128)
"""8-bit format of a second moment, which is a mean of squares: 5 exponent bits instead of a sign and 4.

Under one scale it resolves gradients within a factor of 120,000 (E4M3 would give 480), and the first moment within
229,000. Its scale is a power of two, stored in one byte.
"""

STATE_CELLS: Final[dict[torch.dtype, QuantSpec | None]] = {
    torch.float32: None, torch.bfloat16: None, torch.float16: FP16_STATE, torch.uint8: FP8_STATE
}  # fmt: skip
"""State dtypes, spelled as in TransformerEngine (`torch.uint8` means FP8), and the format of the scaled ones."""

_NONNEGATIVE_CELLS: Final = {**STATE_CELLS, torch.uint8: FP8_NONNEGATIVE_STATE}


def state_cell(dtype: torch.dtype, nonnegative: bool = False) -> QuantSpec | None:
    """Return the format of a state of this dtype, or None for plain numbers. `nonnegative`: see `StateSpec`."""
    return (_NONNEGATIVE_CELLS if nonnegative else STATE_CELLS)[dtype]


_SCALED_STATES = (FP8_STATE, FP16_STATE, FP8_NONNEGATIVE_STATE)

STATE_SCALE_SUFFIXES = tuple({cell.format.copies[Orientation.ROWWISE].scale.key_suffix: 0 for cell in _SCALED_STATES})
"""Suffixes that turn a state's key into the state-dict key of its scales."""


def stored_state_cell(key: str, dtype: torch.dtype, keys: Container[str]) -> QuantSpec | None:
    """Return the format of the state under `key` of a state dict with these keys, or None for plain numbers."""
    for cell in _SCALED_STATES:
        copy = cell.format.copies[Orientation.ROWWISE]
        if copy.codes.encoding.storage is dtype and key + copy.scale.key_suffix in keys:
            return cell
    return None


def scaled_state(key: str) -> str:
    """Return the key of the state that owns the scales under `key`, or "" if `key` holds no scales."""
    return next((key.removesuffix(suffix) for suffix in STATE_SCALE_SUFFIXES if key.endswith(suffix)), "")


ACTIVATION_CELLS: dict[str, QuantSpec | None] = {"high_precision": None, "fp8": FP8_STATE}
"""Values of `activation_storage`, and the format in which an activation saves its inputs [tokens, features]."""
