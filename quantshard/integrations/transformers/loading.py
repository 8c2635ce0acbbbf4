"""Quantization in transformers' `from_pretrained`: layers are converted on the meta device, then filled one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantshard.errors import CheckpointError, ConfigurationError, QuantshardError
from quantshard.formats import Orientation, Role
from quantshard.integrations.transformers.saving import LAYOUT, METHOD, NATIVE, check_layout
from quantshard.interop.conversion.convert import ConversionReport, check_modules, convert
from quantshard.interop.conversion.linear import ConvertedLinear, is_packed, unpack
from quantshard.interop.conversion.selection import Filter
from quantshard.interop.layouts import conversion, table
from quantshard.interop.layouts.conversion import InexactConversionError
from quantshard.interop.layouts.table import EXACT, Layout
from quantshard.interop.layouts.writing import NOTED_AMAX
from quantshard.modules.contexts.layer_recipes import Recipes, check_recipes, concrete_recipes
from quantshard.recipe import AUTO
from quantshard.tensor import component_loading, components, moves, requantize

REPORT: Final = "quantshard_report"
"""Attribute of the model: the conversion report of `from_pretrained`."""


@register_quantization_config(METHOD)
class QuantshardConfig(QuantizationConfigMixin):
    """Makes `from_pretrained(..., quantization_config=QuantshardConfig())` convert a model while loading it.

    See `quantshard.convert` for the arguments. The result matches loading in high precision and then converting, bit
    for bit, but only one weight at a time is in high precision.

    Args:
        recipe: a recipe, its name, a mapping from layer name patterns to recipes, or a function; see `convert`.
        filter: which layers to convert: a function of module and name, or name patterns.
        modules: "linear" or "fused".
        autocast: make the model's forward enter the recipe.
        preserve_high_precision_init_val: keep the file's values on the CPU for an optimizer's masters.
        layout: default layout of `save_pretrained`: "native", or a layout or family in `quantshard.layouts.LAYOUTS`.
    """

    def __init__(
        self,
        recipe: Recipes = AUTO,
        *,
        filter: Filter | None = None,
        modules: str = "linear",
        autocast: bool = True,
        preserve_high_precision_init_val: bool = False,
        layout: str = NATIVE,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        check_recipes("QuantshardConfig", recipe)
        check_modules("QuantshardConfig", modules)
        self.recipe, self.filter, self.modules, self.autocast = concrete_recipes(recipe), filter, modules, autocast
        self.preserve_high_precision_init_val = preserve_high_precision_init_val
        check_layout(layout)
        self.layout = layout
        self.stored: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Create from the `quantization_config` that the native form writes to config.json."""
        recipe, layers = config_dict.get("recipe"), layers_of(config_dict)
        layer_recipes = config_dict.get("layer_recipes") or {}
        unnamed = [name for name, value in {"the model": recipe, **layer_recipes}.items() if value is None]
        if unnamed:
            raise ConfigurationError(f"config.json lacks the recipe of {unnamed[0]}; pass config=training_config(...)")
        default = {"*": recipe} if set(layers) - layer_recipes.keys() else {}
        recipes: Any = {**layer_recipes, **default} if layer_recipes else recipe
        config = cls(
            recipes,
            filter=NameFilter(layers),
            modules=config_dict.get("modules", "linear"),
            autocast=config_dict.get("autocast", True),
        )
        config.stored = dict(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict; recipes and functions are represented by their text."""
        recipe = self.recipe if isinstance(self.recipe, Mapping) else {"*": self.recipe}
        return {
            "quant_method": METHOD, "recipe": {pattern: str(value) for pattern, value in recipe.items()},
            "filter": self.filter if isinstance(self.filter, str | list | None) else repr(self.filter),
            "modules": self.modules, "autocast": self.autocast, "layout": self.layout,
        }  # fmt: skip

    def get(self, key: str, default: Any = None) -> Any:
        """Look up a setting as in a dict, because transformers expects a file's configuration to be one."""
        return getattr(self, key, default)


def training_config(
    path: str, recipe: Recipes = AUTO, *, filter: Filter | None = None, **options: Any
) -> PreTrainedConfig:
    """Return a quantized model's configuration for further training: `from_pretrained(path, config=...)`.

    Use it for files in another program's layout (`quantshard.layouts.LAYOUTS`), which have their codes and scales
    copied, and for the native form with a recipe that config.json cannot represent. transformers accepts
    `quantization_config=` only for files without one, or with one of the same kind.

    Args:
        path: a directory, or a name on the hub.
        recipe, filter, options: see `QuantshardConfig`.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    file_config = getattr(config, "quantization_config", None)
    if file_config is None:
        raise ConfigurationError(f"training_config({str(path)!r}): no quantization_config; pass QuantshardConfig()")
    file_config = file_config if isinstance(file_config, dict) else file_config.to_dict()
    if filter is None and file_config.get("quant_method") == METHOD:
        filter = NameFilter(layers_of(file_config))
    new_config = QuantshardConfig(recipe, filter=filter, **options)
    new_config.stored = file_config
    config.quantization_config = new_config
    return config


@register_quantizer(METHOD)
class QuantshardQuantizer(HfQuantizer):
    """Quantizer that transformers calls while loading; converts layers on the meta device, then fills each."""

    serialized_names: dict[str, list[str]]

    def __init__(self, quantization_config: QuantshardConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.given = quantization_config
        self.weights: dict[str, WeightToFill] = {}
        self.failures: dict[str, QuantshardError] = {}
        self.noted: dict[str, str] = {}
        self.report: ConversionReport | None = None
        file_config = quantization_config.stored
        self.stored_layout = None if file_config is None or file_config.get("quant_method") == METHOD else file_config
        self.layout: table.Layout | None = None
        self.serialized_names = {"weight": ["weight"]}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, Mapping) and "disk" in map(str, device_map.values()):
            raise ConfigurationError("from_pretrained: weights on the disk cannot be trained; change device_map")

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.weights

    def get_quantize_ops(self) -> ConversionOps:
        return WeightFill(self)

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": StoredWeightFill}

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Also read packed stacks of experts, whose names do not end in "weight"."""
        conversions: list[WeightConverter] = super().get_weight_conversions()
        stacks = {".".join(name.split(".")[-2:]) for name, weight in self.weights.items() if weight.leaf != "weight"}
        return conversions + [WeightConverter(name, name, [StoredWeightFill(self)]) for name in stacks if conversions]

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        if getattr(model.config, "distributed_config", None) is not None:
            raise ConfigurationError("from_pretrained: distributed_config is not supported; call fully_shard later")
        if self.stored_layout is not None:
            self._read_layout(checkpoint_files or [])
            if self.has_experts and any(param.ndim == 3 for param in model.parameters()):
                text = "quantized experts in this layout cannot be read; save the model in the native form too"
                raise ConfigurationError(f"from_pretrained: {text}")
        # convert rejects models with this attribute as quantized by another program
        del model.quantization_method
        for target, source in model.all_tied_weights_keys.items():
            # transformers ties weights after loading, but convert needs to know which are tied
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(source))
        settings = self.given
        recipe, filter = settings.recipe, settings.filter
        if isinstance(filter, NameFilter):
            recipe, filter = filter.placed(recipe, model)
            if not filter.names:  # only the head was quantized, and this model has none
                return model
        self.report = convert(
            model, recipe, filter=filter, modules=settings.modules, autocast=settings.autocast,
            preserve_high_precision_init_val=settings.preserve_high_precision_init_val,
        )  # fmt: skip
        for converted in self.report.converted:
            name = converted.name if len(converted.shape) == 3 else f"{converted.name}.weight"
            owner, _, leaf = name.rpartition(".")
            self.weights[name] = WeightToFill(model.get_submodule(owner), leaf, name)
            # else transformers would draw values
            setattr(self.weights[name].param, "_is_hf_initialized", True)  # noqa: B010
        return model

    def _read_layout(self, paths: Iterable[str]) -> None:
        """Determine the files' layout, and read the amaxes that our exports record in the headers."""
        names: set[str] = set()
        for path in paths:
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
                self.noted.update(file.metadata() or {})
        self.layout = table.detect(self.stored_layout, names, "config.json")
        assert self.layout is not None
        self.has_experts = any(re.search(r"\.experts\..*scale", name) for name in names)
        second = [] if self.layout.second is None else [self.layout.second.key]
        keys = {"weight", self.layout.codes_key, self.layout.scale_key, *second}
        # longer names first, because they contain "weight"
        self.serialized_names = {"weight": sorted(keys, key=len, reverse=True)}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        # transformers records load conversions to undo them in a save; filled layers need no undoing
        loaded: Any = model
        conversions = [
            entry
            for entry in getattr(model, "_weight_conversions", ())
            if not any(isinstance(operation, WeightFill) for operation in getattr(entry, "operations", ()))
        ]
        # from here on, the model is like any other converted model
        self.remove_quantization_config(model)
        # removed with the configuration, but saving reads them
        loaded._weight_conversions = conversions
        for name, error in self.failures.items():
            raise type(error)(f"{name}: {error}")
        empty = [name.removesuffix(".weight") for name, weight in self.weights.items() if weight.awaits_values]
        if empty:
            count = f"{len(empty)} of {len(self.weights)} quantized layers"
            raise CheckpointError(f"from_pretrained: the files lack {count} (first: {empty[0]}); change filter=")
        if self.report is not None:
            setattr(model, REPORT, self.report)
        if self.given.layout != NATIVE:
            setattr(model, LAYOUT, self.given.layout)
        return model

    def fill(self, name: str, parts: Mapping[str, Tensor], missing: set[str] | None) -> None:
        """Fill a weight of a converted layer from the files. `parts`: tensors by the name that replaces "weight"."""
        weight, value = self.weights[name], parts.get("weight")
        if missing is not None:  # transformers would initialize keys that no file has, one by one
            missing -= {key for weight in self.weights.values() for key in weight.own_keys()}
        try:
            if self.layout is not None and self.layout.scale_key in parts:
                take_layout(weight.module, self.layout, parts, self.noted.get(f"{NOTED_AMAX}{name}"))
            elif value is None:
                raise CheckpointError(f"the files have {', '.join(parts)}, but no weight")
            else:
                weight.fill(value, self.given.preserve_high_precision_init_val)
        except QuantshardError as error:
            # raised after loading; transformers would only print a table of errors
            self.failures[name] = error


