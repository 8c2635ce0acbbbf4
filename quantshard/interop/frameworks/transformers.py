"""transformers: quantization in `from_pretrained`, saving with `save_pretrained`, and the Trainer.

`quantshard.convert` imports this module if transformers' models are already imported. To load a quantized model in a
process that does not call `convert`, import this module first.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import PushToHubMixin
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantshard.errors import CheckpointError, ConfigurationError, QuantshardError
from quantshard.interop.conversion import forward, packing
from quantshard.interop.conversion.convert import check_modules, convert
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.interop.conversion.report import ConversionReport
from quantshard.interop.conversion.selection import ADAPTERS, Filter
from quantshard.interop.frameworks import transformers_files as files
from quantshard.interop.frameworks.transformers_files import METHOD, NATIVE, NameFilter, layers_of
from quantshard.interop.frameworks.transformers_operations import StoredWeightFill, WeightFill, fills
from quantshard.interop.frameworks.transformers_trainer import ADAPTERS_ALONE, AdamFactory, QuantizedTraining, adam
from quantshard.interop.layouts import table
from quantshard.interop.layouts.table import LAYOUTS
from quantshard.interop.layouts.writing import NOTED_AMAX
from quantshard.modules.contexts.layer_recipes import Recipes, check_recipes, concrete_recipes
from quantshard.recipe import AUTO
from quantshard.tensor import components

__all__ = ["AdamFactory", "QuantizedTraining", "QuantshardConfig", "QuantshardQuantizer", "adam", "training_config"]

REPORT: Final = "quantshard_report"
"""Attribute of the model: the conversion report of `from_pretrained`."""

LAYOUT: Final = "quantshard_layout"
"""Attribute of the model: the layout written by `save_pretrained`, if it is not the native one."""


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

    Raises:
        ConfigurationError: the recipe, the layout or `modules` is unknown.
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
        self.layout = _checked_layout(layout)
        self.stored: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Create from the `quantization_config` that the native form writes to config.json."""
        config = _native(cls, config_dict)
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


def _checked_layout(layout: str) -> str:
    if layout != NATIVE and layout not in {*LAYOUTS, *(row.family for row in LAYOUTS.values())}:
        # raises an error that lists the names
        table.find(layout, set())
    return layout


def _native(cls: type[QuantshardConfig], saved: Mapping[str, Any]) -> QuantshardConfig:
    """Create the configuration described by the native form, which lists layer names."""
    recipe, layers, layer_recipes = saved.get("recipe"), layers_of(saved), saved.get("layer_recipes") or {}
    unnamed = [name for name, value in {"the model": recipe, **layer_recipes}.items() if value is None]
    if unnamed:
        raise ConfigurationError(
            f"config.json cannot hold the recipe of {unnamed[0]}, which has arguments of its own; pass config="
            "quantshard.integrations.transformers.training_config(DIR, recipe) with it"
        )
    default = {"*": recipe} if set(layers) - layer_recipes.keys() else {}
    recipes: Any = {**layer_recipes, **default} if layer_recipes else recipe
    config = cls(
        recipes,
        filter=NameFilter(layers),
        modules=saved.get("modules", "linear"),
        autocast=saved.get("autocast", True),
    )
    config.stored = dict(saved)
    return config


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

    Raises:
        ConfigurationError: there is no configuration, or the files are not quantized.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if os.path.isabs(path) and not os.path.lexists(path):
            raise ConfigurationError(f"training_config({str(path)!r}): there is no such folder") from None
        why = str(error).strip().partition("\n")[0]
        raise ConfigurationError(f"training_config({str(path)!r}): no config.json can be read: {why:.200}") from None
    file_config = getattr(config, "quantization_config", None)
    if file_config is None:
        raise ConfigurationError(
            f"training_config({path!r}): its config.json has no quantization_config; pass quantization_config="
            "QuantshardConfig(recipe) to from_pretrained"
        )
    file_config = file_config if isinstance(file_config, dict) else file_config.to_dict()
    if filter is None and file_config.get("quant_method") == METHOD:
        filter = NameFilter(layers_of(file_config))
    new_config = QuantshardConfig(recipe, filter=filter, **options)
    new_config.stored = file_config
    config.quantization_config = new_config
    return config


