"""TransformerEngine's `pytorch.distributed`: activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantshard import modules
from quantshard.compat.transformer_engine.arguments import supported

__all__ = ["checkpoint"]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`quantshard.checkpoint`, reentrant by default."""
    return modules.checkpoint(function, *args, use_reentrant=use_reentrant, **supported("checkpoint", kwargs))
