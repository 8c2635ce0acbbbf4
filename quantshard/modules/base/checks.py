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
        raise ConfigurationError(
            f"{name} cannot be {dtype}: parameters stand for values of one of {', '.join(map(str, PARAMS_DTYPES))}; "
            "build the module under quantized_model_init with a recipe to store weights in fewer bits"
        )


def check_stays(module: Any, name: str, param: Tensor | None) -> None:
    """Raise UnsupportedOperationError if a quantized weight is deleted, or registered under a foreign name."""
    if param is not None and components.quantized_local(param) is not None:
        raise UnsupportedOperationError(limits.refusal("replaced weight", f"{type(module).__name__}.{name}"))


def check_cut(module: Any, name: str, shape: tuple[int, ...], cut: int | None) -> None:
    """Raise ConfigurationError if tensor parallelism cannot cut the dim `cut` of a parameter into equal parts."""
    if cut is not None and shape[cut] % module.tp_size:
        raise ConfigurationError(
            f"{type(module).__name__}.{name} {list(shape)}: tensor parallelism over {module.tp_size} ranks cuts dim "
            f"{cut}, and {shape[cut]} is not a multiple of {module.tp_size}; choose sizes that tp_size divides"
        )


def wrong_input(owner: str, x: Tensor, params_dtype: torch.dtype) -> ConfigurationError:
    """The error for an input that is a DTensor or has no floating dtype."""
    if isinstance(x, DTensor):
        return ConfigurationError(
            f"{owner}: the input is a DTensor {list(x.shape)} of {x.placements}; give this rank's "
            "part as a plain tensor: x.to_local(), or use_local_output=True of the module before it"
        )
    return ConfigurationError(
        f"{owner}: the input {list(x.shape)} is of {x.dtype}; give a floating dtype, such as x.to({params_dtype})"
    )


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


def wrong_features(
    module: Any, name: str, features: int, x_shape: Sequence[int], mode: str | None
) -> ConfigurationError:
    """The error for an input whose last dim differs from the weight's in_features."""
    part = f", its part of them over {module.tp_size} ranks" if mode == "row" and module.tp_size > 1 else ""
    return ConfigurationError(
        f"{type(module).__name__}.{name} got an input {list(x_shape)}, but its last dim must have the {features} "
        f"features that the weight takes here{part}"
    )


def no_values(name: str) -> ConfigurationError:
    """The error for a parameter that is still on the meta device."""
    return ConfigurationError(
        f"{name} is on the meta device and holds no values; call to_empty(device=...) on the model and load them "
        "(checkpoints.load_high_precision, checkpoints.load), or reset_parameters()"
    )


def wrong_format(name: str, spec: QuantSpec, recipe: Recipe) -> RecipeMismatchError:
    """The error for a weight whose format is not the recipe's."""
    expected = "high precision" if recipe.weight is None else str(recipe.weight)
    return RecipeMismatchError(
        f"Recipe mismatch for {name!r}: it is stored as {spec}, but {recipe.name!r} wants {expected}; enter "
        "autocast with the recipe of the weights"
    )


def check_values(module: Any, name: str, storage: QuantizedStorage) -> None:
    """Raise ConfigurationError if a weight that FSDP2 gathered is outdated, or a weight was never given values."""
    if storage.is_stale:
        raise ConfigurationError(
            f"{module.label(name)} was gathered by FSDP before its last update, so this forward would use old values; "
            "let FSDP free it after the last backward of a step (set_reshard_after_backward(True)), or call reshard() "
            "on the FSDP-wrapped module after optimizer.step()"
        )
    is_capturing = kernel_dispatch.is_capturing()
    if storage.gathered and storage.captured is not is_capturing and (storage.captured or torch.is_grad_enabled()):
        raise ConfigurationError(
            f"{type(module).__name__}.{name} was gathered {'inside' if storage.captured else 'outside'} the capture of "
            f"a CUDA graph and is used {'inside' if is_capturing else 'outside'}; call reshard() on the FSDP-wrapped "
            "module in between"
        )
    # a shard without entries is never written
    shard = storage.sharded_source
    is_unwritten = shard.version == 0 and not private_torch.count_in_place_changes(shard.components.values())
    if storage.version == 0 and storage.device.type != "meta" and is_unwritten and 0 not in shard.shard.shape:
        raise ConfigurationError(f"{module.label(name)} was never given values; load some, or call reset_parameters()")


def refuse_fallbacks(name: str, fallbacks: tuple[str, ...]) -> None:
    """Raise FallbackError if there are any."""
    if fallbacks:
        raise limits.fallback_error(fallbacks, name)
