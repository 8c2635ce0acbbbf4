"""Whether a checkpoint fits a model and its optimizer: the same entries, of the same shapes and dtypes.

What does not fit is no damage: the run's other checkpoints do not fit either, so none is taken in its place.
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


def check_places(model: nn.Module) -> None:
    """Refuse a model whose entries have no place in a checkpoint that all ranks would find alike.

    Raises:
        ConfigurationError: the pieces of a parameter are not where DCP saves them and loads them to.
    """
    components.check_offsets(model.named_parameters())


def check_members(where: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer of other weights than a model's, after `state_dict()` of it has put sharded ones in place.

    It holds none of the model's parameters, and either quantized weights or, where the model is sharded, none that is:
    so it is no optimizer of masters that somebody made by hand.

    Raises:
        ConfigurationError: it is one.
    """
    own = list(model.parameters())
    held = [param for group in optimizer.param_groups for param in group["params"]]
    if not held or {*map(id, own)} & {*map(id, held)}:
        return
    is_before_sharding = any(isinstance(each, DTensor) for each in own) and not any(
        isinstance(each, DTensor) for each in held
    )
    if is_before_sharding or any(components.quantized_local(each) is not None for each in held):
        raise ConfigurationError(
            f"{where}: none of the {len(held)} parameters of this {type(optimizer).__name__} (the first of shape "
            f"{list(held[0].shape)}) is one of this {type(model).__name__}: it is another model's, or was made before "
            "convert, revert or fully_shard put others in their place; make it of this model's parameters, or give the "
            "module that holds its own"
        )


def elsewhere(stored: Iterable[str], model: nn.Module, numbers: ParameterNumbers | None) -> set[str]:
    """The keys of a checkpoint that belong to experts which other ranks hold."""
    if numbers is None and not any(process_groups.expert_axis(module) for module in model.modules()):
        return set()
    own = {key.removeprefix(_MODEL) for key in stored if key.startswith(_MODEL)}
    found = {_MODEL + key for key in state_keys.held_elsewhere(model, own)}
    states = [key for key in stored if key.startswith(_STATES)] if numbers is not None else []
    return found | {key for key in states if numbers and numbers.is_elsewhere(key.split(".")[2])}


def kept(stored: Stored, wanted: Collection[str], optimizer: Optimizer | None, own_seed: bool) -> set[str]:
    """Entries of the optimizer's groups that the checkpoint lacks and that stay as they are: none of its own, but for
    the seed with which it rounds, if `own_seed`: the one of the checkpoint rounded nothing."""
    if optimizer is None:
        return set()
    own = {"params", *components.own_settings(optimizer)} - ({ROUNDING_SEED} if own_seed else set())
    lacking = (key for key in wanted if key.startswith(_GROUPS) and key not in stored)
    return {key for key in lacking if _group_entry(key)[1].partition(".")[0] not in own}


def check_model(path: Path_, stored: Stored, wanted: Mapping[str, Any], casts: Collection[str] | None) -> None:
    """Refuse a checkpoint of another model.

    Args:
        stored, wanted: what the checkpoint has and what is loaded, by key; neither holds what is made anew.
        casts: the keys of plain tensors that may be cast; None for all.

    Raises:
        CheckpointError: naming the first entry, shape or dtype that differs, and what to do about it.
    """
    missing, unknown = _differing(stored, wanted, _MODEL)
    both = [found for found in _tensors(stored, wanted, _MODEL) if isinstance(found[2], Tensor)]
    differing = [*missing, *unknown, *[key for key, entry, value in both if entry.size != value.shape]]
    if differing and all(map(is_history, differing)):
        raise CheckpointError(
            f"{path} is of another recipe: {len(differing)} amax histories are there and not in this model, or the "
            f"reverse, or of another length (first: {differing[0]}); build the model with the recipe that the "
            "checkpoint was written with, or load it with requantize=True, which begins these histories anew"
        )
    if missing or unknown:
        raise CheckpointError(
            f"{path} is of another model: it lacks {len(missing)} of this model's tensors (first: "
            f"{missing[:1] or '-'}) and has {len(unknown)} that this one lacks (first: {unknown[:1] or '-'})"
        )
    if found := next(_objects_for_tensors(stored, wanted, _MODEL), None):
        raise CheckpointError(f"{path} is of another model: {found}")
    for key, _, value in both:
        if private_torch.local_tensor(value).is_meta:
            raise CheckpointError(
                f"{path}: {key} is on the meta device here, where loading does nothing; call reset_parameters() or "
                "to_empty() first"
            )
    for key, entry, value in both:
        if entry.size != value.shape:
            raise CheckpointError(
                f"{path} is of another model: {key} has shape {tuple(entry.size)} there and {tuple(value.shape)} here"
            )
    for key, entry, value in both:
        if casts is not None and key not in casts and entry.properties.dtype != value.dtype:
            raise CheckpointError(
                f"{path} is of another model: {key} is {entry.properties.dtype} there and {value.dtype} here; build "
                "the model with that dtype (params_dtype), or load with requantize=True, lossy=True to cast it"
            )


