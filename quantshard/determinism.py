"""Deterministic mode: on the same software and hardware, the same inputs give the same bits in every run.

The kernels here need no mode: they sum in an order that only shapes decide, have no autotuning, and their atomics take
maxima of integers. What varies is around them: attention's backward, gradients of indexing, how torch.compile tunes
what it makes, and NCCL's choice of a way to sum. `docs/determinism.md` says what may differ without the mode.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from quantshard.argument_kinds import suggests_names
from quantshard.errors import ConfigurationError

CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"
NCCL: Final = "NCCL_ALGO"
VARIABLES: Final = {CUBLAS: ":4096:8", NCCL: "Ring"}
"""What the mode sets where nothing is set."""

_CUBLAS_ALLOWED: Final = (":4096:8", ":16:8")
"""The values under which cuBLAS promises equal bits on several streams; PyTorch looks for them too."""


class _TorchSettings(NamedTuple):
    """Settings of PyTorch for the whole process. `fill`: uninitialized memory, where `enabled`."""

    enabled: bool
    warn_only: bool
    fill: bool
    cudnn: bool
    cudnn_benchmark: bool

    @classmethod
    def now(cls) -> _TorchSettings:
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            _deterministic().fill_uninitialized_memory,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    def put(self) -> None:
        torch.use_deterministic_algorithms(self.enabled, warn_only=self.warn_only)  # Inductor's tuning too
        _deterministic().fill_uninitialized_memory = self.fill
        torch.backends.cudnn.deterministic = self.cudnn
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


ON: Final = _TorchSettings(enabled=True, warn_only=False, fill=False, cudnn=True, cudnn_benchmark=False)
"""Memory is not filled: that costs bandwidth, and nothing here reads what was not written."""

OFF: Final = _TorchSettings(enabled=False, warn_only=False, fill=True, cudnn=False, cudnn_benchmark=False)
"""PyTorch's defaults."""


def _deterministic() -> Any:
    return torch.utils.deterministic  # type: ignore[attr-defined]  # a module that takes assignments


@suggests_names
def deterministic(mode: bool = True) -> AbstractContextManager[Any]:
    """Turn deterministic mode on or off for this process, at once; as a context manager, until its end.

        quantshard.deterministic()          # first thing in a script
        with quantshard.deterministic():    # or for a part of it
            ...

    On: PyTorch's deterministic algorithms, without filling uninitialized memory; attention by flash, efficient or math,
    never cuDNN; no tuning by measurement in cuDNN or torch.compile; CUBLAS_WORKSPACE_CONFIG=:4096:8 and NCCL_ALGO=Ring,
    where these are not set. What has no deterministic way raises when it runs. On a CPU it works alike.

    The two variables are read once, by cuBLAS when the GPU is first used and by NCCL when a process group is made. So
    they stay set after the end, and the mode must first come before.

    Raises:
        ConfigurationError: it is too late for a variable, or one is set to what is not deterministic.
    """
    if mode:
        if torch.cuda.is_available():
            _check_variables()
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
    before = ExitStack()
    before.callback(_TorchSettings.now().put)
    (ON if mode else OFF).put()
    return before


def _check_variables() -> None:
    cublas, nccl = os.environ.get(CUBLAS), os.environ.get(NCCL)
    if cublas is None and torch.cuda.is_initialized():
        raise ConfigurationError(
            f"deterministic mode needs {CUBLAS}={VARIABLES[CUBLAS]} before the GPU is first used, which it was; call "
            "quantshard.deterministic() earlier, or set the variable before Python starts"
        )
    if cublas is not None and cublas not in _CUBLAS_ALLOWED:
        raise ConfigurationError(
            f"deterministic mode: {CUBLAS}={cublas} is not deterministic; unset it, or make it one of: "
            f"{', '.join(_CUBLAS_ALLOWED)}"
        )
    if nccl is None and dist.is_initialized() and "nccl" in dist.get_backend_config():
        raise ConfigurationError(
            f"deterministic mode needs {NCCL}={VARIABLES[NCCL]} before a process group on NCCL is made, and there is "
            "one; call quantshard.deterministic() before init_process_group, or set the variable before Python starts"
        )
    if nccl is not None and _may_be_nvls(nccl):
        raise ConfigurationError(
            f"deterministic mode: {NCCL}={nccl} allows NVLS, whose sums differ between runs; unset it, or make it "
            f"{VARIABLES[NCCL]}"
        )


def _may_be_nvls(algorithms: str) -> bool:
    """Whether a value of NCCL_ALGO leaves NCCL free to sum in the switch; `^` begins a list of what it may not take."""
    named = algorithms.lower()
    return ("nvls" in named) != named.startswith("^")
