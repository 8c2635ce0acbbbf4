"""Checks whether a checkpoint fits a model and its optimizer: the same recipe, entries, shapes and dtypes.

A mismatch is not damage: the run's other checkpoints would not fit either, so none of them is tried instead.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.optim import Optimizer

from quantshard import private_torch
from quantshard.checkpoints import optimizer_states
from quantshard.checkpoints.conversions import HIGH_PRECISION
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.optimizer_states import GROUPS, STATES, Entries, ParameterNumbers
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.checkpoints.saving import digest
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS
from quantshard.numerics.states import ROUNDING_SEED
from quantshard.optimizers.loading import check_group, own_settings
from quantshard.tensor import component_loading, components
from quantshard.tensor.parameter_state import AMAX_HISTORY

_MODEL, _OPTIMIZER = "model.", "optimizer."


def keys_of_other_ranks(stored: Iterable[str], model: nn.Module, numbers: ParameterNumbers | None) -> set[str]:
    if numbers is None and not optimizer_states.expert_layers(model):
        return set()
    model_keys = {key.removeprefix(_MODEL) for key in stored if key.startswith(_MODEL)}
    keys = {_MODEL + key for key in component_loading.held_elsewhere(model, model_keys)}
    if numbers is not None:
        keys |= {key for key in stored if key.startswith(STATES) and key.split(".")[2] in numbers.elsewhere}
    return keys


def unsaved_settings(stored: Entries, live: Collection[str], optimizer: Optimizer | None, own_seed: bool) -> set[str]:
    """Keys of group entries of others, e.g. a scheduler, that the checkpoint lacks. `own_seed`: include the seed."""
    if optimizer is None:
        return set()
    required = {"params", *own_settings(optimizer)} - ({ROUNDING_SEED} if own_seed else set())
    missing = [key for key in live if key.startswith(GROUPS) and key not in stored]
    return {key for key in missing if key.split(".")[3] not in required}


def weight_formats(model: nn.Module, stored: Entries, tags: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(stored format, live format) of each weight that is quantized in the checkpoint or in this model."""
    formats = {}
    for name, param in sorted(components.named_parameters(model).items()):
        storage = components.quantized_storage(param)
        live = HIGH_PRECISION if storage is None else storage.spec.tag
        if _MODEL + name in stored and (storage is not None or name in tags):
            formats[name] = tags.get(name, HIGH_PRECISION), live
    return formats


def check_model(path: Path_, stored: Entries, live: Mapping[str, Any], casts: Collection[str] | None) -> None:
    """Check the model's entries, without converted ones. `casts`: keys of plain tensors to cast; None for all."""
    missing, unexpected = _differing(stored, live, _MODEL)
    if missing or unexpected:
        lacking = f"it lacks {len(missing)} of this model's tensors (first: {missing[:1] or '-'})"
        surplus = f"has {len(unexpected)} that this one lacks (first: {unexpected[:1] or '-'})"
        remedy = _history_remedy([*missing, *unexpected])
        raise CheckpointError(f"{path} is of another model: {lacking} and {surplus}{remedy}")
    for key, entry, value in _pairs(stored, live, _MODEL):
        if not isinstance(value, Tensor):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path} is of another model: {key} is not a tensor there and {_kind(value)} here")
        if private_torch.local_tensor(value).is_meta:
            raise CheckpointError(f"{path}: {key} is on the meta device; call reset_parameters() or to_empty() first")
        if entry.size != value.shape:
            shapes = f"{key} has shape {tuple(entry.size)} there and {tuple(value.shape)} here"
            raise CheckpointError(f"{path} is of another model: {shapes}{_history_remedy([key])}")
        if casts is not None and key not in casts and entry.properties.dtype != value.dtype:
            problem = f"{path} is of another model: {key} is {entry.properties.dtype} there and {value.dtype} here"
            remedy = (
                "build the model with that dtype (params_dtype), or load with requantize=True, lossy=True to cast it"
            )
            raise CheckpointError(f"{problem}; {remedy}")


def _history_remedy(keys: list[str]) -> str:
    are_histories = all(key.endswith(AMAX_HISTORY) for key in keys)
    return "; load with requantize=True, which clears amax histories" if are_histories else ""


def check_optimizer(path: Path_, stored: Entries, live: Mapping[str, Any], optimizer: Optimizer) -> None:
    reseed_hint = " and call the optimizer's reseed_masters()" if hasattr(optimizer, "reseed_masters") else ""
    remedy = f"load the model alone{reseed_hint}"
    if not any([key.startswith(_OPTIMIZER) for key in stored]):
        raise CheckpointError(f"{path} was saved without an optimizer; {remedy}")
    if differences := list(_optimizer_differences(stored, live, optimizer_states.allocates(optimizer))):
        problem = f"{path} is of another optimizer: {', '.join(differences)}"
        remedy = f"load with requantize=True to convert states of other dtypes, or {remedy}"
        raise CheckpointError(f"{problem}; build it with the options that it was saved with, {remedy}")


