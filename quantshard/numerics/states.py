"""The vocabulary of optimizer steps: roles of a parameter's states, and the ways in which they are stored.

Shared by optimizers (`optimizers.state`), their kernels (`kernels.optimizer`) and checkpoints.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, NamedTuple

MASTER: Final = "master_param"
"""Role and state-dict key of the values that a step reads and updates if the parameter has lower precision."""

AVERAGE: Final = "ema_param"
"""Role and state-dict key of the exponential moving average of the trained values, float32."""

EMA_DECAY: Final = "ema_decay"
"""Entry of an optimizer's parameter groups with the decay of the average."""

ROUNDING_SEED: Final = "rounding_seed"
"""Entry of the parameter groups of optimizers that round states, masters or parameters stochastically."""

WEIGHT: Final = "param"
"""Role of the parameter itself, which is not a state."""

REMAINDER_SUFFIX: Final = "_low"
"""Suffix of `MASTER` in state dicts for the low bytes of a master with the parameter as its high bytes."""


def has_master(state: Iterable[Any]) -> bool:
    """True if a parameter's entries in an optimizer's state include a master, in any storage."""
    return any(str(key).startswith(MASTER) for key in state)


class StateSpec(NamedTuple):
    """A state that an optimizer stores for each parameter in addition to the master.

    role: its key in state dicts.
    nonnegative: it has no negative values, like a mean of squares. Rounding never makes a positive value zero.
    words_of: role of the state that shares its words of stochastic rounding, with swapped halves, which saves
        drawing more.
    """

    role: str
    nonnegative: bool = False
    words_of: str | None = None


class StateKind(IntEnum):
    """How a state, a master or a parameter is stored."""

    ABSENT = 0
    """Not stored."""
    PLAIN = 1
    """One float32, bfloat16 or float16 tensor."""
    REMAINDER = 2
    """The low half of a float32; the parameter is the high half (`numerics.join_bfloat16`)."""
    SCALED = 3
    """Components of a format."""
    SPLIT = 4
    """The low byte of 16 bits; the parameter's code is the high byte (`numerics.split_codes.join`)."""
