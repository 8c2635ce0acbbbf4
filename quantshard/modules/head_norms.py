"""Normalization of queries and keys, head by head, before the core attention (`qk_norm_type`).

"RMSNorm" and "LayerNorm" have one weight of a head's size for all query heads, and one for all key heads.
"L2Normalization" has no weight:

    y = x / sqrt(sum(x**2) + eps)

over the features of a head, in float32, rounded once to the dtype of x.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from quantshard.errors import ConfigurationError
from quantshard.modules.base.composite import CompositeModule
from quantshard.modules.norm import LayerNorm, RMSNorm

_L2: Final = "L2Normalization"
_WITH_WEIGHTS: Final = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class L2Normalization(CompositeModule):
    """L2 normalization over the last dim: y = x / sqrt(sum(x**2) + eps)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size], keeping its shape and dtype."""
        high = x.float()
        return (high * torch.rsqrt(high.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}"


def head_norm(owner: str, kind: str | None, size: int, eps: float, **options: Any) -> Any:
    """Create the normalization of heads with `size` features; None if `kind` is None.

    Raises:
        ConfigurationError: `kind` is unknown.
    """
    if kind is None:
        return None
    if kind == _L2:
        return L2Normalization(eps)
    if kind not in _WITH_WEIGHTS:
        kinds = ", ".join([_L2, *_WITH_WEIGHTS])
        raise ConfigurationError(f"{owner}(qk_norm_type={kind!r}): choose one of: {kinds}, or None")
    return _WITH_WEIGHTS[kind](size, eps, **options)


def sum_over_heads(norm: nn.Module | None, cut: bool) -> None:
    """Sum the gradients of a normalization's weights over the tensor-parallel ranks if the heads are sharded (`cut`),
    as sequence parallelism does for sharded rows."""
    if isinstance(norm, RMSNorm | LayerNorm):
        norm.sequence_parallel = cut and norm.tp_mesh is not None
