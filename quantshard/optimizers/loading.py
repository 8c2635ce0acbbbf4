"""Loading of optimizer states: copied into the live tensors without casts, or refused with the option that differs.

Also which parameter groups an optimizer takes; `checkpoints.load` checks groups of any optimizer by the same rules.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quantshard import private_torch
from quantshard.errors import CheckpointError, shown
from quantshard.optimizers.checks import layout
from quantshard.tensor import component_loading

SAVED_OPTIONS = "build it with the options that it was saved with (dtypes, masters, ema_decay)"


def load_optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any], names: Mapping[Tensor, str]) -> bool:
    """Load a state dict into an optimizer's live states and groups. Return whether this rank's states changed."""
    # dcp_to_torch_save turns the integer keys of "state" into strings.
    groups, states = state_dict["param_groups"], state_dict["state"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(f"the optimizer state has {len(groups)} groups, not {len(optimizer.param_groups)}")
    own_names = own_settings(optimizer)
    for number, (saved_group, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        check_group(f"the optimizer state is of another optimizer: its group {number}", saved_group, group, own_names)
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
            raise CheckpointError(f"{names[param]} is frozen, which set_optimizer_state_dict skips; freeze it after")
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


def _check_states(name: str, live: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    if live and not loaded:
        raise CheckpointError(f"{name}: the optimizer state has no entry; freeze it before this optimizer is built")
    if loaded.keys() != live.keys():
        raise CheckpointError(f"{name}: state holds {sorted(loaded)}, this optimizer {sorted(live)}; {SAVED_OPTIONS}")
    for key, value in loaded.items():
        expected, actual = _described(live[key]), _described(value)
        if expected != actual:
            raise CheckpointError(f"{name}: optimizer state {key} is {actual}, not {expected}; {SAVED_OPTIONS}")


def _described(value: Any) -> str:
    return (f"{private_torch.local_tensor(value).dtype} in " if isinstance(value, Tensor) else "") + layout(value)


PARAMETER_ENTRIES = ("params", "param_names")
"""Entries of an optimizer's group that list its parameters. All other entries are options."""

_LARGEST_INTEGER = (1 << 63) - 1  # PyTorch stores Python's integers as int64


def own_settings(optimizer: Optimizer) -> set[str]:
    """Names of the options that the optimizer itself puts into a group; an LR scheduler adds `initial_lr`, say."""
    return {*optimizer.defaults, *getattr(optimizer, "group_entries", ())}


def check_group(where: str, saved: Mapping[str, Any], group: Mapping[str, Any], own_names: Container[str]) -> None:
    """Check that a saved group has the parameters of a live one, in the same order, and options of the same types.
    Parameters are compared by name, or by their number if one side has no names. `own_names`: see `own_settings`."""
    params = saved.get("params")
    if not isinstance(params, list | tuple) or len(params) != len(group["params"]):
        count = len(params) if isinstance(params, list | tuple) else "no list of"
        raise CheckpointError(f"{where} has {count} parameters, not {len(group['params'])}; load the model alone")
    names = () if _is_matched_by_name(saved) else saved.get("param_names") or ()
    for index, (old, new) in enumerate(zip(names, group.get("param_names") or (), strict=False)):
        if not component_loading.is_same_name(str(old), new):
            difference = f"{str(old)!r:.200} as parameter {index}, not {new!r}"
            raise CheckpointError(
                f"{where} has {difference}; pass the same parameters in order, or load the model alone"
            )
    for name in saved.keys() & group.keys() - {*PARAMETER_ENTRIES}:
        # any value replaces an option of others, such as an LR scheduler
        is_checked = name.partition(".")[0] in own_names or isinstance(group[name], bool | int | float | Tensor)
        if is_checked and not _is_like(saved[name], group[name]):
            difference = f"{name} = {shown(saved[name])}, and this optimizer has {shown(group[name])}"
            raise CheckpointError(f"{where} has {difference}; choose another checkpoint, or load the model alone")


def _is_matched_by_name(group: Mapping[str, Any]) -> bool:
    """Return True for a state dict of `set_optimizer_state_dict`, which can name experts of other ranks."""
    return any(isinstance(param, str) and not param.isdigit() for param in group["params"])


def _is_like(saved: Any, own: Any) -> bool:
    if own is None:
        return True
    if saved is None:
        return isinstance(own, bool | str)
    if isinstance(own, tuple | list):
        is_list = isinstance(saved, tuple | list) and len(saved) == len(own)
        return is_list and all(_is_like(saved_item, own_item) for saved_item, own_item in zip(saved, own, strict=True))
    if isinstance(own, bool | int | float | Tensor):
        if isinstance(saved, Tensor):
            return not saved.is_complex() and (saved.numel() == 1 or saved.shape == getattr(own, "shape", None))
        return isinstance(saved, float) or (isinstance(saved, int) and abs(saved) <= _LARGEST_INTEGER)
    return type(saved) is type(own)


def as_setting(saved: Any, own: Any) -> Any:
    """Convert a saved option to the form of `own`: a one-element tensor becomes a number where `own` is a number."""
    is_number = isinstance(own, bool | int | float) and isinstance(saved, Tensor)
    return saved.item() if is_number and saved.numel() == 1 else saved


def _load_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Copy the entries of a saved group. Tensors are copied in place, because a captured step reads their addresses."""
    for key, value in saved.items():
        if key in PARAMETER_ENTRIES:
            continue
        value, live = as_setting(value, group.get(key)), group.get(key)
        if isinstance(live, Tensor):
            live.copy_(value.reshape(live.shape)) if isinstance(value, Tensor) else live.fill_(value)
        elif isinstance(live, tuple) and isinstance(value, list):  # set_optimizer_state_dict(full_state_dict=True)
            group[key] = tuple(value)
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value
