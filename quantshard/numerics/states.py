"""The words for what a step of an optimizer reads and writes of a parameter: roles, and kinds in which it is stored.

Optimizers (`optimizers.state`), their kernels (`kernels.optimizer`) and checkpoints all take them from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, NamedTuple

MASTER: Final = "master_param"
"""The role of the values that a step reads and updates where the parameter is coarser, and their key in state dicts."""

AVERAGE: Final = "ema_param"
"""The role of the exponential moving average of the values that are trained, float32, and its key in state dicts."""

EMA_DECAY: Final = "ema_decay"
"""The entry of an optimizer's groups that says how slowly the average follows."""

ROUNDING_SEED: Final = "rounding_seed"
"""The entry of groups that an optimizer has which rounds states, masters or parameters stochastically."""

WEIGHT: Final = "param"
"""The role of the parameter itself, which is no state."""

REMAINDER_SUFFIX: Final = "_low"
"""What is appended to `MASTER` in state dicts for the low bytes of a master whose high bytes are the parameter."""


def has_master(state: Iterable[Any]) -> bool:
    """Whether a parameter's entries in an optimizer's state have a master, whichever way it is kept."""
    return any(str(key).startswith(MASTER) for key in state)


class StateSpec(NamedTuple):
    """A state that an optimizer keeps of each parameter beside the master: its role, which is its key in state dicts.

    `nonnegative`: it has no negative values, as a mean of squares, and a positive one never becomes zero when it is
    rounded; a negative one would. `words_of`: role of a state whose words of stochastic rounding it takes, halves
    exchanged, to save the time of drawing others.
    """

    role: str
    nonnegative: bool = False
    words_of: str | None = None


class StateKind(IntEnum):
    """How a state, a master or a parameter is stored."""

    ABSENT = 0
    """Not at all."""
    PLAIN = 1
    """One float32, bfloat16 or float16 tensor."""
    REMAINDER = 2
    """The low half of a float32, the high half being the parameter (`numerics.join_bfloat16`)."""
    SCALED = 3
    """Components of a format row."""
    SPLIT = 4
    """The low byte of 16 bits, the high byte being the parameter's code (`numerics.split_codes.join`)."""
