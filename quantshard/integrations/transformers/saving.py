"""`save_pretrained` of converted models, in the native form or in a layout of `layouts/table.py`.

Native: each quantized weight is one tensor of bytes (`linear.pack`), from which training resumes bit for bit. Readers
without quantshard see a wrong shape and raise.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers import HfQuantizer
from transformers.utils import PushToHubMixin

from quantshard.errors import ConfigurationError, warn_user
from quantshard.formats import ALL
from quantshard.interop.conversion import forward
from quantshard.interop.conversion.forward import ENTERS, RECIPE
from quantshard.interop.conversion.fusion import is_fused
from quantshard.interop.conversion.linear import pack
from quantshard.interop.conversion.selection import ADAPTERS
from quantshard.interop.layouts import table
from quantshard.interop.layouts.names import IDENTITY, Names, is_stack, names_in_files
from quantshard.interop.layouts.source import ModelWeight, WeightReader
from quantshard.interop.layouts.table import COMPRESSED_TENSORS, LAYOUTS, Layout
from quantshard.interop.layouts.writing import WEIGHTS, Export, ExportPlan
from quantshard.recipe import Recipe, resolve, stock_name
from quantshard.tensor import components
from quantshard.tensor.parameter_state import AMAX_HISTORY

NATIVE: Final = "native"
METHOD: Final = "quantshard"
"""`quant_method` of the native form."""

LAYOUT: Final = "quantshard_layout"
"""Attribute of the model: the layout written by `save_pretrained`, if it is not the native one."""

ADAPTERS_ALONE: Final = "_hf_peft_config_loaded"
"""transformers' private mark on models that save and load only adapters."""

_WRAPPED: Final = ".base_layer"


