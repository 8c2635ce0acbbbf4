"""Checks whether a checkpoint fits a model and its optimizer: the same entries, with the same shapes and dtypes.

A mismatch is not damage: the run's other checkpoints would not fit either, so none of them is tried instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata, TensorStorageMetadata
from torch.optim import Optimizer

from quantshard import private_torch, state_storage
from quantshard.checkpoints import optimizer_states
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.optimizer_states import GROUPS, STATES, ParameterNumbers
from quantshard.checkpoints.requantize import is_history
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError
from quantshard.foreign import shown
from quantshard.formats import FORMATS
from quantshard.numerics.states import AVERAGE, ROUNDING_SEED
from quantshard.tensor import components

_MODEL, _OPTIMIZER = "model.", "optimizer."

Stored = Mapping[str, STORAGE_TYPES]


def elsewhere(stored: Iterable[str], model: nn.Module, numbers: ParameterNumbers | None) -> set[str]:
    """The keys of a checkpoint that belong to experts of other ranks."""
    if numbers is None and not any(process_groups.expert_axis(module) for module in model.modules()):
        return set()
    model_keys = {key.removeprefix(_MODEL) for key in stored if key.startswith(_MODEL)}
    other_ranks_keys = {_MODEL + key for key in components.held_elsewhere(model, model_keys)}
    states = [key for key in stored if key.startswith(STATES)] if numbers is not None else []
    return other_ranks_keys | {key for key in states if numbers and numbers.is_elsewhere(key.split(".")[2])}


def kept(stored: Stored, wanted: Collection[str], optimizer: Optimizer | None, own_seed: bool) -> set[str]:
    """The keys of the optimizer's groups that keep their live value because the checkpoint lacks them.

    The optimizer itself did not create these entries, but e.g. a scheduler did. `own_seed`: also keep the optimizer's
    rounding seed, if the checkpoint has none.
    """
    if optimizer is None:
        return set()
    required = {"params", *state_storage.own_settings(optimizer)} - ({ROUNDING_SEED} if own_seed else set())
    missing = [key for key in wanted if key.startswith(GROUPS) and key not in stored]
    return {key for key in missing if key.split(".")[3] not in required}


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
    path: Path_, stored: Stored, wanted: Mapping[str, Any], optimizer: Optimizer, can_convert: Callable[[], bool]
) -> None:
    """Check the optimizer's part of a checkpoint, with the arguments and errors of `check_model`.

    `can_convert`: returns whether some states differ in a dtype that `requantize=True` would convert.
    """
    reseed_hint = " and call the optimizer's reseed_masters()" if hasattr(optimizer, "reseed_masters") else ""
    remedy = f"load the model alone{reseed_hint}"
    if not any([key.startswith(_OPTIMIZER) for key in stored]):
        raise CheckpointError(f"{path} was saved without an optimizer; {remedy}")
    differences = list(_optimizer_differences(stored, wanted, optimizer_states.allocates(optimizer)))
    if not differences:
        return
    if reason := _averages_difference(stored, wanted) or _frozen_difference(stored, wanted, optimizer):
        raise CheckpointError(f"{path} has {reason}; or {remedy}")
    raise CheckpointError(
        f"{path} is of another optimizer: {', '.join(differences)}; build it with the options that it was saved with, "
        + ("load it with requantize=True, which takes states of other dtypes, " if can_convert() else "")
        + f"or {remedy}"
    )


def names_parameters(key: str) -> bool:
    """Whether an entry of a group names the group's parameters (`state_storage.PARAMETER_ENTRIES`)."""
    return key.startswith(GROUPS) and key.split(".", 3)[3] in state_storage.PARAMETER_ENTRIES


