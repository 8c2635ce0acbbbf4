"""Presets of `FusedAdam`, `Lion` and `Muon`: named ways to store masters and moments, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import torch

from quantshard.errors import ConfigurationError, meant
from quantshard.formats import Format, Orientation
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, NONNEGATIVE
from quantshard.numerics.muon import MOMENTUM_BUFFER
from quantshard.numerics.states import MASTER
from quantshard.state_cells import state_cell

ADAMW, LION, MUON = ALGORITHMS = ("adamw", "lion", "muon")
"""Optimizer algorithms, as named by `quantshard train`, `plan` and the groups of `Muon`."""

UNUSED_OPTIONS: Final = {
    ADAMW: ("momentum_buffer_dtype",),
    LION: ("exp_avg_sq_dtype", "momentum_buffer_dtype"),
    MUON: (),
}
"""The `StateOptions` that each algorithm ignores."""


class StateBytes(NamedTuple):
    """Bytes per element of a large matrix, scales included."""

    weight: float
    master: float
    moments: float

    @property
    def together(self) -> float:
        """Bytes per element of weight, master and both moments."""
        return self.weight + self.master + self.moments


@dataclass(frozen=True)
class StateOptions:
    """How `FusedAdam`, `Lion` and `Muon` store masters and moments. Names and defaults equal the optimizers' arguments.

    Only Muon uses `momentum_buffer_dtype`, and Lion ignores `exp_avg_sq_dtype`.
    """

    master_weights: bool = True
    master_weight_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    momentum_buffer_dtype: torch.dtype = torch.float32

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `FusedAdam`."""
        return {name: getattr(self, name) for name in OPTION_NAMES}

    @property
    def lion_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Lion`, which has no second moment."""
        return {name: value for name, value in self.arguments.items() if name not in UNUSED_OPTIONS[LION]}

    @property
    def muon_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Muon`."""
        return {**self.arguments, "momentum_buffer_dtype": self.momentum_buffer_dtype}

    def dtypes(self, algorithm: str = ADAMW) -> dict[str, torch.dtype]:
        """State -> dtype of a quantized weight under one of `ALGORITHMS`."""
        moments = {
            ADAMW: {EXP_AVG: self.exp_avg_dtype, EXP_AVG_SQ: self.exp_avg_sq_dtype},
            LION: {EXP_AVG: self.exp_avg_dtype},
            MUON: {MOMENTUM_BUFFER: self.momentum_buffer_dtype},
        }[algorithm]
        return moments | {MASTER: self.master_weight_dtype} if self.master_weights else moments

    def splits(self, weight: Format) -> bool:
        """True if the master of a weight in this format is 16 bits, stored as the weight's code and a low byte."""
        return self.store_param_remainders and self.master_weights and is_split(weight, self.master_weight_dtype)

    def bytes_of(self, weight: Format) -> StateBytes:
        """Bytes per element of a weight in this format and of its states under AdamW."""
        sizes = {state: _state_bytes(state, dtype) for state, dtype in self.dtypes().items()}
        if self.splits(weight):
            sizes[MASTER] = 1.0
        return StateBytes(weight.bytes_per_element, sizes.get(MASTER, 0.0), sizes[EXP_AVG] + sizes[EXP_AVG_SQ])


OPTION_NAMES: Final = tuple(field.name for field in fields(StateOptions) if field.name != "momentum_buffer_dtype")
"""The options of `FusedAdam` that a preset sets."""

PRESET_ARGUMENTS: Final = ("preset", *OPTION_NAMES)
"""The arguments of `FusedAdam` that choose how masters and moments are stored."""

STATE_ARGUMENTS: Final = (
    *PRESET_ARGUMENTS, "momentum_buffer_dtype", "state_dtypes", "use_decoupled_grad", "max_skipped_in_a_row",
)  # fmt: skip
"""The arguments of any optimizer here that choose how states are stored and a step works. They apply to all parameters,
so parameter groups cannot override them."""

