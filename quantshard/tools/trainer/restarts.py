"""What a later start changes of a run: by the flags of `train --auto-resume`, and by an edited `config.toml`.

torchrun, SLURM and Kubernetes start a command again as it stands, on as many processes as there are then. So its flags
say what the run is, at the first start, and must not say anything else at a later one, but for what `resume` changes.
Nor may its `config.toml`: half of what it says is in the checkpoints too, and those go before.
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
    with_states,
)
from quantshard.tools.trainer.settings.schema import shown_value

CHANGEABLE = frozenset(
    "steps mesh dp_replicate keep_last keep_every async_save deterministic data checkpoints device cuda_graphs".split()
)
"""Settings that a later start may change: those of `resume`, but for the recipe and the preset, and the device."""

_RESUMED = ("recipe", "preset", *STATE_SETTINGS)
"""Settings that `resume` alone may change, by making weights or states anew."""

_ALWAYS = ("deterministic", "device")
"""Settings that a process follows before it can know those of the run, so that they are as now, given or not."""

_SPLITS = ("micro_batch", "micro_batches")
"""Settings that say how a process takes its share of a step, which is another on other processes."""

_KEPT_PANELS = ("Model", "Data", "Training", "Precision")
"""Of settings that say what is trained."""

_PLACES = frozenset("model init_from data heldout_data tokenizer token_cache checkpoints".split())
"""Settings that are looked for elsewhere where a folder was moved; what is found there is compared by itself."""


def recorded(settings: TrainSettings) -> dict[str, Any]:
    """Settings as a start of the run records them."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return found | {"preset": named_preset(settings.preset)}


def edited(config: str, settings: TrainSettings, starts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What somebody has written into a run's `config.toml` since its last start, in words; it is followed.

    `starts`: the run's records, of which releases before had no settings. A start that was killed before it could
    write `config.toml` anew left it as the one before did.

    Raises:
        ConfigurationError: it is a setting that says what is trained, which a run keeps.
    """
    known = [with_states(each["settings"]) for each in starts if isinstance(each.get("settings"), dict)][-2:]
    now, told = recorded(settings), []
    for setting in setting_fields():
        name = setting.name
        values = [each[name] for each in reversed(known) if name in each]
        if not values or name in _PLACES or now[name] in values:
            continue
        what = f"{name} = {shown_value(now[name])}"
        if setting.metadata["panel"] in _KEPT_PANELS and name not in CHANGEABLE and name not in _SPLITS:
            way = "start another run with --init-from"
            if name == "preset" or name in STATE_SETTINGS:
                way = "give its optimizer other states after that, by quantshard resume --preset"
            if name == "recipe":
                way = f"quantize its weights anew after that, by quantshard resume --recipe {shlex.quote(now[name])}"
            raise ConfigurationError(
                f"{config} has {what}, and the run was started with {shown_value(values[0])}, which it keeps, as its "
                f"checkpoints do; write that there again, or {way}"
            )
        told.append(f"{config} was edited: {what}, and was {shown_value(values[0])}")
    return tuple(told)


def check_steps(run: str, steps: int, complete: Sequence[int]) -> None:
    """Refuse to make a run shorter than what it has saved. `complete`: steps of its checkpoints, ascending.

    Raises:
        ConfigurationError: with the numbers.
    """
    if complete and steps < complete[-1]:
        raise ConfigurationError(
            f"{run} has a checkpoint of step {complete[-1]}, and steps = {steps} would end before it; give at least "
            f"{complete[-1]}, or another run its weights with --init-from"
        )


def overrides(
    run: str, before: TrainSettings, now: TrainSettings, given: Collection[str], processes: int
) -> dict[str, Any]:
    """The settings of a run that a start on so many processes changes. `given`: the names that the user has given.

    A mesh of another number of processes is left out: the run then goes on in dp_shard, as `resume` does.

    Raises:
        ConfigurationError: a setting differs that a run keeps.
    """
    before = replace(before, **as_settings(before.state_options))  # an earlier release's run says less of them
    found: dict[str, Any] = {}
    for name in sorted(given):
        value, was = getattr(now, name), getattr(before, name)
        if value == was or (name == "mesh" and value and MeshSpec.parse(value).processes != processes):
            continue
        if name not in CHANGEABLE:
            since = " or resumed" if name in _RESUMED else ""
            raise ConfigurationError(
                f"{run} was started{since} with {name} = {_shown(name, was)}, and --auto-resume goes on with it, but "
                f"{name} = {_shown(name, value)} is given; give what it was, or name another --run"
            )
        found[name] = list(value) if isinstance(value, tuple) else value
    return found | {name: getattr(now, name) for name in _ALWAYS}


def _shown(name: str, value: Any) -> str:
    """A setting's value, as one would give it."""
    return shown_value(FLOAT32_STATES if name == "preset" and not value else value)
