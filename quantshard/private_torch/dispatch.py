"""Seeing every ATen operation that runs, and its results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from quantshard.private_torch.lookup import missing, private_name

_mode = private_name("torch.utils._python_dispatch.TorchDispatchMode", "counting the memory of a step before it runs")


def answer_operations(answer: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Within it, `answer(operation, args, kwargs)` is called in place of each ATen operation, those of backward too.

    The note on `torch.utils._python_dispatch` in PyTorch's docs shows the class as the way to do so; it has no other
    name.

    Raises:
        TorchVersionError: this version of PyTorch has no such class.
    """
    if (error := missing(_mode)) is not None:
        raise error

    class OperationMode(_mode):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return answer(function, args, kwargs or {})

    found: AbstractContextManager[Any] = OperationMode()
    return found
