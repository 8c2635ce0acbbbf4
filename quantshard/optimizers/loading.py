"""Loading an optimizer's state: copied into the live tensors, never cast, or refused with the option that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.errors import CheckpointError
from quantshard.optimizers.state import MASTER, MOMENTS, REMAINDER_SUFFIX

OWN_ENTRIES = ("params", "param_names")
"""Entries of a group that a load leaves as they are."""


def check_groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Raise CheckpointError unless both are groups of the same parameters, as far as their numbers and names say."""
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"the optimizer state has groups of {sizes[0]} parameters, this optimizer {sizes[1]}; build it over the "
            "same model"
        )
    for theirs, ours in zip(saved, own, strict=True):
        _check_names(theirs.get("param_names"), ours.get("param_names"))


def _check_names(saved: list[str] | None, own: list[str] | None) -> None:
    if saved is None or own is None:
        return
    for index, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        if theirs != ours:
            raise CheckpointError(
                f"parameter {index} of the optimizer state is {theirs!r}, of this optimizer {ours!r}; pass the same "
                "parameters in the same order"
            )


def check_states(name: str, live: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless `loaded` fits into the live states of the parameter `name`."""
    if loaded.keys() != live.keys():
        raise CheckpointError(
            f"{name}: the optimizer state holds {sorted(loaded)}, this optimizer {sorted(live)}; construct it with "
            f"the master_weights, exp_avg_dtype and exp_avg_sq_dtype that it was saved with{_differing(live, loaded)}"
        )
    for key, value in loaded.items():
        kinds = ["a DTensor" if isinstance(t, DTensor) else "a plain tensor" for t in (value, live[key])]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"{name}: optimizer state {key} is {kinds[0]} in the state dict but {kinds[1]} here, as its parameter; "
                "both must be the same: load with torch.distributed.checkpoint, or distribute the tensor first"
            )
        own, new = private_torch.local_tensor(live[key]), private_torch.local_tensor(value)
        if own.dtype != new.dtype or own.shape != new.shape or live[key].shape != value.shape:
            raise CheckpointError(
                f"{name}: optimizer state {key} is {new.dtype} {tuple(value.shape)} (local {tuple(new.shape)}), this "
                f"optimizer's is {own.dtype} {tuple(live[key].shape)} (local {tuple(own.shape)}); construct it over "
                f"the same model and mesh, with the same state dtypes{_differing(live, loaded)}"
            )


def _differing(live: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> str:
    """The options that the saved optimizer was constructed with, where they differ."""
    pairs = [(_options(live, role), _options(loaded, role)) for role in (*MOMENTS, MASTER)]
    options = [theirs for ours, theirs in pairs if ours != theirs and loaded]
    return f" ({', '.join(options)})" if options else ""


def _options(states: Mapping[str, Tensor], role: str) -> str:
    """The option of FusedAdam that a state tells of."""
    if role + REMAINDER_SUFFIX in states:
        return "store_param_remainders=True"
    dtype = states[role].dtype if role in states else None
    if role == MASTER:
        return "master_weights=False" if dtype is None else f"master_weight_dtype={dtype}"
    return f"{role}_dtype={dtype}"


def load_group(own: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Take over the entries of a group: tensors in place, since a captured step reads them where they are."""
    for key, value in saved.items():
        if key in OWN_ENTRIES:
            continue
        if isinstance(own.get(key), Tensor):
            own[key].fill_(value)
        elif isinstance(own.get(key), tuple):  # set_optimizer_state_dict(full_state_dict=True) makes lists of tuples
            own[key] = tuple(value)
        else:
            own[key] = value.clone() if isinstance(value, Tensor) else value