def check_groups(
    path: Path_,
    saved_values: Mapping[str, Any],
    live: Mapping[str, Any],
    optimizer: Optimizer,
    numbers: ParameterNumbers | None,
) -> None:
    """Check that a step can run with the checkpoint's groups: the same parameters, and options of the same types."""
    own_names = own_settings(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        prefix = f"{GROUPS}{number}."
        saved = {key.removeprefix(prefix): value for key, value in saved_values.items() if key.startswith(prefix)}
        # the state dict can differ from the group
        entries = {**{name: live[prefix + name] for name in saved}, **group}
        entries |= {} if numbers is None else numbers.groups[number]
        check_group(f"{path} is of another optimizer: its group {number}", saved, entries, own_names)


def _optimizer_differences(stored: Entries, live: Mapping[str, Any], allocates: bool) -> Iterator[str]:
    """Describe the first difference of each kind. `allocates`: the optimizer creates all its states at construction."""
    stored_groups, live_groups, num_stored, num_live = (
        len({key.split(".")[2] for key in keys if key.startswith(prefix)})
        for prefix in (GROUPS, STATES)
        for keys in (stored, live)
    )
    if stored_groups != live_groups:
        yield f"its number of groups is {stored_groups} and this one's {live_groups}"
    if allocates and num_stored != num_live:
        yield f"it has states of {num_stored} parameters and this one of {num_live} (frozen ones have none)"
    missing, unexpected = _differing(stored, live, _OPTIMIZER)
    missing_options = [key for key in missing if key.startswith(GROUPS)]
    if missing_options and stored_groups == live_groups:
        _, _, number, name = missing_options[0].split(".", 3)
        yield f"its group {number} has no {name!r}"
    if missing_states := [key for key in missing if not key.startswith(GROUPS)]:
        yield f"it lacks {len(missing_states)} of this one's tensors (first: {missing_states[:1]})"
    if unexpected_states := [key for key in unexpected if key.startswith(STATES)]:
        yield f"it has {len(unexpected_states)} tensors that this one lacks (first: {unexpected_states[:1]})"
    for key, entry, value in _pairs(stored, live, _OPTIMIZER):
        stored_kind = "not a tensor"
        if isinstance(entry, TensorStorageMetadata):
            stored_kind = f"{entry.properties.dtype} {list(entry.size)}"
        elif not key.startswith(STATES):
            # a setting can become a tensor here (`capturable`)
            continue
        if stored_kind != _kind(value):
            yield f"{key} is {stored_kind} there and {_kind(value)} here"
            return


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "not a tensor"


def _differing(stored: Iterable[str], live: Iterable[str], prefix: str) -> tuple[list[str], list[str]]:
    """(keys that the checkpoint lacks, keys that only the checkpoint has) among those with a prefix."""
    stored_keys, live_keys = ({key for key in keys if key.startswith(prefix)} for keys in (stored, live))
    return sorted(live_keys - stored_keys), sorted(stored_keys - live_keys)


def _pairs(stored: Entries, live: Mapping[str, Any], prefix: str) -> list[tuple[str, STORAGE_TYPES, Any]]:
    return [(key, stored[key], live[key]) for key in sorted(stored.keys() & live.keys()) if key.startswith(prefix)]


_SUFFIXES = {"", *(part.key_suffix for fmt in FORMATS.values() for part in fmt.components)}


def check_ties(reader: SafeReader, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Check that tied weights have equal values in the checkpoint; each rank compares some of the pairs."""
    first_names: dict[nn.Parameter, str] = {}
    groups = [] if optimizer is None else optimizer.param_groups
    stepped_ids = {id(param) for group in groups for param in group["params"]}
    pairs = [
        (first_names[param], name)
        for name, param in model.named_parameters(remove_duplicate=False)
        if first_names.setdefault(param, name) != name and id(param) not in stepped_ids
    ]
    for first, alias in pairs[agreement.rank() :: agreement.rank_count()]:
        values, alias_values = (
            {
                suffix: digest(reader.value(f"model.{name}{suffix}"))
                for suffix in _SUFFIXES
                if f"model.{name}{suffix}" in reader.entries
            }
            for name in (first, alias)
        )
        if values and alias_values and values != alias_values:
            raise CheckpointError(f"{reader.path}: {alias} and {first}, which are tied in this model, differ")
