"""transformers: `from_pretrained` quantizes while it loads, `save_pretrained` writes what is read again; the Trainer.

`quantshard.convert` imports this module if transformers' models are imported. Import it yourself to load a quantized
model in a process that converts none.
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
from quantshard.interop.frameworks.transformers_files import METHOD, NATIVE
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
"""The model's attribute with what `from_pretrained` converted and left."""

LAYOUT: Final = "quantshard_layout"
"""The model's attribute with the form that `save_pretrained` writes, where it is not the native one."""


@register_quantization_config(METHOD)
class QuantshardConfig(QuantizationConfigMixin):
    """How `from_pretrained(..., quantization_config=QuantshardConfig())` converts a model while it loads it.

    The arguments are those of `quantshard.convert`, which is what happens; the model is as if it had been called after
    loading in high precision, bit for bit, but one weight at a time is in high precision.

    Args:
        recipe: a recipe, its name, a mapping from patterns of layers' names to recipes, or a function; see `convert`.
        filter: which layers to convert: a function of module and name, or patterns of names.
        modules: "linear" or "fused".
        autocast: make the model's forward enter the recipe.
        preserve_high_precision_init_val: keep the file's values on the CPU, for the masters of an optimizer.
        layout: what `save_pretrained` writes unless it is told otherwise: "native", or a row or family of
            `quantshard.layouts.LAYOUTS`.

    Raises:
        ConfigurationError: there is no such recipe or layout, or `modules` is neither.
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
        """From the `quantization_config` that the native form has in its config.json."""
        found = _native(cls, config_dict)
        return (found, kwargs) if return_unused_kwargs else found

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it: recipes and functions by what they print."""
        recipe = self.recipe if isinstance(self.recipe, Mapping) else {"*": self.recipe}
        return {
            "quant_method": METHOD, "recipe": {pattern: str(each) for pattern, each in recipe.items()},
            "filter": self.filter if isinstance(self.filter, str | list | None) else repr(self.filter),
            "modules": self.modules, "autocast": self.autocast, "layout": self.layout,
        }  # fmt: skip

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dictionary, which transformers takes the configuration of a file for."""
        return getattr(self, key, default)


def _checked_layout(layout: str) -> str:
    if layout != NATIVE and layout not in {*LAYOUTS, *(row.family for row in LAYOUTS.values())}:
        table.find(layout, set())  # raises, with the names
    return layout


def _native(cls: type[QuantshardConfig], saved: Mapping[str, Any]) -> QuantshardConfig:
    """The configuration of what the native form says, by names of layers."""
    recipe, layers, own = saved.get("recipe"), saved.get("layers"), saved.get("layer_recipes") or {}
    if not isinstance(layers, list) or not isinstance(own, dict):
        raise CheckpointError(
            "config.json's quantization_config of quantshard has no list of layers; the file is damaged, or of another "
            "release"
        )
    unnamed = [name for name, each in {"the model": recipe, **own}.items() if each is None]
    if unnamed:
        raise ConfigurationError(
            f"config.json cannot hold the recipe of {unnamed[0]}, which has arguments of its own; pass config="
            "quantshard.integrations.transformers.training_config(DIR, recipe) with it"
        )
    rest = {"*": recipe} if set(layers) - own.keys() else {}
    recipes: Any = {**own, **rest} if own else recipe
    found = cls(
        recipes,
        filter=_NameFilter(layers),
        modules=saved.get("modules", "linear"),
        autocast=saved.get("autocast", True),
    )
    found.stored = dict(saved)
    return found


class _NameFilter:
    """A filter of `convert` that takes these very layers."""

    leaves_out = "not quantized in the files"
    """What is said of others."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def __call__(self, module: nn.Module, name: str) -> bool:
        return name in self.names

    def placed(self, recipes: Recipes, model: PreTrainedModel) -> tuple[Recipes, _NameFilter]:
        """Recipes and names as a model has them that may be the base of the one that was saved, or have it as its base:
        then a prefix is gone, or is there."""
        here = {name for name, _ in model.named_modules()}
        prefix = f"{model.base_model_prefix}."
        names = {}
        for name in self.names:
            other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
            if found := next((each for each in (name, other) if each in here), None):
                names[name] = found
        if isinstance(recipes, Mapping):  # of layers by name, and of all others
            gone = self.names - names.keys()
            recipes = {names.get(name, name): recipe for name, recipe in recipes.items() if name not in gone}
        return recipes, _NameFilter(names.values())


