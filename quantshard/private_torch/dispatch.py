"""Seeing every ATen operation that runs, and its results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from quantshard.private_torch.lookup import missing, private_name

_dispatch = private_name("torch.utils._python_dispatch", "counting the memory of a step before it runs")


def answer_operations(answer: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Within it, `answer(operation, args, kwargs)` is called in place of each ATen operation, those of backward too.

    `TorchDispatchMode` is PyTorch's way to do so, in its own debugging tools too, and has no public name.

    Raises:
        TorchVersionError: this version of PyTorch has no such class.
    """
    if (error := missing(_dispatch)) is not None:
        raise error

    class OperationMode(_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return answer(function, args, kwargs or {})

    found: AbstractContextManager[Any] = OperationMode()
    return found
