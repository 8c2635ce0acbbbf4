"""What `save_pretrained` of a converted model writes, and how one weight of it is read again.

Native: each quantized weight is one tensor of bytes (`conversion/packing.py`), from which training goes on bit for bit;
a reader without quantshard finds a wrong shape and raises. A layout of `layouts/table.py`: what other programs read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
from quantshard.recipe import Recipe, resolve, stock_name
from quantshard.tensor import components
from quantshard.tensor.storage import AMAX_HISTORY

NATIVE: Final = "native"
METHOD: Final = "quantshard"
"""`quant_method` of the native form."""


@dataclass
class SavedForm:
    """What is to be written: tensors by name, the configuration's `quantization_config`, strings for file headers."""

    tensors: dict[str, Tensor]
    quantization: dict[str, Any] | None
    metadata: dict[str, str] = field(default_factory=dict)


def saved_form(model: nn.Module, entries: Mapping[str, Tensor], layout: str) -> SavedForm:
    """The form of a converted model that `layout` names: "native", or a row or family of `layouts.LAYOUTS`.

    Args:
        entries: the model's state dict, whole.

    Raises:
        ConfigurationError: there is no such layout, or a weight does not go into it exactly; the model is sharded.
    """
    weights = quantized_weights(model)
    _check_whole(entries)
    parts = {name: _parts(param, name, entries) for name, param in weights.items()}
    taken = {name + suffix for name, found in parts.items() for suffix in found}
    others = {name: value for name, value in entries.items() if name not in taken}
    if layout == NATIVE:
        packed = {name: packing.pack(found) for name, found in parts.items()}
        return SavedForm({**others, **packed}, native_config(model, weights))
    tags = {components.storage_of(param).cell.tag for param in weights.values()}
    others = {name: value for name, value in others.items() if not name.endswith(AMAX_HISTORY)}  # of no layout
    row = table.find(layout, tags)
    if row.is_plain:
        return _plain_form(model, row, weights, parts, others)
    form = _layout_form(model, row, weights, parts, others)
    _warn_of_unread(model, row, weights)
    return form


def _warn_of_unread(model: nn.Module, row: Layout, weights: Mapping[str, Tensor]) -> None:
    """Tell of what transformers (5.24) cannot read again, whichever other program does."""
    if ALL not in row.block and min(row.block) > 1:
        # of one block transformers has the size right, whatever it is
        few = 1 if row.family == COMPRESSED_TENSORS else max(row.block)
        cut = [
            name
            for name, param in weights.items()
            if any(size % block and size > few for size, block in zip(param.shape, row.block, strict=True))
        ]
        if cut:
            warn_user(
                f"save_pretrained(layout={row.name!r}): {cut[0]} {list(weights[cut[0]].shape)}"
                + (f" and {len(cut) - 1} more have" if len(cut) > 1 else " has")
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
    """The quantized parameters by their names in the state dict."""
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
    """A weight's entries in a state dict, by key suffix."""
    wanted = components.suffixes(param)
    lacking = [suffix for suffix in wanted if name + suffix not in entries]
    if lacking:
        raise ConfigurationError(
            f"save_pretrained: the state dict lacks {name}{lacking[0]}, and codes mean nothing without it; pass the "
            "model's whole state dict, or none"
        )
    return {suffix: entries[name + suffix] for suffix in wanted}


def _components(param: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Component name -> tensor, of entries by key suffix."""
    fmt = components.storage_of(param).cell.format
    return {component.name: parts[component.key_suffix] for component in fmt.components}


# Native


def native_config(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The `quantization_config` of the native form: which layers are quantized, by which recipes.

    Of a model that was converted in part, or in several parts, it is as if the whole had been, with the recipe that
    most layers have.

    Raises:
        ConfigurationError: some of its parts enter their recipes and others do not; a weight is in none of them.
    """
    layers = [name.removesuffix(".weight") for name in weights]
    parts = {name: _converted_part(model, name) for name in layers}
    enters = {bool(getattr(part, ENTERS)) for part in parts.values() or [model]}
    if len(enters) > 1:
        raise ConfigurationError(
            "save_pretrained: parts of this model were converted with autocast=True and others with autocast=False, "
            "which config.json cannot say; convert them alike, or save with quantshard.checkpoints.save"
        )
    given = {name: getattr(model.get_submodule(name), "recipe", None) for name in layers}
    own: dict[str, Recipe] = {name: resolve(given[name] or getattr(part, RECIPE)) for name, part in parts.items()}
    around = resolve(getattr(model, RECIPE, None) or max(own.values(), key=list(own.values()).count))
    return {
        "quant_method": METHOD,
        "recipe": stock_name(around),
        "layers": layers,
        "layer_recipes": {name: stock_name(each) for name, each in own.items() if given[name] or each != around},
        "modules": "fused" if is_fused(model) else "linear",
        "autocast": enters.pop(),
    }


def _converted_part(model: nn.Module, layer: str) -> nn.Module:
    """The innermost module around a layer that entered a recipe when it was converted."""
    path = layer.split(".")
    around = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) - 1, -1, -1)]
    found = next((module for module in around if hasattr(module, RECIPE)), None)
    if found is None:
        raise ConfigurationError(
            f"save_pretrained: {layer} is quantized, and in no part of this model that convert changed; save "
            "with quantshard.checkpoints.save"
        )
    return found


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
    found = {}
    for name, param in weights.items():
        copy, shape = (
            components.storage_of(param).cell.format.copies[Orientation.ROWWISE],
            (param.shape[0], param.shape[1]),
        )
        found[name] = numerics.dequantize(copy, _components(param, parts[name]), shape).to(row.dtype)
    return SavedForm({**others, **found}, None)


