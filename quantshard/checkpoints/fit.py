"""Checks whether a checkpoint fits a model and its optimizer: the same entries, with the same shapes and dtypes.

A mismatch is not damage: the run's other checkpoints would not fit either, so none of them is tried instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard import private_torch
from quantshard.checkpoints import optimizer_states
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.parameter_numbers import ParameterNumbers
from quantshard.checkpoints.requantize import is_history
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.foreign import shown
from quantshard.numerics.states import AVERAGE, ROUNDING_SEED
from quantshard.tensor import components, state_keys

_MODEL, _OPTIMIZER, _STATES, _GROUPS = "model.", "optimizer.", "optimizer.state.", "optimizer.param_groups."

Stored = Mapping[str, STORAGE_TYPES]


def check_members(where: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Check that an optimizer belongs to a model. Call it after `model.state_dict()`, which reshards parameters.

    An optimizer is rejected if it has none of the model's parameters, and either has quantized weights, or has only
    unsharded parameters while the model is sharded. Otherwise it can be an optimizer of hand-made masters.

    Raises:
        ConfigurationError: the optimizer has other weights than the model.
    """
    model_params = list(model.parameters())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params or {*map(id, model_params)} & {*map(id, params)}:
        return
    is_before_sharding = any(isinstance(p, DTensor) for p in model_params) and not any(
        isinstance(p, DTensor) for p in params
    )
    if is_before_sharding or any(components.quantized_local(p) is not None for p in params):
        raise ConfigurationError(
            f"{where}: none of the {len(params)} parameters of this {type(optimizer).__name__} (the first of shape "
            f"{list(params[0].shape)}) is one of this {type(model).__name__}: it is another model's, or was made "
            "before convert, revert or fully_shard put others in their place; make it of this model's parameters, or "
            "give the module that holds its own"
        )


def elsewhere(stored: Iterable[str], model: nn.Module, numbers: ParameterNumbers | None) -> set[str]:
    """The keys of a checkpoint that belong to experts of other ranks."""
    if numbers is None and not any(process_groups.expert_axis(module) for module in model.modules()):
        return set()
    model_keys = {key.removeprefix(_MODEL) for key in stored if key.startswith(_MODEL)}
    other_ranks_keys = {_MODEL + key for key in state_keys.held_elsewhere(model, model_keys)}
    states = [key for key in stored if key.startswith(_STATES)] if numbers is not None else []
    return other_ranks_keys | {key for key in states if numbers and numbers.is_elsewhere(key.split(".")[2])}


def kept(stored: Stored, wanted: Collection[str], optimizer: Optimizer | None, own_seed: bool) -> set[str]:
    """The keys of the optimizer's groups that keep their live value because the checkpoint lacks them.

    The optimizer itself did not create these entries, but e.g. a scheduler did. `own_seed`: also keep the optimizer's
    rounding seed, if the checkpoint has none.
    """
    if optimizer is None:
        return set()
    required = {"params", *components.own_settings(optimizer)} - ({ROUNDING_SEED} if own_seed else set())
    missing = (key for key in wanted if key.startswith(_GROUPS) and key not in stored)
    return {key for key in missing if _group_entry(key)[1].partition(".")[0] not in required}


