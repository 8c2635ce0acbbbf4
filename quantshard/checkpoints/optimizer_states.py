"""The optimizer's part of a checkpoint: what is saved, and the state dict that a load writes into.

A stock `torch.optim` optimizer creates states in its first step. For a load they are created here, by a step with zero
gradients on a zero parameter that stands for the model's. Under expert parallelism, a checkpoint numbers parameters as
one process with all experts would (`ParameterNumbers`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard import limits, private_torch
from quantshard.collectives import process_groups
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.grouped_linear import GroupedLinear
from quantshard.optimizers.loading import PARAMETER_ENTRIES, own_settings
from quantshard.tensor import components

STATES = "optimizer.state."
"""Prefix of the keys of states, followed by the parameter's number and the state's name."""

GROUPS = "optimizer.param_groups."
"""Prefix of the keys of group entries, followed by the group's number and the entry's name."""

Entries = Mapping[str, STORAGE_TYPES]
Group = Mapping[str, Any]
V = TypeVar("V")


def check_members(where: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Check that an optimizer belongs to a model. Call it after `model.state_dict()`, which reshards parameters."""
    model_params = list(model.parameters())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params or {*map(id, model_params)} & {*map(id, params)}:
        return
    # hand-made masters are neither quantized, nor unsharded while the model is sharded
    are_sharded = [any(isinstance(param, DTensor) for param in members) for members in (model_params, params)]
    if are_sharded == [True, False] or any(components.quantized_local(p) is not None for p in params):
        problem = f"{where}: none of the {len(params)} parameters of this {type(optimizer).__name__} is in this"
        raise ConfigurationError(f"{problem} {type(model).__name__}; build it after convert, revert or fully_shard")


def saved(optimizer: Optimizer, numbers: ParameterNumbers | None) -> dict[str, Any]:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:  # then a load could not create its states
        raise ConfigurationError(limits.refusal("closure optimizer", type(optimizer).__name__))
    state: dict[str, Any] = optimizer.state_dict()
    for group in state["param_groups"]:
        if "param_names" in group:
            group["param_names"] = [components.canonical_name(name) for name in group["param_names"]]
    return state if numbers is None else numbers.to_checkpoint(state)


def to_load(optimizer: Optimizer, stored: Entries, numbers: ParameterNumbers | None) -> dict[str, Any]:
    """The optimizer's state dict to load into, with all states that the checkpoint has. Can be a collective call."""
    # unlike `state_dict`, `state_dict_to_fill` does not raise after bad steps, since a load repairs them
    state: dict[str, Any] = getattr(optimizer, "state_dict_to_fill", optimizer.state_dict)()
    _add_entries_of_others(state["param_groups"], stored, own_settings(optimizer))
    if numbers is not None:
        return numbers.to_checkpoint(state)
    if allocates(optimizer):
        return state
    stored_states = by_number(stored)
    without_states = {number for number in state["state"] if isinstance(number, int)} - stored_states.keys()
    state["state"] = {key: value for key, value in state["state"].items() if key not in without_states}
    numbered = enumerate((param, group) for group in optimizer.param_groups for param in group["params"])
    for number, (param, group) in numbered:
        stored_state = stored_states.get(number, {})
        if not _covers(state["state"].get(number, {}), stored_state):
            state["state"][number] = _new_state(optimizer, group, param, stored_state)
    return state


def _add_entries_of_others(groups: list[dict[str, Any]], stored: Entries, own_names: set[str]) -> None:
    """Add placeholders for group entries of other code than the optimizer, e.g. a scheduler's `initial_lr`."""
    for key, entry in stored.items():
        number, _, name = key.removeprefix(GROUPS).partition(".")
        if not key.startswith(GROUPS) or not number.isdecimal() or int(number) >= len(groups):
            continue
        is_value = isinstance(entry, BytesStorageMetadata) and "." not in name
        if is_value and name not in own_names | {*PARAMETER_ENTRIES}:
            groups[int(number)].setdefault(name, None)


def by_number(entries: Mapping[str, V]) -> dict[int | None, dict[str, V]]:
    states: dict[int | None, dict[str, V]] = {}
    for key, entry in entries.items():
        number, _, name = key.removeprefix(STATES).partition(".")
        if key.startswith(STATES) and number.isdecimal():
            states.setdefault(int(number), {})[name] = entry
    return states


def allocates(optimizer: Optimizer) -> bool:
    """Whether the optimizer creates all its states at construction, as quantshard's do, and loads into them."""
    return hasattr(optimizer, "initialize_state")


def _covers(live: Mapping[str, Any], stored: Entries) -> bool:
    flat = private_torch.flatten_state_dict(dict(live))[0]
    return all(
        key in flat and (not isinstance(entry, TensorStorageMetadata) or flat[key] is not None)
        for key, entry in stored.items()
    )


