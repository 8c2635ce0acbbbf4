"""Conversion operations that transformers runs for each tensor of a file while it loads a quantized model.

They fill converted layers and pass through all other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from quantshard.errors import ConfigurationError, QuantshardError
from quantshard.interop.conversion.linear import ConvertedLinear


class LayersToFill(Protocol):
    """The interface that these operations need from the quantizer."""

    layers: dict[str, ConvertedLinear]
    failures: dict[str, QuantshardError]

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Return whether a tensor of a file belongs to a quantized weight."""

    def fill(self, name: str, parts: Mapping[str, Tensor], missing: set[str] | None) -> None:
        """Fill a converted layer with one weight of the files. `parts`: tensors keyed by the name that replaces
        "weight"."""


def fills(conversion: Any) -> bool:
    """Return whether an entry of transformers' list of conversions is one of these, which saving need not undo."""
    return any(isinstance(operation, WeightFill) for operation in getattr(conversion, "operations", ()))


class WeightFill(ConversionOps):
    """Fills converted layers with tensors in high precision, and passes through all others."""

    def __init__(self, hf_quantizer: LayersToFill) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: Any) -> WeightFill:
        """Share the quantizer, because transformers copies the operation for each tensor."""
        return type(self)(self.hf_quantizer)

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        rest = {}
        for name, entry in input_dict.items():
            value = entry[0] if isinstance(entry, list) else entry
            if self.hf_quantizer.param_needs_quantization(kwargs["model"], name):
                self.hf_quantizer.fill(name.removesuffix(".weight"), {"weight": value}, missing_keys)
            else:
                rest[name] = value
        return rest


class StoredWeightFill(WeightFill):
    """Fills converted layers with tensors as stored in the files, and casts all others to the model's dtype."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], missing_keys: set[str] | None = None, full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, Tensor]:
        parts = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        name = full_layer_name.removesuffix(".weight")
        if name in self.hf_quantizer.layers:
            self.hf_quantizer.fill(name, parts, missing_keys)
            return {}
        weight = parts.get("weight")
        if weight is None or len(parts) > 1 or weight.element_size() < 2:
            self.hf_quantizer.failures[name] = ConfigurationError(
                f"it is quantized in the files ({', '.join(parts)}), and not to be here; let filter= match it"
            )
            return {}
        dtype = kwargs["model"].get_parameter_or_buffer(full_layer_name).dtype
        return {full_layer_name: weight.to(dtype) if weight.is_floating_point() else weight}
