"""An optimizer's part of a checkpoint: what is saved of it, and what a load writes into.

A stock `torch.optim` optimizer makes the states of a parameter in its first step, so one that was just built has none
to load into. They are made here, for those parameters that have states in the checkpoint: of the kinds that a step with
a gradient of zeros gives to a parameter of zeros that stands for the model's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata, TensorStorageMetadata
from torch.optim import Optimizer

from quantshard import limits, private_torch
from quantshard.checkpoints.parameter_numbers import ParameterNumbers, state_to_fill
from quantshard.errors import ConfigurationError
from quantshard.tensor import components

STATES = "optimizer.state."
"""What the keys of states begin with: this, the parameter's number, and the state's own name."""

GROUPS = "optimizer.param_groups."
"""What the keys of group entries begin with: this, the group's number, and the entry's own name."""

Entries = Mapping[str, STORAGE_TYPES]


def saved(optimizer: Optimizer, numbers: ParameterNumbers | None) -> dict[str, Any]:
    """The optimizer's state dict, with parameters named as the model's entries are, and its numbers.

    Raises:
        ConfigurationError: its `step()` needs a closure, so its states could not be made for a load.
    """
    _check_step(optimizer)
    state: dict[str, Any] = optimizer.state_dict()
    for group in state["param_groups"]:
        if "param_names" in group:
            group["param_names"] = [components.canonical_name(name) for name in group["param_names"]]
    return state if numbers is None else numbers.to_checkpoint(state)


def _check_step(optimizer: Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(limits.refusal("states of closures", type(optimizer).__name__))


def to_load(optimizer: Optimizer, stored: Entries, numbers: ParameterNumbers | None) -> dict[str, Any]:
    """The state dict of an optimizer, with states for those parameters that have some in the checkpoint, and its
    numbers.

    The optimizer and its parameters stay as they are. A collective call where its step is one on sharded parameters.
    """
    state = state_to_fill(optimizer)
    _add_entries_of_others(state["param_groups"], stored, components.own_settings(optimizer))
    if numbers is not None:
        return numbers.to_checkpoint(state)
    if allocates(optimizer):
        return state
    by_number = _by_number(stored)
    lacking = {number for number in state["state"] if isinstance(number, int)} - by_number.keys()
    state["state"] = {key: own for key, own in state["state"].items() if key not in lacking}
    numbered = enumerate((param, group) for group in optimizer.param_groups for param in group["params"])
    for number, (param, group) in numbered:
        theirs = by_number.get(number, {})
        if not _covers(state["state"].get(number, {}), theirs):
            state["state"][number] = _made(optimizer, group, param, theirs)
    return state


def _add_entries_of_others(groups: list[dict[str, Any]], stored: Entries, own: set[str]) -> None:
    """Make a place for group entries that others than the optimizer saved, such as a scheduler's `initial_lr`."""
    for key, entry in stored.items():
        number, _, name = key.removeprefix(GROUPS).partition(".")
        if not key.startswith(GROUPS) or not number.isdecimal() or int(number) >= len(groups):
            continue
        is_value = isinstance(entry, BytesStorageMetadata) and "." not in name
        if is_value and name not in own | {*components.PARAMETER_ENTRIES}:
            groups[int(number)].setdefault(name, None)


def _by_number(stored: Entries) -> dict[int, dict[str, STORAGE_TYPES]]:
    """The states of a checkpoint: of each parameter's number, its entries by their names."""
    found: dict[int, dict[str, STORAGE_TYPES]] = {}
    for key, entry in stored.items():
        number, _, name = key.removeprefix(STATES).partition(".")
        if key.startswith(STATES) and number.isdecimal():
            found.setdefault(int(number), {})[name] = entry
    return found


def allocates(optimizer: Optimizer) -> bool:
    """Whether it makes all states when it is built, as ours do, and loads into these."""
    return hasattr(optimizer, "initialize_state")


def _covers(own: Mapping[str, Any], theirs: Entries) -> bool:
    """Whether a state has what is to be loaded into it, by the keys of its entries in a checkpoint."""
    flat = private_torch.flatten_state_dict(dict(own))[0]
    return all(key in flat and (not _is_tensor(entry) or flat[key] is not None) for key, entry in theirs.items())


def _is_tensor(entry: STORAGE_TYPES) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def _made(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor, theirs: Entries) -> dict[str, Any]:
    """A state for a parameter: what a first step makes, and what only later ones do as far as its layout is clear."""
    made = _first(optimizer, group, param)
    flat = private_torch.flatten_state_dict(made)[0]
    for key, entry in theirs.items():
        if not isinstance(entry, TensorStorageMetadata):
            if flat.get(key) is None and "." not in key:
                made[key] = None  # to be read as an object
        elif flat.get(key) is None and "." not in key:
            if entry.size == param.shape:
                made[key] = components.zeros_like(param, entry.properties.dtype)
            elif not entry.size:
                made[key] = torch.zeros((), dtype=entry.properties.dtype, device="cpu")
    return made


def _first(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The state after a first step; {} if this optimizer cannot make it by itself."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return {}  # a step of one within it would be a step of the model
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in components.PARAMETER_ENTRIES}
    probe = nn.Parameter(components.zeros_like(param, param.dtype))
    probe.grad = components.zeros_like(param, param.dtype)
    device = private_torch.local_tensor(param).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            return private_torch.first_state(optimizer, settings, probe)
        except Exception:  # a class of the caller's can fail in any way; the comparison then names what is missing
            return {}


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], numbers: ParameterNumbers | None) -> None:
    """Load a state dict of `to_load`, without casting any state.

    Stock `load_state_dict` casts states to the dtype of their parameter, which loses bits of float32 states of 16-bit
    weights.
    """
    optimizer.load_state_dict(dict(state) if numbers is None else numbers.from_checkpoint(state, optimizer))
    if allocates(optimizer):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        live = optimizer.state.get(param, {})
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and live[key].dtype != value.dtype:
                live[key] = value
