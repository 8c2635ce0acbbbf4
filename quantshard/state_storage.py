"""How optimizer states are stored: formats by dtype, options of `FusedAdam`, `Lion` and `Muon`, and presets."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypedDict

import torch

from quantshard.errors import ConfigurationError, meant
from quantshard.formats import FP8_1X128, FP16_1X128, UE5M3_1X128, Format, Orientation, Scaling
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ
from quantshard.numerics.muon import MOMENTUM_BUFFER
from quantshard.numerics.states import MASTER
from quantshard.recipe_table import QuantSpec

# Formats

FP8_STATE = QuantSpec(FP8_1X128, Scaling(power_of_two=True))
"""8-bit format of a moment: E4M3 with one float32 scale per 128 elements of a row.

The scale is a power of two, so that an unchanged value keeps its bits when the scale changes.
"""

FP16_STATE = QuantSpec(FP16_1X128, Scaling(power_of_two=True))
"""FP16 format of a state, with the same scales, because squares of small gradients are below FP16's range."""

FP8_NONNEGATIVE_STATE = QuantSpec(UE5M3_1X128)
"""8-bit format of a second moment, which is a mean of squares: 5 exponent bits instead of a sign and 4.

Under one scale it resolves gradients within a factor of 120,000 (E4M3 would give 480). Its scale is a power of two.
"""

PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of masters and of unquantized parameters. All arithmetic is float32, which represents their values exactly."""

STATE_QUANT_SPECS: Final[dict[torch.dtype, QuantSpec | None]] = {
    torch.float32: None, torch.bfloat16: None, torch.float16: FP16_STATE, torch.uint8: FP8_STATE
}  # fmt: skip
"""State dtypes, spelled as in TransformerEngine (`torch.uint8` means FP8), and the format of the scaled ones."""


def state_quant_spec(dtype: torch.dtype, nonnegative: bool = False) -> QuantSpec | None:
    """Return the format of a state of this dtype, or None for plain numbers. `nonnegative`: see `StateSpec`."""
    return FP8_NONNEGATIVE_STATE if nonnegative and dtype is torch.uint8 else STATE_QUANT_SPECS[dtype]


_SCALED_STATES = (FP8_STATE, FP16_STATE, FP8_NONNEGATIVE_STATE)

STATE_SCALE_SUFFIXES = tuple({spec.format.copies[Orientation.ROWWISE].scale.key_suffix: 0 for spec in _SCALED_STATES})
"""Suffixes that turn a state's key into the state-dict key of its scales."""


def stored_state_spec(key: str, dtype: torch.dtype, keys: Container[str]) -> QuantSpec | None:
    """Return the format of the state under `key` of a state dict with these keys, or None for plain numbers."""
    for spec in _SCALED_STATES:
        copy = spec.format.copies[Orientation.ROWWISE]
        if copy.codes.encoding.storage is dtype and key + copy.scale.key_suffix in keys:
            return spec
    return None


def scaled_state(key: str) -> str:
    """Return the key of the state that owns the scales under `key`, or "" if `key` holds no scales."""
    return next((key.removesuffix(suffix) for suffix in STATE_SCALE_SUFFIXES if key.endswith(suffix)), "")


def check_dtype(optimizer: str, role: str, dtype: torch.dtype) -> None:
    """Check that states of this role can have the dtype."""
    allowed = PLAIN_DTYPES if role == MASTER else tuple(STATE_QUANT_SPECS)
    if dtype not in allowed:
        option = "master_weight_dtype" if role == MASTER else f"{role}_dtype"
        names = ", ".join(map(str, allowed)) + (" (uint8: FP8)" if torch.uint8 in allowed else "")
        raise ConfigurationError(f"{optimizer}({option}={dtype}) is not supported; use one of {names}")


def floor_of(dtype: torch.dtype, nonnegative: bool = False) -> float:
    """Return `Encoding.relative_min` of a matrix state of this dtype, or 0 if every element has its own exponent."""
    spec = state_quant_spec(dtype, nonnegative)
    return 0.0 if spec is None else spec.format.copies[Orientation.ROWWISE].codes.encoding.relative_min


def stored_dtype(dtype: torch.dtype, ndim: int) -> torch.dtype:
    """Return the dtype in which a state is stored: scaled dtypes are for 2-D parameters, others use float32 instead."""
    return torch.float32 if STATE_QUANT_SPECS[dtype] is not None and ndim != 2 else dtype


def needs_master(is_quantized: bool, dtype: torch.dtype, master: torch.dtype) -> bool:
    """Whether a parameter has less precision than a master would have."""
    return is_quantized or torch.finfo(dtype).eps > torch.finfo(master).eps


def splits(weight: Format | None, dtype: torch.dtype, master: torch.dtype) -> bool:
    """Whether a master can be stored as only the bits that its parameter lacks (`store_param_remainders`).

    A bfloat16 parameter lacks 16 bits of a float32, whatever the dtype of other masters; an 8-bit quantized weight
    lacks the low 8 bits of a 16-bit master. `weight`: its format, or None for a parameter of `dtype`.
    """
    if weight is None:
        return dtype is torch.bfloat16
    return weight.copies[Orientation.ROWWISE].codes.encoding.bits == 8 and master is torch.float16


# Options

ADAMW, LION, MUON = ALGORITHMS = ("adamw", "lion", "muon")
"""Optimizer algorithms, as named by `quantshard train`, `plan` and the groups of `Muon`."""

