"""Checks of a model before `convert` changes it, so that a conversion either completes or changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from quantshard.errors import ConfigurationError
from quantshard.interop.conversion.selection import LayerChoice
from quantshard.recipe import QuantSpec
from quantshard.tensor import components
from quantshard.tensor.quantized_tensor import quantize_weight
from quantshard.tensor.requantize import non_finite

_HALF = torch.finfo(torch.float16)

_QUANTIZERS = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "auto_gptq": "GPTQ",
    "gptqmodel": "GPTQ",
    "awq": "AWQ",
    "hqq": "HQQ",
    "eetq": "EETQ",
    "aqlm": "AQLM",
    "compressed_tensors": "compressed-tensors",
    "optimum": "optimum-quanto",
}
"""Package of a module's or weight's class -> the library that quantized it."""

_PACKED = ("qweight", "qzeros", "weight_packed")
"""Names of parameters and buffers in which other libraries store codes."""


def check_model(model: nn.Module, what: str) -> None:
    """Check that a model can be converted.

    Raises:
        ConfigurationError: the model is itself a linear layer, sharded, already quantized by any library, or lazy.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{what} takes a model, a torch.nn.Module, not a {type(model).__name__}")
    # set by transformers on models that were loaded quantized
    method = getattr(model, "quantization_method", None)
    if method is not None:
        raise ConfigurationError(
            f"{what}: this {type(model).__name__} is quantized already, by {getattr(method, 'value', method)}; load "
            "it in high precision"
        )
    if isinstance(model, nn.Linear):
        raise ConfigurationError(
            f"{what} changes the layers inside of a model, and this model is itself a Linear: put it into one, "
            "as torch.nn.Sequential(layer)"
        )
    check_unsharded(model, what)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigurationError(
                f"{what}: {name} is of a lazy layer and has no shape yet; run the model once before"
            )
        if components.quantized_local(parameter) is not None:
            raise ConfigurationError(
                f"{what}: {name} is quantized already, to {components.storage_of(parameter).cell.format.name}; "
                "quantshard.revert gives the plain layers back"
            )
    _check_foreign(model, what)


def check_unsharded(model: nn.Module, what: str) -> None:
    """Check that no parameter is sharded.

    Raises:
        ConfigurationError: a parameter is sharded.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigurationError(
                f"{what}: {name} is sharded ({', '.join(map(str, parameter.placements))}); convert first, then "
                "fully_shard, then make the optimizer"
            )


def _check_foreign(model: nn.Module, what: str) -> None:
    modules = list(_foreign(model))
    if modules:
        kinds = Counter(f"{library}'s {kind}" if library else kind for _, library, kind in modules)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
        raise ConfigurationError(
            f"{what}: this model is quantized already, by another library: it has {counts}, the first {modules[0][0]}; "
            "load it in bfloat16, without that quantization, and convert that (its codes are not read as values here)"
        )


def _foreign(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield modules quantized by other libraries: name, library if known, and class."""
    for name, module in model.named_modules():
        tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        library, weight = _quantizer(type(module)), tensors.get("weight")
        if weight is not None and _quantizer(type(weight)):
            yield name, _quantizer(type(weight)), type(weight).__name__
        elif any(packed in tensors and not tensors[packed].is_floating_point() for packed in _PACKED):
            yield name, library, type(module).__name__
        elif isinstance(module, nn.Linear) and weight is not None and weight.dtype.itemsize == 1:
            yield name, library, f"{type(module).__name__} of {str(weight.dtype).removeprefix('torch.')}"


def _quantizer(kind: type) -> str:
    return next(
        (library for base in kind.__mro__ if (library := _QUANTIZERS.get(base.__module__.partition(".")[0]))), ""
    )


@torch.no_grad()
def check_values(chosen: Sequence[LayerChoice]) -> None:
    """Check the values of all layers to convert, before the first is converted. Skips the meta device.

    Reads each weight once, temporarily using one byte per element, and synchronizes with a GPU once.

    Raises:
        ConfigurationError: a value is infinite or NaN, which codes would hide, or codes of float16 values would exceed
            float16's range.
    """
    layers = [choice for choice in chosen if choice.recipe and not choice.module.weight.is_meta]
    if not layers:
        return
    largest = torch.stack([_largest(choice.module.weight).cpu() for choice in layers]).tolist()
    bad = [choice for choice, amax in zip(layers, largest, strict=True) if not amax < float("inf")]  # also catches NaN
    if bad:
        weight = bad[0].module.weight.detach()
        more = f" (and those of {len(bad) - 1} other layers)" if len(bad) > 1 else ""
        hint = f"; float16 ends at {_HALF.max:.0f}: load the model in bfloat16" if weight.dtype is torch.float16 else ""
        raise ConfigurationError(
            f"convert: {bad[0].name}.weight{more}: {non_finite(weight, (0, 0))}{hint}; codes saturate, which would "
            "hide it, so nothing was converted. Look at where the values come from"
        )
    for choice, amax in zip(layers, largest, strict=True):
        weight = choice.module.weight
        if weight.dtype is torch.float16 and amax > _HALF.max / 2 and choice.recipe and choice.recipe.weight:
            _check_half(choice.name, weight, amax, choice.recipe.weight)


def _largest(weight: Tensor) -> Tensor:
    """Return the largest magnitude as float64; NaN if any value is NaN."""
    if weight.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    low, high = torch.aminmax(weight.detach())
    return torch.maximum(-low.double(), high.double())


def _check_half(name: str, weight: Tensor, largest: float, cell: QuantSpec) -> None:
    if not quantize_weight(weight.detach(), cell).dequantize().isfinite().all():
        raise ConfigurationError(
            f"convert: {name}.weight: its largest value, {largest:.0f}, is rounded up to codes that stand for more "
            f"than {_HALF.max:.0f}, float16's largest, so nothing was converted: load the model in bfloat16"
        )
