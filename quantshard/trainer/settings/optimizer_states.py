"""How a run's optimizer keeps masters and moments: by a preset's name, or by settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from quantshard.errors import ConfigurationError
from quantshard.presets import PRESETS, StateOptions, check_preset
from quantshard.trainer.settings.schema import shown_value

AUTO: Final = "auto"
"""What the preset says, and float32 where there is none."""

MASTER_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""How masters may be stored, by the words of settings and options."""

MOMENT_DTYPES: Final = {**MASTER_DTYPES, "fp8": torch.uint8}
"""How Adam's moments may be stored, by the words of settings and options."""

STATE_SETTINGS: Final = {
    "master_weights": "master_weights",
    "master_dtype": "master_weight_dtype",
    "exp_avg_dtype": "exp_avg_dtype",
    "exp_avg_sq_dtype": "exp_avg_sq_dtype",
}
"""The settings that a preset decides, and what `FusedAdam` calls them."""

_WORDS: Final = {dtype: word for word, dtype in MOMENT_DTYPES.items()}


def word_of(value: Any) -> Any:
    """An option's value as a setting has it."""
    return _WORDS.get(value, value)


def state_options(preset: str, settings: Mapping[str, Any]) -> StateOptions:
    """What a preset, "" for none, and settings choose together.

    `settings`: by the names of `STATE_SETTINGS`; those that are left out, or `AUTO`, and masters that are not turned
    off, are as the preset has them.

    Raises:
        ConfigurationError: there is no such preset, or a setting contradicts it.
    """
    options = check_preset(f"preset = {shown_value(preset)}", preset) if preset else StateOptions()
    given = {
        name: MOMENT_DTYPES.get(value, value)
        for name, value in settings.items()
        if value not in (AUTO, None) and not (preset and name == "master_weights" and value)
    }
    for name, value in given.items() if preset else ():
        own = getattr(options, STATE_SETTINGS[name])
        if value != own:
            raise ConfigurationError(
                f"preset = {shown_value(preset)} has {name} = {word_of(own)!r}, but {name} = {word_of(value)!r} is "
                "given; leave one of the two out"
            )
    return StateOptions(**options.arguments | {STATE_SETTINGS[name]: value for name, value in given.items()})


def as_settings(options: StateOptions) -> dict[str, Any]:
    """Options by the names and words of settings."""
    return {name: word_of(getattr(options, option)) for name, option in STATE_SETTINGS.items()}


def undecided(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """A file's settings without those that the preset of a flag decides; flags go before the file."""
    decided = STATE_SETTINGS if flags.get("preset") else {}
    return {name: value for name, value in file.items() if name not in decided}


HELP: Final = f"how masters and moments are kept, in place of the settings below: {', '.join(PRESETS)}"
"""What the setting of the preset is."""