def training_config(
    path: str, recipe: Recipes = AUTO, *, filter: Filter | None = None, **options: Any
) -> PreTrainedConfig:
    """The configuration of a quantized model, to train on from it: `from_pretrained(path, config=...)`.

    For files of another program's layout (`quantshard.layouts.LAYOUTS`), of which codes and scales are copied, and for
    the native form of a recipe that config.json cannot hold. transformers takes a `quantization_config=` only beside
    files that have none, or one of the same kind.

    Args:
        path: a directory, or a name on the hub.
        recipe, filter, options: those of `QuantshardConfig`.

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
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        raise ConfigurationError(
            f"training_config({path!r}): its config.json has no quantization_config; pass quantization_config="
            "QuantshardConfig(recipe) to from_pretrained"
        )
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    if filter is None and stored.get("quant_method") == METHOD:
        filter = _NameFilter(stored["layers"])
    given = QuantshardConfig(recipe, filter=filter, **options)
    given.stored = stored
    config.quantization_config = given
    return config


@register_quantizer(METHOD)
class QuantshardQuantizer(HfQuantizer):
    """What transformers calls while it loads a model: layers are converted on the meta device, then filled in turn."""

    serialized_names: dict[str, list[str]]

    def __init__(self, quantization_config: QuantshardConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.given = quantization_config
        self.layers: dict[str, ConvertedLinear] = {}
        self.failures: dict[str, QuantshardError] = {}
        self.noted: dict[str, str] = {}
        self.report: ConversionReport | None = None
        self.written: files.SavedForm | None = None
        stored = quantization_config.stored
        self.stored_layout = None if stored is None or stored.get("quant_method") == METHOD else stored
        self.layout: table.Layout | None = None
        self.in_layout: set[str] = set()  # the layers that have scales in the files; others have values there
        self.serialized_names = {"weight": ["weight"]}

    # What transformers asks

    def is_serializable(self) -> bool:
        """`save_pretrained` writes it."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Weights are trained as they are."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Without adapters."""
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What `save_pretrained` writes: the form that `_save` made."""
        return (None, {}) if self.written is None else (self.written.tensors, dict(self.written.metadata))

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what cannot be: offloaded weights.

        Raises:
            ConfigurationError: weights are to be on the disk.
        """
        if isinstance(device_map, Mapping) and "disk" in map(str, device_map.values()):
            raise ConfigurationError("from_pretrained: device_map puts weights on the disk, where none can be trained")

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor of a file is quantized."""
        return param_name.removesuffix(".weight") in self.layers and param_name.endswith(".weight")

    def get_quantize_ops(self) -> ConversionOps:
        """What fills converted layers with values in high precision."""
        return WeightFill(self)

    def get_load_operations(self) -> dict[str, Any]:
        """What fills them with quantized ones."""
        return {"deserialize": StoredWeightFill}

    def get_weight_conversions(self) -> list[WeightConverter]:
        """The same with the names in the files, for which transformers before 5.21 asks; "weight" is in the others."""
        return [
            WeightConverter(sorted(names, key=len, reverse=True), target, [StoredWeightFill(self)])
            for target, names in self.serialized_names.items()
            if self.pre_quantized
        ]

    # While it loads

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
        del model.quantization_method  # by which convert knows what another program quantized
        for target, source in model.all_tied_weights_keys.items():
            # transformers ties them after loading, and convert is to know which they are
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(source))
        given = self.given
        recipe, filter = given.recipe, given.filter
        if isinstance(filter, _NameFilter):
            recipe, filter = filter.placed(recipe, model)
            if not filter.names:  # a base of a model of which the head alone is quantized
                return model
        self.report = convert(
            model, recipe, filter=filter, modules=given.modules, autocast=given.autocast,
            preserve_high_precision_init_val=given.preserve_high_precision_init_val,
        )  # fmt: skip
        self.layers = {each.name: model.get_submodule(each.name) for each in self.report.converted}  # type: ignore[misc]
        for layer in self.layers.values():
            setattr(layer.weight, "_is_hf_initialized", True)  # noqa: B010 (else transformers would draw values)
        loading: Any = model
        plan = loading._get_dtype_plan
        loading._get_dtype_plan = lambda dtype: {**self._dtypes_read(dtype), **plan(dtype)}
        return model

    def _dtypes_read(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """By patterns of names, the dtype that weights have when they are read: the model's, or a layout's of codes.

        Before 5.23 transformers casts what it reads to the dtype of the parameter's entry, here of codes, unless told.
        """
        return {
            re.escape(f"{name}.weight"): torch.float8_e4m3fn if name in self.in_layout else dtype
            for name in self.layers
        }

    def _read_layout(self, paths: Iterable[str]) -> None:
        """Find the layout of the files, and the amaxes that our exports have in the headers."""
        names: set[str] = set()
        for path in paths:
            with safe_open(path, framework="pt") as opened:
                names |= set(opened.keys())
                self.noted.update(opened.metadata() or {})
        self.layout = table.detect(self.stored_layout, names, "config.json")
        assert self.layout is not None
        scale = f".{self.layout.scale_key}"
        self.in_layout = {name.removesuffix(scale) for name in names if name.endswith(scale)}
        self.serialized_names = {"weight": list(dict.fromkeys(["weight", *files.layout_keys(self.layout)]))}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        # transformers keeps how it loaded, to undo that in a save; there is nothing to undo of what is filled here
        loaded: Any = model
        conversions = [each for each in getattr(model, "_weight_conversions", ()) if not fills(each)]
        self.remove_quantization_config(model)  # from here on it is a converted model, as any other
        vars(loaded).pop("_get_dtype_plan", None)  # there is none where nothing is quantized here
        loaded._weight_conversions = conversions  # which 5.24 removes with the configuration, though a save reads them
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
        """Fill a converted layer with one weight of the files; `parts`: by what stands in place of "weight"."""
        layer = self.layers[name]
        if missing is not None:  # once, for all: transformers would make those that no file has, one by one
            missing -= {f"{n}.{key}" for n, each in self.layers.items() for key in _own_keys(each)}
        try:
            self._fill(layer, name, parts)
        except QuantshardError as error:
            self.failures[name] = error  # told at the end, by itself; transformers would print a table of errors

    def _fill(self, layer: ConvertedLinear, name: str, parts: Mapping[str, Tensor]) -> None:
        weight = parts.get("weight")
        if self.layout is not None and self.layout.scale_key in parts:
            return files.take_layout(layer, self.layout, parts, self.noted.get(f"{NOTED_AMAX}{name}.weight"))
        if weight is None:
            raise CheckpointError(f"the files have {', '.join(parts)} of it, and no weight")
        if packing.is_packed(weight):
            found = packing.unpack(layer.weight, weight, name)
            layer.leave_meta(weight.device)
            return components.load_components(layer.weight, found, name)
        if not weight.is_floating_point() or weight.shape != layer.weight.shape or weight.element_size() < 2:
            raise CheckpointError(
                f"it is {weight.dtype} {list(weight.shape)} in the files, and values {list(layer.weight.shape)} are "
                "needed"
            )
        if weight.dtype != layer.weight.dtype:
            layer.to(weight.dtype)  # as transformers keeps some modules in float32
        layer.take_values(weight, f"{name}.weight", self.given.preserve_high_precision_init_val)


def _own_keys(layer: ConvertedLinear) -> list[str]:
    """What is in a state dict of a layer's weight and histories, and in no file in high precision."""
    suffixes = [] if components.quantized_local(layer.weight) is None else components.suffixes(layer.weight)
    return [f"weight{suffix}" for suffix in suffixes] + [name for name, _ in layer.named_buffers(recurse=False)]


# Saving

_WRAPPED = ".base_layer"
"""How names of layers end that adapters of PEFT are around."""


def _save(
    model: PreTrainedModel, plain: Callable[..., Any], save_directory: Any, *args: Any, layout: str | None = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """`save_pretrained` of a converted model; `layout`: see `QuantshardConfig`."""
    if layout is not None:
        _check_asked(model, layout)
    if hasattr(model, "get_base_model") or getattr(model, ADAPTERS_ALONE, False):  # the former of a PeftModel
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
        return None  # of a rank that does not write, after a gather on rank 0
    chosen = _checked_layout(str(layout or getattr(model, LAYOUT, NATIVE)))
    form = files.saved_form(model, model.state_dict() if state is None else state, chosen)
    with _writing(model, form):
        return plain(save_directory, **kwargs)


@contextmanager
def _writing(model: PreTrainedModel, form: files.SavedForm) -> Iterator[None]:
    """Show transformers' `save_pretrained` the tensors of a form, and its `quantization_config`."""
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
    layers = (each for each in model.modules() if isinstance(each, ConvertedLinear))
    if not any(components.quantized_local(each.weight) is not None for each in layers):
        raise ConfigurationError(
            f"save_pretrained(layout={layout!r}): no weight of this {type(model).__name__} is quantized, so nothing "
            "would be written in that layout; leave layout= out, or call quantshard.convert(model, recipe) first"
        )


def _hearing_layout(plain: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' `save_pretrained` takes any argument; of a model that nobody converted this one is refused."""

    @functools.wraps(plain)  # with the guard's mark
    def save(self: PreTrainedModel, *args: Any, layout: str | None = None, **kwargs: Any) -> Any:
        if layout is not None:
            _check_asked(self, layout)
            kwargs["layout"] = layout
        return plain(self, *args, **kwargs)

    return save


forward.SAVERS.append((PushToHubMixin, _save))  # base of PreTrainedModel and of PEFT's models
forward.guard_saving()
setattr(PreTrainedModel, forward.SAVE, _hearing_layout(PreTrainedModel.save_pretrained))
