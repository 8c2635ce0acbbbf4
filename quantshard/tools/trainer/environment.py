"""The environment that determines a run's bits, apart from settings and data: hardware, versions, library settings.

It is recorded at each start; a resume warns about `differences`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from quantshard.modules import attention_backends
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.schema import shown_value
from quantshard.version import __version__

Environment = dict[str, Any]
"""JSON object: strings and booleans by name, and "variables": a table of environment variables."""

_PREFIXES = ("CUBLAS", "CUDNN_", "DNNL_", "NCCL_", "ONEDNN_", "TORCH_BLAS_")
_NAMES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_NO_MATTER = ("CUBLAS_LOGDEST_DBG", "CUBLAS_LOGINFO_DBG", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
"""Names and prefixes of environment variables that change how libraries compute, and exceptions among them."""


def current_environment(settings: TrainSettings, device: torch.device) -> Environment:
    """Return the environment of this process, which computes on `device`."""
    head_size = settings.hidden // settings.heads
    on_gpu = _of_gpu(device) if device.type == "cuda" else {"device": f"CPU {_cpu()}"}
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **on_gpu,
        "python": platform.python_version(),
        "quantshard": __version__,
        "torch": torch.__version__,
        "attention": attention_backends.described("auto", device, settings.torch_params_dtype, head_size),
        "float32 products": torch.get_float32_matmul_precision(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if _matters(name)},
    }


def _of_gpu(device: torch.device) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(device),
        "triton": _version("triton"),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
    }


def _cpu() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _matters(name: str) -> bool:
    return (name in _NAMES or name.startswith(_PREFIXES)) and name not in _NO_MATTER


def differences(before: object, now: Environment) -> list[str]:
    """List the entries that were added, removed or changed. `before`: read from a file, so of any type."""
    environments = [{**side, **_table(side.get("variables"))} for side in map(_table, (before, now))]
    names = [name for name in dict.fromkeys([*environments[0], *environments[1]]) if name != "variables"]
    return [
        f"{name} was {_said(environments[0].get(name))}, is {_said(environments[1].get(name))}"
        for name in names
        if environments[0].get(name) != environments[1].get(name)
    ]


def _table(value: object) -> dict[str, Any]:
    """Convert to a table with string keys; empty if the value is not a mapping."""
    return {str(name): entry for name, entry in value.items()} if isinstance(value, Mapping) else {}


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else value if isinstance(value, str) and len(value) < 200 else shown_value(value)
