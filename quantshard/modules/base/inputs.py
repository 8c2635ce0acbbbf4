"""Checks of a module's input, and its cast to the dtype of `torch.autocast`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.errors import ConfigurationError, warn_once


def autocast_input(x: Tensor) -> Tensor:
    """Cast x to the dtype of the active `torch.autocast` of its device, if there is one.

    The module then computes as with an input of that dtype outside of autocast. As in PyTorch, float64 is not cast.
    """
    kind = x.device.type
    if not ((kind in _WITH_AUTOCAST or _has_autocast(kind)) and torch.is_autocast_enabled(kind)):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x


_WITH_AUTOCAST = ("cuda", "cpu")
"""Device types with autocast in every build of PyTorch."""


@private_torch.constant_in_graphs  # torch 2.11 cannot trace it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def checked_input(owner: str, x: Tensor, params_dtype: torch.dtype) -> Tensor:
    """Check the input of a module and cast it to the dtype of `torch.autocast`.

    Raises:
        ConfigurationError: the input is a DTensor or has no floating dtype.
    """
    if isinstance(x, DTensor):
        raise ConfigurationError(
            f"{owner}: the input is a DTensor {list(x.shape)} of {x.placements}; give this rank's "
            "part as a plain tensor: x.to_local(), or use_local_output=True of the module before it"
        )
    if not x.is_floating_point():
        raise ConfigurationError(
            f"{owner}: the input {list(x.shape)} is of {x.dtype}; give a floating dtype, such as x.to({params_dtype})"
        )
    return autocast_input(x)


@private_torch.constant_in_graphs
def warn_of_wide_input(owner: str, given: torch.dtype, own: torch.dtype) -> None:
    """Warn once that a layer computes in its input's dtype, which is wider than that of its weights.

    PyTorch's layers raise here. The dtype of a quantized weight is only nominal, and a float32 residual stream over
    bfloat16 layers can be intended.
    """
    wide, narrow = (str(dtype).removeprefix("torch.") for dtype in (given, own))
    warn_once(
        "wide input",
        f"{owner}: an input of {wide} in a layer of {narrow}: it computes in {wide}, and what follows takes the memory "
        f"for it; give x.to(torch.{narrow}), enter torch.autocast, or cast the model (quantized weights keep their "
        "codes)",
    )
