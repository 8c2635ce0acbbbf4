"""Normalization of queries and keys, head by head, before the core attention (`qk_norm_type`).

"RMSNorm" and "LayerNorm" have one weight, of a head's size, for all heads of the queries and one for those of the keys.
"L2Normalization" has none:

    y = x / sqrt(sum(x**2) + eps)

over the features of a head, in float32, rounded once to the dtype of x.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.errors import ConfigurationError
from quantshard.modules.base.composite import CompositeModule
from quantshard.modules.norm import LayerNorm, RMSNorm

_L2: Final = "L2Normalization"
_WITH_WEIGHTS: Final = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class L2Normalization(CompositeModule):
    """y = x / sqrt(sum(x**2) + eps) over the last dim."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}"


def head_norm(owner: str, kind: str | None, size: int, eps: float, asked: TensorParallelConfig, **options: Any) -> Any:
    """The normalization of heads of `size` features, or None.

    Raises:
        ConfigurationError: there is no such kind.
    """
    if kind is None:
        return None
    if kind == _L2:
        return L2Normalization(eps)
    if kind not in tuple(_WITH_WEIGHTS):  # it may be of any type
        known = ", ".join([_L2, *_WITH_WEIGHTS])
        raise ConfigurationError(f"{owner}(qk_norm_type={kind!r}): choose one of: {known}, or None")
    return _WITH_WEIGHTS[kind](size, eps, **vars(replace(asked, sequence_parallel=False)), **options)


def sum_over_heads(norm: nn.Module | None, cut: bool) -> None:
    """Let the gradients of a normalization's weights be summed over the ranks of tensor parallelism, where each has
    other heads (`cut`), as they are where each has other rows."""
    if isinstance(norm, RMSNorm | LayerNorm):
        norm.sequence_parallel = cut and norm.tp_mesh is not None
