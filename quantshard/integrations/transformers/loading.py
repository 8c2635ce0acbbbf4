"""Quantization in transformers' `from_pretrained`: layers are converted on the meta device, then filled one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_renamings,
)
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantshard.errors import CheckpointError, ConfigurationError, QuantshardError
from quantshard.integrations.transformers.filling import WeightToFill, scales_by_row
from quantshard.integrations.transformers.saving import LAYOUT, METHOD, NATIVE, check_layout
from quantshard.interop.conversion.convert import ConversionReport, check_modules, convert
from quantshard.interop.conversion.selection import Filter
from quantshard.interop.layouts import conversion, table
from quantshard.interop.layouts.writing import NOTED_AMAX
from quantshard.modules.contexts.layer_recipes import Recipes, check_recipes, concrete_recipes
from quantshard.recipe import AUTO

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
        if unnamed := [name for name, value in {"the model": recipe, **layer_recipes}.items() if value is None]:
            raise ConfigurationError(f"config.json lacks the recipe of {unnamed[0]}; pass config=training_config(...)")
        default = {"*": recipe} if set(layers) - layer_recipes.keys() else {}
        recipes: Any = {**layer_recipes, **default} if layer_recipes else recipe
        options = {key: config_dict[key] for key in ("modules", "autocast") if key in config_dict}
        config = cls(recipes, filter=NameFilter(layers), **options)
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

    def update_weight_conversions(self, weight_conversions: Any, model: PreTrainedModel) -> Any:
        """Read packed stacks of experts, and stacks whose experts the files have one by one, in a layout."""
        conversions = super().update_weight_conversions(weight_conversions, model)
        if self.layout is not None:
            renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
            self.noted.update({apply_renamings(key, renamings): value for key, value in self.noted.items()})
            return [StackFill.instead_of(conversion, self) for conversion in conversions]
        stacks = {".".join(name.split(".")[-2:]) for name in self.weights if not name.endswith(".weight")}
        packed = stacks if self.pre_quantized else ()
        return conversions + [WeightConverter(name, name, [StoredWeightFill(self)]) for name in packed]

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        if getattr(model.config, "distributed_config", None) is not None:
            raise ConfigurationError("from_pretrained: distributed_config is not supported; call fully_shard later")
        if self.stored_layout is not None:
            self._read_layout(checkpoint_files or [])
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
        second = [] if self.layout.second is None else [self.layout.second.key]
        keys = {"weight", self.layout.codes_key, self.layout.scale_key, *second}
        # longer names first, because they contain "weight"
        self.serialized_names = {"weight": sorted(keys, key=len, reverse=True)}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        # transformers records load conversions to undo them in a save; filled layers need no undoing
        loaded: Any = model
        conversions = []
        for entry in getattr(model, "_weight_conversions", ()):
            fills = [fill for fill in getattr(entry, "operations", ()) if isinstance(fill, WeightFill)]
            conversions += [fill.plain for fill in fills if isinstance(fill, StackFill)] if fills else [entry]
        # from here on, the model is like any other converted model
        self.remove_quantization_config(model)
        # removed with the configuration, but saving reads them
        loaded._weight_conversions = conversions
        for name, error in self.failures.items():
            raise type(error)(f"{name}: {error}")
        if empty := [name.removesuffix(".weight") for name, weight in self.weights.items() if weight.awaits_values]:
            count = f"{len(empty)} of {len(self.weights)} quantized layers"
            raise CheckpointError(f"from_pretrained: the files lack {count} (first: {empty[0]}); change filter=")
        if self.report is not None:
            setattr(model, REPORT, self.report)
        if self.given.layout != NATIVE:
            setattr(model, LAYOUT, self.given.layout)
        return model

    def fill(self, name: str, missing: set[str] | None, write: Callable[[WeightToFill], None]) -> None:
        """Fill a weight of a converted layer by `write`."""
        if missing is not None:  # transformers would initialize keys that no file has, one by one
            missing -= {key for weight in self.weights.values() for key in weight.own_keys()}
        try:
            write(self.weights[name])
        except QuantshardError as error:
            # raised after loading; transformers would only print a table of errors
            self.failures[name] = error

    def write(self, parts: Mapping[str, Tensor], weight: WeightToFill) -> None:
        """Write tensors of the files, by the name that replaces "weight"."""
        if self.layout is not None and self.layout.scale_key in parts:
            weight.take_layout(self.layout, parts, self.noted.get(f"{NOTED_AMAX}{weight.name}"))
        elif "weight" not in parts:
            raise CheckpointError(f"the files have {', '.join(parts)}, but no weight")
        else:
            weight.fill(parts["weight"], self.given.preserve_high_precision_init_val)


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
                self.hf_quantizer.fill(name, missing_keys, partial(self.hf_quantizer.write, {"weight": value}))
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
            self.hf_quantizer.fill(full_layer_name, missing_keys, partial(self.hf_quantizer.write, parts))
            return {}
        weight = parts.get("weight")
        if weight is None or len(parts) > 1 or weight.element_size() < 2:
            self.hf_quantizer.failures[full_layer_name] = _unmatched(parts)
            return {}
        dtype = kwargs["model"].get_parameter_or_buffer(full_layer_name).dtype
        return {full_layer_name: weight.to(dtype) if weight.is_floating_point() else weight}


class StackFill(WeightFill):
    """Fills stacks of experts by the operations of `plain`, which here stack codes, and the scales of each row."""

    def __init__(self, hf_quantizer: QuantshardQuantizer, plain: WeightConverter) -> None:
        super().__init__(hf_quantizer)
        self.plain = plain

    def __deepcopy__(self, memo: Any) -> StackFill:
        return type(self)(self.hf_quantizer, self.plain)

    @classmethod
    def instead_of(cls, entry: WeightTransform, quantizer: QuantshardQuantizer) -> WeightTransform:
        """Return a converter of experts that also reads scales; other conversions are returned as they are."""
        sources = entry.source_patterns
        if not isinstance(entry, WeightConverter) or not all(re.search(r"\*.*\.weight$", name) for name in sources):
            return entry
        names = [name.removesuffix("weight") + key for name in sources for key in quantizer.serialized_names["weight"]]
        return entry.copy(names, entry.target_patterns, operations=[cls(quantizer, entry)])

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], missing_keys: set[str] | None = None, full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, Tensor]:
        quantizer = self.hf_quantizer
        assert quantizer.layout is not None
        patterns = {"source_patterns": self.plain.source_patterns, "target_patterns": self.plain.target_patterns}
        built = partial(self._built, input_dict, {**kwargs, **patterns, "full_layer_name": full_layer_name})
        is_quantized = any(name.endswith(f".{quantizer.layout.scale_key}") for name in input_dict)
        if full_layer_name in quantizer.weights:
            write = partial(self._write, input_dict, built)
            if not is_quantized:
                write = partial(quantizer.write, {"weight": built("weight")})
            quantizer.fill(full_layer_name, missing_keys, write)
            return {}
        if is_quantized:
            quantizer.failures[full_layer_name] = _unmatched(input_dict)
            return {}
        return {full_layer_name: built("weight").to(kwargs["model"].get_parameter(full_layer_name).dtype)}

    def _built(
        self, parts: Mapping[str, list[Tensor]], context: Any, key: str, of: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Build the stack of what `of` returns for each tensor whose name ends in `key`, its pattern and number."""
        values: Any = {
            f"{name.removesuffix(key)}weight": [
                part if of is None else of(part, name, i) for i, part in enumerate(tensors)
            ]
            for name, tensors in parts.items()
            if name.endswith(f".{key}")
        }
        for operation in self.plain.operations:
            values = operation.convert(values, **context)
        (stack,) = values.values()
        return stack[0] if isinstance(stack, list) else stack

    def _write(self, parts: Mapping[str, list[Tensor]], built: Callable[..., Tensor], weight: WeightToFill) -> None:
        """Write codes and scales: transformers' operations move the scales of rows as they move the rows."""
        layout, noted = self.hf_quantizer.layout, self.hf_quantizer.noted
        assert layout is not None
        prefix, amaxes = weight.name.removesuffix(self.plain.target_patterns[0]), None

        def scales(part: Tensor, name: str, number: int) -> Tensor:
            codes = parts[name.removesuffix(layout.scale_key) + layout.codes_key][number]
            return scales_by_row(layout, part, len(codes))

        def amax(part: Tensor, name: str, number: int) -> Tensor:
            assert layout.second is not None
            stem, fmt = name.removesuffix(layout.second.key), weight.storage.spec.format
            recorded = noted.get(NOTED_AMAX + prefix + stem.replace("*", str(number)) + "weight")
            rows = len(parts[stem + layout.codes_key][number])
            return conversion.amax_of(part, fmt, layout.second.divides, recorded).expand(rows, 1)

        if layout.second is not None:
            amaxes = built(layout.second.key, amax)
            if not torch.equal(amaxes, amaxes[:, :1].expand_as(amaxes)):
                raise CheckpointError("parts of one expert have different second scales; use layouts.load(lossy=True)")
            amaxes = amaxes[:, 0]
        codes = built(layout.codes_key, lambda part, *_: part.view(torch.uint8))
        weight.take_rows(layout, codes.flatten(0, 1), built(layout.scale_key, scales).flatten(0, 1), amaxes)


def _unmatched(parts: Iterable[str]) -> ConfigurationError:
    names = ", ".join(parts)
    return ConfigurationError(f"quantized in the files ({names}), but not in this model; let filter= match it")


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
