"""Loads the weights of a Trainer's checkpoint into the live model, bit for bit.

The Trainer loads by the names in the files and only logs missing weights. However, transformers saves many
architectures under other names, some with split or joined tensors (experts), and reverses this while loading. This
module applies the same reversal, and treats a missing weight as an error.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from quantshard import foreign
from quantshard.errors import CheckpointError, ConfigurationError, warn_user
from quantshard.foreign import FILE_BYTES
from quantshard.interop.conversion import packing
from quantshard.tensor import components

_UNSAVED: Final = "_keys_to_ignore_on_save"
"""transformers' private list of a model's computed entries, such as sinusoids, which are never saved."""

_SHOWN: Final = 3
"""Number of names listed in an error."""


def weight_files(folder: str) -> list[str]:
    """Return the files of a checkpoint that hold the model's weights, as the Trainer chooses them.

    Files of other kinds (adapters, FSDP) are ignored.

    Raises:
        CheckpointError: an index is invalid.
    """
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if os.path.isfile(path := os.path.join(folder, name)):
            return [path]
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if os.path.isfile(path := os.path.join(folder, name)):
            index = foreign.read_json(path, FILE_BYTES["index"], raising=CheckpointError, follow=True)
            names = index.get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
                raise CheckpointError(f"{path} has no weight_map of names; the checkpoint is damaged")
            return [os.path.join(folder, file) for file in sorted(set(names.values()))]
    return []


def load_weights(model: nn.Module, folder: str) -> None:
    """Load the weights of a checkpoint in place into an unsharded model.

    Raises:
        ConfigurationError: a weight is quantized in the files but not in the model, or vice versa.
        CheckpointError: a weight of the model is missing, or cannot be assembled from the files.
        RuntimeError: raised by PyTorch if a weight has another shape or recipe in the files.
    """
    file_entries: dict[str, Tensor] = {}
    for path in weight_files(folder):
        file_entries.update(load_state_dict(path))
    entries = _by_live_names(model, file_entries, folder) if isinstance(model, PreTrainedModel) else file_entries
    weights = components.quantized_parameters(model)
    _check_forms(model, weights, entries, folder)
    _check_complete(model, weights, entries, folder)
    unexpected = model.load_state_dict(entries, strict=False).unexpected_keys
    if unexpected:
        warn_user(
            f"{folder}: {len(unexpected)} tensors of the checkpoint are none of this {type(model).__name__}'s, and "
            f"were left: {_listed(unexpected)}"
        )


def _by_live_names(model: PreTrainedModel, stored: Mapping[str, Tensor], folder: str) -> dict[str, Tensor]:
    """Rename, split and join tensors as `from_pretrained` would, without casting.

    Packed weights are treated like other tensors, which reverses any splitting of their bytes during saving.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    live, prefix = {**components.named_parameters(model), **model.state_dict()}, model.base_model_prefix
    entries: dict[str, Tensor] = {}
    pending: dict[str, WeightConverter] = {}
    for key in sorted(stored, key=_with_numbers):
        name, pattern = rename_source_key(key, renamings, converters, prefix, live)
        # unknown to the model, or a rule changed a name that was already correct
        if name not in live:
            entries[key] = stored[key]
        elif pattern is None:
            entries[name] = stored[key]
        else:
            converter = pending.setdefault(name, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, key, pattern, stored[key])  # type: ignore[arg-type]
    for name, converter in pending.items():
        try:
            converted: dict[str, Any] = converter.convert(name, model=model, config=model.config)
        # transformers' operations can raise any exception
        except Exception as error:
            raise CheckpointError(
                f"{folder}: {name} of this {type(model).__name__} cannot be made of the tensors in the checkpoint: "
                f"{type(error).__name__}: {error}"
            ) from error
        entries.update({entry: value[0] if isinstance(value, list) else value for entry, value in converted.items()})
    return entries


