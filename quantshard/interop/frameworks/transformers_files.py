"""The forms that `save_pretrained` writes for a converted model, and reading a weight in another program's layout.

Native: each quantized weight is one tensor of bytes (`conversion/packing.py`), from which training resumes bit for bit.
Readers without quantshard see a wrong shape and raise. Other forms are the layouts of `layouts/table.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from quantshard import numerics
from quantshard.errors import CheckpointError, ConfigurationError, warn_user
from quantshard.formats import ALL, Orientation, Role
from quantshard.interop.conversion import packing
from quantshard.interop.conversion.forward import ENTERS, RECIPE
from quantshard.interop.conversion.fusion import is_fused
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.interop.conversion.selection import stacked_experts
from quantshard.interop.layouts import conversion, table
from quantshard.interop.layouts.conversion import InexactConversionError
from quantshard.interop.layouts.table import COMPRESSED_TENSORS, EXACT, Layout
from quantshard.interop.layouts.writing import NOTED_AMAX
from quantshard.modules.contexts.layer_recipes import Recipes
from quantshard.recipe import Recipe, resolve, stock_name
from quantshard.tensor import components
from quantshard.tensor.storage import AMAX_HISTORY

NATIVE: Final = "native"
METHOD: Final = "quantshard"
"""`quant_method` of the native form."""


@dataclass
class SavedForm:
    """The output of a save: tensors by name, the configuration's `quantization_config`, and strings for file
    headers."""

    tensors: dict[str, Tensor]
    quantization: dict[str, Any] | None
    metadata: dict[str, str] = field(default_factory=dict)


def saved_form(model: nn.Module, entries: Mapping[str, Tensor], layout: str) -> SavedForm:
    """Build a converted model's tensors in `layout`: "native", or a layout or family in `layouts.LAYOUTS`.

    Args:
        model: the converted model.
        entries: the model's unsharded state dict.
        layout: name of the layout.

    Raises:
        ConfigurationError: the layout is unknown, cannot represent a weight exactly, or the model is sharded.
    """
    weights = quantized_weights(model)
    _check_whole(entries)
    parts = {name: _parts(param, name, entries) for name, param in weights.items()}
    part_keys = {name + suffix for name, entry in parts.items() for suffix in entry}
    plain_entries = {name: value for name, value in entries.items() if name not in part_keys}
    if layout == NATIVE:
        packed = {name: packing.pack(entry) for name, entry in parts.items()}
        return SavedForm({**plain_entries, **packed}, native_config(model, weights))
    tags = {components.storage_of(param).cell.tag for param in weights.values()}
    # no layout has amax histories
    plain_entries = {name: value for name, value in plain_entries.items() if not name.endswith(AMAX_HISTORY)}
    row = table.find(layout, tags)
    if row.is_plain:
        return _plain_form(model, row, weights, parts, plain_entries)
    form = _layout_form(model, row, weights, parts, plain_entries)
    _warn_of_unread(model, row, weights)
    return form


def _warn_of_unread(model: nn.Module, row: Layout, weights: Mapping[str, Tensor]) -> None:
    """Warn about weights that transformers (5.24) cannot read in this layout, even if other programs can."""
    if ALL not in row.block and min(row.block) > 1:
        # transformers handles a single block of any size
        safe_size = 1 if row.family == COMPRESSED_TENSORS else max(row.block)
        unaligned = [
            name
            for name, param in weights.items()
            if any(size % block and size > safe_size for size, block in zip(param.shape, row.block, strict=True))
        ]
        if unaligned:
            warn_user(
                f"save_pretrained(layout={row.name!r}): {unaligned[0]} {list(weights[unaligned[0]].shape)}"
                + (f" and {len(unaligned) - 1} more have" if len(unaligned) > 1 else " has")
                + f" sides that are no multiples of {row.block[0]}; transformers alone reads such weights wrong in "
                "this layout, or not at all, and by quantshard's training_config right"
            )
    experts = stacked_experts(model)
    if experts and row.family == COMPRESSED_TENSORS and row.second is not None:
        warn_user(
            f"save_pretrained(layout={row.name!r}): transformers does not read stacked experts ({experts[0][0]}) "
            "beside quantized layers in this layout; it reads 'native' and 'plain-bf16'"
        )


def quantized_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the quantized parameters by their names in the state dict."""
    return components.quantized_parameters(model)


