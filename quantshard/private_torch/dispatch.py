"""Intercepting every ATen operation that runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from quantshard.private_torch.lookup import missing, private_name

_dispatch = private_name("torch.utils._python_dispatch", "counting the memory of a step before it runs")


def answer_operations(answer: Callable[..., Any]) -> AbstractContextManager[Any]:
    """A context in which `answer(operation, args, kwargs)` replaces each ATen operation, including those of backward.

    `TorchDispatchMode`, which PyTorch's own debugging tools use for this, has no public name.

    Raises:
        TorchVersionError: this version of PyTorch has no such class.
    """
    if (error := missing(_dispatch)) is not None:
        raise error

    class OperationMode(_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return answer(function, args, kwargs or {})

    mode: AbstractContextManager[Any] = OperationMode()
    return mode
