"""Private parts of state dicts, distributed checkpoints and optimizers."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quantshard.private_torch.lookup import needs_attributes, private_name

_DCP = "torch.distributed.checkpoint"
_SAVING, _LOADING = "saving by checkpoints.save", "loading by checkpoints.load"
_BACKGROUND = "saving in the background"

state_dict_stager = private_name(f"{_DCP}._state_dict_stager.StateDictStager", _BACKGROUND)
"""Copies a state dict into host memory that the next copy reuses. The public `DefaultStager` ends its stager after
each copy in torch 2.11, so every save would pin the memory again."""

storage_info = private_name(f"{_DCP}.filesystem._StorageInfo", "reading the metadata of a checkpoint")
"""Location of one piece of an entry in the metadata of DCP. DCP's readers need this class, which has no public name."""

flatten_state_dict = private_name(f"{_DCP}._nested_dict.flatten_state_dict", _LOADING)
"""Flattens nested state dicts to the keys of DCP's planners, and returns the path to each entry."""

save_checkpoint = private_name(f"{_DCP}.state_dict_saver._save_state_dict", _SAVING)

load_checkpoint = private_name(f"{_DCP}.state_dict_loader._load_state_dict", _LOADING)
"""`dcp.save` and `dcp.load` without their warning in a single process. A warnings filter, the public way to silence
it, covers the whole process: a save in a thread would silence warnings of training."""


_checkpoint_wrapper = private_name(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_PREFIX",
    "naming the parameters of modules in checkpoint_wrapper",
    "recompute with quantshard.checkpoint",
)


def without_wrappers(name: str) -> str:
    """A parameter's or module's name without the parts that `checkpoint_wrapper` inserts, as in keys of state dicts."""
    if isinstance(_checkpoint_wrapper, str):
        return name.replace(_checkpoint_wrapper, "")
    if any(part.startswith("_checkpoint") for part in name.split(".")):
        raise _checkpoint_wrapper.error()
    return name


def collects_state_dict_keys() -> bool:
    """Whether the caller's caller is `set_model_state_dict`, collecting the names that DDP and torch.compile prefix.

    It renames only parameters and buffers, and has no public way to add other keys of a state dict.
    """
    return sys._getframe(2).f_globals.get("__name__") == f"{_DCP}.state_dict"


_executor = private_name(f"{_DCP}._async_process_executor", _BACKGROUND, "save with async_='thread'")


@needs_attributes(_BACKGROUND)
def end_checkpoint_process() -> None:
    """End the process that `dcp.async_save` keeps for saving, if there is one.

    It lives as long as this process and keeps the ranks that it started with. No public API ends it.
    """
    if _executor._CHECKPOINT_PROCESS is not None:
        _executor._CHECKPOINT_PROCESS = None  # the destructor stops the process and waits


@needs_attributes("load_state_dict of quantshard's optimizers")
def load_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Hooks registered on an optimizer's `load_state_dict`: (pre-hooks, post-hooks).

    A class that overrides the method has no public way to run them.
    """
    before = optimizer._optimizer_load_state_dict_pre_hooks  # type: ignore[attr-defined]
    return [*before.values()], [*optimizer._optimizer_load_state_dict_post_hooks.values()]  # type: ignore[attr-defined]


@needs_attributes("loading a stock optimizer that has not stepped")
def first_state(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], probe: nn.Parameter) -> dict[str, Any]:
    """The state that a first `step()` creates for a parameter.

    Only `step()` creates states. It runs on a copy of the optimizer with its own states, groups and hooks, so the
    optimizer is unchanged.
    """
    shadow = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        shadow.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    shadow.__dict__.pop("step", None)  # an LR scheduler wraps it to count steps
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.state, shadow.param_groups = defaultdict(dict), [{**settings, "params": [probe]}]
    shadow.step()
    return dict(shadow.state.get(probe, {}))
