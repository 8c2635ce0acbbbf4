"""How a run's optimizer keeps masters and moments: by a preset's name, or by settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from quantshard.argument_kinds import meant
from quantshard.errors import ConfigurationError
from quantshard.presets import MUON, PRESETS, StateOptions
from quantshard.tools.trainer.settings.schema import shown_value

AUTO: Final = "auto"
"""What the preset says, and float32 where there is none."""

MASTER_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""How masters may be stored, by the words of settings and options."""

MOMENT_DTYPES: Final = {**MASTER_DTYPES, "fp8": torch.uint8}
"""How moments may be stored, by the words of settings and options."""

STATE_SETTINGS: Final = {
    "master_weights": "master_weights",
    "master_dtype": "master_weight_dtype",
    "master_remainders": "store_param_remainders",
    "exp_avg_dtype": "exp_avg_dtype",
    "exp_avg_sq_dtype": "exp_avg_sq_dtype",
    "momentum_dtype": "momentum_buffer_dtype",
}
"""The settings that a preset decides, and what `FusedAdam` and `Muon` call them."""

FLOAT32_STATES: Final = "none"
"""What `--preset` is given for float32 masters and moments, where those of a file or of a run are others."""

SWITCH: Final = {"on": True, "off": False}
"""Whether of masters only the remainders are kept, by the words of settings and options."""

_VALUES: Final = {**MOMENT_DTYPES, **SWITCH}


def word_of(name: str, value: Any) -> Any:
    """The value of the option that a setting stands for, as the setting has it."""
    if name == "master_weights":
        return value
    return next((word for word, option in _VALUES.items() if option is value), value)


def state_options(preset: str, settings: Mapping[str, Any]) -> StateOptions:
    """What a preset, "" or `FLOAT32_STATES` for none, and settings choose together.

    `settings`: by the names of `STATE_SETTINGS`; those that are left out, or `AUTO`, and masters that are not turned
    off, are as the preset has them.

    Raises:
        ConfigurationError: there is no such preset, or a setting contradicts it or another.
    """
    preset = named_preset(preset)
    if preset:
        _check_name(f"preset = {shown_value(preset)}", preset)
    options = PRESETS[preset] if preset else StateOptions()
    given = _given(preset, settings)
    for name in _contradicting(options, given) if preset else ():
        raise ConfigurationError(
            f"preset = {shown_value(preset)} has {name} = {word_of(name, getattr(options, STATE_SETTINGS[name]))!r}, "
            f"but {name} = {word_of(name, given[name])!r} is given; leave one of the two out"
        )
    chosen = replace(options, **{STATE_SETTINGS[name]: value for name, value in given.items()})
    if chosen.store_param_remainders and (not chosen.master_weights or chosen.master_weight_dtype is torch.bfloat16):
        raise ConfigurationError(
            "master_remainders = 'on' needs master_weights = true, and a master_dtype of float32 or float16; it has "
            + ("no masters" if not chosen.master_weights else "masters in bfloat16, as wide as the weights")
        )
    return chosen


def named_preset(preset: str) -> str:
    """A preset's name, "" for `FLOAT32_STATES`."""
    return "" if preset == FLOAT32_STATES else preset


def _check_name(where: str, preset: str) -> None:
    known = [*PRESETS, FLOAT32_STATES]
    if preset not in known:
        raise ConfigurationError(
            f"{where}: there is no such preset; {meant(preset, known)}there are {', '.join(PRESETS)} and, for float32 "
            f"masters and moments, {FLOAT32_STATES}"
        )


