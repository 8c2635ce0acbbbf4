"""Loading of optimizer states: copied into the live tensors without casts, or refused with the option that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from quantshard import private_torch, state_storage
from quantshard.errors import CheckpointError
from quantshard.foreign import shown
from quantshard.optimizers import guards
from quantshard.tensor import components

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

SAVED_OPTIONS = "build it with the options that it was saved with (dtypes, masters, ema_decay)"


def with_hooks(
    load_state_dict: Callable[[AnyOptimizer, dict[str, Any]], None],
) -> Callable[[AnyOptimizer, dict[str, Any]], None]:
    """Make a `load_state_dict` method run its registered hooks, as PyTorch's does.

    Pre-hooks can change the copy of the state dict that they get, or return another one.
    """

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
    """Load a state dict into an optimizer's live states and groups. Return whether this rank's states changed.

    Raises:
        CheckpointError: it belongs to other parameters or states; the message names the first difference.
    """
    # dcp_to_torch_save turns the integer keys of "state" into strings.
    groups, states = state_dict["param_groups"], state_dict["state"]
    _check_groups(groups, optimizer)
    entries = [
        (param, optimizer.state.get(param, {}), states.get(index, states.get(str(index), {})))
        for saved_group, group in zip(groups, optimizer.param_groups, strict=True)
        for index, param in zip(saved_group["params"], group["params"], strict=True)
    ]
    if any(map(_is_matched_by_name, groups)):
        _check_frozen(entries, names)
    loads = [(names[param], live, loaded) for param, live, loaded in entries]
    for name, live, loaded in loads:
        _check_states(name, live, loaded)
    changed = False
    for _, live, loaded in loads:
        for key, value in loaded.items():
            if isinstance(value, Tensor):
                changed |= _copied(private_torch.local_tensor(live[key]), private_torch.local_tensor(value), changed)
            else:
                live[key] = value
    for saved_group, group in zip(groups, optimizer.param_groups, strict=True):
        _load_group(group, saved_group)
    return changed


def _check_frozen(states: list[tuple[Tensor, dict[str, Any], Mapping[str, Any]]], names: Mapping[Tensor, str]) -> None:
    """Reject what `set_optimizer_state_dict` passes for frozen parameters: nothing, or the live states themselves.

    Raises:
        CheckpointError: names the first such parameter.
    """
    for param, live, loaded in states:
        if live and not param.requires_grad and all(loaded.get(key) is value for key, value in live.items() if loaded):
            raise CheckpointError(
                f"{names[param]} is frozen, and set_optimizer_state_dict does not load states of frozen parameters; "
                "call requires_grad_(True) for the load, then freeze it again"
            )


def _copied(live: Tensor, value: Tensor, is_known: bool) -> bool:
    """Copy a value into a live tensor. Return whether it changed; False without a comparison if `is_known`."""
    if is_known or live is value or live.data_ptr() == value.data_ptr():
        live.copy_(value)
        return False
    before = live.clone()
    live.copy_(value)
    return not torch.equal(before, live)


def _check_groups(saved: list[dict[str, Any]], optimizer: Optimizer) -> None:
    live_groups, settings = optimizer.param_groups, state_storage.own_settings(optimizer)
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, live_groups)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"the optimizer state has groups of {sizes[0]} parameters, this optimizer {sizes[1]}; build it over the "
            "same model"
        )
    for theirs, ours in zip(saved, live_groups, strict=True):
        if not _is_matched_by_name(theirs):
            _check_names(theirs.get("param_names"), ours.get("param_names"))
        for key in theirs.keys() & ours.keys() - {*state_storage.PARAMETER_ENTRIES}:
            if not state_storage.can_take(key in settings, theirs[key], ours[key]):
                raise CheckpointError(
                    f"the optimizer state says {key} = {shown(theirs[key])}, where this optimizer has "
                    f"{shown(ours[key])}; choose another checkpoint"
                )


def _is_matched_by_name(group: Mapping[str, Any]) -> bool:
    """Return True for a state dict from `set_optimizer_state_dict`, which matches states by parameter names.

    Its list of names then comes from whichever rank saved it, possibly one with other experts.
    """
    return any(isinstance(param, str) and not param.isdigit() for param in group["params"])


def _check_names(saved: list[str] | None, own: list[str] | None) -> None:
    if saved is None or own is None:
        return
    for index, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        if not components.is_same_name(theirs, ours):
            raise CheckpointError(
                f"parameter {index} of the optimizer state is {theirs!r}, of this optimizer {ours!r}; pass the same "
                "parameters in the same order"
            )


def _check_states(name: str, live: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    if live and not loaded:
        raise CheckpointError(
            f"{name}: the optimizer state has no entry for it; build this optimizer with the parameter frozen, as it "
            "was when the saved one was built"
        )
    if loaded.keys() != live.keys():
        raise CheckpointError(
            f"{name}: the optimizer state holds {sorted(loaded)}, this optimizer {sorted(live)}; {SAVED_OPTIONS}"
        )
    for key, value in loaded.items():
        want, got = _described(live[key]), _described(value)
        if want != got:
            raise CheckpointError(
                f"{name}: optimizer state {key} is {got}, this optimizer's is {want}; {SAVED_OPTIONS}, over the same "
                "model and mesh"
            )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return guards.kind(value)
    local = private_torch.local_tensor(value)
    return f"{local.dtype} {tuple(value.shape)} in {guards.kind(value)} (local {tuple(local.shape)})"


def _load_group(own: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Copy the entries of a saved group. Tensors are copied in place, because a captured step reads their addresses."""
    for key, value in saved.items():
        if key in state_storage.PARAMETER_ENTRIES:
            continue
        value, live = state_storage.as_setting(value, own.get(key)), own.get(key)
        if isinstance(live, Tensor):
            live.copy_(value.reshape(live.shape)) if isinstance(value, Tensor) else live.fill_(value)
        elif isinstance(live, tuple) and isinstance(value, list):  # set_optimizer_state_dict(full_state_dict=True)
            own[key] = tuple(value)
        else:
            own[key] = value.clone() if isinstance(value, Tensor) else value