UNUSED_OPTIONS = {ADAMW: ("momentum_buffer_dtype",), LION: ("exp_avg_sq_dtype", "momentum_buffer_dtype"), MUON: ()}
"""The `StateOptions` that each algorithm ignores."""


@dataclass(frozen=True)
class StateOptions:
    """How `FusedAdam`, `Lion` and `Muon` store masters and moments. Names and defaults equal the optimizers'."""

    master_weights: bool = True
    master_weight_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    momentum_buffer_dtype: torch.dtype = torch.float32

    def arguments(self, algorithm: str = ADAMW) -> dict[str, Any]:
        """Keyword arguments of the optimizer of one of `ALGORITHMS`."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in options.items() if name not in UNUSED_OPTIONS[algorithm]}

    def dtypes(self, algorithm: str = ADAMW) -> dict[str, torch.dtype]:
        """State -> dtype of a quantized weight under one of `ALGORITHMS`."""
        roles = {ADAMW: (EXP_AVG, EXP_AVG_SQ), LION: (EXP_AVG,), MUON: (MOMENTUM_BUFFER,)}[algorithm]
        moments = {role: getattr(self, f"{role}_dtype") for role in roles}
        return moments | {MASTER: self.master_weight_dtype} if self.master_weights else moments


STATE_ARGUMENTS: Final = (
    "preset", *(field.name for field in fields(StateOptions)), "state_dtypes", "use_decoupled_grad",
    "max_skipped_in_a_row", "release_gradients", "max_grad_norm", "max_grad_value",
)  # fmt: skip
"""The arguments of any optimizer here that choose how states are stored and a step works. They apply to all parameters,
so parameter groups cannot override them."""

_LEAN8 = StateOptions(
    master_weight_dtype=torch.float16, store_param_remainders=True, exp_avg_dtype=torch.uint8,
    exp_avg_sq_dtype=torch.uint8, momentum_buffer_dtype=torch.bfloat16,
)  # fmt: skip
PRESETS: Final = {"lean8": _LEAN8, "lean6": replace(_LEAN8, exp_avg_sq_dtype=torch.bfloat16)}
"""The presets by name; docs/optimizers.md gives the reasons.

lean8: 16-bit masters and 8-bit moments. The codes of an FP8 weight are the high byte of its master, so one more byte is
stored. For a BF16 parameter the master is float32, and 16 bits are stored.

lean6: one more byte, for a second moment in BF16, where every value has its own exponent.

Muon's momentum is BF16 in both presets: orthogonalization amplifies the smallest singular values to the size of the
largest, and with them the error of rounding to FP8.
"""


def check_remainders(where: str, has_masters: bool, master: torch.dtype) -> None:
    """Check that `store_param_remainders` is used with masters, of a dtype that it supports."""
    if not has_masters:
        raise ConfigurationError(f"{where}(store_param_remainders=True) needs masters; pass master_weights=True")
    if master is torch.bfloat16:
        rule = "use float32, or float16 for FP8 weights"
        raise ConfigurationError(f"{where}(store_param_remainders=True, master_weight_dtype={master}): {rule}")


def chosen_options(where: str, preset: str | None, options_by_name: Mapping[str, Any]) -> StateOptions:
    """Combine a preset, if any, with explicit options by name; None means not set. `where`: for error messages."""
    explicit = {name: value for name, value in options_by_name.items() if value is not None}
    if preset is None:
        dtype = explicit.get("master_weight_dtype", torch.float32)
        if explicit.get("master_weights") is False and dtype is not torch.float32:
            raise ConfigurationError(f"{where}: master_weights=False has no masters of {dtype}; leave one out")
        return StateOptions(**explicit)
    options = PRESETS.get(preset) if isinstance(preset, str) else None
    if options is None:
        choices = f"{meant(preset, PRESETS)}there are {', '.join(PRESETS)}"
        raise ConfigurationError(f"{where}(preset={preset!r}): there is no such preset; {choices}")
    for name, value in explicit.items():
        if value != getattr(options, name):
            rule = f"the preset has {name}={getattr(options, name)}; leave one out"
            raise ConfigurationError(f"{where}(preset={preset!r}, {name}={value}): {rule}")
    return options


class CommonOptions(TypedDict, total=False):
    """Keyword arguments of `FusedAdam`, `Lion` and `Muon` with their defaults; `FusedAdam` describes them."""

    preset: str | None  # None
    master_weights: bool | None  # True
    master_weight_dtype: torch.dtype | None  # float32
    store_param_remainders: bool | None  # False
    use_decoupled_grad: bool  # False
    capturable: bool  # False
    max_skipped_in_a_row: int  # 10
    ema_decay: float  # 0.0
    release_gradients: bool  # False
    max_grad_norm: float  # 0.0
    max_grad_value: float  # 0.0


def storage_arguments(
    optimizer: str, state_dtypes: Mapping[str, torch.dtype | None], common: CommonOptions
) -> dict[str, Any]:
    """Return an optimizer's options as keyword arguments of `ElementwiseOptimizer`, with a dtype for each state."""
    arguments: dict[str, Any] = dict(common)
    explicit: dict[str, Any] = {f"{role}_dtype": dtype for role, dtype in state_dtypes.items()}
    names = ("master_weights", "master_weight_dtype", "store_param_remainders")
    explicit |= {name: arguments.pop(name, None) for name in names}
    options = chosen_options(optimizer, arguments.pop("preset", None), explicit)
    dtypes = {role: getattr(options, f"{role}_dtype") for role in state_dtypes}
    return arguments | {"state_dtypes": dtypes} | {name: getattr(options, name) for name in names}