def decided_names(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of settings that were given, and of those that `FLOAT32_STATES` among them decides."""
    return (*given, *(STATE_SETTINGS if given.get("preset") == FLOAT32_STATES else ()))


def _given(preset: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What settings ask for, as options have it."""
    return {
        name: _VALUES.get(value, value)
        for name, value in settings.items()
        if value not in (AUTO, None) and not (preset and name == "master_weights" and value)
    }


def _contradicting(options: StateOptions, given: Mapping[str, Any]) -> list[str]:
    return [name for name, value in given.items() if value != getattr(options, STATE_SETTINGS[name])]


def as_settings(options: StateOptions) -> dict[str, Any]:
    """Options by the names and words of settings."""
    return {name: word_of(name, getattr(options, option)) for name, option in STATE_SETTINGS.items()}


def with_states(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run has recorded, as they are meant: it has recorded all that presets decided then.

    One of an earlier release kept whole masters by any preset, and by Muon its momentum as `exp_avg_dtype` said.
    """
    found = dict(recorded)
    if recorded.get("preset") and "master_remainders" not in recorded:
        found |= {"master_remainders": "off", "preset": ""}
    if recorded.get("optimizer") == "muon" and "momentum_dtype" not in recorded:
        found |= {"momentum_dtype": recorded.get("exp_avg_dtype", AUTO), "preset": ""}
    return found


def of_preset(preset: str) -> dict[str, Any]:
    """The settings of a run whose masters and moments are to be kept as a preset says, or `FLOAT32_STATES`.

    Raises:
        ConfigurationError: there is no such preset.
    """
    _check_name(f"--preset {preset!r}", preset)
    decided = {name: AUTO for name in STATE_SETTINGS if name != "master_weights"}
    return {"preset": named_preset(preset), "master_weights": True, **decided}


def below_flags(file: Mapping[str, Any], flags: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A file's settings where flags go before them.

    The preset of a flag decides all of `STATE_SETTINGS`. A preset of the file that a flag of one of these contradicts
    is spelled out instead, so that it still decides the others.

    Args:
        file: its settings.
        flags: those that were given.
        where: the file.

    Raises:
        ConfigurationError: naming the file: there is no preset of that name, or it contradicts its own.
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
    given = {name: flags[name] for name in STATE_SETTINGS if name in flags}
    if not _contradicting(options, _given(preset, given)):
        return dict(file)
    kept = {**file, **as_settings(options)}
    no_masters = given.get("master_weights") is False
    unused = {"preset", *(["master_dtype", "master_remainders"] if no_masters else [])}
    return {name: value for name, value in kept.items() if name not in unused}


def above_file(flags: Mapping[str, Any], file: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """The flags above what `below_flags` gave of a file: `AUTO` is what a preset says, one that is spelled out too."""
    spelled = _is_spelled_out(file, below, flags)
    return {name: flag for name, flag in flags.items() if not (spelled and name in STATE_SETTINGS and flag == AUTO)}


def _is_spelled_out(file: Mapping[str, Any], below: Mapping[str, Any], flags: Mapping[str, Any]) -> bool:
    return "preset" not in flags and bool(file.get("preset")) and "preset" not in below


def dropped_preset(file: Mapping[str, Any], below: Mapping[str, Any], flags: Mapping[str, Any], where: str) -> str:
    """What to tell where `below_flags` has spelled out the preset of a file; "" where it has not."""
    if not _is_spelled_out(file, below, flags):
        return ""
    said = ", ".join(f"{name} = {flags[name]!r}" for name in STATE_SETTINGS if name in flags)
    kept = ", ".join(f"{name} = {below[name]!r}" for name in STATE_SETTINGS if name in below and name not in flags)
    return f"{where}: preset = {shown_value(file['preset'])}, but for {said}; of it stay {kept}"


def float_momentum(flags: Mapping[str, Any], settings: Any) -> str:
    """What to tell where a flag says how first moments are kept and nothing does of Muon's momentum; else ""."""
    if settings.optimizer != MUON or flags.get("exp_avg_dtype", AUTO) == AUTO or settings.momentum_dtype != AUTO:
        return ""
    kept = word_of("momentum_dtype", settings.state_options.momentum_buffer_dtype)
    return (
        f"exp_avg_dtype = {flags['exp_avg_dtype']!r} is of AdamW's groups beside Muon, whose momentum is kept in "
        f"{kept}; momentum_dtype says otherwise"
    )


HELP: Final = (
    f"how masters and moments are kept, in place of the settings below: {', '.join(PRESETS)}, {FLOAT32_STATES}"
)
"""What the setting of the preset is."""
