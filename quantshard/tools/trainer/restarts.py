"""Settings that a restart may change: by the flags of `train --auto-resume`, or by an edited `config.toml`.

torchrun, SLURM and Kubernetes restart a command unchanged, perhaps on another number of ranks. The flags define the run
at the first start; at a later start they may differ only in what `resume` can change. The same holds for `config.toml`,
because the checkpoints repeat half of its settings and take precedence.

Each start also records the environment that determines a run's bits, apart from settings and data: hardware, versions,
library settings. A resume warns about `differences`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import torch

from quantshard.errors import ConfigurationError
from quantshard.modules import attention_backends
from quantshard.tools.trainer.settings.config import TrainSettings, setting_fields
from quantshard.tools.trainer.settings.values import (
    FLOAT32_STATES,
    STATE_SETTINGS,
    MeshSpec,
    as_settings,
    named_preset,
    shown_value,
)
from quantshard.version import __version__

CHANGEABLE = frozenset(
    "steps mesh dp_replicate keep_last keep_every async_save deterministic data checkpoints device cuda_graphs".split()
)
"""Settings that a restart may change: the device and those of `resume`, except the recipe and the preset."""

_CONVERTED = ("recipe", "preset", *STATE_SETTINGS)
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

    `starts`: records of the run. The last two count, because a start that was killed before it wrote `config.toml` left
    the file of the start before.
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
            if name in _CONVERTED:
                flag = f"recipe {shlex.quote(now[name])}" if name == "recipe" else "preset"
                advice = f"change it with quantshard resume --{flag}"
            raise ConfigurationError(
                f"{config} has {change}, and the run was started with {shown_value(values[0])}, which it keeps; write "
                f"that again, or {advice}"
            )
        messages.append(f"{config} was edited: {change}, and was {shown_value(values[0])}")
    return tuple(messages)


def check_steps(run: str, steps: int, complete: Sequence[int]) -> None:
    """Refuse to end a run before its last checkpoint. `complete`: steps of its checkpoints, ascending."""
    if complete and steps < complete[-1]:
        raise ConfigurationError(
            f"{run} has a checkpoint of step {complete[-1]}, and steps = {steps} would end before it; give at least "
            f"{complete[-1]}"
        )


def overrides(
    run: str, before: TrainSettings, now: TrainSettings, given: Collection[str], processes: int
) -> dict[str, Any]:
    """Return the settings that a restart on `processes` ranks changes. `given`: names of the settings that the user
    gave.

    A mesh for another number of ranks is left out; the run then continues with all ranks in dp_shard, as `resume` does.
    """
    before = replace(before, **as_settings(before.state_options))
    result: dict[str, Any] = {}
    for name in sorted(given):
        value, old = getattr(now, name), getattr(before, name)
        if value == old or (name == "mesh" and value and MeshSpec.parse(value).processes != processes):
            continue
        if name not in CHANGEABLE:
            since = " or resumed" if name in _CONVERTED else ""
            was, now_ = (shown_value(FLOAT32_STATES if name == "preset" and not v else v) for v in (old, value))
            raise ConfigurationError(
                f"{run} was started{since} with {name} = {was}, but {name} = {now_} is given; give what it was, or "
                "name another --run"
            )
        result[name] = list(value) if isinstance(value, tuple) else value
    return result | {name: getattr(now, name) for name in _ALWAYS}


# The environment ------------------------------------------------------------------------------------------------------

_PREFIXES = ("CUBLAS", "CUDNN_", "DNNL_", "NCCL_", "ONEDNN_", "TORCH_BLAS_")
_NAMES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_NO_MATTER = ("CUBLAS_LOGDEST_DBG", "CUBLAS_LOGINFO_DBG", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
"""Names and prefixes of environment variables that change how libraries compute, and exceptions among them."""


def current_environment(settings: TrainSettings, device: torch.device) -> dict[str, Any]:
    """Return what determines the bits of this process on `device`: strings and booleans by name, and "variables", a
    table of environment variables."""
    hardware = {"device": f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}
    if device.type == "cuda":
        has_nccl = torch.distributed.is_nccl_available()
        hardware = {
            "device": torch.cuda.get_device_name(device),
            "triton": _version("triton"),
            "cuda": str(torch.version.cuda or torch.version.hip),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        }
    head_size = settings.hidden // settings.heads
    names = [name for name in sorted(os.environ) if name in _NAMES or name.startswith(_PREFIXES)]
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **hardware,
        "python": platform.python_version(),
        "quantshard": __version__,
        "torch": torch.__version__,
        "attention": attention_backends.described("auto", device, settings.torch_params_dtype, head_size),
        "float32 products": torch.get_float32_matmul_precision(),
        "variables": {name: os.environ[name] for name in names if name not in _NO_MATTER},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def differences(before: object, now: Mapping[str, Any]) -> list[str]:
    """List the entries that were added, removed or changed. `before`: read from a file, so of any type."""
    old, new = ({**side, **_table(side.get("variables"))} for side in map(_table, (before, now)))
    names = [name for name in {**old, **new} if name != "variables" and old.get(name) != new.get(name)]
    return [f"{name} was {_shown(old.get(name))}, is {_shown(new.get(name))}" for name in names]


def _table(value: object) -> dict[str, Any]:
    """Convert to a table with string keys; empty if the value is not a mapping."""
    return {str(name): entry for name, entry in value.items()} if isinstance(value, Mapping) else {}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else value if isinstance(value, str) and len(value) < 200 else shown_value(value)
