"""Staging: the copy of a state, in memory of the host, that a save in the background writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from quantshard import private_torch


class Stager(AsyncStager):
    """Copies states; when `stage` returns all is copied, so it is the state at the call.

    The memory is pinned where there is a GPU, and used again by the next copy, which therefore must not begin before
    the last one is written. `shared`: so that another process can write the copy.
    """

    def __init__(self, shared: bool) -> None:
        self._gpu = torch.cuda.is_available()
        self._copier = private_torch.state_dict_stager(pin_memory=self._gpu, share_memory=shared)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy; entries keep their kinds (DTensors of the same placement)."""
        copy: dict[str, Any] = self._copier.stage(state_dict, non_blocking=self._gpu)
        if self._gpu:
            torch.cuda.synchronize()
        return copy

    def synchronize_staging(self) -> None:
        """Nothing: `stage` has waited."""

    def close(self) -> None:
        """Let go of the memory."""
        self._copier.close()


class CopiedStateStager(AsyncStager):
    """For a state that is a copy already."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state itself."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing: the memory is another's."""
