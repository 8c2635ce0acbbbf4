"""Operations on the meta device that allocate what a GPU would: scaled matrix products and fused attention.

PyTorch chooses an attention backend by device, and on the meta device materializes query-key products. A GPU uses flash
attention for 16-bit dtypes without a mask (or cuDNN's, which saves the same), otherwise memory-efficient attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from quantshard.tools.planning.timeline import MemoryTimeline

_aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
_LARGEST_FLASH_HEAD = 256
_SUM_BYTES = 4
"""Size of the float32 in which attention's backward accumulates the gradient of queries."""

_OUT_DTYPE = 9
"""Position of the output dtype among the arguments of `_scaled_mm_v2`."""


class GpuTimeline(MemoryTimeline):
    """A timeline of operations as a GPU runs them.

    A model's checks that all elements satisfy a condition (no padding token, one sequence per row) evaluate to true,
    because a training step has full sequences.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._holding = WeakTensorKeyDictionary()

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if function is _aten._local_scalar_dense.default and args[0] in self._holding:
            return True
        if function is _aten.all.default:
            result = super().operation(function, args, kwargs)
            self._holding[result] = True
            return result
        if function is _aten._scaled_mm_v2.default:
            return super().operation(_scaled_product, args, kwargs)
        if function is _aten._scaled_dot_product_flash_attention_backward.default:
            self.reserve(args[1].numel() * _SUM_BYTES)
        return super().operation(function, args, kwargs)


def _scaled_product(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=others[_OUT_DTYPE - 2])


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Make `torch.nn.functional.scaled_dot_product_attention` use a GPU's backend for tensors on the meta device.

    Backends that the caller disabled (`torch.nn.attention.sdpa_kernel`) are not used. A `TorchFunctionMode` would not
    do: PyTorch disables such modes in backward, where layers are recomputed.
    """
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


_plain_attention = F.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    plain = partial(
        _plain_attention, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if not query.is_meta:
        return plain()
    backends = torch.backends.cuda
    is_flash = query.dtype in _HALVES and attn_mask is None and query.shape[-1] <= _LARGEST_FLASH_HEAD
    if is_flash and (backends.flash_sdp_enabled() or backends.cudnn_sdp_enabled()):
        flash: Tensor = _aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return flash
    if query.ndim == 4 and query.shape[-3] == key.shape[-3] and backends.mem_efficient_sdp_enabled():
        bias = attn_mask
        if bias is not None:
            shape = (*query.shape[:-1], key.shape[-2])
            bias = (torch.empty_like(bias, dtype=query.dtype) if bias.dtype is torch.bool else bias).expand(shape)
        saves_logsumexp = query.requires_grad or key.requires_grad or value.requires_grad
        memory_efficient: Tensor = _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, saves_logsumexp, dropout_p, is_causal, scale=scale
        )[0]
        return memory_efficient
    return plain()
