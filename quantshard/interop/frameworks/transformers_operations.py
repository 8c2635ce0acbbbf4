"""What transformers calls for each tensor of a file while it loads a model that is quantized meanwhile: it fills the
layer, and hands on what is none of a quantized layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from quantshard.errors import ConfigurationError, QuantshardError
from quantshard.interop.conversion.linear import ConvertedLinear


class LayersToFill(Protocol):
    """What these operations ask of the quantizer that loads."""

    layers: dict[str, ConvertedLinear]
    failures: dict[str, QuantshardError]

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor of a file is quantized."""

    def fill(self, name: str, parts: Mapping[str, Tensor], missing: set[str] | None) -> None:
        """Fill a converted layer with one weight of the files; `parts`: by what stands in place of "weight"."""


def fills(conversion: Any) -> bool:
    """Whether an entry of transformers' list of conversions is one of these, of which a save has nothing to undo."""
    return any(isinstance(operation, WeightFill) for operation in getattr(conversion, "operations", ()))


class WeightFill(ConversionOps):
    """Fills converted layers with tensors in high precision, as transformers has them ready; hands on all others."""

    def __init__(self, hf_quantizer: LayersToFill) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: Any) -> WeightFill:
        """As one is made for each tensor: of the same layers."""
        return type(self)(self.hf_quantizer)

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        rest = {}
        for name, given in input_dict.items():
            value = given[0] if isinstance(given, list) else given
            if self.hf_quantizer.param_needs_quantization(kwargs["model"], name):
                self.hf_quantizer.fill(name.removesuffix(".weight"), {"weight": value}, missing_keys)
            else:
                rest[name] = value
        return rest


class StoredWeightFill(WeightFill):
    """Fills converted layers with tensors as the files have them; hands on all others, in the model's dtype."""

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
        wanted = kwargs["model"].get_parameter_or_buffer(full_layer_name).dtype
        return {full_layer_name: weight.to(wanted) if weight.is_floating_point() else weight}
