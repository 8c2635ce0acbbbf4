"""History of a GPU's allocations over some steps."""

from __future__ import annotations

from typing import Final

import torch

from quantshard.private_torch.lookup import missing, private_name

_FEATURE = "the memory snapshot of `train --profile`"
_record = private_name("torch.cuda.memory._record_memory_history", _FEATURE)
_dump = private_name("torch.cuda.memory._dump_snapshot", _FEATURE)

_MOST_EVENTS: Final = 200_000
"""Allocations and frees to keep, the newest ones; each takes some kilobytes."""


def begin_memory_history(device: torch.device) -> None:
    """Start to record the allocations on a GPU and the Python code that they come from.

    Raises:
        TorchVersionError: this version of PyTorch has no such recorder.
    """
    if error := missing(_record, _dump):
        raise error
    _record("all", context="alloc", stacks="python", max_entries=_MOST_EVENTS, device=device, clear_history=True)


def end_memory_history(file: str | None) -> None:
    """Stop recording, and write the history for pytorch.org/memory_viz; None discards it."""
    try:
        if file is not None:
            _dump(file)
    finally:
        _record(None)
