"""PEFT: LoRA and DoRA over frozen quantized weights. Merging rounds once, and unmerging restores the exact codes.

Plain LoRA trains, saves and loads without this module. It adds DoRA, which needs norms of the base weight; merging all
adapters in one rounding, with exact unmerging; `safe_merge`; and errors for unsupported variants.
"""

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
from quantshard.tensor import component_loading, components
from quantshard.tensor.parameter_state import RNG_DRAWS

__all__ = ["load_adapter", "register", "save_adapter"]

_REGISTER = "_register_custom_module"
"""PEFT's experimental method for custom layers; there is no alternative."""


def register(config: PeftConfig) -> PeftConfig:
    """Make a LoRA configuration wrap quantized layers with `QuantizedLoraLinear`, and return it.

        model = peft.get_peft_model(model, quantshard.integrations.peft.register(LoraConfig(...)))

    Args:
        config: LoRA configuration, with or without `use_dora`, for `get_peft_model` or a trainer's `peft_config`.
    """
    if not isinstance(config, LoraConfig):
        raise ConfigurationError(f"register({type(config).__name__}) is not supported; use a LoraConfig")
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in ("gaussian", "orthogonal"):
        raise ConfigurationError(f"init_lora_weights={init!r} changes the base weights; use True or 'gaussian'")
    variants = [option.name for option in fields(config) if option.metadata.get("is_lora_variant")]
    if unsupported := [name for name in variants if name != "use_dora" and getattr(config, name)]:
        raise ConfigurationError(f"LoraConfig({unsupported[0]}=...) is not supported; use LoRA or DoRA")
    getattr(config, _REGISTER)({Linear: QuantizedLoraLinear})
    return config


def load_adapter(model: nn.Module, folder: str | Path, **options: Any) -> PeftModel:
    """Add an adapter written by `save_pretrained` to a model with quantized weights.

    Args:
        model: a model with the same converted layers as the trained one.
        folder: directory with adapter_config.json.
        options: arguments of `PeftModel.from_pretrained`, such as `is_trainable=True`.
    """
    config = register(PeftConfig.from_pretrained(str(folder)))
    _check_whole_layers(model, Path(folder) / SAFETENSORS_WEIGHTS_NAME)
    config.inference_mode = not options.get("is_trainable", False)
    return PeftModel.from_pretrained(model, str(folder), config=config, **options)


def _check_whole_layers(model: nn.Module, path: Path) -> None:
    """Check that layers in `modules_to_save` are quantized in both the file and the model, or in neither."""
    if not path.is_file():
        return
    with safe_open(path, framework="pt") as file:
        keys = set(file.keys())
    for name, param in components.named_parameters(model).items():
        key = f"base_model.model.{name}"
        in_file, in_model = key + components.FORMAT_SUFFIX in keys, components.quantized_local(param) is not None
        if key in keys and in_file != in_model:
            kind = "quantized" if in_file else "plain"
            raise ConfigurationError(f"{name} (modules_to_save) is {kind} in {path} only; convert as for training")


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


class QuantizedLoraLinear(lora.Linear):
    """PEFT's LoRA layer over a quantized layer. While merged, it also keeps the original codes."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **options: Any) -> None:
        base = base_layer.get_base_layer() if isinstance(base_layer, lora.LoraLayer) else base_layer
        weight = getattr(base, "weight", None)
        if components.quantized_local(weight) is None:
            raise ConfigurationError(f"{base} has no quantized weight for an adapter; leave it out of target_modules")
        if isinstance(weight, DTensor):
            raise ConfigurationError(f"{base} is sharded; call fully_shard after get_peft_model or load_adapter")
        super().__init__(base_layer, adapter_name, **options)
        self._before: tuple[Tensor, Tensor | None] | None = None

    @property
    def lora_variants(self) -> dict[tuple[str, ...], type | None]:
        return {(): None, ("use_dora",): DoraLinearVariant}

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Quantize the base weight plus adapters, with a single rounding.

        Args:
            safe_merge: raise ValueError, as PEFT does, if merged values are infinite or NaN. Nothing changes then.
            adapter_names: adapters to merge. Default: the active ones.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        base: Any = self.get_base_layer()
        if isinstance(base.weight, DTensor):
            raise UnsupportedOperationError("merge: the weight is sharded; use save_adapter, and merge unsharded")
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
        draws = components.storage_of(base.weight).state[RNG_DRAWS]
        components.storage_of(weight).state[RNG_DRAWS].copy_(draws)  # never reuse random bits
        component_loading.load_components(base.weight, components.state_of(weight), "weight")
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
                    raise ConfigurationError(f"merge: adapter {name!r} has a bias, but its layer has none")
                bias = bias + self.lora_B[name].bias * self.scaling[name]
        return values, bias