def _new_state(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor, stored: Entries) -> dict[str, Any]:
    """A new state for a parameter: the result of a first step, and later entries whose layout can be inferred."""
    state = _first_state(optimizer, group, param)
    flat = private_torch.flatten_state_dict(state)[0]
    for key, entry in stored.items():
        if flat.get(key) is not None or "." in key:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            state[key] = None  # placeholder for an object
        elif entry.size == param.shape:
            state[key] = components.zeros_like(param, entry.properties.dtype)
        elif not entry.size:
            state[key] = torch.zeros((), dtype=entry.properties.dtype, device="cpu")
    return state


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The state after a first step; {} if this optimizer cannot run a step on its own."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return {}  # a step of the inner optimizer would change the model
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in PARAMETER_ENTRIES}
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
    """Load a state dict of `to_load`, without casting any state as stock `load_state_dict` does."""
    optimizer.load_state_dict(dict(state) if numbers is None else numbers.from_checkpoint(state, optimizer))
    if allocates(optimizer):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        live = optimizer.state.get(param, {})
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and live[key].dtype != value.dtype:
                live[key] = value


def expert_layers(model: nn.Module) -> dict[str, GroupedLinear]:
    """The layers whose experts are on several ranks, by the prefix of their keys."""
    return {
        f"{components.canonical_name(name)}." if name else "": module
        for name, module in model.named_modules()
        if isinstance(module, GroupedLinear) and process_groups.expert_axis(module) is not None
    }


@dataclass(frozen=True)
class ParameterNumbers:
    """The parameter numbers of an optimizer, under expert parallelism.

    `local`: the number of each local parameter, in the optimizer's order. `groups`: the parameter entries of each
    group, as in one process. `digest`: a hash of all names, compared between ranks by `check_alike`.
    """

    local: Sequence[int]
    groups: Sequence[Group]
    digest: str

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> ParameterNumbers | None:
        """The numbers for a model and its optimizer, without communication; None without expert parallelism."""
        layers = expert_layers(model)
        if not layers:
            return None
        names = {id(param): name for name, param in reversed(components.named_parameters(model).items())}
        numbers: list[int] = []
        groups: list[Group] = []
        names_by_group: list[list[str]] = []
        for group in optimizer.param_groups:
            local_names = [names.get(id(param), "") for param in group["params"]]
            all_names, local_set = list(_of_all_ranks(local_names, layers)), {*local_names}
            offset = sum(map(len, names_by_group))
            number_of = {name: offset + index for index, name in enumerate(all_names)}
            is_in_order = [name for name in all_names if name in local_set] == local_names
            is_split = any(name in number_of for names in names_by_group for name in names)  # e.g. a group per expert
            # states of the first step, parameters of another model, and experts out of order have no numbers
            if not allocates(optimizer) or not is_in_order or is_split:
                raise UnsupportedOperationError(limits.refusal("unnamed states", type(optimizer).__name__))
            numbers += [number_of[name] for name in local_names]
            name_entry = {"param_names": all_names} if "param_names" in group else {}
            groups.append({"params": list(number_of.values()), **name_entry})
            names_by_group.append(all_names)
        return ParameterNumbers(numbers, groups, sha256(repr(names_by_group).encode()).hexdigest())

    def to_checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        states = {self.local[number]: value for number, value in state["state"].items()}
        pairs = zip(state["param_groups"], self.groups, strict=True)
        return {**state, "state": states, "param_groups": [{**group, **entries} for group, entries in pairs]}

    def from_checkpoint(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        local_index = {number: index for index, number in enumerate(self.local)}
        states = {local_index[number]: value for number, value in state["state"].items()}
        groups, first = [], 0
        for live_group, stored_group in zip(optimizer.param_groups, state["param_groups"], strict=True):
            entries = {key: live_group[key] for key in PARAMETER_ENTRIES if key in live_group}
            entries["params"] = list(range(first, first + len(live_group["params"])))
            first += len(live_group["params"])
            groups.append({**stored_group, **entries})
        return {**state, "state": states, "param_groups": groups}

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        count = sum(len(group["params"]) for group in self.groups)
        return frozenset(map(str, {*range(count)} - {*self.local}))


def check_alike(digests: Iterable[str | None], optimizer: Optimizer | None) -> None:
    """Check that ranks have the same parameter names; not so e.g. if one rank's experts of a layer are all frozen."""
    if optimizer is not None and len({*digests}) > 1:
        raise UnsupportedOperationError(limits.refusal("unnamed states", type(optimizer).__name__))


def numbers_of(optimizer: Optimizer, known: ParameterNumbers | None) -> dict[int, int]:
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    return dict(zip(map(id, params), known.local if known else range(len(params)), strict=True))


def _of_all_ranks(names: Iterable[str], layers: Mapping[str, GroupedLinear]) -> Iterator[str]:
    """Insert the names of other ranks' experts into this rank's parameter names, in the order of one process."""

    def owner(name: str) -> str:
        prefix = f"{name.rpartition('.')[0]}." if "." in name else ""
        return prefix if prefix in layers else f"\n{name}"

    for prefix, names_of_owner in groupby(names, owner):
        if prefix not in layers:
            yield prefix.removeprefix("\n")
            continue
        local_names = [name.removeprefix(prefix) for name in names_of_owner]
        experts = [layers[prefix].of_every_expert(name) for name in local_names]
        kinds = experts[: len({*map(tuple, experts)})]  # one list per parameter of an expert: weight, bias
        for names_of_kind in zip(*kinds, strict=True):
            yield from (prefix + name for name in names_of_kind)
