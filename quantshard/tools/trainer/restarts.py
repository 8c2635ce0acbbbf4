"""Settings that a restart by `train --auto-resume` may change, and the environment of a start.

torchrun, SLURM and Kubernetes restart a command unchanged, perhaps on another number of ranks. The flags define the run
at the first start; at a later start they may differ only in `CHANGEABLE`.
"""

import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from quantshard.errors import ConfigurationError, shown
from quantshard.modules import attention_backends
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import FLOAT32_STATES, STATE_SETTINGS, MeshSpec, as_settings, named_preset
from quantshard.version import __version__

CHANGEABLE = frozenset(
    "steps mesh keep_last keep_every async_save deterministic data checkpoints device cuda_graphs".split()
)


def recorded(settings: TrainSettings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return values | {"preset": named_preset(settings.preset)}


def overrides(
    run: str, before: TrainSettings, now: TrainSettings, given: Collection[str], processes: int
) -> dict[str, Any]:
    """Return the settings among `given` that a restart changes, without a mesh for another number of ranks."""
    before = replace(before, **as_settings(before.state_options))
    result: dict[str, Any] = {}
    for name in sorted(given):
        value, old = getattr(now, name), getattr(before, name)
        if value == old or (name == "mesh" and value and MeshSpec.parse(value).processes != processes):
            continue
        if name not in CHANGEABLE:
            # only `resume` changes these, by converting weights or states
            since = " or resumed" if name in ("recipe", "preset", *STATE_SETTINGS) else ""
            was, now_ = (shown(FLOAT32_STATES if name == "preset" and not v else v) for v in (old, value))
            text = f"{name} = {was}, but {name} = {now_} is given; give what it was, or name another --run"
            raise ConfigurationError(f"{run} was started{since} with {text}")
        result[name] = list(value) if isinstance(value, tuple) else value
    # a process applies these before it has read the run's
    return result | {"deterministic": now.deterministic, "device": now.device}


def current_environment(settings: TrainSettings, device: torch.device) -> dict[str, Any]:
    """Return what determines the bits of this process on `device`, apart from settings and data."""
    is_gpu = device.type == "cuda"
    cpu = f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": torch.cuda.get_device_name(device) if is_gpu else cpu,
        "python": platform.python_version(),
        "quantshard": __version__,
        "torch": torch.__version__,
        "attention": attention_backends.describe("auto", (), device, settings.torch_params_dtype, settings.head_size),
        "float32 products": torch.get_float32_matmul_precision(),
    }


def differences(before: object, now: Mapping[str, Any]) -> list[str]:
    """List the entries of `now` that `before`, a table from a file, has with another value."""
    old = before if isinstance(before, Mapping) else {}
    names = [name for name in now if old.get(name) != now[name]]
    return [f"{name} was {shown(old.get(name))}, is {shown(now[name])}" for name in names]