def check_model(path: Path_, stored: Stored, wanted: Mapping[str, Any], casts: Collection[str] | None) -> None:
    """Check the model's part of a checkpoint.

    Args:
        stored, wanted: the checkpoint's entries and the live entries to load, by key, both without converted entries.
        casts: the keys of plain tensors that can be cast; None for all.

    Raises:
        CheckpointError: names the first entry, shape or dtype that differs, and a remedy.
    """
    missing, unexpected = _differing(stored, wanted, _MODEL)
    pairs = [item for item in _tensors(stored, wanted, _MODEL) if isinstance(item[2], Tensor)]
    mismatched = [*missing, *unexpected, *[key for key, entry, value in pairs if entry.size != value.shape]]
    if mismatched and all(map(is_history, mismatched)):
        raise CheckpointError(
            f"{path} is of another recipe: {len(mismatched)} amax histories are there and not in this model, or the "
            f"reverse, or of another length (first: {mismatched[0]}); build the model with the recipe that the "
            "checkpoint was written with, or load it with requantize=True, which begins these histories anew"
        )
    if missing or unexpected:
        raise CheckpointError(
            f"{path} is of another model: it lacks {len(missing)} of this model's tensors (first: "
            f"{missing[:1] or '-'}) and has {len(unexpected)} that this one lacks (first: {unexpected[:1] or '-'})"
        )
    if item := next(_objects_for_tensors(stored, wanted, _MODEL), None):
        raise CheckpointError(f"{path} is of another model: {item}")
    for key, _, value in pairs:
        if private_torch.local_tensor(value).is_meta:
            raise CheckpointError(
                f"{path}: {key} is on the meta device here, where loading does nothing; call reset_parameters() or "
                "to_empty() first"
            )
    for key, entry, value in pairs:
        if entry.size != value.shape:
            raise CheckpointError(
                f"{path} is of another model: {key} has shape {tuple(entry.size)} there and {tuple(value.shape)} here"
            )
    for key, entry, value in pairs:
        if casts is not None and key not in casts and entry.properties.dtype != value.dtype:
            raise CheckpointError(
                f"{path} is of another model: {key} is {entry.properties.dtype} there and {value.dtype} here; build "
                "the model with that dtype (params_dtype), or load with requantize=True, lossy=True to cast it"
            )


def check_optimizer(
    path: Path_, stored: Stored, wanted: Mapping[str, Any], optimizer: Optimizer, can_convert: bool
) -> None:
    """Check the optimizer's part of a checkpoint, with the arguments and errors of `check_model`.

    `can_convert`: some states differ in a dtype that `requantize=True` would convert.
    """
    reseed_hint = " and call the optimizer's reseed_masters()" if hasattr(optimizer, "reseed_masters") else ""
    remedy = f"load the model alone{reseed_hint}"
    if not any(key.startswith(_OPTIMIZER) for key in stored):
        raise CheckpointError(f"{path} was saved without an optimizer; {remedy}")
    if averages := _averages_difference(stored, wanted):
        raise CheckpointError(f"{path} has {averages}; or {remedy}")
    if frozen := _frozen_difference(stored, wanted, optimizer):
        raise CheckpointError(f"{path} has {frozen}; or {remedy}")
    if differences := list(_optimizer_differences(stored, wanted, optimizer_states.allocates(optimizer))):
        raise CheckpointError(
            f"{path} is of another optimizer: {', '.join(differences)}; build it with the options that it was saved "
            "with, "
            + ("load it with requantize=True, which takes states of other dtypes, " if can_convert else "")
            + f"or {remedy}"
        )


def is_object(key: str, stored: Stored) -> bool:
    """Whether an entry belongs to the optimizer and is not a tensor in the checkpoint."""
    return key.startswith(_OPTIMIZER) and isinstance(stored[key], BytesStorageMetadata)


def parameter_entries(keys: Iterable[str]) -> list[str]:
    """The keys among `keys` that name a group's parameters (`components.PARAMETER_ENTRIES`)."""
    return [key for key in keys if key.startswith(_GROUPS) and _group_entry(key)[1] in components.PARAMETER_ENTRIES]


