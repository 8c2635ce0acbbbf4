"""Loading of optimizer states: copied into the live tensors without casts, or refused with the option that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from quantshard import private_torch, state_storage
from quantshard.errors import CheckpointError, shown
from quantshard.optimizers.base import layout
from quantshard.tensor import components

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

SAVED_OPTIONS = "build it with the options that it was saved with (dtypes, masters, ema_decay)"


def with_hooks(
    load_state_dict: Callable[[AnyOptimizer, dict[str, Any]], None],
) -> Callable[[AnyOptimizer, dict[str, Any]], None]:
    """Make a `load_state_dict` method run its registered hooks, as PyTorch's does. Pre-hooks can change or replace a
    copy of the state dict."""

    @wraps(load_state_dict)
    def hooked(self: AnyOptimizer, state_dict: dict[str, Any]) -> None:
        before, after = private_torch.load_hooks(self)
        state_dict = dict(state_dict)
        for hook in before:
            returned = hook(self, state_dict)
            state_dict = state_dict if returned is None else returned
        load_state_dict(self, state_dict)
        for hook in after:
            hook(self)

    return hooked


def load_optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any], names: Mapping[Tensor, str]) -> bool:
    """Load a state dict into an optimizer's live states and groups. Return whether this rank's states changed."""
    # dcp_to_torch_save turns the integer keys of "state" into strings.
    groups, states = state_dict["param_groups"], state_dict["state"]
    _check_groups(groups, optimizer)
    entries = [
        (param, optimizer.state.get(param, {}), states.get(index, states.get(str(index), {})))
        for saved_group, group in zip(groups, optimizer.param_groups, strict=True)
        for index, param in zip(saved_group["params"], group["params"], strict=True)
    ]
    matched_by_name = any(map(_is_matched_by_name, groups))
    for param, live, loaded in entries:
        # For frozen parameters set_optimizer_state_dict passes nothing, or the live states themselves.
        is_live = all(loaded.get(key) is value for key, value in live.items() if loaded)
        if matched_by_name and live and not param.requires_grad and is_live:
            raise CheckpointError(
                f"{names[param]} is frozen, and set_optimizer_state_dict does not load its states; call "
                "requires_grad_(True) for the load, then freeze it again"
            )
        _check_states(names[param], live, loaded)
    changed = False
    for _, live, loaded in entries:
        for key, value in loaded.items():
            if isinstance(value, Tensor):
                changed |= _copy(private_torch.local_tensor(live[key]), private_torch.local_tensor(value), changed)
            else:
                live[key] = value
    for saved_group, group in zip(groups, optimizer.param_groups, strict=True):
        _load_group(group, saved_group)
    return changed


def _copy(live: Tensor, value: Tensor, is_known: bool) -> bool:
    """Copy a value into a live tensor. Return whether it changed; False without a comparison if `is_known`."""
    if is_known or live is value or live.data_ptr() == value.data_ptr():
        live.copy_(value)
        return False
    before = live.clone()
    live.copy_(value)
    return not torch.equal(before, live)


def _check_groups(saved: list[dict[str, Any]], optimizer: Optimizer) -> None:
    live_groups, settings = optimizer.param_groups, state_storage.own_settings(optimizer)
    saved_sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (saved, live_groups))
    if saved_sizes != own_sizes:
        raise CheckpointError(
            f"the optimizer state has groups of {saved_sizes} parameters, this optimizer {own_sizes}; build it over "
            "the same model"
        )
    for saved_group, group in zip(saved, live_groups, strict=True):
        saved_names, names = saved_group.get("param_names"), group.get("param_names")
        if saved_names is not None and names is not None and not _is_matched_by_name(saved_group):
            for index, (saved_name, name) in enumerate(zip(saved_names, names, strict=True)):
                if not components.is_same_name(saved_name, name):
                    raise CheckpointError(
                        f"parameter {index} of the optimizer state is {saved_name!r}, of this optimizer {name!r}; pass "
                        "the same parameters in the same order"
                    )
        for key in saved_group.keys() & group.keys() - {*state_storage.PARAMETER_ENTRIES}:
            if not state_storage.can_take(key in settings, saved_group[key], group[key]):
                raise CheckpointError(
                    f"the optimizer state says {key} = {shown(saved_group[key])}, where this optimizer has "
                    f"{shown(group[key])}; choose another checkpoint"
                )


def _is_matched_by_name(group: Mapping[str, Any]) -> bool:
    """Return True for a state dict from `set_optimizer_state_dict`, which matches states by parameter names.

    Its list of names then comes from whichever rank saved it, possibly one with other experts.
    """
    return any(isinstance(param, str) and not param.isdigit() for param in group["params"])


def _check_states(name: str, live: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    if live and not loaded:
        raise CheckpointError(
            f"{name}: the optimizer state has no entry for it; freeze the parameter before this optimizer is built, as "
            "in the saved run"
        )
    if loaded.keys() != live.keys():
        raise CheckpointError(
            f"{name}: the optimizer state holds {sorted(loaded)}, this optimizer {sorted(live)}; {SAVED_OPTIONS}"
        )
    for key, value in loaded.items():
        expected, found = _described(live[key]), _described(value)
        if expected != found:
            raise CheckpointError(
                f"{name}: optimizer state {key} is {found}, this optimizer's is {expected}; {SAVED_OPTIONS}, over the "
                "same model and mesh"
            )


def _described(value: Any) -> str:
    return (
        f"{private_torch.local_tensor(value).dtype} in {layout(value)}" if isinstance(value, Tensor) else layout(value)
    )


def _load_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Copy the entries of a saved group. Tensors are copied in place, because a captured step reads their addresses."""
    for key, value in saved.items():
        if key in state_storage.PARAMETER_ENTRIES:
            continue
        value, live = state_storage.as_setting(value, group.get(key)), group.get(key)
        if isinstance(live, Tensor):
            live.copy_(value.reshape(live.shape)) if isinstance(value, Tensor) else live.fill_(value)
        elif isinstance(live, tuple) and isinstance(value, list):  # set_optimizer_state_dict(full_state_dict=True)
            group[key] = tuple(value)
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value
