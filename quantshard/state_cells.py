"""How tensors beside weights are stored: states of optimizers, and what an activation keeps of its inputs."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import torch

from quantshard.formats import FP8_1X128, FP16_1X128, UE5M3_1X128, Orientation, Scaling
from quantshard.recipe_table import QuantSpec

FP8_STATE = QuantSpec(FP8_1X128, Scaling(power_of_two=True))
"""How an optimizer stores a moment in 8 bits: E4M3 with one float32 scale for 128 elements of a row. FSDP cuts no
row, so only tensor parallelism along the columns makes these scales need a reduction. The scale is a power of two, so a
value that did not change stays as it was when it does."""

FP16_STATE = QuantSpec(FP16_1X128, Scaling(power_of_two=True))
"""How an optimizer stores a state in FP16: scaled likewise, since squares of small gradients are below its range."""

FP8_NONNEGATIVE_STATE = QuantSpec(UE5M3_1X128)
"""The same of a second moment, which is never negative and holds squares: 5 bits of exponent in place of a sign and 4.
Under one scale it tells gradients apart within a factor of 120,000, as the first moment does within 229,000; in E4M3 it
would be 480. Its scale is a power of two too, in a byte."""

STATE_CELLS: Final[dict[torch.dtype, QuantSpec | None]] = {
    torch.float32: None, torch.bfloat16: None, torch.float16: FP16_STATE, torch.uint8: FP8_STATE
}  # fmt: skip
"""State dtypes, spelled as TransformerEngine does (`torch.uint8` means FP8), and the row of those that are scaled."""

_NONNEGATIVE_CELLS: Final = {**STATE_CELLS, torch.uint8: FP8_NONNEGATIVE_STATE}


def state_cell(dtype: torch.dtype, nonnegative: bool = False) -> QuantSpec | None:
    """How a state of this dtype is stored; None: as plain numbers. `nonnegative`: see `StateSpec`."""
    return (_NONNEGATIVE_CELLS if nonnegative else STATE_CELLS)[dtype]


_SCALED_STATES = (FP8_STATE, FP16_STATE, FP8_NONNEGATIVE_STATE)

STATE_SCALE_SUFFIXES = tuple({cell.format.copies[Orientation.ROWWISE].scale.key_suffix: 0 for cell in _SCALED_STATES})
"""What is appended to a state's key in state dicts for its scales."""


def stored_state_cell(key: str, dtype: torch.dtype, keys: Container[str]) -> QuantSpec | None:
    """How the state under a key of a state dict, of this dtype and among these keys, was stored; None: as plain
    numbers."""
    for cell in _SCALED_STATES:
        stored = cell.format.copies[Orientation.ROWWISE]
        if stored.codes.encoding.storage is dtype and key + stored.scale.key_suffix in keys:
            return cell
    return None


def scaled_state(key: str) -> str:
    """The key of the state whose scales an entry of a state dict has; "" if it has none."""
    return next((key.removesuffix(suffix) for suffix in STATE_SCALE_SUFFIXES if key.endswith(suffix)), "")


ACTIVATION_CELLS: dict[str, QuantSpec | None] = {"high_precision": None, "fp8": FP8_STATE}
"""Values of `activation_storage`, and how the inputs of an activation, [tokens, features], are kept then."""
