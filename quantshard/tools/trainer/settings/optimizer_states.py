"""Storage of a run's masters and moments, chosen by a preset or by individual settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from quantshard.errors import ConfigurationError, meant
from quantshard.state_storage import MUON, PRESETS, StateOptions
from quantshard.tools.trainer.settings.schema import shown_value

AUTO: Final = "auto"
"""Use the preset's value, or float32 without a preset."""

MASTER_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Storage dtypes of masters, by their name in settings and options."""

MOMENT_DTYPES: Final = {**MASTER_DTYPES, "fp8": torch.uint8}
"""Storage dtypes of moments, by their name in settings and options."""

STATE_SETTINGS: Final = {
    "master_weights": "master_weights",
    "master_dtype": "master_weight_dtype",
    "master_remainders": "store_param_remainders",
    "exp_avg_dtype": "exp_avg_dtype",
    "exp_avg_sq_dtype": "exp_avg_sq_dtype",
    "momentum_dtype": "momentum_buffer_dtype",
}
"""Settings that a preset determines, and the matching arguments of `FusedAdam` and `Muon`."""

FLOAT32_STATES: Final = "none"
"""Value of `--preset` for float32 masters and moments, to override the preset of a file or run."""

SWITCH: Final = {"on": True, "off": False}
"""Whether to store only the remainders of masters, by the words of settings and options."""

_VALUES: Final = {**MOMENT_DTYPES, **SWITCH}


def word_of(name: str, value: Any) -> Any:
    """Convert the value of an optimizer option to the value of the setting."""
    if name == "master_weights":
        return value
    return next((word for word, option in _VALUES.items() if option is value), value)


def state_options(preset: str, settings: Mapping[str, Any]) -> StateOptions:
    """Combine a preset ("" or `FLOAT32_STATES` for none) with individual settings.

    `settings`: values by the names of `STATE_SETTINGS`. The preset decides settings that are missing or `AUTO`, and
    `master_weights` unless it is False.

    Raises:
        ConfigurationError: the preset is unknown, or a setting contradicts it or another setting.
    """
    preset = named_preset(preset)
    if preset:
        _check_name(f"preset = {shown_value(preset)}", preset)
    options = PRESETS[preset] if preset else StateOptions()
    explicit = _given(preset, settings)
    for name in _contradicting(options, explicit) if preset else ():
        raise ConfigurationError(
            f"preset = {shown_value(preset)} has {name} = {word_of(name, getattr(options, STATE_SETTINGS[name]))!r}, "
            f"but {name} = {word_of(name, explicit[name])!r} is given; leave one of the two out"
        )
    combined = replace(options, **{STATE_SETTINGS[name]: value for name, value in explicit.items()})
    if combined.store_param_remainders and (
        not combined.master_weights or combined.master_weight_dtype is torch.bfloat16
    ):
        raise ConfigurationError(
            "master_remainders = 'on' needs master_weights = true, and a master_dtype of float32 or float16; it has "
            + ("no masters" if not combined.master_weights else "masters in bfloat16, as wide as the weights")
        )
    return combined


def named_preset(preset: str) -> str:
    """Return the preset's name; "" for `FLOAT32_STATES`."""
    return "" if preset == FLOAT32_STATES else preset


def _check_name(where: str, preset: str) -> None:
    names = [*PRESETS, FLOAT32_STATES]
    if preset not in names:
        raise ConfigurationError(
            f"{where}: there is no such preset; {meant(preset, names)}there are {', '.join(PRESETS)} and, for float32 "
            f"masters and moments, {FLOAT32_STATES}"
        )