def check_groups(path: Path_, theirs: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that the checkpoint's states belong to the optimizer's parameters, in the same order.

    Parameters are compared by name, or by their number if one side has no names.

    Args:
        theirs: the checkpoint's values of entries, at least of those that name parameters.
        groups: the optimizer's groups.

    Raises:
        CheckpointError: names the first group or parameter that differs.
    """
    for number, group in enumerate(groups):
        params = theirs.get(f"{GROUPS}{number}.params", ())
        if not isinstance(params, list | tuple) or len(params) != len(group["params"]):
            count = len(params) if isinstance(params, list | tuple) else "no list of"
            raise CheckpointError(
                f"{path} is of another optimizer: its group {number} has {count} parameters and this one's "
                f"{len(group['params'])}; build it over the same model, or load the model alone"
            )
        names = theirs.get(f"{GROUPS}{number}.param_names"), group.get("param_names")
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
    own_names = state_storage.own_settings(optimizer)
    for key, value in theirs.items():
        if not key.startswith(GROUPS):
            continue
        _, _, number, name = key.split(".", 3)
        live = optimizer.param_groups[int(number)].get(name, wanted[key])  # the state dict can differ from the group
        if not state_storage.can_take(name.partition(".")[0] in own_names, value, live):
            raise CheckpointError(
                f"{path} is of another optimizer, or damaged: its group {number} says {name} = {shown(value)}, where "
                f"this optimizer has {shown(live)}; choose another checkpoint, or load the model alone"
            )


def _averages_difference(stored: Iterable[str], wanted: Iterable[str]) -> str:
    """The rest of an error message if only one side has averages of weights; otherwise ""."""
    stored_has, live_has = (
        any(key.startswith(STATES) and key.endswith(f".{AVERAGE}") for key in keys) for keys in (stored, wanted)
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
    shapes = ((entry.size, getattr(value, "shape", None)) for _, entry, value in _tensors(stored, wanted, STATES))
    names = _parameter_names(optimizer)
    only_stored, only_live = sorted(stored_numbers - live_numbers), sorted(live_numbers - stored_numbers)
    prefixes = tuple(f"{STATES}{number}." for number in stored_numbers ^ live_numbers)
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
    numbers = {key.split(".")[2] for key in keys if key.startswith(STATES)}
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
        len({key.split(".")[2] for key in keys if key.startswith(GROUPS)}) for keys in (stored, wanted)
    )
    if stored_groups != live_groups:
        yield f"its number of groups is {stored_groups} and this one's {live_groups}"
    num_stored, num_live = len(_numbers(stored)), len(_numbers(wanted))
    if allocates and num_stored != num_live:
        yield f"it has states of {num_stored} parameters and this one of {num_live}"
    missing_keys, unexpected = _differing(stored, wanted, _OPTIMIZER)
    missing_options = [key for key in missing_keys if key.startswith(GROUPS)]
    if missing_options and stored_groups == live_groups:
        _, _, number, name = missing_options[0].split(".", 3)
        yield f"its group {number} has no {name!r}"
    if missing := sorted(set(missing_keys) - set(missing_options)):
        yield f"it lacks {len(missing)} of this one's tensors (first: {missing[:1]})"
    if unexpected := [key for key in unexpected if key.startswith(STATES)]:
        yield f"it has {len(unexpected)} tensors that this one lacks (first: {unexpected[:1]})"
    for key, entry, value in _tensors(stored, wanted, _OPTIMIZER):
        is_tensor = isinstance(value, Tensor)
        if not is_tensor or entry.properties.dtype != value.dtype or entry.size != value.shape:
            live_kind = _described(value.dtype, value.shape) if is_tensor else "no tensor"
            yield f"{key} is {_described(entry.properties.dtype, entry.size)} there and {live_kind} here"
            return
    yield from islice(_objects_for_tensors(stored, wanted, STATES), 1)


def _described(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{dtype} {list(size)}"


def _differing(stored: Iterable[str], wanted: Iterable[str], prefix: str) -> tuple[list[str], list[str]]:
    """(keys that the checkpoint lacks, keys that only the checkpoint has) among those with a prefix."""
    stored_keys, wanted_keys = ({key for key in keys if key.startswith(prefix)} for keys in (stored, wanted))
    return sorted(wanted_keys - stored_keys), sorted(stored_keys - wanted_keys)


def _tensors(stored: Stored, wanted: Mapping[str, Any], prefix: str) -> list[tuple[str, TensorStorageMetadata, Any]]:
    """(key, stored entry, live entry) of each tensor in the checkpoint that is loaded."""
    keys = [key for key in sorted(stored.keys() & wanted.keys()) if key.startswith(prefix)]
    entries = [(key, stored[key], wanted[key]) for key in keys]
    return [(key, entry, value) for key, entry, value in entries if isinstance(entry, TensorStorageMetadata)]


def _objects_for_tensors(stored: Stored, wanted: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Describe live tensors that are not tensors in the checkpoint."""
    for key in sorted(stored.keys() & wanted.keys()):
        value = wanted[key]
        if key.startswith(prefix) and isinstance(value, Tensor) and isinstance(stored[key], BytesStorageMetadata):
            yield f"{key} is no tensor there and {_described(value.dtype, value.shape)} here"


# Tied weights

_SUFFIXES = {"", *(part.key_suffix for fmt in FORMATS.values() for part in fmt.components)}
"""Key suffixes of the entries that determine a weight's values."""


def check_ties(reader: SafeReader, model: nn.Module, stepped: Iterable[Tensor]) -> None:
    """Check that tied weights have equal values in the checkpoint; otherwise a load would lose one of them.

    Each rank compares some of the pairs, so the caller must raise errors on all ranks. `stepped`: parameters whose
    optimizer states are loaded too. They need no check: if the weights were not tied in the checkpoint, the number of
    states differs.

    Raises:
        CheckpointError: two names that share one weight in this model have different values in the checkpoint.
    """
    first_names: dict[nn.Parameter, str] = {}
    stepped_ids = {id(param) for param in stepped}
    pairs = [
        (first_names[param], name)
        for name, param in model.named_parameters(remove_duplicate=False)
        if first_names.setdefault(param, name) != name and id(param) not in stepped_ids
    ]
    for first, alias in pairs[agreement.rank() :: agreement.rank_count()]:
        values, alias_values = (
            {
                suffix: reader.value(f"model.{name}{suffix}")
                for suffix in _SUFFIXES
                if f"model.{name}{suffix}" in reader.entries
            }
            for name in (first, alias)
        )
        if values and alias_values and not _are_equal(values, alias_values):
            raise CheckpointError(
                f"{reader.path} has other values for {alias} than for {first}, one tied weight in this model; load it "
                "into a model where they are not tied"
            )


def _are_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Whether tensors are equal bit for bit."""
    return one.keys() == two.keys() and all(
        value.dtype == two[suffix].dtype and torch.equal(_bytes(value), _bytes(two[suffix]))
        for suffix, value in one.items()
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
