"""What `train --auto-resume` changes of a run that is there already.

torchrun, SLURM and Kubernetes start a command again as it stands, on as many processes as there are then. So its flags
say what the run is, at the first start, and must not say anything else at a later one, but for what `resume` changes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from quantshard.errors import ConfigurationError
from quantshard.trainer.settings.config import TrainSettings
from quantshard.trainer.settings.mesh import MeshSpec
from quantshard.trainer.settings.optimizer_states import as_settings
from quantshard.trainer.settings.schema import shown_value

CHANGEABLE = frozenset(
    "steps mesh dp_replicate keep_last keep_every async_save deterministic data checkpoints device cuda_graphs".split()
)
"""Settings that a later start may change: those of `resume`, but for the recipe, and the device."""

_ALWAYS = ("deterministic", "device")
"""Settings that a process follows before it can know those of the run, so that they are as now, given or not."""


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
            raise ConfigurationError(
                f"{run} was started with {name} = {shown_value(was)}, and --auto-resume goes on with it, but {name} = "
                f"{shown_value(value)} is given; give what it was, or name another --run"
            )
        found[name] = list(value) if isinstance(value, tuple) else value
    return found | {name: getattr(now, name) for name in _ALWAYS}