def decided_names(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the explicit settings and of those that an explicit `FLOAT32_STATES` decides."""
    return (*given, *(STATE_SETTINGS if given.get("preset") == FLOAT32_STATES else ()))


def _given(preset: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert explicit settings to values of options."""
    return {
        name: _VALUES.get(value, value)
        for name, value in settings.items()
        if value not in (AUTO, None) and not (preset and name == "master_weights" and value)
    }


def _contradicting(options: StateOptions, given: Mapping[str, Any]) -> list[str]:
    return [name for name, value in given.items() if value != getattr(options, STATE_SETTINGS[name])]


def as_settings(options: StateOptions) -> dict[str, Any]:
    """Convert options to settings."""
    return {name: word_of(name, getattr(options, option)) for name, option in STATE_SETTINGS.items()}


def of_preset(preset: str) -> dict[str, Any]:
    """Return the settings that make a run use a preset or `FLOAT32_STATES`.

    Raises:
        ConfigurationError: the preset is unknown.
    """
    _check_name(f"--preset {preset!r}", preset)
    automatic = {name: AUTO for name in STATE_SETTINGS if name != "master_weights"}
    return {"preset": named_preset(preset), "master_weights": True, **automatic}


def below_flags(file: Mapping[str, Any], flags: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a file's settings, adjusted so that flags override them.

    A preset flag replaces all of `STATE_SETTINGS`. If a flag contradicts the file's preset, the preset is expanded into
    its individual settings, so that the rest of the preset still applies.

    Args:
        file: settings of the file.
        flags: explicit flags.
        where: path of the file, for messages.

    Raises:
        ConfigurationError: the file's preset is unknown, or contradicts its other settings.
    """
    if flags.get("preset"):
        return {name: value for name, value in file.items() if name not in STATE_SETTINGS}
    preset = "" if "preset" in flags else named_preset(file.get("preset", ""))
    if not preset:
        return dict(file)
    try:
        options = state_options(preset, {name: file[name] for name in STATE_SETTINGS if name in file})
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    explicit = {name: flags[name] for name in STATE_SETTINGS if name in flags}
    if not _contradicting(options, _given(preset, explicit)):
        return dict(file)
    expanded = {**file, **as_settings(options)}
    no_masters = explicit.get("master_weights") is False
    unused = {"preset", *(["master_dtype", "master_remainders"] if no_masters else [])}
    return {name: value for name, value in expanded.items() if name not in unused}


def above_file(flags: Mapping[str, Any], file: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags to apply above the result of `below_flags`. A flag `AUTO` stands for the value of the preset,
    also if the preset was expanded."""
    is_expanded = _is_spelled_out(file, below, flags)
    return {name: flag for name, flag in flags.items() if not (is_expanded and name in STATE_SETTINGS and flag == AUTO)}


def _is_spelled_out(file: Mapping[str, Any], below: Mapping[str, Any], flags: Mapping[str, Any]) -> bool:
    return "preset" not in flags and bool(file.get("preset")) and "preset" not in below


def dropped_preset(file: Mapping[str, Any], below: Mapping[str, Any], flags: Mapping[str, Any], where: str) -> str:
    """Return a message if `below_flags` expanded the file's preset; otherwise ""."""
    if not _is_spelled_out(file, below, flags):
        return ""
    overrides = ", ".join(f"{name} = {flags[name]!r}" for name in STATE_SETTINGS if name in flags)
    remaining = ", ".join(f"{name} = {below[name]!r}" for name in STATE_SETTINGS if name in below and name not in flags)
    return f"{where}: preset = {shown_value(file['preset'])}, but for {overrides}; of it stay {remaining}"


def float_momentum(flags: Mapping[str, Any], settings: Any) -> str:
    """Return a message if a flag sets the dtype of first moments but not of Muon's momentum; otherwise ""."""
    if settings.optimizer != MUON or flags.get("exp_avg_dtype", AUTO) == AUTO or settings.momentum_dtype != AUTO:
        return ""
    dtype = word_of("momentum_dtype", settings.state_options.momentum_buffer_dtype)
    return (
        f"exp_avg_dtype = {flags['exp_avg_dtype']!r} is of AdamW's groups beside Muon, whose momentum is kept in "
        f"{dtype}; momentum_dtype says otherwise"
    )


HELP: Final = f"storage of masters and moments, instead of the settings below: {', '.join(PRESETS)}, {FLOAT32_STATES}"
"""Help text of the setting `preset`."""
