"""Settings that a restart may change: by the flags of `train --auto-resume`, or by an edited `config.toml`.

torchrun, SLURM and Kubernetes restart a command unchanged, perhaps on another number of ranks. The flags define the run
at the first start; at a later start they may differ only in what `resume` can change. The same holds for `config.toml`,
because the checkpoints repeat half of its settings and take precedence.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.settings.config import TrainSettings, setting_fields
from quantshard.tools.trainer.settings.mesh import MeshSpec
from quantshard.tools.trainer.settings.optimizer_states import (
    FLOAT32_STATES,
    STATE_SETTINGS,
    as_settings,
    named_preset,
)
from quantshard.tools.trainer.settings.schema import shown_value

CHANGEABLE = frozenset(
    "steps mesh dp_replicate keep_last keep_every async_save deterministic data checkpoints device cuda_graphs".split()
)
"""Settings that a restart may change: the device and those of `resume`, except the recipe and the preset."""

_RESUMED = ("recipe", "preset", *STATE_SETTINGS)
"""Settings that only `resume` may change, by converting weights or states."""

_ALWAYS = ("deterministic", "device")
"""Settings that a process applies before it has read the run's; the current value always counts."""

_SPLITS = ("micro_batch", "micro_batches")
"""Settings of how a rank splits its share of a step, which depends on the number of ranks."""

_KEPT_PANELS = ("Model", "Data", "Training", "Precision")
"""Panels of the settings that define what is trained."""

_PLACES = frozenset("model init_from data heldout_data tokenizer token_cache checkpoints".split())
"""Paths that change when a folder is moved; the contents are compared separately."""


def recorded(settings: TrainSettings) -> dict[str, Any]:
    """Return the settings as a start of the run records them."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return values | {"preset": named_preset(settings.preset)}


def edited(config: str, settings: TrainSettings, starts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """List the settings in `config.toml` that were edited since the last start, one message each. The edited values are
    used.

    `starts`: records of the run. The last two count, because a start that
    was killed before it wrote `config.toml` left the file of the start before.

    Raises:
        ConfigurationError: an edited setting defines what is trained and cannot change.
    """
    recorded_settings = [start["settings"] for start in starts if isinstance(start.get("settings"), dict)][-2:]
    now, messages = recorded(settings), []
    for setting in setting_fields():
        name = setting.name
        values = [start[name] for start in reversed(recorded_settings) if name in start]
        if not values or name in _PLACES or now[name] in values:
            continue
        change = f"{name} = {shown_value(now[name])}"
        if setting.metadata["panel"] in _KEPT_PANELS and name not in CHANGEABLE and name not in _SPLITS:
            advice = "start another run with --init-from"
            if name == "preset" or name in STATE_SETTINGS:
                advice = "give its optimizer other states after that, by quantshard resume --preset"
            if name == "recipe":
                advice = f"quantize its weights anew after that, by quantshard resume --recipe {shlex.quote(now[name])}"
            raise ConfigurationError(
                f"{config} has {change}, and the run was started with {shown_value(values[0])}, which it keeps, as its "
                f"checkpoints do; write that there again, or {advice}"
            )
        messages.append(f"{config} was edited: {change}, and was {shown_value(values[0])}")
    return tuple(messages)


def check_steps(run: str, steps: int, complete: Sequence[int]) -> None:
    """Refuse to end a run before its last checkpoint. `complete`: steps of its checkpoints, ascending.

    Raises:
        ConfigurationError: `steps` is less than the last complete step.
    """
    if complete and steps < complete[-1]:
        raise ConfigurationError(
            f"{run} has a checkpoint of step {complete[-1]}, and steps = {steps} would end before it; give at least "
            f"{complete[-1]}, or another run its weights with --init-from"
        )


def overrides(
    run: str, before: TrainSettings, now: TrainSettings, given: Collection[str], processes: int
) -> dict[str, Any]:
    """Return the settings that a restart on `processes` ranks changes. `given`: names of the settings that the user
    gave.

    A mesh for another number of ranks is left out; the run then continues with all ranks in dp_shard, as `resume` does.

    Raises:
        ConfigurationError: a setting that cannot change differs.
    """
    before = replace(before, **as_settings(before.state_options))
    result: dict[str, Any] = {}
    for name in sorted(given):
        value, old = getattr(now, name), getattr(before, name)
        if value == old or (name == "mesh" and value and MeshSpec.parse(value).processes != processes):
            continue
        if name not in CHANGEABLE:
            since = " or resumed" if name in _RESUMED else ""
            raise ConfigurationError(
                f"{run} was started{since} with {name} = {_shown(name, old)}, and --auto-resume goes on with it, but "
                f"{name} = {_shown(name, value)} is given; give what it was, or name another --run"
            )
        result[name] = list(value) if isinstance(value, tuple) else value
    return result | {name: getattr(now, name) for name in _ALWAYS}


def _shown(name: str, value: Any) -> str:
    """Format a setting's value as the user would write it."""
    return shown_value(FLOAT32_STATES if name == "preset" and not value else value)
