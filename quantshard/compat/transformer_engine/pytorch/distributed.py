"""TransformerEngine's `pytorch.distributed`: activation checkpointing."""

from collections.abc import Callable
from typing import Any

from quantshard import modules
from quantshard.compat.transformer_engine.arguments import supported

__all__ = ["checkpoint"]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`quantshard.checkpoint`, reentrant by default. Keyword arguments of the function are passed in both cases."""
    kwargs = supported("checkpoint", kwargs)
    if use_reentrant:
        function, args, kwargs = _by_position(function, args, kwargs)
    return modules.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")  # not the function's


def _by_position(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Convert keyword arguments to positional ones, the only ones that the reentrant implementation accepts."""
    options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    names = [name for name in kwargs if name not in options]
    if not names:
        return function, args, options
    count = len(args)

    def call_by_name(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return call_by_name, (*args, *(kwargs[name] for name in names)), options
