"""PEFT: LoRA and DoRA over frozen quantized weights. Merging rounds once, and unmerging restores the exact codes.

Layers made by `quantshard.convert` work with plain LoRA without this module: adapters train, save and load. This module
adds DoRA, which needs norms of the base weight; merging all adapters in one rounding with exact unmerging, where PEFT
rounds once per adapter and subtracts; `safe_merge`; and errors for unsupported variants.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import layer as lora
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import check_adapters_to_merge
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard.checkpoints.disk import agreement
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules import Linear
from quantshard.tensor import components
from quantshard.tensor.storage import DRAWS

_REGISTER = "_register_custom_module"
"""PEFT's experimental method for custom layers; there is no alternative."""


def register(config: PeftConfig) -> PeftConfig:
    """Make a LoRA configuration wrap quantized layers with `QuantizedLoraLinear`, and return it.

        model = peft.get_peft_model(model, quantshard.integrations.peft.register(LoraConfig(...)))

    Args:
        config: LoRA configuration, with or without `use_dora`, for `get_peft_model` or a trainer's `peft_config`.

    Raises:
        ConfigurationError: the configuration is not LoRA, or needs the base weight in high precision.
    """
    if not isinstance(config, LoraConfig):
        raise ConfigurationError(
            f"register({type(config).__name__}): LoRA and DoRA are supported over quantized weights; use a LoraConfig"
        )
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in ("gaussian", "orthogonal"):
        raise ConfigurationError(
            f"register(LoraConfig(init_lora_weights={init!r})): it would change the base weights, which are "
            "quantized; use True, 'gaussian' or 'orthogonal'"
        )
    variants = [option.name for option in fields(config) if option.metadata.get("is_lora_variant")]
    if unsupported := [name for name in variants if name != "use_dora" and getattr(config, name)]:
        raise ConfigurationError(
            f"register(LoraConfig({unsupported[0]}=...)): LoRA and DoRA alone are supported over quantized weights"
        )
    getattr(config, _REGISTER)({Linear: QuantizedLoraLinear})
    return config


def load_adapter(model: nn.Module, folder: str | Path, **options: Any) -> PeftModel:
    """Add an adapter written by `save_pretrained` to a model with quantized weights.

    Args:
        model: a model with the same converted layers as the trained one.
        folder: directory with adapter_config.json.
        options: arguments of `PeftModel.from_pretrained`, such as `is_trainable=True`.

    Raises:
        ConfigurationError: the adapter is not LoRA, or a complete layer in it (`modules_to_save`) is quantized in the
            files but not in the model, or vice versa.
    """
    config = register(PeftConfig.from_pretrained(str(folder)))
    _check_whole_layers(model, Path(folder) / SAFETENSORS_WEIGHTS_NAME)
    config.inference_mode = not options.get("is_trainable", False)
    return PeftModel.from_pretrained(model, str(folder), config=config, **options)


def _check_whole_layers(model: nn.Module, path: Path) -> None:
    """Check that layers replaced completely by an adapter are quantized both in its files and in the model, or in
    neither. Otherwise PEFT would load codes as values."""
    if not path.is_file():
        return
    with safe_open(path, framework="pt") as file:
        keys = set(file.keys())
    for name, param in components.named_parameters(model).items():
        key = f"base_model.model.{name}"
        in_file, in_model = key + components.FORMAT_SUFFIX in keys, components.quantized_local(param) is not None
        if key in keys and in_file != in_model:
            model_form, file_form = ("quantized", "plain") if in_model else ("plain", "quantized")
            raise ConfigurationError(
                f"load_adapter: {name} is {file_form} in {path} (modules_to_save) and {model_form} in this model; "
                + (
                    "leave its layer out of convert: filter="
                    if in_model
                    else "convert the model as the one that was trained"
                )
            )


def save_adapter(model: PeftModel, folder: str | Path, **options: Any) -> None:
    """Write a model's adapters like `model.save_pretrained`. Under FSDP2 this is a collective call.

    Args:
        model: a model with adapters. Under FSDP2 every rank must call, and rank 0 writes.
        folder: directory for adapter_config.json and adapter_model.safetensors.
        options: arguments of `PeftModel.save_pretrained`.
    """
    markers = ("lora_", "modules_to_save")
    selected = {key: value for key, value in model.state_dict().items() if any(word in key for word in markers)}
    full = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in selected.items()}
    options = {"save_embedding_layers": False, "is_main_process": agreement.rank() == 0, **options}
    model.save_pretrained(str(folder), state_dict=full, **options)