@dataclass(frozen=True)
class WeightToFill:
    """A weight on the meta device: of a linear layer, or a stack of experts. `leaf`: its name in the module."""

    module: Any
    leaf: str
    name: str

    @property
    def param(self) -> Tensor:
        param: Tensor = getattr(self.module, self.leaf)
        return param

    @property
    def awaits_values(self) -> bool:
        is_left = components.quantized_local(self.param) is None or self.param.is_meta
        return is_left or (isinstance(self.module, ConvertedLinear) and self.module.awaits_values)

    def own_keys(self) -> list[str]:
        """List the keys of the weight and of histories, which high-precision files do not have."""
        suffixes = [] if components.quantized_local(self.param) is None else components.suffixes(self.param)
        buffers = [f"{self.name.removesuffix(self.leaf)}{name}" for name, _ in self.module.named_buffers(recurse=False)]
        return [self.name + suffix for suffix in suffixes] + buffers

    def fill(self, value: Tensor, keep: bool) -> None:
        """Fill with values, or with a packed weight. `keep`: keep values on the CPU for an optimizer's masters."""
        if is_packed(value):
            entries = unpack(self.param, value, self.name)
            self._leave_meta(value.device)
            return component_loading.load_components(self.param, entries, self.name)
        if not value.is_floating_point() or value.shape != self.param.shape or value.element_size() < 2:
            raise CheckpointError(f"the files have {value.dtype} {list(value.shape)}, not {list(self.param.shape)}")
        if value.dtype != self.param.dtype:
            self.module.to(value.dtype)  # transformers keeps some modules in float32
        if isinstance(self.module, ConvertedLinear):
            return self.module.take_values(value, self.name, keep)
        self._leave_meta(value.device)
        matrix = value.detach().flatten(0, 1)
        requantize.requantize_([(self.param, matrix)], names=[self.name])
        if keep:
            components.storage_of(self.param).keep_initial_values(matrix.cpu().clone())

    def _leave_meta(self, device: torch.device) -> None:
        if isinstance(self.module, ConvertedLinear):
            return self.module.leave_meta(device)
        self.module._awaits_values = False
        moves.move_parameter(self.param, lambda stack: torch.empty_like(stack, device=device))


