"""PEFT: LoRA and DoRA over frozen quantized weights, merged in one rounding and unmerged to the same codes.

PEFT takes the layers that `quantshard.convert` makes for `nn.Linear`, so plain LoRA trains, is saved and is loaded
without this module. What it adds: DoRA, whose norms need the values of the base weight; merging, which PEFT does in one
rounding for each adapter and undoes by subtraction; `safe_merge`; and refusals by name.
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
"""PEFT's method for layers of others, which it documents as experimental; there is no other way."""


def register(config: PeftConfig) -> PeftConfig:
    """Let a LoRA configuration wrap quantized layers as this module does; returns it.

        model = peft.get_peft_model(model, quantshard.integrations.peft.register(LoraConfig(...)))

    Args:
        config: with or without `use_dora`; give it to `get_peft_model`, or to a trainer as its `peft_config`.

    Raises:
        ConfigurationError: it is of another kind than LoRA, or of a variant that needs the base weight in high
            precision.
    """
    if not isinstance(config, LoraConfig):
        raise ConfigurationError(
            f"register({type(config).__name__}): LoRA and DoRA are supported over quantized weights; use a LoraConfig"
        )
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower() not in ("gaussian", "orthogonal"):
        raise ConfigurationError(
            f"register(LoraConfig(init_lora_weights={start!r})): it would change the base weights, which are "
            "quantized; use True, 'gaussian' or 'orthogonal'"
        )
    variants = [each.name for each in fields(config) if each.metadata.get("is_lora_variant")]
    if others := [name for name in variants if name != "use_dora" and getattr(config, name)]:
        raise ConfigurationError(
            f"register(LoraConfig({others[0]}=...)): LoRA and DoRA alone are supported over quantized weights"
        )
    getattr(config, _REGISTER)({Linear: QuantizedLoraLinear})
    return config


def load_adapter(model: nn.Module, folder: str | Path, **options: Any) -> PeftModel:
    """Put an adapter that `save_pretrained` wrote onto a model with quantized weights.

    Args:
        model: converted, with the same layers as the one that was trained.
        folder: with adapter_config.json.
        options: of `PeftModel.from_pretrained`, such as `is_trainable=True`.

    Raises:
        ConfigurationError: the adapter is no LoRA, or has whole layers (`modules_to_save`) that are quantized in its
            files and not in the model, or the other way round.
    """
    config = register(PeftConfig.from_pretrained(str(folder)))
    _check_whole_layers(model, Path(folder) / SAFETENSORS_WEIGHTS_NAME)
    config.inference_mode = not options.get("is_trainable", False)
    return PeftModel.from_pretrained(model, str(folder), config=config, **options)


def _check_whole_layers(model: nn.Module, path: Path) -> None:
    """Check that layers that an adapter replaces as a whole are quantized in its files as in a model; PEFT would load
    codes as values."""
    if not path.is_file():
        return
    with safe_open(path, framework="pt") as opened:
        keys = set(opened.keys())
    for name, param in components.named_parameters(model).items():
        key = f"base_model.model.{name}"
        stored, quantized = key + components.FORMAT_SUFFIX in keys, components.quantized_local(param) is not None
        if key in keys and stored != quantized:
            here, there = ("quantized", "plain") if quantized else ("plain", "quantized")
            raise ConfigurationError(
                f"load_adapter: {name} is {there} in {path} (modules_to_save) and {here} in this model; "
                + (
                    "leave its layer out of convert: filter="
                    if quantized
                    else "convert the model as the one that was trained"
                )
            )


def save_adapter(model: PeftModel, folder: str | Path, **options: Any) -> None:
    """Write the adapters of a model as `model.save_pretrained` does, also of a sharded one. A collective call then.

    Args:
        model: with adapters; under FSDP2 every rank calls, and rank 0 writes.
        folder: for adapter_config.json and adapter_model.safetensors.
        options: of `PeftModel.save_pretrained`.
    """
    kept = ("lora_", "modules_to_save")
    trained = {key: value for key, value in model.state_dict().items() if any(word in key for word in kept)}
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in trained.items()}
    options = {"save_embedding_layers": False, "is_main_process": agreement.rank() == 0, **options}
    model.save_pretrained(str(folder), state_dict=whole, **options)