def check_optimizer(
    path: Path_, stored: Stored, wanted: Mapping[str, Any], optimizer: Optimizer, can_convert: bool
) -> None:
    """Refuse a checkpoint of another optimizer; arguments and errors as of `check_model`. `can_convert`: there are
    states in other dtypes, which a load by `requantize=True` would take."""
    reseeds = " and call the optimizer's reseed_masters()" if hasattr(optimizer, "reseed_masters") else ""
    alone = f"load the model alone{reseeds}"
    if not any(key.startswith(_OPTIMIZER) for key in stored):
        raise CheckpointError(f"{path} was saved without an optimizer; {alone}")
    if averages := _averages_difference(stored, wanted):
        raise CheckpointError(f"{path} has {averages}; or {alone}")
    if frozen := _frozen_difference(stored, wanted, optimizer):
        raise CheckpointError(f"{path} has {frozen}; or {alone}")
    if found := list(_optimizer_differences(stored, wanted, optimizer_states.allocates(optimizer))):
        raise CheckpointError(
            f"{path} is of another optimizer: {', '.join(found)}; build it with the options that it was saved with, "
            + ("load it with requantize=True, which takes states of other dtypes, " if can_convert else "")
            + f"or {alone}"
        )


def is_object(key: str, stored: Stored) -> bool:
    """Whether an entry is the optimizer's and no tensor in the checkpoint."""
    return key.startswith(_OPTIMIZER) and isinstance(stored[key], BytesStorageMetadata)


def parameter_entries(keys: Iterable[str]) -> list[str]:
    """The keys of groups' `components.PARAMETER_ENTRIES` among some."""
    return [key for key in keys if key.startswith(_GROUPS) and _group_entry(key)[1] in components.PARAMETER_ENTRIES]