def _check_whole(entries: Mapping[str, Tensor]) -> None:
    for name, value in entries.items():
        if isinstance(value, DTensor):
            raise ConfigurationError(
                f"save_pretrained: {name} is sharded; on every rank call state = torch.distributed.checkpoint."
                "state_dict.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                "cpu_offload=True)), then on rank 0 model.save_pretrained(..., state_dict=state)"
            )
        if value.is_meta:
            raise ConfigurationError(
                f"save_pretrained: {name} is on the meta device, where it has no values; load the model first"
            )


def _parts(param: Tensor, name: str, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a weight's state dict entries by key suffix."""
    suffixes = components.suffixes(param)
    missing = [suffix for suffix in suffixes if name + suffix not in entries]
    if missing:
        raise ConfigurationError(
            f"save_pretrained: the state dict lacks {name}{missing[0]}, and codes mean nothing without it; pass the "
            "model's whole state dict, or none"
        )
    return {suffix: entries[name + suffix] for suffix in suffixes}


def _components(param: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert entries by key suffix to tensors by component name."""
    fmt = components.storage_of(param).cell.format
    return {component.name: parts[component.key_suffix] for component in fmt.components}


# Native


def native_config(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the `quantization_config` of the native form, which lists quantized layers and their recipes.

    A model converted in part, or in several parts, is described as a converted model with the most common recipe.

    Raises:
        ConfigurationError: only some parts enter their recipes, or a weight is in no converted part.
    """
    layers = [name.removesuffix(".weight") for name in weights]
    parts = {name: _converted_part(model, name) for name in layers}
    enters = {bool(getattr(part, ENTERS)) for part in parts.values() or [model]}
    if len(enters) > 1:
        raise ConfigurationError(
            "save_pretrained: parts of this model were converted with autocast=True and others with autocast=False, "
            "which config.json cannot say; convert them alike, or save with quantshard.checkpoints.save"
        )
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
        raise ConfigurationError(
            f"save_pretrained: {layer} is quantized, and in no part of this model that convert changed; save "
            "with quantshard.checkpoints.save"
        )
    return part


# Layouts


def _plain_form(
    model: nn.Module, row: Layout, weights: Mapping[str, Tensor], parts: Mapping[str, dict[str, Tensor]],
    others: dict[str, Tensor],
) -> SavedForm:  # fmt: skip
    dtype = next(iter(weights.values())).dtype if weights else row.dtype
    if row.dtype != dtype:
        raise ConfigurationError(
            f"save_pretrained(layout={row.name!r}): the weights of this model stand for {dtype}, which config.json "
            f"says too; call model.to({row.dtype}) first"
        )
    tensors = {}
    for name, param in weights.items():
        copy, shape = (
            components.storage_of(param).cell.format.copies[Orientation.ROWWISE],
            (param.shape[0], param.shape[1]),
        )
        tensors[name] = numerics.dequantize(copy, _components(param, parts[name]), shape).to(row.dtype)
    return SavedForm({**others, **tensors}, None)


def _layout_form(
    model: nn.Module, row: Layout, weights: Mapping[str, Tensor], parts: Mapping[str, dict[str, Tensor]],
    others: dict[str, Tensor],
) -> SavedForm:  # fmt: skip
    tensors, amaxes = {}, {}
    for name, param in weights.items():
        cell, parts_by_name = components.storage_of(param).cell, _components(param, parts[name])
        verdict = table.verdict(cell, row, has_input_amax=False)
        shape = (param.shape[0], param.shape[1])
        try:
            if verdict.kind != EXACT:
                raise InexactConversionError(verdict.why)
            converted = conversion.to_layout(row, cell.format, parts_by_name, shape)
        except InexactConversionError as error:
            raise ConfigurationError(
                f"save_pretrained(layout={row.name!r}): {name} {list(shape)}, {cell.tag}, does not go into it exactly: "
                f"{error}; choose another layout, or save with quantshard.checkpoints.save and export with "
                "quantshard.layouts.export(lossy=True)"
            ) from None
        tensors.update({name.removesuffix("weight") + key: tensor for key, tensor in converted.items()})
        amax = cell.format.copies[Orientation.ROWWISE].amax
        if amax is not None:
            amaxes[NOTED_AMAX + name] = float(parts_by_name[amax.name]).hex()
    return SavedForm({**others, **tensors}, row.config(_ignored(model, weights)), amaxes)


def _ignored(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """List the modules with matrices that stay in high precision."""
    params = components.named_parameters(model)
    return sorted(n.rpartition(".")[0] for n, param in params.items() if param.ndim == 2 and n not in weights)


def take_layout(layer: ConvertedLinear, layout: Layout, parts: Mapping[str, Tensor], noted: str | None) -> None:
    """Fill a converted layer on the meta device with a weight in another program's layout, bit for bit.

    Args:
        layer: the layer to fill.
        layout: the layout of the weight.
        parts: tensors keyed by the name that replaces "weight".
        noted: the amax recorded in the header of our own exports.

    Raises:
        CheckpointError: the layer's format cannot represent the weight exactly.
    """
    cell = components.storage_of(layer.weight).cell
    verdict = table.import_verdict(cell, layout)
    rows, cols = layer.weight.shape
    expected = conversion.shapes(layout, rows, cols)
    for key, (_, shape) in expected.items():
        if key not in parts or parts[key].numel() != torch.Size(shape).numel():
            actual = "missing" if key not in parts else list(parts[key].shape)
            raise CheckpointError(f"{key} is {actual}, and a {layout.name} weight [{rows}, {cols}] has {list(shape)}")
    if verdict.kind != EXACT:
        raise CheckpointError(f"it cannot be copied into {cell}: {verdict.why}")
    layer.leave_meta(parts[layout.codes_key].device)
    storage = components.storage_of(layer.weight)
    scale = cell.format.copies[Orientation.ROWWISE].scale
    scales = conversion.stored_scale(layout, parts[layout.scale_key])
    by_row = scales[torch.arange(rows, device=scales.device) // min(layout.block[0], max(rows, 1))]
    try:
        grid = conversion.our_grid(by_row, layout, cell.format, storage.shard.resident(scale), cols)
    except InexactConversionError as error:
        raise CheckpointError(f"it cannot be copied into {cell}: {error}") from None
    values = {Role.CODES: parts[layout.codes_key].view(torch.uint8), Role.SCALE: grid}
    if layout.second is not None:
        values[Role.AMAX] = conversion.amax_of(parts[layout.second.key], cell.format, layout.second.divides, noted)
    pairs = [(storage.components[c.name], values[c.role]) for c in cell.format.components]
    components.write_components(layer.weight, pairs)
    storage.forget_amaxes()


def layout_keys(layout: Layout) -> Sequence[str]:
    """Return the names that replace "weight" in the keys of a weight's tensors."""
    second = [] if layout.second is None else [layout.second.key]
    return [layout.codes_key, layout.scale_key, *second]


def layers_of(saved: Mapping[str, Any]) -> list[str]:
    """Return the layers that the native form of a `quantization_config` lists.

    Raises:
        CheckpointError: the list is missing.
    """
    layers = saved.get("layers")
    if not isinstance(layers, list) or not isinstance(saved.get("layer_recipes") or {}, dict):
        raise CheckpointError(
            "config.json's quantization_config of quantshard has no list of layers; the file is damaged, or of another "
            "release"
        )
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
        """Adapt recipes and names to a model that is the saved model's base, or has the saved model as its base.

        A name prefix is then removed or added.
        """
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
