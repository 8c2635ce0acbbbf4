"""Checks of a module's input and of its weights before a GEMM, and the cast to the dtype of `torch.autocast`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import limits, private_torch
from quantshard.errors import ConfigurationError, RecipeMismatchError, warn_once
from quantshard.gemm import hardware
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.tensor.quantized_tensor import QuantizedTensor

PARAMS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WITH_AUTOCAST = ("cuda", "cpu")
"""Device types with autocast in every build of PyTorch."""


def autocast_input(x: Tensor) -> Tensor:
    """Cast x to the dtype of the active `torch.autocast` of its device, if there is one.

    The module then computes as with an input of that dtype outside of autocast. As in PyTorch, float64 is not cast.
    """
    kind = x.device.type
    if not ((kind in _WITH_AUTOCAST or _has_autocast(kind)) and torch.is_autocast_enabled(kind)):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x


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


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ConfigurationError if parameters cannot have this dtype."""
    if dtype not in PARAMS_DTYPES:
        raise ConfigurationError(
            f"{name} cannot be {dtype}: parameters stand for values of one of {', '.join(map(str, PARAMS_DTYPES))}; "
            "build the module under quantized_model_init with a recipe to store weights in fewer bits"
        )


def wrong_features(
    module: Any, name: str, features: int, x_shape: Sequence[int], mode: str | None
) -> ConfigurationError:
    """The error for an input whose last dim differs from the weight's in_features."""
    part = f", its part of them over {module.tp_size} ranks" if mode == "row" and module.tp_size > 1 else ""
    return ConfigurationError(
        f"{type(module).__name__}.{name} got an input {list(x_shape)}, but its last dim must have the {features} "
        f"features that the weight takes here{part}"
    )


def check_place(name: str, param: Tensor | None, device: torch.device) -> None:
    """Raise ConfigurationError if a parameter is still on the meta device."""
    if param is not None and param.is_meta and device.type != "meta":
        raise ConfigurationError(
            f"{name} is on the meta device and holds no values; call to_empty(device=...) on the model and load them "
            "(checkpoints.load_high_precision, checkpoints.load), or reset_parameters()"
        )


def check_weight(module: Any, name: str, weight: Tensor, call: LinearContext, device: torch.device) -> None:
    """Check that a weight can be used in this call with an input on `device`.

    Raises:
        RecipeMismatchError: the weight's format is not the recipe's.
        ConfigurationError: the weight is stale, has no values, or was gathered before this CUDA graph's capture.
        FallbackError: under strict, the weight's GEMMs would fall back.
    """
    recipe, storage = call.recipe, weight.quantized_storage if isinstance(weight, QuantizedTensor) else None
    if storage is not None and storage.is_stale:
        raise ConfigurationError(
            f"{module.label(name)} was gathered by FSDP before its last update, so this forward would use old values; "
            "let FSDP free it after the last backward of a step (set_reshard_after_backward(True)), or call reshard() "
            "on the FSDP-wrapped module after optimizer.step()"
        )
    if storage is not None and storage.gathered:
        storage.check_captured(f"{type(module).__name__}.{name}")
    if storage is not None and storage.version == 0 and not weight.is_meta and storage.is_unwritten:
        raise ConfigurationError(
            f"{module.label(name)} was never given values: to_empty took memory as it was, and nothing was loaded "
            "since; call checkpoints.load_high_precision(model, state_dict) or checkpoints.load before the first "
            "forward, or reset_parameters() for new values"
        )
    spec = None if storage is None else storage.spec
    if spec not in (recipe.weight, None) and recipe.table:
        expected = "high precision" if recipe.weight is None else str(recipe.weight)
        raise RecipeMismatchError(
            f"{module.label(name)} is stored as {spec}, but autocast's recipe {recipe.name!r} wants {expected}; give "
            "it the one by which the weights were made"
        )
    if storage is None and recipe.weight is not None and module.training and torch.is_grad_enabled():
        silencer = "warnings.filterwarnings('ignore', '.*requantized')"
        limits.warn("quantized each forward", module.label(name), silencer)
    if weight.is_meta:
        check_place(module.label(name), weight, device)
    if call.strict:
        refuse_fallbacks(module.label(name), hardware.fallbacks(storage, recipe, device))


def refuse_fallbacks(name: str, fallbacks: tuple[str, ...]) -> None:
    """Raise FallbackError if there are any."""
    if fallbacks:
        raise limits.fallback_error(fallbacks, name)
