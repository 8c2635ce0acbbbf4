"""The memory of a step: the history of a GPU's allocations, or a count of operations that do not run."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from quantshard.private_torch.lookup import missing, private_name

_FEATURE = "the memory snapshot of `train --profile`"
_record = private_name("torch.cuda.memory._record_memory_history", _FEATURE)
_dump = private_name("torch.cuda.memory._dump_snapshot", _FEATURE)

_dispatch = private_name("torch.utils._python_dispatch", "counting the memory of a step before it runs")

_MOST_EVENTS: Final = 200_000
"""Allocations and frees to keep, the newest ones; each takes some kilobytes."""


def begin_memory_history(device: torch.device) -> None:
    """Start to record the allocations on a GPU and the Python code that they come from."""
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


def answer_operations(answer: Callable[..., Any]) -> AbstractContextManager[Any]:
    """A context in which `answer(operation, args, kwargs)` replaces each ATen operation, also in backward."""

    class OperationMode(_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # otherwise Dynamo runs compiled functions eagerly

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return answer(function, args, kwargs or {})

    return OperationMode()