def check_groups(path: Path_, theirs: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the states of other parameters, or of the same in another order; where either has no names, by their
    numbers alone.

    Args:
        theirs: what the checkpoint has under the `parameter_entries`.
        groups: those of the optimizer.

    Raises:
        CheckpointError: naming the first group, or parameter, that differs.
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
        for index, (saved, own) in enumerate(zip(*(found or () for found in names), strict=False)):
            if not components.is_same_name(str(saved), own):
                raise CheckpointError(
                    f"{path} is of another optimizer: parameter {index} of its group {number} is {str(saved)!r:.200} "
                    f"and this one's {own!r}; pass the same parameters in the same order, or load the model alone"
                )


def check_settings(path: Path_, theirs: Mapping[str, Any], wanted: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Refuse options of groups that no step could be made with: of another type than those that are there.

    Args:
        theirs: what the checkpoint has of the optimizer besides tensors.
        wanted: what the optimizer's state dict has, by the same keys.

    Raises:
        CheckpointError: naming the first.
    """
    own = components.own_settings(optimizer)
    for key, saved in theirs.items():
        if key.startswith(_STATES):
            _check_count(path, key, saved, wanted[key])
        if not key.startswith(_GROUPS):
            continue
        number, name = _group_entry(key)
        live = optimizer.param_groups[int(number)].get(name, wanted[key])  # its state dict may have it otherwise
        if not components.can_take(name.partition(".")[0] in own, saved, live):
            raise CheckpointError(
                f"{path} is of another optimizer, or damaged: its group {number} says {name} = {shown(saved)}, where "
                f"this optimizer has {shown(live)}; choose another checkpoint, or load the model alone"
            )


def _check_count(path: Path_, key: str, saved: Any, own: Any) -> None:
    """Refuse what is no number in the place of one of a state, such as the count of a stock optimizer's steps."""
    if isinstance(own, Tensor) and own.ndim == 0 and not components.can_take(True, saved, own):
        raise CheckpointError(
            f"{path} is damaged: {key} is {shown(saved)}, where this optimizer has a number; choose another "
            "checkpoint, or load the model alone"
        )


def _averages_difference(stored: Iterable[str], wanted: Iterable[str]) -> str:
    """What to do where only one side has averages of weights, in words."""
    theirs, ours = (
        any(key.startswith(_STATES) and key.endswith(f".{AVERAGE}") for key in keys) for keys in (stored, wanted)
    )
    if ours and not theirs:
        return (
            f"no averages of weights ({AVERAGE}), which this optimizer keeps; build it without ema_decay, load, and "
            "then call its begin_average(decay), so that they begin with the masters of now"
        )
    if theirs and not ours:
        return (
            f"averages of weights ({AVERAGE}), which this optimizer does not keep; build it with the ema_decay that it "
            "was saved with, load, and then call its drop_average() to go on without them"
        )
    return ""


def _frozen_difference(stored: Stored, wanted: Mapping[str, Any], optimizer: Optimizer) -> str:
    """What to do where parameters are frozen on one side alone, in words; "" where states differ in more."""
    theirs, ours = map(_numbers, (stored, wanted))
    shapes = ((entry.size, getattr(value, "shape", None)) for _, entry, value in _tensors(stored, wanted, _STATES))
    names = _parameter_names(optimizer)
    there, here = sorted(theirs - ours), sorted(ours - theirs)
    of_these = tuple(f"{_STATES}{number}." for number in theirs ^ ours)
    differing = [key for keys in _differing(stored, wanted, _OPTIMIZER) for key in keys]
    if not all(key.startswith(of_these) for key in differing) or any(own != size for size, own in shapes):
        return ""
    if bool(there) == bool(here) or max(there + here) >= len(names):
        return ""
    if here:
        return (
            f"no states of {len(here)} parameters that this optimizer trains (first: {names[here[0]][0]!r}); they were "
            "frozen there, or not given to it; freeze them with requires_grad_(False) before you build the optimizer, "
            "load, and to train them then unfreeze each and call initialize_state(parameter)"
        )
    if any(names[number][1].requires_grad for number in there):
        return ""
    return (
        f"states of {len(there)} parameters that were frozen before this optimizer was built (first: "
        f"{names[there[0]][0]!r}); build it while they are trained, load, and freeze them then"
    )


def _numbers(keys: Iterable[str]) -> set[int]:
    """Of the parameters that have states among these keys."""
    found = {key.split(".")[2] for key in keys if key.startswith(_STATES)}
    return {int(each) for each in found if each.isdecimal()}


def _parameter_names(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The parameters by number, with their names or what stands for these."""
    found: list[tuple[str, Tensor]] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"parameter {len(found) + at}" for at in range(len(group["params"]))]
        found += zip(names, group["params"], strict=True)
    return found


def _optimizer_differences(stored: Stored, wanted: Mapping[str, Any], allocates: bool) -> Iterator[str]:
    """The first difference of each kind, in words. `allocates`: whether the optimizer makes all states itself."""
    theirs, ours = (len({_group_entry(key)[0] for key in keys if key.startswith(_GROUPS)}) for keys in (stored, wanted))
    if theirs != ours:
        yield f"its number of groups is {theirs} and this one's {ours}"
    many, few = len(_numbers(stored)), len(_numbers(wanted))
    if allocates and many != few:
        yield f"it has states of {many} parameters and this one of {few}"
    lacking, unknown = _differing(stored, wanted, _OPTIMIZER)
    options = [key for key in lacking if key.startswith(_GROUPS)]
    if options and theirs == ours:
        number, name = _group_entry(options[0])
        yield f"its group {number} has no {name!r}"
    if missing := sorted(set(lacking) - set(options)):
        yield f"it lacks {len(missing)} of this one's tensors (first: {missing[:1]})"
    if unknown := [key for key in unknown if key.startswith(_STATES)]:
        yield f"it has {len(unknown)} tensors that this one lacks (first: {unknown[:1]})"
    for key, entry, value in _tensors(stored, wanted, _OPTIMIZER):
        there, here = _described(entry.properties.dtype, entry.size), "no tensor"
        if isinstance(value, Tensor):
            here = _described(value.dtype, value.shape)
        if there != here:
            yield f"{key} is {there} there and {here} here"
            return
    yield from islice(_objects_for_tensors(stored, wanted, _STATES, 0 if allocates else 1), 1)


def _described(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{dtype} {list(size)}"


def _group_entry(key: str) -> tuple[str, str]:
    number, _, name = key.removeprefix(_GROUPS).partition(".")
    return number, name


def _differing(stored: Iterable[str], wanted: Iterable[str], prefix: str) -> tuple[list[str], list[str]]:
    """Keys with a prefix that the checkpoint lacks, and those that it has and that are not wanted."""
    theirs, ours = ({key for key in keys if key.startswith(prefix)} for keys in (stored, wanted))
    return sorted(ours - theirs), sorted(theirs - ours)


def _tensors(
    stored: Stored, wanted: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, TensorStorageMetadata, Any]]:
    """What is a tensor in the checkpoint, with what is wanted under its key."""
    for key in sorted(stored.keys() & wanted.keys()):
        entry = stored[key]
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            yield key, entry, wanted[key]


def _objects_for_tensors(stored: Stored, wanted: Mapping[str, Any], prefix: str, least: int = 0) -> Iterator[str]:
    """What is a tensor here, of so many dims at `least`, and none in the checkpoint, in words.

    Of the counts of a stock optimizer's steps earlier versions of PyTorch made numbers.
    """
    for key in sorted(stored.keys() & wanted.keys()):
        value = wanted[key]
        if key.startswith(prefix) and isinstance(value, Tensor) and isinstance(stored[key], BytesStorageMetadata):
            if value.ndim >= least:
                yield f"{key} is no tensor there and {_described(value.dtype, value.shape)} here"