@register_quantizer(METHOD)
class QuantshardQuantizer(HfQuantizer):
    """The quantizer that transformers calls while loading: layers are converted on the meta device, then filled one by
    one."""

    serialized_names: dict[str, list[str]]

    def __init__(self, quantization_config: QuantshardConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.given = quantization_config
        self.layers: dict[str, ConvertedLinear] = {}
        self.failures: dict[str, QuantshardError] = {}
        self.noted: dict[str, str] = {}
        self.report: ConversionReport | None = None
        self.written: files.SavedForm | None = None
        file_config = quantization_config.stored
        self.stored_layout = None if file_config is None or file_config.get("quant_method") == METHOD else file_config
        self.layout: table.Layout | None = None
        self.in_layout: set[str] = set()  # layers with scales in the files; the files have values for all others
        self.serialized_names = {"weight": ["weight"]}

    # Interface used by transformers

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` is supported."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: quantized weights are trained directly."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True: training needs no adapters."""
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return the tensors and metadata prepared by `_save`."""
        return (None, {}) if self.written is None else (self.written.tensors, dict(self.written.metadata))

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Check that no weights are offloaded to disk.

        Raises:
            ConfigurationError: `device_map` places weights on disk.
        """
        if isinstance(device_map, Mapping) and "disk" in map(str, device_map.values()):
            raise ConfigurationError("from_pretrained: device_map puts weights on the disk, where none can be trained")

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Return whether a tensor of a file belongs to a quantized weight."""
        return param_name.removesuffix(".weight") in self.layers and param_name.endswith(".weight")

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that fills converted layers with high-precision values."""
        return WeightFill(self)

    def get_load_operations(self) -> dict[str, Any]:
        """Return the operations that fill converted layers with quantized values."""
        return {"deserialize": StoredWeightFill}

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return the load operations with the names in the files, as needed by transformers before 5.21.

        Longer names come first, because they contain "weight".
        """
        return [
            WeightConverter(sorted(names, key=len, reverse=True), target, [StoredWeightFill(self)])
            for target, names in self.serialized_names.items()
            if self.pre_quantized
        ]

    # Loading

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        if getattr(model.config, "distributed_config", None) is not None:
            raise ConfigurationError(
                "from_pretrained(distributed_config=...) shards before it loads, and scales of blocks over several "
                "ranks would need a collective for each weight; load without it, then call fully_shard"
            )
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
        self.layers = {converted.name: model.get_submodule(converted.name) for converted in self.report.converted}  # type: ignore[misc]
        for layer in self.layers.values():
            setattr(layer.weight, "_is_hf_initialized", True)  # noqa: B010 (else transformers would draw values)
        loading: Any = model
        plan = loading._get_dtype_plan
        loading._get_dtype_plan = lambda dtype: {**self._dtypes_read(dtype), **plan(dtype)}
        return model

    def _dtypes_read(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype in which weights are read, by name pattern: the model's, or the dtype of a layout's codes.

        transformers before 5.23 would otherwise cast what it reads to the dtype of the parameter's entry, which holds
        codes.
        """
        return {
            re.escape(f"{name}.weight"): torch.float8_e4m3fn if name in self.in_layout else dtype
            for name in self.layers
        }

    def _read_layout(self, paths: Iterable[str]) -> None:
        """Determine the files' layout, and read the amaxes that our exports record in the headers."""
        names: set[str] = set()
        for path in paths:
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
                self.noted.update(file.metadata() or {})
        self.layout = table.detect(self.stored_layout, names, "config.json")
        assert self.layout is not None
        scale = f".{self.layout.scale_key}"
        self.in_layout = {name.removesuffix(scale) for name in names if name.endswith(scale)}
        self.serialized_names = {"weight": list(dict.fromkeys(["weight", *files.layout_keys(self.layout)]))}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        # transformers records load conversions to undo them in a save; filled layers need no undoing
        loaded: Any = model
        conversions = [conversion for conversion in getattr(model, "_weight_conversions", ()) if not fills(conversion)]
        # from here on, the model is like any other converted model
        self.remove_quantization_config(model)
        vars(loaded).pop("_get_dtype_plan", None)  # missing if nothing was quantized
        # 5.24 removes these with the configuration, but saving reads them
        loaded._weight_conversions = conversions
        for name, error in self.failures.items():
            raise type(error)(f"{name}.weight: {error}")
        empty = [name for name, layer in self.layers.items() if components.quantized_local(layer.weight) is None
                 or layer.awaits_values]  # fmt: skip
        if empty:
            raise CheckpointError(
                f"from_pretrained: the files have no weight for {len(empty)} of {len(self.layers)} quantized layers "
                f"(first: {empty[0]}); choose others with filter=, or load in high precision and call "
                "quantshard.convert"
            )
        if self.report is not None:
            setattr(model, REPORT, self.report)
        if self.given.layout != NATIVE:
            setattr(model, LAYOUT, self.given.layout)
        return model

    def fill(self, name: str, parts: Mapping[str, Tensor], missing: set[str] | None) -> None:
        """Fill a converted layer with one weight of the files. `parts`: tensors keyed by the name that replaces
        "weight"."""
        layer = self.layers[name]
        if missing is not None:  # transformers would initialize keys that no file has, one by one
            missing -= {f"{n}.{key}" for n, converted in self.layers.items() for key in _own_keys(converted)}
        try:
            self._fill(layer, name, parts)
        except QuantshardError as error:
            # raised after loading; transformers would only print a table of errors
            self.failures[name] = error

    def _fill(self, layer: ConvertedLinear, name: str, parts: Mapping[str, Tensor]) -> None:
        weight = parts.get("weight")
        if self.layout is not None and self.layout.scale_key in parts:
            return files.take_layout(layer, self.layout, parts, self.noted.get(f"{NOTED_AMAX}{name}.weight"))
        if weight is None:
            raise CheckpointError(f"the files have {', '.join(parts)} of it, and no weight")
        if packing.is_packed(weight):
            entries = packing.unpack(layer.weight, weight, name)
            layer.leave_meta(weight.device)
            return components.load_components(layer.weight, entries, name)
        if not weight.is_floating_point() or weight.shape != layer.weight.shape or weight.element_size() < 2:
            raise CheckpointError(
                f"it is {weight.dtype} {list(weight.shape)} in the files, and values {list(layer.weight.shape)} are "
                "needed"
            )
        if weight.dtype != layer.weight.dtype:
            layer.to(weight.dtype)  # transformers keeps some modules in float32
        layer.take_values(weight, f"{name}.weight", self.given.preserve_high_precision_init_val)


def _own_keys(layer: ConvertedLinear) -> list[str]:
    """List the state dict keys of a layer's weight and histories, which high-precision files do not have."""
    suffixes = [] if components.quantized_local(layer.weight) is None else components.suffixes(layer.weight)
    return [f"weight{suffix}" for suffix in suffixes] + [name for name, _ in layer.named_buffers(recurse=False)]


# Saving

_WRAPPED = ".base_layer"
"""Suffix of the names of layers that are wrapped by PEFT adapters."""


def _save(
    model: PreTrainedModel, plain: Callable[..., Any], save_directory: Any, *args: Any, layout: str | None = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Implement `save_pretrained` for a converted model. `layout`: see `QuantshardConfig`."""
    if layout is not None:
        _check_asked(model, layout)
    if hasattr(model, "get_base_model") or getattr(model, ADAPTERS_ALONE, False):  # the former: a PeftModel
        adapters = [name for name in files.quantized_weights(model) if f".{ADAPTERS}" in name]
        if adapters:
            raise ConfigurationError(
                f"save_pretrained: adapters are quantized, the first {adapters[0]}, and PEFT would write their codes "
                "as values; quantshard.revert the model first, or convert it before it gets adapters"
            )
        if layout is not None:
            raise ConfigurationError(
                f"save_pretrained(layout={layout!r}): of this {type(model).__name__} adapters alone are written, and "
                "none is quantized; leave layout= out, or save the model after its merge_and_unload() or unload()"
            )
        return plain(save_directory, *args, **kwargs)
    if wrapped := next((name for name, _ in model.named_modules() if name.endswith(_WRAPPED)), None):
        raise ConfigurationError(
            f"save_pretrained: PEFT has put an adapter around {wrapped.removesuffix(_WRAPPED)}, and the name of its "
            "weight is one that nobody reads; save the adapters by save_pretrained of the PeftModel, and the model "
            "after its merge_and_unload() or unload()"
        )
    if args:
        raise ConfigurationError("save_pretrained of a quantized model takes all but the directory by name")
    if kwargs.get("distributed_checkpoint"):
        raise ConfigurationError(
            "save_pretrained(distributed_checkpoint=True) would write codes as values; save a sharded model with "
            "quantshard.checkpoints.save"
        )
    state = kwargs.pop("state_dict", None)
    if state is not None and not state and not kwargs.get("is_main_process", True):
        # a rank that does not write, after a gather on rank 0
        return None
    layout_name = _checked_layout(str(layout or getattr(model, LAYOUT, NATIVE)))
    form = files.saved_form(model, model.state_dict() if state is None else state, layout_name)
    with _writing(model, form):
        return plain(save_directory, **kwargs)


@contextmanager
def _writing(model: PreTrainedModel, form: files.SavedForm) -> Iterator[None]:
    """Temporarily make transformers' `save_pretrained` write a form's tensors and `quantization_config`."""
    quantizer = QuantshardQuantizer(QuantshardConfig("bf16"))
    quantizer.written = form
    config = model.config
    setattr(model, "hf_quantizer", quantizer)  # noqa: B010 (nn.Module has no such attribute)
    if form.quantization is not None:
        config.quantization_config = form.quantization
    try:
        yield
    finally:
        del model.hf_quantizer
        if form.quantization is not None:
            del config.quantization_config


def _check_asked(model: nn.Module, layout: str) -> None:
    _checked_layout(str(layout))
    layers = (module for module in model.modules() if isinstance(module, ConvertedLinear))
    if not any(components.quantized_local(module.weight) is not None for module in layers):
        raise ConfigurationError(
            f"save_pretrained(layout={layout!r}): no weight of this {type(model).__name__} is quantized, so nothing "
            "would be written in that layout; leave layout= out, or call quantshard.convert(model, recipe) first"
        )


def _hearing_layout(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument `layout` to transformers' `save_pretrained`, and reject it for models that are not converted.

    transformers accepts any keyword argument and would ignore it.
    """

    # also copies the guard's mark
    @functools.wraps(plain)
    def save(self: PreTrainedModel, *args: Any, layout: str | None = None, **kwargs: Any) -> Any:
        if layout is not None:
            _check_asked(self, layout)
            kwargs["layout"] = layout
        return plain(self, *args, **kwargs)

    return save


forward.SAVERS.append((PushToHubMixin, _save))  # base of PreTrainedModel and of PEFT's models
forward.guard_saving()
setattr(PreTrainedModel, forward.SAVE, _hearing_layout(PreTrainedModel.save_pretrained))
