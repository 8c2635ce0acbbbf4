"""Which of PyTorch's implementations of scaled_dot_product_attention runs: its "backends".

PyTorch takes the first that works of an order of its own, which begins with flash. On Hopper cuDNN is faster: causal
attention of 2 x 8192 tokens in bf16, 32 heads of 128 features over 8 of keys, takes 7.1 ms of an H200 forward and
backward by cuDNN, 13.0 by flash. So "auto" puts cuDNN first there, for the kind of input that this was measured on: 16
bits, no mask, no dropout, heads of a multiple of 8 features up to 128. cuDNN plans each new shape once, which takes a
while; what it does not take goes on to the next.

What the caller disabled (`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`) stays so under "auto".
With `torch.use_deterministic_algorithms(True)` flash is first, and cuDNN left out: its gradients differ between runs,
as those of flash do without that setting. Any other choice than "auto" is tried alone, and raises where it does not
work.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantshard import private_torch
from quantshard.errors import ConfigurationError

AUTO = "auto"
_KINDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = (AUTO, *_KINDS)

_HOPPER = 9
"""Compute capability, the major number."""

_NONE_WORKS = ("No available kernel", "No viable backend")
"""How PyTorch's messages begin, on GPUs and on the CPU."""

Order = tuple[str, ...]
"""Names of backends in the order in which they are tried; empty: PyTorch's own."""


@private_torch.constant_in_graphs
def order(asked: str, device: torch.device, dtype: torch.dtype, head_size: int, plain: bool) -> Order:
    """Which backends are tried, without any if PyTorch's order is left as it is.

    Args:
        asked: one of `BACKENDS`.
        device, dtype: of queries, keys and values.
        head_size: features of a head.
        plain: neither mask nor dropout.
    """
    if asked != AUTO:
        return (asked,)
    if device.type != "cuda":
        return ()
    if torch.are_deterministic_algorithms_enabled():
        return _enabled("flash", "efficient", "math")
    if plain and _cudnn_is_fastest(device, dtype, head_size) and torch.backends.cuda.cudnn_sdp_enabled():
        return _enabled("cudnn", "flash", "efficient", "math")
    return ()


def _cudnn_is_fastest(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    fits = dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 128
    return fits and torch.version.hip is None and _is_hopper(device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == _HOPPER


def _enabled(*names: str) -> Order:
    allowed = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return tuple(name for name in names if allowed[name])


def attend(tried: Order, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's scaled_dot_product_attention by the first of the backends in `tried` that works.

    Raises:
        ConfigurationError: none works.
    """
    if not tried:
        return F.scaled_dot_product_attention(q, k, v, **options)
    try:
        with sdpa_kernel([_KINDS[name] for name in tried], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, **options)
    except RuntimeError as error:
        if not str(error).startswith(_NONE_WORKS):
            raise
        masked = ", a mask" if options.get("attn_mask") is not None else ""
        raise ConfigurationError(
            f"attention by {' or '.join(tried)} is not available for queries {tuple(q.shape)}, keys {tuple(k.shape)}, "
            f"{q.dtype}{masked} on {q.device}; use attention_backend='auto'"
        ) from error


def described(asked: str, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """What `order` gives without mask and dropout, in words."""
    is_there = device.type != "cuda" or torch.cuda.is_available()
    tried = order(asked, device, dtype, head_size, True) if is_there else ()
    first, *others = tried or ("PyTorch's own choice",)
    return first + (f", else {', '.join(others)}" if others else "")