class _BaseValues(nn.Module):
    """A quantized layer with its weight presented as a plain dequantized tensor, from which DoRA computes norms."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.__dict__["weight"] = _values(base)  # not registered: neither trained nor saved
        self.bias = base.bias


class _LayerValues:
    """A proxy of a LoRA layer that returns `_BaseValues` as its base layer."""

    def __init__(self, layer: lora.Linear) -> None:
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._layer, name, value)

    def get_base_layer(self) -> nn.Module:
        return _BaseValues(self._layer.get_base_layer())


class QuantizedDoraVariant(DoraLinearVariant):
    """DoRA (Liu et al., 2024, arXiv:2402.09353) over a quantized weight."""

    @staticmethod
    def init(module: Any, adapter_name: str, **options: Any) -> None:
        """Initialize magnitudes from the row norms of the quantized weight."""
        layer: Any = _LayerValues(module)
        DoraLinearVariant.init(layer, adapter_name, **options)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **options: Any) -> Tensor:
        """Scale the base output and add the adapter's."""
        layer: Any = _LayerValues(module)
        return DoraLinearVariant.forward(layer, active_adapter, x, result, **options)


class QuantizedLoraLinear(lora.Linear):
    """PEFT's LoRA layer over a quantized layer. While merged, it also keeps the original codes, doubling the weight's
    memory."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **options: Any) -> None:
        base = base_layer.get_base_layer() if isinstance(base_layer, lora.LoraLayer) else base_layer
        _check_base(base)
        super().__init__(base_layer, adapter_name, **options)
        self._before: tuple[Tensor, Tensor | None] | None = None

    @property
    def lora_variants(self) -> dict[tuple[str, ...], type | None]:
        """Variants that need only the values of the base weight."""
        return {(): None, ("use_dora",): QuantizedDoraVariant}

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Quantize the base weight plus adapters, with a single rounding.

        Args:
            safe_merge: raise ValueError, as PEFT does, if merged values are infinite or NaN. Otherwise the error is a
                ConfigurationError. Nothing changes in either case.
            adapter_names: adapters to merge. Default: the active ones.

        Raises:
            UnsupportedOperationError: the weight is sharded.
            ConfigurationError: an adapter has a bias but the base layer has none.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        base: Any = self.get_base_layer()
        _check_whole(base.weight)
        bias = None if base.bias is None else base.bias.clone()
        original = self._before or (base.weight.detach().clone(), bias)
        merged = [*self.merged_adapters, *names]
        values, bias = self._merged(merged, *original)
        if safe_merge and not values.isfinite().all():
            raise ValueError(f"merged values of {', '.join(merged)} are infinite or NaN; nothing was merged")
        base.weight.quantize_(values)
        if bias is not None:
            base.bias.copy_(bias)
        self._before = original
        self.merged_adapters[:] = merged

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the codes and scales from before the first merge, bit for bit."""
        if self._before is None:
            # warns that nothing is merged
            super().unmerge()
            return
        base: Any = self.get_base_layer()
        weight, bias = self._before
        draws = components.storage_of(base.weight).state[DRAWS]
        components.storage_of(weight).state[DRAWS].copy_(draws)  # never reuse random bits
        components.load_components(base.weight, components.state_of(weight), "weight")
        if bias is not None:
            base.bias.copy_(bias)
        self._before = None
        self.merged_adapters.clear()

    def _merged(self, names: list[str], weight: Any, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the merged weight and bias from the unmerged ones."""
        base = weight.dequantize(dtype=torch.float32)
        values = base
        for name in names:
            delta = self.get_delta_weight(name).float()
            values = values + delta
            if name in self.lora_variant:
                magnitude = self.lora_magnitude_vector[name].weight.float()
                values = values * (magnitude / torch.linalg.norm(base + delta, dim=1)).unsqueeze(1)
            if self.lora_bias[name]:
                if bias is None:
                    raise ConfigurationError(
                        f"merge: adapter {name!r} has a bias (lora_bias=True), and the layer has none to add it to"
                    )
                bias = bias + self.lora_B[name].bias * self.scaling[name]
        return values, bias


def _check_base(base: nn.Module) -> None:
    """Check that a layer has an unsharded quantized weight of its own.

    Raises:
        ConfigurationError: it does not.
    """
    weight = getattr(base, "weight", None)
    if components.quantized_local(weight) is None:
        raise ConfigurationError(
            f"{base} is a layer of quantshard without a quantized weight, to which PEFT can add no adapter; leave it "
            "out of target_modules, or build it under quantized_model_init"
        )
    if isinstance(weight, DTensor):
        raise ConfigurationError(
            f"{base} is sharded ({', '.join(map(str, weight.placements))}); the order is convert, then get_peft_model "
            "(or load_adapter), then fully_shard, then the optimizer"
        )


def _check_whole(weight: Tensor) -> None:
    if isinstance(weight, DTensor):
        raise UnsupportedOperationError(
            f"merge: a weight of shape {tuple(weight.shape)} is sharded ({', '.join(map(str, weight.placements))}), "
            "where adapters and scales belong to several ranks; save_adapter(), and load_adapter() onto a model that "
            "is not sharded, to merge there"
        )


def _values(layer: nn.Module) -> Tensor:
    """Return a layer's weight as a plain dequantized tensor without a gradient."""
    weight: Any = layer.weight
    return weight.detach().dequantize()