def take_layout(layer: ConvertedLinear, layout: Layout, parts: Mapping[str, Tensor], noted: str | None) -> None:
    """Fill a converted layer on the meta device with a weight in another program's layout, bit for bit.

    `parts`: tensors keyed by the name that replaces "weight". `noted`: the amax in the header of quantshard's exports.
    """
    spec = components.storage_of(layer.weight).spec
    verdict = table.import_verdict(spec, layout)
    rows, cols = layer.weight.shape
    expected = conversion.shapes(layout, rows, cols)
    for key, (_, shape) in expected.items():
        if key not in parts or parts[key].numel() != torch.Size(shape).numel():
            actual = "missing" if key not in parts else list(parts[key].shape)
            raise CheckpointError(f"{key} is {actual}; a {layout.name} weight [{rows}, {cols}] has {list(shape)}")
    if verdict.kind != EXACT:
        raise CheckpointError(f"it cannot be copied into {spec}: {verdict.why}")
    layer.leave_meta(parts[layout.codes_key].device)
    storage = components.storage_of(layer.weight)
    scale = spec.format.copies[Orientation.ROWWISE].scale
    scales = conversion.stored_scale(layout, parts[layout.scale_key])
    by_row = scales[torch.arange(rows, device=scales.device) // min(layout.block[0], max(rows, 1))]
    try:
        grid = conversion.our_grid(by_row, layout, spec.format, storage.shard.resident(scale), cols)
    except InexactConversionError as error:
        raise CheckpointError(f"it cannot be copied into {spec}: {error}") from None
    values = {Role.CODES: parts[layout.codes_key].view(torch.uint8), Role.SCALE: grid}
    if layout.second is not None:
        values[Role.AMAX] = conversion.amax_of(parts[layout.second.key], spec.format, layout.second.divides, noted)
    pairs = [(storage.components[c.name], values[c.role]) for c in spec.format.components]
    component_loading.write_components(layer.weight, pairs)
    storage.forget_amaxes()


class WeightFill(ConversionOps):
    """Fills converted layers with high-precision tensors of a file, and passes through all others."""

    def __init__(self, hf_quantizer: QuantshardQuantizer) -> None:
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
                self.hf_quantizer.fill(name, {"weight": value}, missing_keys)
            else:
                rest[name] = value
        return rest


class StoredWeightFill(WeightFill):
    """Fills converted layers with tensors as stored in the files, and casts all others to the model's dtype."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], missing_keys: set[str] | None = None, full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, Tensor]:
        parts = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        if not full_layer_name.endswith(".weight"):  # a stack of experts
            parts = dict(zip(["weight"], parts.values(), strict=True))
        if full_layer_name in self.hf_quantizer.weights:
            self.hf_quantizer.fill(full_layer_name, parts, missing_keys)
            return {}
        weight = parts.get("weight")
        if weight is None or len(parts) > 1 or weight.element_size() < 2:
            self.hf_quantizer.failures[full_layer_name] = ConfigurationError(
                f"quantized in the files ({', '.join(parts)}), but not in this model; let filter= match it"
            )
            return {}
        dtype = kwargs["model"].get_parameter_or_buffer(full_layer_name).dtype
        return {full_layer_name: weight.to(dtype) if weight.is_floating_point() else weight}


def layers_of(saved: Mapping[str, Any]) -> list[str]:
    layers = saved.get("layers")
    if not isinstance(layers, list) or not isinstance(saved.get("layer_recipes") or {}, dict):
        raise CheckpointError("config.json is damaged: its quantization_config has no list of layers")
    return layers


class NameFilter:
    """A filter for `convert` that selects layers by exact name."""

    leaves_out = "not quantized in the files"
    """Reason reported for all other layers."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def __call__(self, module: nn.Module, name: str) -> bool:
        return name in self.names

    def placed(self, recipes: Recipes, model: PreTrainedModel) -> tuple[Recipes, NameFilter]:
        """Adapt recipes and names to the base model of the saved one, or to a model around it, by a prefix."""
        module_names = {name for name, _ in model.named_modules()}
        prefix = f"{model.base_model_prefix}."
        names = {}
        for name in self.names:
            alternative = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
            if match := next((candidate for candidate in (name, alternative) if candidate in module_names), None):
                names[name] = match
        if isinstance(recipes, Mapping):  # layers by name, and * for all others
            gone = self.names - names.keys()
            recipes = {names.get(name, name): recipe for name, recipe in recipes.items() if name not in gone}
        return recipes, NameFilter(names.values())