class _BaseValues(nn.Module):
    """A quantized layer whose weight reads as a plain tensor of its values, which DoRA takes norms of."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.__dict__["weight"] = _values(base)  # no parameter: nothing trains or saves it
        self.bias = base.bias


class _LayerValues:
    """A LoRA layer that gives `_BaseValues` as its base; else the layer itself."""

    def __init__(self, layer: lora.Linear) -> None:
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._layer, name, value)

    def get_base_layer(self) -> nn.Module:
        return _BaseValues(self._layer.get_base_layer())


class QuantizedDoraVariant(DoraLinearVariant):
    """DoRA (Liu et al., 2024, arXiv:2402.09353) of a quantized weight."""

    @staticmethod
    def init(module: Any, adapter_name: str, **options: Any) -> None:
        """Begin with the norms of the rows of the quantized weight."""
        layer: Any = _LayerValues(module)
        DoraLinearVariant.init(layer, adapter_name, **options)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **options: Any) -> Tensor:
        """The base's output scaled, and the adapter's added."""
        layer: Any = _LayerValues(module)
        return DoraLinearVariant.forward(layer, active_adapter, x, result, **options)


class QuantizedLoraLinear(lora.Linear):
    """PEFT's LoRA layer over a quantized one. Merged, it keeps the codes from before, as many bytes again."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **options: Any) -> None:
        under = base_layer.get_base_layer() if isinstance(base_layer, lora.LoraLayer) else base_layer
        _check_base(under)
        super().__init__(base_layer, adapter_name, **options)
        self._before: tuple[Tensor, Tensor | None] | None = None

    @property
    def lora_variants(self) -> dict[tuple[str, ...], type | None]:
        """Those that need nothing of the base weight but its values."""
        return {(): None, ("use_dora",): QuantizedDoraVariant}

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Quantize base and adapters together, in one rounding.

        Args:
            safe_merge: raise PEFT's kind of error, and change nothing, if merged values are infinite or NaN; without
                it the error is a `ConfigurationError`, and nothing is changed either.
            adapter_names: which; by default the active ones.

        Raises:
            UnsupportedOperationError: the weight is sharded.
            ConfigurationError: an adapter has a bias and the base has none.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        base: Any = self.get_base_layer()
        _check_whole(base.weight)
        bias = None if base.bias is None else base.bias.clone()
        before = self._before or (base.weight.detach().clone(), bias)
        merged = [*self.merged_adapters, *names]
        values, bias = self._merged(merged, *before)
        if safe_merge and not values.isfinite().all():
            raise ValueError(f"merged values of {', '.join(merged)} are infinite or NaN; nothing was merged")
        base.weight.quantize_(values)
        if bias is not None:
            base.bias.copy_(bias)
        self._before = before
        self.merged_adapters[:] = merged

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the codes and scales from before the first merge back, bit for bit."""
        if self._before is None:
            super().unmerge()  # which warns that there is nothing to do
            return
        base: Any = self.get_base_layer()
        weight, bias = self._before
        drawn = components.storage_of(base.weight).state[DRAWS]
        components.storage_of(weight).state[DRAWS].copy_(drawn)  # no random word is used twice
        components.load_components(base.weight, components.state_of(weight), "weight")
        if bias is not None:
            base.bias.copy_(bias)
        self._before = None
        self.merged_adapters.clear()

    def _merged(self, names: list[str], weight: Any, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Values of weight and bias with all of these adapters, from those before any was merged."""
        start = weight.dequantize(dtype=torch.float32)
        values = start
        for name in names:
            delta = self.get_delta_weight(name).float()
            values = values + delta
            if name in self.lora_variant:
                magnitude = self.lora_magnitude_vector[name].weight.float()
                values = values * (magnitude / torch.linalg.norm(start + delta, dim=1)).unsqueeze(1)
            if self.lora_bias[name]:
                if bias is None:
                    raise ConfigurationError(
                        f"merge: adapter {name!r} has a bias (lora_bias=True), and the layer has none to add it to"
                    )
                bias = bias + self.lora_B[name].bias * self.scaling[name]
        return values, bias


def _check_base(base: nn.Module) -> None:
    """Raise if a layer has no weight of its own that is quantized and whole."""
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
    """The values of a layer's weight as a plain tensor without a gradient."""
    weight: Any = layer.weight
    return weight.detach().dequantize()