class SavedForm(HfQuantizer):
    """What a save writes; a quantizer, because `save_pretrained` asks the model's quantizer for tensors."""

    def __init__(
        self, tensors: dict[str, Tensor], quantization: dict[str, Any] | None, metadata: dict[str, str] | None = None
    ) -> None:
        self.tensors, self.quantization, self.metadata = tensors, quantization, metadata or {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        return self.tensors, dict(self.metadata)


def saved_form(model: nn.Module, entries: Mapping[str, Tensor], layout: str) -> SavedForm:
    """Build a converted model's tensors in `layout` from its unsharded state dict."""
    weights = components.quantized_parameters(model)
    for name, value in entries.items():
        if isinstance(value, DTensor):
            raise ConfigurationError(
                f"save_pretrained: {name} is sharded; pass state_dict=get_model_state_dict(model, options="
                "StateDictOptions(full_state_dict=True, cpu_offload=True)) on rank 0"
            )
        if value.is_meta:
            raise ConfigurationError(f"save_pretrained: {name} is on the meta device; load the model first")
    parts = {name: {s: entries[name + s] for s in components.suffixes(param)} for name, param in weights.items()}
    part_keys = {name + suffix for name, entry in parts.items() for suffix in entry}
    plain_entries = {name: value for name, value in entries.items() if name not in part_keys}
    if layout == NATIVE:
        packed = {name: pack(entry) for name, entry in parts.items()}
        return SavedForm({**plain_entries, **packed}, native_config(model, weights))
    tags = {components.storage_of(param).spec.tag for param in weights.values()}
    # no layout has amax histories
    plain_entries = {name: value for name, value in plain_entries.items() if not name.endswith(AMAX_HISTORY)}
    return _layout_form(model, table.find(layout, tags), weights, entries, plain_entries)


class _StateDictWeights(WeightReader):
    """The quantized weights in an unsharded state dict."""

    def __init__(self, weights: Mapping[str, Tensor], entries: Mapping[str, Tensor]) -> None:
        self.path, self._entries = "save_pretrained", entries
        self.weights = {
            name: ModelWeight(name, tuple(param.shape), components.storage_of(param).spec.of_matrix, torch.uint8)
            for name, param in weights.items()
        }

    def parts(self, weight: ModelWeight) -> Mapping[str, Tensor]:
        return {c.name: self._entries[weight.name + c.key_suffix].flatten(0, -2) for c in weight.format.components}

    scales = parts

    def input_amax(self, name: str) -> None:
        return None


def _layout_form(
    model: nn.Module, row: Layout, weights: Mapping[str, Tensor], entries: Mapping[str, Tensor],
    plain_entries: dict[str, Tensor],
) -> SavedForm:  # fmt: skip
    where = f"save_pretrained(layout={row.name!r})"
    dtype = next(iter(weights.values())).dtype if weights else row.dtype
    if row.is_plain and row.dtype != dtype:
        raise ConfigurationError(f"{where}: call model.to({row.dtype}) first, not {dtype}")
    names: Names = IDENTITY
    if not row.is_plain and _has_stacks(weights):
        names = names_in_files(model, {name: tuple(param.shape) for name, param in weights.items()})
        plain_entries = revert_weight_conversion(cast(PreTrainedModel, model), plain_entries)
    report = Export("save_pretrained", row)
    plan = ExportPlan(_StateDictWeights(weights, entries), row, names, {}, WEIGHTS, False, report, set())
    try:
        batches = plan.groups()
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    tensors = {name: part for batch in batches for name, part in batch.make().items()}
    form = SavedForm({**plain_entries, **tensors}, None)
    if not row.is_plain:
        shapes = {name: shape for batch in batches for name, (_, shape) in batch.tensors.items()}
        _warn_of_unread(model, row, {name: shape for name, shape in shapes.items() if name.endswith(".weight")})
        plain = {name: param for name, param in components.named_parameters(model).items() if name not in weights}
        matrices = [name for name, p in plain.items() if p.ndim == 2 or is_stack(name, tuple(p.shape))]
        form.quantization = row.config(sorted({name.rpartition(".")[0] for name in matrices}))
        form.metadata = plan.noted
    return form


def _warn_of_unread(model: nn.Module, row: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Warn about weights that transformers (5.24) cannot read in this layout, even if other programs can."""
    if ALL not in row.block and min(row.block) > 1:
        # transformers handles a single block of any size
        safe_size = 1 if row.family == COMPRESSED_TENSORS else max(row.block)
        unaligned = [
            f"{name} {list(shape)}"
            for name, shape in shapes.items()
            if any(size % block and size > safe_size for size, block in zip(shape, row.block, strict=True))
        ]
        if unaligned:
            text = f"transformers misreads sides that are not multiples of {row.block[0]} ({unaligned[0]})"
            warn_user(f"save_pretrained(layout={row.name!r}): {text}; read them by training_config")
    is_read = row.family != COMPRESSED_TENSORS or ALL in row.block
    params = components.named_parameters(model).items()
    stacks = [name for name, param in params if is_stack(name, tuple(param.shape))]
    unread = [name for name in stacks if row.second or name in components.quantized_parameters(model)]
    if unread and not is_read:
        warn_user(f"save_pretrained(layout={row.name!r}): transformers reads no stacked experts ({unread[0]})")


def native_config(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the native form's `quantization_config`; a partly converted model has its most common recipe."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in weights))  # a layer of experts has two weights
    parts = {name: _converted_part(model, name) for name in layers}
    enters = {bool(getattr(part, ENTERS)) for part in parts.values() or [model]}
    if len(enters) > 1:
        raise ConfigurationError("save_pretrained: parts have autocast=True and autocast=False; convert all alike")
    explicit = {name: getattr(model.get_submodule(name), "recipe", None) for name in layers}
    recipes: dict[str, Recipe] = {
        name: resolve(explicit[name] or getattr(part, RECIPE)) for name, part in parts.items()
    }
    around = resolve(getattr(model, RECIPE, None) or max(recipes.values(), key=list(recipes.values()).count))
    return {
        "quant_method": METHOD,
        "recipe": stock_name(around),
        "layers": layers,
        "layer_recipes": {
            name: stock_name(recipe) for name, recipe in recipes.items() if explicit[name] or recipe != around
        },
        "modules": "fused" if is_fused(model) else "linear",
        "autocast": enters.pop(),
    }


def _converted_part(model: nn.Module, layer: str) -> nn.Module:
    """Return the innermost module around a layer that entered a recipe when it was converted."""
    path = layer.split(".")
    around = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) - 1, -1, -1)]
    part = next((module for module in around if hasattr(module, RECIPE)), None)
    if part is None:
        raise ConfigurationError(f"save_pretrained: {layer} was not converted; save with quantshard.checkpoints.save")
    return part


def _has_stacks(weights: Mapping[str, Tensor]) -> bool:
    return any(param.ndim == 3 for param in weights.values())


def check_layout(layout: str) -> None:
    if layout != NATIVE and layout not in {*LAYOUTS, *(row.family for row in LAYOUTS.values())}:
        # raises an error that lists the names
        table.find(layout, set())


def _save(
    model: PreTrainedModel, plain: Callable[..., Any], save_directory: Any, *, layout: str | None = None, **kwargs: Any
) -> Any:  # fmt: skip
    """Implement `save_pretrained` for a converted model. `layout`: see `QuantshardConfig`."""
    if layout is not None:
        _check_requested(model, layout)
    if hasattr(model, "get_base_model") or getattr(model, ADAPTERS_ALONE, False):  # the former: a PeftModel
        adapters = [name for name in components.quantized_parameters(model) if f".{ADAPTERS}" in name]
        if adapters or layout is not None:
            raise ConfigurationError(
                f"save_pretrained: PEFT would write the codes of {adapters[0]} as values; call quantshard.revert first"
                if adapters
                else f"save_pretrained(layout={layout!r}): only adapters are written, in high precision; omit layout="
            )
        return plain(save_directory, **kwargs)
    if wrapped := next((name for name, _ in model.named_modules() if name.endswith(_WRAPPED)), None):
        name = wrapped.removesuffix(_WRAPPED)
        raise ConfigurationError(f"save_pretrained: {name} has a PEFT adapter; save the PeftModel, or merge it")
    if kwargs.get("distributed_checkpoint"):
        raise ConfigurationError("save_pretrained(distributed_checkpoint=True): use quantshard.checkpoints.save")
    state = kwargs.pop("state_dict", None)
    if state is not None and not state and not kwargs.get("is_main_process", True):
        # a rank that does not write, after a gather on rank 0
        return None
    layout_name = str(layout or getattr(model, LAYOUT, NATIVE))
    form = saved_form(model, model.state_dict() if state is None else state, layout_name)
    if form.quantization is not None and _has_stacks(components.quantized_parameters(model)):
        kwargs["save_original_format"] = False  # transformers cannot split codes; `form` has the names of the files
    config: Any = model.config
    setattr(model, "hf_quantizer", form)  # noqa: B010 (nn.Module has no such attribute)
    if form.quantization is not None:
        config.quantization_config = form.quantization
    try:
        return plain(save_directory, **kwargs)
    finally:
        del model.hf_quantizer
        if form.quantization is not None:
            del config.quantization_config


def _check_requested(model: nn.Module, layout: str) -> None:
    check_layout(str(layout))
    if not components.quantized_parameters(model):
        kind = type(model).__name__
        raise ConfigurationError(f"save_pretrained(layout=): {kind} has no quantized weight; call quantshard.convert")


def _with_layout(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument `layout` to `save_pretrained`, and reject it for models that are not converted."""

    # also copies the guard's mark
    @functools.wraps(plain)
    def save(self: PreTrainedModel, *args: Any, layout: str | None = None, **kwargs: Any) -> Any:
        if layout is not None:
            _check_requested(self, layout)
            kwargs["layout"] = layout
        return plain(self, *args, **kwargs)

    return save


forward.SAVERS.append((PushToHubMixin, _save))  # base of PreTrainedModel and of PEFT's models
forward.guard_saving()
setattr(PreTrainedModel, forward.SAVE, _with_layout(PreTrainedModel.save_pretrained))
