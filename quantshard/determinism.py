"""Deterministic mode: on the same software and hardware, the same inputs give the same bits in every run.

quantshard's kernels are always deterministic. The mode covers what surrounds them: attention's backward, gradients of
indexing, autotuning in torch.compile, and NCCL's choice of an algorithm (`docs/distributed.md#determinism`).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from quantshard.errors import ConfigurationError

CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"
NCCL: Final = "NCCL_ALGO"
VARIABLES: Final = {CUBLAS: ":4096:8", NCCL: "Ring"}
"""Environment variables that the mode sets if they are unset."""

_CUBLAS_ALLOWED: Final = (":4096:8", ":16:8")
"""Values for which cuBLAS guarantees equal bits on several streams. PyTorch accepts the same ones."""


class _TorchSettings(NamedTuple):
    """Process-wide settings of PyTorch. `fill`: fill uninitialized memory, if `enabled`."""

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
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    def put(self) -> None:
        # also turns off Inductor's autotuning
        torch.use_deterministic_algorithms(self.enabled, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = self.cudnn
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


ON: Final = _TorchSettings(enabled=True, warn_only=False, fill=False, cudnn=True, cudnn_benchmark=False)
"""Deterministic mode. Memory is not filled: that costs bandwidth, and quantshard never reads uninitialized memory."""

OFF: Final = _TorchSettings(enabled=False, warn_only=False, fill=True, cudnn=False, cudnn_benchmark=False)
"""PyTorch's defaults."""


def deterministic(mode: bool = True) -> AbstractContextManager[Any]:
    """Turn deterministic mode on or off for this process, immediately. As a context manager, restore the mode at exit.

        quantshard.deterministic()          # first thing in a script
        with quantshard.deterministic():    # or for a part of it
            ...

    The mode uses PyTorch's deterministic algorithms, without filling uninitialized memory. Attention uses flash,
    efficient or math kernels, never cuDNN. cuDNN and torch.compile do not autotune. CUBLAS_WORKSPACE_CONFIG=:4096:8 and
    NCCL_ALGO=Ring are set unless they are already set. Operations without a deterministic algorithm raise when they
    run. The mode also works on a CPU.

    cuBLAS reads its variable once, when the GPU is first used, and NCCL when a process group is created. Turn the mode
    on before that; the variables stay set after the context exits.

    Raises:
        ConfigurationError: it is too late to set a variable, or a variable has a value that is not deterministic.
    """
    if mode:
        if torch.cuda.is_available():
            _check_variables()
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
    restore = ExitStack()
    restore.callback(_TorchSettings.now().put)
    (ON if mode else OFF).put()
    return restore


def _check_variables() -> None:
    cublas, nccl = os.environ.get(CUBLAS), os.environ.get(NCCL)
    if cublas is None and torch.cuda.is_initialized():
        raise ConfigurationError(
            f"deterministic() must be called before the GPU is used, or {CUBLAS}={VARIABLES[CUBLAS]} set"
        )
    if cublas is not None and cublas not in _CUBLAS_ALLOWED:
        raise ConfigurationError(f"deterministic mode: unset {CUBLAS}={cublas}, or use {', '.join(_CUBLAS_ALLOWED)}")
    if nccl is None and dist.is_initialized() and "nccl" in dist.get_backend_config():
        raise ConfigurationError(
            f"deterministic() must be called before init_process_group, or {NCCL}={VARIABLES[NCCL]} set"
        )
    # a leading `^` excludes the listed algorithms
    if nccl is not None and ("nvls" in nccl.lower()) != nccl.startswith("^"):
        raise ConfigurationError(f"deterministic mode: {NCCL}={nccl} allows NVLS; unset it, or use {VARIABLES[NCCL]}")