PRESETS: Final = {
    "lean8": StateOptions(
        master_weight_dtype=torch.float16,
        store_param_remainders=True,
        exp_avg_dtype=torch.uint8,
        exp_avg_sq_dtype=torch.uint8,
        momentum_buffer_dtype=torch.bfloat16,
    ),
    "lean6": StateOptions(
        master_weight_dtype=torch.float16,
        store_param_remainders=True,
        exp_avg_dtype=torch.uint8,
        exp_avg_sq_dtype=torch.bfloat16,
        momentum_buffer_dtype=torch.bfloat16,
    ),
}
"""The presets by name; docs/optimizers.md gives the reasons.

lean8: 16-bit masters and 8-bit moments. The codes of an FP8 weight are the high byte of its master, so one more byte is
stored. (For a BF16 parameter the master is float32, and 16 bits are stored.)

lean6: one more byte, for a second moment in BF16, where every value has its own exponent. With one scale per 128
values, the second moment is the first state that a large neighbor spoils, because it holds squares of gradients.

Muon's momentum, the only moment of a matrix, is BF16 in both presets: orthogonalization amplifies the smallest singular
values to the size of the largest, and with them the error of rounding to FP8. Lion has only a first moment, so both
presets store it the same way.
"""


def check_preset(where: str, name: Any) -> StateOptions:
    """Return the options of a preset.

    Raises:
        ConfigurationError: there is no preset of this name. The message starts with `where`.
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    raise ConfigurationError(f"{where}: there is no such preset; {meant(name, PRESETS)}there are {', '.join(PRESETS)}")


def check_remainders(where: str, has_masters: bool, master: torch.dtype) -> None:
    """Check that `store_param_remainders` is used with masters, of a dtype that it supports.

    Raises:
        ConfigurationError: there are no masters or their dtype is not supported. The message starts with `where`.
    """
    if not has_masters or master is torch.bfloat16:
        raise ConfigurationError(
            f"{where}(store_param_remainders=True): parameter and remainder are a master, so leave "
            f"master_weights=True (not {has_masters}); it is of float32 beside a bfloat16 parameter, and of 16 bits "
            f"beside an FP8 weight if master_weight_dtype is float16, which must be one of the two (not {master})"
        )


def chosen_options(where: str, preset: str | None, given: Mapping[str, Any]) -> StateOptions:
    """Combine a preset with explicit options. Without a preset, missing options get their defaults.

    Args:
        where: the optimizer that received the arguments, for error messages.
        preset: a name in `PRESETS`, or None.
        given: option -> value, for names in `OPTION_NAMES`. None means not set.

    Raises:
        ConfigurationError: there is no such preset, an option contradicts it, or options contradict each other.
    """
    explicit = {name: value for name, value in given.items() if value is not None}
    if preset is None:
        dtype = explicit.get("master_weight_dtype", torch.float32)
        if explicit.get("master_weights") is False and dtype is not torch.float32:
            raise ConfigurationError(
                f"{where}(master_weights=False, master_weight_dtype={dtype}): there are no "
                "masters to be of a dtype; leave one of the two out"
            )
        return StateOptions(**explicit)
    options = check_preset(f"{where}(preset={preset!r})", preset)
    for name, value in explicit.items():
        if value != getattr(options, name):
            raise ConfigurationError(
                f"{where}(preset={preset!r}, {name}={value}): the preset has {name}={getattr(options, name)}; leave "
                "one of the two out"
            )
    return options


def preset_of(dtypes: Mapping[str, torch.dtype], split: bool | None = None) -> str:
    """Return the preset that stores a quantized weight with exactly these states, "lean8 or lean6" if both do, or "".

    Args:
        split: for an 8-bit weight, whether its master is stored as low bytes only. None for other weights.
    """
    return " or ".join(
        name
        for name, options in PRESETS.items()
        if dtypes in [options.dtypes(algorithm) for algorithm in ALGORITHMS]
        and split in (None, options.store_param_remainders)
    )


def is_split(weight: Format, master: torch.dtype) -> bool:
    """True if a weight in this format stores only the low byte of a master of this dtype (`store_param_remainders`),
    which requires 8-bit codes and a float16 master."""
    return weight.copies[Orientation.ROWWISE].codes.encoding.bits == 8 and master is torch.float16


def _state_bytes(state: str, dtype: torch.dtype) -> float:
    cell = state_cell(dtype, state in NONNEGATIVE)
    return float(dtype.itemsize) if cell is None else cell.format.bytes_per_element