def check_groups(path: Path_, theirs: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that the checkpoint's states belong to the optimizer's parameters, in the same order.

    Parameters are compared by name, or by their number if one side has no names.

    Args:
        theirs: the checkpoint's values of the `parameter_entries`.
        groups: the optimizer's groups.

    Raises:
        CheckpointError: names the first group or parameter that differs.
    """
    for number, group in enumerate(groups):
        params = theirs.get(f"{_GROUPS}{number}.params", ())
        if not isinstance(params, list | tuple) or len(params) != len(group["params"]):
            count = len(params) if isinstance(params, list | tuple) else "no list of"
            raise CheckpointError(
                f"{path} is of another optimizer: its group {number} has {count} parameters and this one's "
                f"{len(group['params'])}; build it over the same model, or load the model alone"
            )
        names = theirs.get(f"{_GROUPS}{number}.param_names"), group.get("param_names")
        for index, (old, new) in enumerate(zip(*(side or () for side in names), strict=False)):
            if not components.is_same_name(str(old), new):
                raise CheckpointError(
                    f"{path} is of another optimizer: parameter {index} of its group {number} is {str(old)!r:.200} "
                    f"and this one's {new!r}; pass the same parameters in the same order, or load the model alone"
                )


def check_settings(path: Path_, theirs: Mapping[str, Any], wanted: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Check that a step can run with the checkpoint's group options: each must have the type of the live one.

    Args:
        theirs: the checkpoint's entries of the optimizer that are not tensors.
        wanted: the entries of the optimizer's state dict under the same keys.

    Raises:
        CheckpointError: names the first option that does not fit.
    """
    own_names = components.own_settings(optimizer)
    for key, value in theirs.items():
        if not key.startswith(_GROUPS):
            continue
        number, name = _group_entry(key)
        live = optimizer.param_groups[int(number)].get(name, wanted[key])  # the state dict can differ from the group
        if not components.can_take(name.partition(".")[0] in own_names, value, live):
            raise CheckpointError(
                f"{path} is of another optimizer, or damaged: its group {number} says {name} = {shown(value)}, where "
                f"this optimizer has {shown(live)}; choose another checkpoint, or load the model alone"
            )


def _averages_difference(stored: Iterable[str], wanted: Iterable[str]) -> str:
    """The rest of an error message if only one side has averages of weights; otherwise ""."""
    stored_has, live_has = (
        any(key.startswith(_STATES) and key.endswith(f".{AVERAGE}") for key in keys) for keys in (stored, wanted)
    )
    if live_has and not stored_has:
        return (
            f"no averages of weights ({AVERAGE}), which this optimizer keeps; build it without ema_decay, load, and "
            "then call its begin_average(decay), so that they begin with the masters of now"
        )
    if stored_has and not live_has:
        return (
            f"averages of weights ({AVERAGE}), which this optimizer does not keep; build it with the ema_decay that it "
            "was saved with, load, and then call its drop_average() to go on without them"
        )
    return ""


def _frozen_difference(stored: Stored, wanted: Mapping[str, Any], optimizer: Optimizer) -> str:
    """The rest of an error message if the sides differ only in frozen parameters; otherwise ""."""
    stored_numbers, live_numbers = map(_numbers, (stored, wanted))
    shapes = ((entry.size, getattr(value, "shape", None)) for _, entry, value in _tensors(stored, wanted, _STATES))
    names = _parameter_names(optimizer)
    only_stored, only_live = sorted(stored_numbers - live_numbers), sorted(live_numbers - stored_numbers)
    prefixes = tuple(f"{_STATES}{number}." for number in stored_numbers ^ live_numbers)
    mismatched = [key for keys in _differing(stored, wanted, _OPTIMIZER) for key in keys]
    if not all(key.startswith(prefixes) for key in mismatched) or any(
        live_shape != size for size, live_shape in shapes
    ):
        return ""
    if bool(only_stored) == bool(only_live) or max(only_stored + only_live) >= len(names):
        return ""
    if only_live:
        return (
            f"no states of {len(only_live)} parameters that this optimizer trains (first: {names[only_live[0]][0]!r}); "
            "they were frozen there, or not given to it; freeze them with requires_grad_(False) before you build the "
            "optimizer, load, and to train them then unfreeze each and call initialize_state(parameter)"
        )
    if any(names[number][1].requires_grad for number in only_stored):
        return ""
    return (
        f"states of {len(only_stored)} parameters that were frozen before this optimizer was built (first: "
        f"{names[only_stored[0]][0]!r}); build it while they are trained, load, and freeze them then"
    )


def _numbers(keys: Iterable[str]) -> set[int]:
    """The numbers of the parameters that have states among these keys."""
    numbers = {key.split(".")[2] for key in keys if key.startswith(_STATES)}
    return {int(number) for number in numbers if number.isdecimal()}


def _parameter_names(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """(name, parameter) by number; "parameter N" for a parameter without a name."""
    named: list[tuple[str, Tensor]] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"parameter {len(named) + index}" for index in range(len(group["params"]))]
        named += zip(names, group["params"], strict=True)
    return named


def _optimizer_differences(stored: Stored, wanted: Mapping[str, Any], allocates: bool) -> Iterator[str]:
    """Describe the first difference of each kind. `allocates`: the optimizer creates all its states at construction."""
    stored_groups, live_groups = (
        len({_group_entry(key)[0] for key in keys if key.startswith(_GROUPS)}) for keys in (stored, wanted)
    )
    if stored_groups != live_groups:
        yield f"its number of groups is {stored_groups} and this one's {live_groups}"
    num_stored, num_live = len(_numbers(stored)), len(_numbers(wanted))
    if allocates and num_stored != num_live:
        yield f"it has states of {num_stored} parameters and this one of {num_live}"
    missing_keys, unexpected = _differing(stored, wanted, _OPTIMIZER)
    missing_options = [key for key in missing_keys if key.startswith(_GROUPS)]
    if missing_options and stored_groups == live_groups:
        number, name = _group_entry(missing_options[0])
        yield f"its group {number} has no {name!r}"
    if missing := sorted(set(missing_keys) - set(missing_options)):
        yield f"it lacks {len(missing)} of this one's tensors (first: {missing[:1]})"
    if unexpected := [key for key in unexpected if key.startswith(_STATES)]:
        yield f"it has {len(unexpected)} tensors that this one lacks (first: {unexpected[:1]})"
    for key, entry, value in _tensors(stored, wanted, _OPTIMIZER):
        stored_kind, live_kind = _described(entry.properties.dtype, entry.size), "no tensor"
        if isinstance(value, Tensor):
            live_kind = _described(value.dtype, value.shape)
        if stored_kind != live_kind:
            yield f"{key} is {stored_kind} there and {live_kind} here"
            return
    yield from islice(_objects_for_tensors(stored, wanted, _STATES), 1)


def _described(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{dtype} {list(size)}"


def _group_entry(key: str) -> tuple[str, str]:
    number, _, name = key.removeprefix(_GROUPS).partition(".")
    return number, name


def _differing(stored: Iterable[str], wanted: Iterable[str], prefix: str) -> tuple[list[str], list[str]]:
    """(keys that the checkpoint lacks, keys that only the checkpoint has) among those with a prefix."""
    stored_keys, wanted_keys = ({key for key in keys if key.startswith(prefix)} for keys in (stored, wanted))
    return sorted(wanted_keys - stored_keys), sorted(stored_keys - wanted_keys)


def _tensors(
    stored: Stored, wanted: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, TensorStorageMetadata, Any]]:
    """(key, stored entry, live entry) of each tensor in the checkpoint that is loaded."""
    for key in sorted(stored.keys() & wanted.keys()):
        entry = stored[key]
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            yield key, entry, wanted[key]


def _objects_for_tensors(stored: Stored, wanted: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Describe live tensors that are not tensors in the checkpoint."""
    for key in sorted(stored.keys() & wanted.keys()):
        value = wanted[key]
        if key.startswith(prefix) and isinstance(value, Tensor) and isinstance(stored[key], BytesStorageMetadata):
            yield f"{key} is no tensor there and {_described(value.dtype, value.shape)} here"