def _layout_form(
    model: nn.Module, row: Layout, weights: Mapping[str, Tensor], parts: Mapping[str, dict[str, Tensor]],
    others: dict[str, Tensor],
) -> SavedForm:  # fmt: skip
    found, noted = {}, {}
    for name, param in weights.items():
        cell, held = components.storage_of(param).cell, _components(param, parts[name])
        verdict = table.verdict(cell, row, has_input_amax=False)
        shape = (param.shape[0], param.shape[1])
        try:
            if verdict.kind != EXACT:
                raise InexactConversionError(verdict.why)
            made = conversion.to_layout(row, cell.format, held, shape)
        except InexactConversionError as error:
            raise ConfigurationError(
                f"save_pretrained(layout={row.name!r}): {name} {list(shape)}, {cell.tag}, does not go into it exactly: "
                f"{error}; choose another layout, or save with quantshard.checkpoints.save and export with "
                "quantshard.layouts.export(lossy=True)"
            ) from None
        found.update({name.removesuffix("weight") + key: tensor for key, tensor in made.items()})
        amax = cell.format.copies[Orientation.ROWWISE].amax
        if amax is not None:
            noted[NOTED_AMAX + name] = float(held[amax.name]).hex()
    return SavedForm({**others, **found}, row.config(_ignored(model, weights)), noted)


def _ignored(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """The modules with matrices that stay in high precision."""
    named = components.named_parameters(model)
    return sorted(n.rpartition(".")[0] for n, param in named.items() if param.ndim == 2 and n not in weights)


def take_layout(layer: ConvertedLinear, layout: Layout, parts: Mapping[str, Tensor], noted: str | None) -> None:
    """Fill a converted layer, on the meta device still, with a weight of another program's layout, bit for bit.

    Args:
        parts: by what stands in place of "weight" in the names there.
        noted: the amax that our export has in the header.

    Raises:
        CheckpointError: the weight does not go into this layer's format exactly.
    """
    cell = components.storage_of(layer.weight).cell
    verdict = table.import_verdict(cell, layout)
    rows, cols = layer.weight.shape
    wanted = conversion.shapes(layout, rows, cols)
    for key, (_, shape) in wanted.items():
        if key not in parts or parts[key].numel() != torch.Size(shape).numel():
            held = "missing" if key not in parts else list(parts[key].shape)
            raise CheckpointError(f"{key} is {held}, and a {layout.name} weight [{rows}, {cols}] has {list(shape)}")
    if verdict.kind != EXACT:
        raise CheckpointError(f"it cannot be copied into {cell}: {verdict.why}")
    layer.leave_meta(parts[layout.codes_key].device)
    storage = components.storage_of(layer.weight)
    scale = cell.format.copies[Orientation.ROWWISE].scale
    stored = conversion.stored_scale(layout, parts[layout.scale_key])
    by_row = stored[torch.arange(rows, device=stored.device) // min(layout.block[0], max(rows, 1))]
    try:
        grid = conversion.our_grid(by_row, layout, cell.format, storage.shard.resident(scale), cols)
    except InexactConversionError as error:
        raise CheckpointError(f"it cannot be copied into {cell}: {error}") from None
    found = {Role.CODES: parts[layout.codes_key].view(torch.uint8), Role.SCALE: grid}
    if layout.second is not None:
        known = None if noted is None else float.fromhex(noted)
        found[Role.AMAX] = conversion.amax_of(parts[layout.second.key], cell.format, layout.second.divides, known)
    pairs = [(storage.components[c.name], found[c.role]) for c in cell.format.components]
    components.write_components(layer.weight, pairs)
    storage.forget_amaxes()


def layout_keys(layout: Layout) -> Sequence[str]:
    """What stands in place of "weight" in the names of a weight's tensors."""
    second = [] if layout.second is None else [layout.second.key]
    return [layout.codes_key, layout.scale_key, *second]
