"""Copies of a state in host memory, for background saves."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from quantshard import private_torch


class Stager(AsyncStager):
    """Copies states. When `stage` returns, the copy is complete and holds the state at the time of the call.

    The memory is pinned if there is a GPU, and reused by the next copy. So the previous copy must be written before the
    next `stage`. `shared`: put the copy in shared memory, for another process.
    """

    def __init__(self, shared: bool) -> None:
        self._gpu = torch.cuda.is_available()
        self._copier = private_torch.state_dict_stager(pin_memory=self._gpu, share_memory=shared)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the copy; entries keep their types (a DTensor keeps its placements)."""
        copy: dict[str, Any] = self._copier.stage(state_dict, non_blocking=self._gpu)
        if self._gpu:
            torch.cuda.synchronize()
        return copy

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` is synchronous."""

    def close(self) -> None:
        """Free the memory."""
        self._copier.close()


class CopiedStateStager(AsyncStager):
    """Stager for a state that is already a copy."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state itself."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the memory belongs to the `Stager`."""
