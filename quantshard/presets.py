"""Presets of `FusedAdam`, `Lion` and `Muon`: names of how they keep masters and moments, and the memory it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import torch

from quantshard.argument_kinds import meant
from quantshard.errors import ConfigurationError
from quantshard.formats import Format, Orientation
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, NONNEGATIVE
from quantshard.numerics.muon import MOMENTUM_BUFFER
from quantshard.numerics.states import MASTER
from quantshard.state_cells import state_cell

ADAMW, LION, MUON = ALGORITHMS = ("adamw", "lion", "muon")
"""By which a parameter is stepped, as `quantshard train`, `plan` and groups of `Muon` name it."""


UNUSED_OPTIONS: Final = {
    ADAMW: ("momentum_buffer_dtype",),
    LION: ("exp_avg_sq_dtype", "momentum_buffer_dtype"),
    MUON: (),
}
"""Of `StateOptions`, those that say nothing of an optimizer's states."""


class StateBytes(NamedTuple):
    """Bytes for one element of a large matrix, scales included."""

    weight: float
    master: float
    moments: float

    @property
    def together(self) -> float:
        """Of weight, master and both moments."""
        return self.weight + self.master + self.moments


@dataclass(frozen=True)
class StateOptions:
    """How `FusedAdam`, `Lion` and `Muon` keep masters and moments; the names are those of their arguments, the defaults
    too.

    `momentum_buffer_dtype` is Muon's alone; Lion has no `exp_avg_sq_dtype`.
    """

    master_weights: bool = True
    master_weight_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    momentum_buffer_dtype: torch.dtype = torch.float32

    @property
    def arguments(self) -> dict[str, Any]:
        """As arguments of `FusedAdam`."""
        return {name: getattr(self, name) for name in OPTION_NAMES}

    @property
    def lion_arguments(self) -> dict[str, Any]:
        """As arguments of `Lion`, which has no second moment."""
        return {name: value for name, value in self.arguments.items() if name not in UNUSED_OPTIONS[LION]}

    @property
    def muon_arguments(self) -> dict[str, Any]:
        """As arguments of `Muon`."""
        return {**self.arguments, "momentum_buffer_dtype": self.momentum_buffer_dtype}

    def dtypes(self, algorithm: str = ADAMW) -> dict[str, torch.dtype]:
        """State -> dtype, of a quantized weight that is stepped by one of `ALGORITHMS`."""
        moments = {
            ADAMW: {EXP_AVG: self.exp_avg_dtype, EXP_AVG_SQ: self.exp_avg_sq_dtype},
            LION: {EXP_AVG: self.exp_avg_dtype},
            MUON: {MOMENTUM_BUFFER: self.momentum_buffer_dtype},
        }[algorithm]
        return moments | {MASTER: self.master_weight_dtype} if self.master_weights else moments

    def splits(self, weight: Format) -> bool:
        """Whether the master of a weight in this format is the low bytes of 16 bits alone, of which its codes are the
        high ones."""
        return self.store_param_remainders and self.master_weights and is_split(weight, self.master_weight_dtype)

    def bytes_of(self, weight: Format) -> StateBytes:
        """Of a weight in this format."""
        sizes = {state: _state_bytes(state, dtype) for state, dtype in self.dtypes().items()}
        if self.splits(weight):
            sizes[MASTER] = 1.0
        return StateBytes(weight.bytes_per_element, sizes.get(MASTER, 0.0), sizes[EXP_AVG] + sizes[EXP_AVG_SQ])


OPTION_NAMES: Final = tuple(each.name for each in fields(StateOptions) if each.name != "momentum_buffer_dtype")
"""The options of `FusedAdam` that a preset decides."""

PRESET_ARGUMENTS: Final = ("preset", *OPTION_NAMES)
"""The arguments of `FusedAdam` that say how masters and moments are kept."""

STATE_ARGUMENTS: Final = (
    *PRESET_ARGUMENTS, "momentum_buffer_dtype", "state_dtypes", "use_decoupled_grad", "max_skipped_in_a_row",
)  # fmt: skip
"""Those of any optimizer here, and how a step goes: of all its parameters, so none of them is an entry of a group."""

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
"""Every preset by its name; docs/optimizers.md argues for each.

lean8: masters of 16 bits, of which the codes of an FP8 weight are the high byte, so that a byte is kept beside them,
and both moments of 8. (Beside a BF16 parameter 16 bits are kept, and its master is float32.) lean6: a byte more, for a
second moment in BF16, each value of which has an exponent of its own: under a scale that 128 share, the second moment
reaches as far down as the squares of gradients do, so it is the first of the states that a large neighbour spoils.
Muon's momentum, the only moment of a matrix, is BF16 in both: to orthogonalize it brings its smallest singular values
to the size of the largest, and with them what rounding to FP8 has added. Lion, which has a first moment alone, is the
same by both.
"""


def check_preset(where: str, name: Any) -> StateOptions:
    """The options of a preset.

    Raises:
        ConfigurationError: there is none of this name; the message begins with `where`.
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    raise ConfigurationError(f"{where}: there is no such preset; {meant(name, PRESETS)}there are {', '.join(PRESETS)}")


def check_remainders(where: str, has_masters: bool, master: torch.dtype) -> None:
    """Check that `store_param_remainders` stands beside masters, of a dtype with which it has a meaning.

    Raises:
        ConfigurationError: it does not; the message begins with `where`.
    """
    if not has_masters or master is torch.bfloat16:
        raise ConfigurationError(
            f"{where}(store_param_remainders=True): parameter and remainder are a master, so leave "
            f"master_weights=True (not {has_masters}); it is of float32 beside a bfloat16 parameter, and of 16 bits "
            f"beside an FP8 weight if master_weight_dtype is float16, which must be one of the two (not {master})"
        )


def chosen_options(where: str, preset: str | None, given: Mapping[str, Any]) -> StateOptions:
    """The options that a preset and explicit ones choose together; without a preset, the others are the defaults.

    Args:
        where: whose arguments these are.
        preset: a name of `PRESETS`, or None.
        given: option -> value, of `OPTION_NAMES`; None is not given.

    Raises:
        ConfigurationError: there is no such preset, or an option contradicts it, or one another.
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
    """The name of the preset by which a quantized weight has exactly these states, "lean8 or lean6" where that is more
    than one; "" if there is none.

    `split`: of a weight of 8 bits, whether its master is the low bytes alone; None: of another.
    """
    return " or ".join(
        name
        for name, each in PRESETS.items()
        if dtypes in [each.dtypes(by) for by in ALGORITHMS] and split in (None, each.store_param_remainders)
    )


def is_split(weight: Format, master: torch.dtype) -> bool:
    """Whether a weight in this format keeps of a master of this dtype the low byte alone (`store_param_remainders`):
    beside codes of 8 bits, of float16."""
    return weight.copies[Orientation.ROWWISE].codes.encoding.bits == 8 and master is torch.float16


def _state_bytes(state: str, dtype: torch.dtype) -> float:
    cell = state_cell(dtype, state in NONNEGATIVE)
    return float(dtype.itemsize) if cell is None else cell.format.bytes_per_element
