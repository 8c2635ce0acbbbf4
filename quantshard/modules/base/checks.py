"""Checks of a module's parameters and input that seldom matter, and the errors and warnings of the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, limits, private_torch
from quantshard.errors import ConfigurationError, RecipeMismatchError, UnsupportedOperationError, warn_once
from quantshard.modules.contexts import context
from quantshard.recipe import QuantSpec, Recipe
from quantshard.tensor import components, reads
from quantshard.tensor.storage import QuantizedStorage

reads.is_strict = context.is_strict
PARAMS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ConfigurationError if parameters cannot have this dtype."""
    if dtype not in PARAMS_DTYPES:
        allowed = ", ".join(map(str, PARAMS_DTYPES))
        raise ConfigurationError(f"{name} cannot be {dtype}; use {allowed}, or quantized_model_init for fewer bits")


def check_stays(module: Any, name: str, param: Tensor | None) -> None:
    """Raise UnsupportedOperationError if a quantized weight is deleted, or registered under a foreign name."""
    if param is not None and components.quantized_local(param) is not None:
        raise UnsupportedOperationError(limits.refusal("replaced weight", f"{type(module).__name__}.{name}"))


def check_cut(module: Any, name: str, shape: tuple[int, ...], cut: int | None) -> None:
    """Raise ConfigurationError if tensor parallelism cannot cut the dim `cut` of a parameter into equal parts."""
    if cut is not None and shape[cut] % module.tp_size:
        subject = f"{type(module).__name__}.{name} {list(shape)}"
        raise ConfigurationError(f"{subject}: tensor parallelism needs a multiple of {module.tp_size} in dim {cut}")


def wrong_input(owner: str, x: Tensor, params_dtype: torch.dtype) -> ConfigurationError:
    """The error for an input that is a DTensor or has no floating dtype."""
    if isinstance(x, DTensor):
        return ConfigurationError(f"{owner}: the input is a DTensor {list(x.shape)} of {x.placements}; use to_local()")
    return ConfigurationError(f"{owner}: the input {list(x.shape)} is of {x.dtype}; give x.to({params_dtype})")


@private_torch.constant_in_graphs
def warn_of_wide_input(owner: str, given: torch.dtype, own: torch.dtype) -> None:
    """Warn once that a layer computes in its input's dtype, which is wider than that of its weights.

    PyTorch's layers raise here. The dtype of a quantized weight is only nominal, and a float32 residual stream over
    bfloat16 layers can be intended.
    """
    wide, narrow = (str(dtype).removeprefix("torch.") for dtype in (given, own))
    remedy = f"give x.to(torch.{narrow}), enter torch.autocast, or cast the model"
    warn_once("wide input", f"{owner}: an input of {wide} in a layer of {narrow} computes in {wide}; {remedy}")


def wrong_features(module: Any, name: str, size: int, x_shape: Sequence[int], mode: str | None) -> ConfigurationError:
    """The error for an input whose last dim differs from the weight's in_features."""
    part = f", its part of them over {module.tp_size} ranks" if mode == "row" and module.tp_size > 1 else ""
    subject = f"{type(module).__name__}.{name}: an input {list(x_shape)}"
    return ConfigurationError(f"{subject} must have the {size} features that the weight takes here{part}")


def no_values(name: str) -> ConfigurationError:
    """The error for a parameter that is still on the meta device."""
    remedy = "call to_empty(device=...) on the model and load values, or reset_parameters()"
    return ConfigurationError(f"{name} is on the meta device and holds no values; {remedy}")


def wrong_format(name: str, spec: QuantSpec, recipe: Recipe) -> RecipeMismatchError:
    """The error for a weight whose format is not the recipe's."""
    expected = "high precision" if recipe.weight is None else str(recipe.weight)
    problem = f"it is stored as {spec}, but {recipe.name!r} wants {expected}"
    return RecipeMismatchError(f"Recipe mismatch for {name!r}: {problem}; enter autocast with the weights' recipe")


def check_values(module: Any, name: str, storage: QuantizedStorage) -> None:
    """Raise ConfigurationError if a weight that FSDP2 gathered is outdated, or a weight was never given values."""
    if storage.is_stale:
        remedy = "call reshard() on its FSDP module after optimizer.step(), or set_reshard_after_backward(True)"
        raise ConfigurationError(f"{module.label(name)} was gathered by FSDP before its last update; {remedy}")
    is_capturing = kernel_dispatch.is_capturing()
    if storage.gathered and storage.captured is not is_capturing and (storage.captured or torch.is_grad_enabled()):
        here, there = ("inside", "outside") if storage.captured else ("outside", "inside")
        where = f"{here} the capture of a CUDA graph and is used {there}"
        raise ConfigurationError(f"{module.label(name)} was gathered {where}; call reshard() on its FSDP module before")
    # a shard without entries is never written
    shard = storage.sharded_source
    is_unwritten = shard.version == 0 and not private_torch.count_in_place_changes(shard.components.values())
    if storage.version == 0 and storage.device.type != "meta" and is_unwritten and 0 not in shard.shard.shape:
        raise ConfigurationError(f"{module.label(name)} was never given values; load some, or call reset_parameters()")


def refuse_fallbacks(name: str, fallbacks: tuple[str, ...]) -> None:
    """Raise FallbackError if there are any."""
    if fallbacks:
        raise limits.fallback_error(fallbacks, name)
