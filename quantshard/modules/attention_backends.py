"""Choice among PyTorch's implementations ("backends") of scaled_dot_product_attention.

PyTorch runs the first backend that works, in its own order, which starts with flash. On Hopper cuDNN is faster: causal
attention over 2 x 8192 tokens in bf16, with 32 query heads and 8 key heads of 128 features, takes 7.1 ms forward and
backward on an H200 by cuDNN and 13.0 ms by flash. Hence "auto" tries cuDNN first on Hopper for the inputs that this was
measured on: 16 bits, no mask, no dropout, heads of up to 128 features, in multiples of 8. cuDNN plans each new shape
once, which takes a while; inputs that cuDNN does not support go to the next backend.

"auto" respects backends that the caller disabled (`torch.nn.attention.sdpa_kernel`,
`torch.backends.cuda.enable_*_sdp`). Under `torch.use_deterministic_algorithms(True)` flash comes first and cuDNN is
left out, since cuDNN's gradients differ between runs (as do flash's without that setting). Any choice other than "auto"
is the only one tried, and raises if it does not work.
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
"""Major number of the compute capability."""

_NONE_WORKS = ("No available kernel", "No viable backend")
"""Starts of PyTorch's error messages, on GPUs and on the CPU."""

Order = tuple[str, ...]
"""Names of backends in the order in which they are tried. Empty: PyTorch's own order."""


@private_torch.constant_in_graphs
def order(asked: str, device: torch.device, dtype: torch.dtype, head_size: int, plain: bool) -> Order:
    """Return the backends to try, in order; empty for PyTorch's own order.

    Args:
        asked: one of `BACKENDS`.
        device, dtype: device and dtype of queries, keys and values.
        head_size: features of a head.
        plain: there is neither a mask nor dropout.
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
    """Run PyTorch's scaled_dot_product_attention on the first backend in `tried` that works.

    Raises:
        ConfigurationError: no backend works.
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
    """Describe the result of `order` without mask and dropout."""
    is_available = device.type != "cuda" or torch.cuda.is_available()
    backends = order(asked, device, dtype, head_size, True) if is_available else ()
    first, *fallbacks = backends or ("PyTorch's own choice",)
    return first + (f", else {', '.join(fallbacks)}" if fallbacks else "")