def _with_numbers(key: str) -> list[tuple[int, int | str]]:
    """Sort key that orders numbers in names numerically, as transformers does: expert 2 before expert 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]


def _check_forms(
    model: nn.Module, weights: Mapping[str, Tensor], entries: Mapping[str, Tensor], folder: str
) -> None:  # fmt: skip
    """Check that weights are quantized both in the checkpoint and in the model, or in neither."""
    params = components.named_parameters(model)
    plain = [name for name, param in params.items() if name not in weights and param.is_floating_point()]
    tags = {name: tag for name in plain if (tag := _tag_of(name, entries)) is not None}
    if tags:
        first, tag = next(iter(tags.items()))
        raise ConfigurationError(
            f"{folder}: the checkpoint is quantized ({tag!r}), and {len(tags)} weights that are codes there are plain "
            f"in this {type(model).__name__}, the first {first}. Convert the model as it was, before the Trainer gets "
            f"it: quantshard.convert(model, recipe), or from_pretrained({folder!r})"
        )
    wrong = {name: actual for name, param in weights.items() if (actual := _other_form(param, name, entries))}
    if wrong:
        first, actual = next(iter(wrong.items()))
        raise ConfigurationError(
            f"{folder}: the checkpoint has {first} as {actual}, and this model's is "
            f"{components.storage_of(weights[first]).cell.tag!r} ({len(wrong)} weights in all). A Trainer resumes what "
            "was saved of a model converted by the same recipe, in the native form (no layout=); to train on from "
            "values, load them by from_pretrained(..., quantization_config=QuantshardConfig(recipe)), and train "
            "without resume_from_checkpoint"
        )


def _other_form(param: Tensor, name: str, entries: Mapping[str, Tensor]) -> str | None:
    """Describe a checkpoint's entry for a quantized weight if it is not in the weight's format; otherwise None."""
    entry, tag = entries.get(name), _tag_of(name, entries)
    if tag is not None:
        return None if tag == components.storage_of(param).cell.tag else repr(tag)
    return None if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _tag_of(name: str, entries: Mapping[str, Tensor]) -> str | None:
    """Return the format tag of a weight that is quantized in a checkpoint, packed or as separate parts."""
    tag = entries.get(name + components.FORMAT_SUFFIX)
    if tag is None and name in entries and packing.is_packed(entries[name]):
        tag = entries[name][: components.FORMAT_TAG_BYTES]
    return None if tag is None else components.read_format_tag(tag)


def _check_complete(
    model: nn.Module, weights: Mapping[str, Tensor], entries: Mapping[str, Tensor], folder: str
) -> None:  # fmt: skip
    """Check that the checkpoint has every state dict entry: by name, in a packed weight, or by the name of a tied
    tensor."""
    packed = {name for name in weights if name in entries and packing.is_packed(entries[name])}
    parts = {name + suffix: (name, suffix) for name, param in weights.items() for suffix in components.suffixes(param)}
    names_by_tensor: dict[int, list[str]] = {}
    tensors = {**components.named_parameters(model), **dict(model.named_buffers(remove_duplicate=False))}
    for name, tensor in tensors.items():
        names_by_tensor.setdefault(id(tensor), []).append(name)

    def is_there(key: str) -> bool:
        name, suffix = parts.get(key, (key, ""))
        tied = names_by_tensor[id(tensors[name])] if name in tensors else [name]
        return any(alias in packed or alias + suffix in entries for alias in tied)

    unsaved = set(getattr(model, _UNSAVED, None) or ())
    live = model.state_dict()
    missing = [key for key in live if key not in unsaved and not is_there(key)]
    if missing:
        # name a completely missing weight once, without its scales
        named = list(dict.fromkeys(key if (name := parts.get(key, (key,))[0]) in entries else name for key in missing))
        unused = [key for key in entries if key not in live]
        raise CheckpointError(
            f"{folder}: {len(named)} weights of this {type(model).__name__} are not in the checkpoint: {_listed(named)}"
            + (f"; it has {len(unused)} that this model has not: {_listed(unused)}" if unused else "")
            + ". They would keep the values that they have now; resume with the model of which the checkpoint was "
            f"saved, or load it by from_pretrained({folder!r}), which says what it finds, and train on from that"
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
