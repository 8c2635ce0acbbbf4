"""The optimizer's part of a checkpoint: what is saved, and the state dict that a load writes into.

A stock `torch.optim` optimizer creates a parameter's states in its first step, so a new optimizer has no states to load
into. They are created here for the parameters that have states in the checkpoint, by a step with zero gradients on a
zero parameter that stands for the model's.
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
"""Prefix of the keys of states, followed by the parameter's number and the state's name."""

GROUPS = "optimizer.param_groups."
"""Prefix of the keys of group entries, followed by the group's number and the entry's name."""

Entries = Mapping[str, STORAGE_TYPES]


def saved(optimizer: Optimizer, numbers: ParameterNumbers | None) -> dict[str, Any]:
    """The optimizer's state dict, with the parameter names and numbers of a checkpoint.

    Raises:
        ConfigurationError: the optimizer's `step()` needs a closure, so a load could not create its states.
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
    """The optimizer's state dict as the target of a load.

    Parameters get states if the checkpoint has some for them. The optimizer and its parameters are not changed. A
    collective call if the optimizer's step on sharded parameters is one.
    """
    state = state_to_fill(optimizer)
    _add_entries_of_others(state["param_groups"], stored, components.own_settings(optimizer))
    if numbers is not None:
        return numbers.to_checkpoint(state)
    if allocates(optimizer):
        return state
    by_number = _by_number(stored)
    without_states = {number for number in state["state"] if isinstance(number, int)} - by_number.keys()
    state["state"] = {key: value for key, value in state["state"].items() if key not in without_states}
    numbered = enumerate((param, group) for group in optimizer.param_groups for param in group["params"])
    for number, (param, group) in numbered:
        stored_state = by_number.get(number, {})
        if not _covers(state["state"].get(number, {}), stored_state):
            state["state"][number] = _made(optimizer, group, param, stored_state)
    return state


def _add_entries_of_others(groups: list[dict[str, Any]], stored: Entries, own: set[str]) -> None:
    """Add placeholders for group entries of other code than the optimizer, e.g. a scheduler's `initial_lr`."""
    for key, entry in stored.items():
        number, _, name = key.removeprefix(GROUPS).partition(".")
        if not key.startswith(GROUPS) or not number.isdecimal() or int(number) >= len(groups):
            continue
        is_value = isinstance(entry, BytesStorageMetadata) and "." not in name
        if is_value and name not in own | {*components.PARAMETER_ENTRIES}:
            groups[int(number)].setdefault(name, None)


def _by_number(stored: Entries) -> dict[int, dict[str, STORAGE_TYPES]]:
    """The checkpoint's state entries by parameter number and state name."""
    states: dict[int, dict[str, STORAGE_TYPES]] = {}
    for key, entry in stored.items():
        number, _, name = key.removeprefix(STATES).partition(".")
        if key.startswith(STATES) and number.isdecimal():
            states.setdefault(int(number), {})[name] = entry
    return states


def allocates(optimizer: Optimizer) -> bool:
    """Whether the optimizer creates all its states at construction, as quantshard's do, and loads into them."""
    return hasattr(optimizer, "initialize_state")


def _covers(own: Mapping[str, Any], theirs: Entries) -> bool:
    """Whether a live state has an entry for each stored one, by flattened key."""
    flat = private_torch.flatten_state_dict(dict(own))[0]
    return all(key in flat and (not _is_tensor(entry) or flat[key] is not None) for key, entry in theirs.items())


def _is_tensor(entry: STORAGE_TYPES) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def _made(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor, theirs: Entries) -> dict[str, Any]:
    """A new state for a parameter: the result of a first step, and later entries whose layout can be inferred."""
    state = _first(optimizer, group, param)
    flat = private_torch.flatten_state_dict(state)[0]
    for key, entry in theirs.items():
        if not isinstance(entry, TensorStorageMetadata):
            if flat.get(key) is None and "." not in key:
                state[key] = None  # placeholder for an object
        elif flat.get(key) is None and "." not in key:
            if entry.size == param.shape:
                state[key] = components.zeros_like(param, entry.properties.dtype)
            elif not entry.size:
                state[key] = torch.zeros((), dtype=entry.properties.dtype, device="cpu")
    return state


def _first(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The state after a first step; {} if this optimizer cannot run a step on its own."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return {}  # a step of the inner optimizer would change the model
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in components.PARAMETER_ENTRIES}
    probe = nn.Parameter(components.zeros_like(param, param.dtype))
    probe.grad = components.zeros_like(param, param.dtype)
    device = private_torch.local_tensor(param).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            return private_torch.first_state(optimizer, settings, probe)
        except Exception:  # user code can raise anything; `fit` then reports the missing states
            return {}


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], numbers: ParameterNumbers | None) -> None:
    """Load a state dict of `to_load`, without casting any state.

    Stock `load_state_dict` casts states to the dtype of their parameter, so float32 states of 16-bit weights would lose
    bits.
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
