"""The weights of a Trainer's checkpoint, read into the live model bit for bit by all names that transformers gave them.

The Trainer itself loads by the names in the files, and logs what it did not find. But transformers saves many
architectures under other names than their own, some with tensors cut or joined (experts), and undoes that while it
loads. Here the same undoing goes before the load, and a weight that is in no file is an error.
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
from quantshard.interop.conversion import packing
from quantshard.read_limits import FILE_BYTES
from quantshard.tensor import components

_UNSAVED: Final = "_keys_to_ignore_on_save"
"""transformers' list, of a model, of what no save writes since it is computed: sinusoids; there is no public one."""

_SHOWN: Final = 3
"""Names that an error lists."""


def weight_files(folder: str) -> list[str]:
    """The files of a checkpoint that hold the model's weights, those that the Trainer takes; none of other kinds, as
    adapters and what FSDP writes.

    Raises:
        CheckpointError: there is an index, and it is none.
    """
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if os.path.isfile(path := os.path.join(folder, name)):
            return [path]
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if os.path.isfile(path := os.path.join(folder, name)):
            index = foreign.read_json(path, FILE_BYTES["index"], raising=CheckpointError, follow=True)
            names = index.get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(each, str) for each in names.values()):
                raise CheckpointError(f"{path} has no weight_map of names; the checkpoint is damaged")
            return [os.path.join(folder, each) for each in sorted(set(names.values()))]
    return []


def load_weights(model: nn.Module, folder: str) -> None:
    """Load the weights of a checkpoint in place, into a model that is on this process whole.

    Raises:
        ConfigurationError: a weight is quantized in the files and not in the model, or the other way round.
        CheckpointError: a weight of the model is in no file, or cannot be made of what is there.
        RuntimeError: PyTorch's; a weight has another shape or recipe in the files.
    """
    stored: dict[str, Tensor] = {}
    for path in weight_files(folder):
        stored.update(load_state_dict(path))
    entries = _by_live_names(model, stored, folder) if isinstance(model, PreTrainedModel) else stored
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
    """The tensors as `from_pretrained` would give them to the model: renamed, cut, joined, and nothing cast.

    A packed weight is a tensor as any other: what cut its bytes while it was saved is undone here.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    live, prefix = {**components.named_parameters(model), **model.state_dict()}, model.base_model_prefix
    found: dict[str, Tensor] = {}
    joined: dict[str, WeightConverter] = {}
    for key in sorted(stored, key=_with_numbers):
        name, pattern = rename_source_key(key, renamings, converters, prefix, live)
        if name not in live:  # none of the model's, or a rule has met a name that is right already
            found[key] = stored[key]
        elif pattern is None:
            found[name] = stored[key]
        else:
            converter = joined.setdefault(name, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, key, pattern, stored[key])  # type: ignore[arg-type]
    for name, converter in joined.items():
        try:
            made: dict[str, Any] = converter.convert(name, model=model, config=model.config)
        except Exception as error:  # of any operation of transformers
            raise CheckpointError(
                f"{folder}: {name} of this {type(model).__name__} cannot be made of the tensors in the checkpoint: "
                f"{type(error).__name__}: {error}"
            ) from error
        found.update({each: value[0] if isinstance(value, list) else value for each, value in made.items()})
    return found


def _with_numbers(key: str) -> list[tuple[int, int | str]]:
    """To sort names as transformers does: expert 2 before expert 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]


def _check_forms(
    model: nn.Module, weights: Mapping[str, Tensor], entries: Mapping[str, Tensor], folder: str
) -> None:  # fmt: skip
    """Refuse values where there are to be codes, and codes where there are to be values."""
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
    wrong = {name: there for name, param in weights.items() if (there := _other_form(param, name, entries))}
    if wrong:
        first, there = next(iter(wrong.items()))
        raise ConfigurationError(
            f"{folder}: the checkpoint has {first} as {there}, and this model's is "
            f"{components.storage_of(weights[first]).cell.tag!r} ({len(wrong)} weights in all). A Trainer resumes what "
            "was saved of a model converted by the same recipe, in the native form (no layout=); to train on from "
            "values, load them by from_pretrained(..., quantization_config=QuantshardConfig(recipe)), and train "
            "without resume_from_checkpoint"
        )


def _other_form(param: Tensor, name: str, entries: Mapping[str, Tensor]) -> str | None:
    """What a checkpoint has of a quantized weight, if it has something else than a weight of this format."""
    entry, tag = entries.get(name), _tag_of(name, entries)
    if tag is not None:
        return None if tag == components.storage_of(param).cell.tag else repr(tag)
    return None if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _tag_of(name: str, entries: Mapping[str, Tensor]) -> str | None:
    """The format of a weight that is quantized in a checkpoint, packed or in parts."""
    tag = entries.get(name + components.FORMAT_SUFFIX)
    if tag is None and name in entries and packing.is_packed(entries[name]):
        tag = entries[name][: components.FORMAT_TAG_BYTES]
    return None if tag is None else components.read_format_tag(tag)


def _check_complete(
    model: nn.Module, weights: Mapping[str, Tensor], entries: Mapping[str, Tensor], folder: str
) -> None:  # fmt: skip
    """Every entry of the state dict is to be had: by its name, in a packed weight, or by another name of the same."""
    packed = {name for name in weights if name in entries and packing.is_packed(entries[name])}
    parts = {name + suffix: (name, suffix) for name, param in weights.items() for suffix in components.suffixes(param)}
    same: dict[int, list[str]] = {}
    tensors = {**components.named_parameters(model), **dict(model.named_buffers(remove_duplicate=False))}
    for name, tensor in tensors.items():
        same.setdefault(id(tensor), []).append(name)

    def is_there(key: str) -> bool:
        name, suffix = parts.get(key, (key, ""))
        tied = same[id(tensors[name])] if name in tensors else [name]
        return any(each in packed or each + suffix in entries for each in tied)

    left = set(getattr(model, _UNSAVED, None) or ())
    live = model.state_dict()
    absent = [key for key in live if key not in left and not is_there(key)]
    if absent:
        # of a weight that is absent whole its own name, not those of its scales
        named = list(dict.fromkeys(key if (name := parts.get(key, (key,))[0]) in entries else name for key in absent))
        other = [key for key in entries if key not in live]
        raise CheckpointError(
            f"{folder}: {len(named)} weights of this {type(model).__name__} are not in the checkpoint: {_listed(named)}"
            + (f"; it has {len(other)} that this model has not: {_listed(other)}" if other else "")
            + ". They would keep the values that they have now; resume with the model of which the checkpoint was "
            f"saved, or load it by from_pretrained({folder!r}), which says what it finds, and train on from that"
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
