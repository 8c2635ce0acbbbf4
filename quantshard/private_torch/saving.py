"""Private parts of state dicts, distributed checkpoints and optimizers."""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from quantshard.private_torch.lookup import private_name

_DCP = "torch.distributed.checkpoint"
_SAVING, _LOADING = "saving by checkpoints.save", "loading by checkpoints.load"
_BACKGROUND = "saving in the background"

state_dict_stager = private_name(f"{_DCP}._state_dict_stager.StateDictStager", _BACKGROUND)
"""Copies a state dict into host memory that the next copy reuses. torch 2.11's `DefaultStager` does not reuse it."""

storage_info = private_name(f"{_DCP}.filesystem._StorageInfo", "reading the metadata of a checkpoint")
"""Location of one piece of an entry in the metadata of DCP."""

flatten_state_dict = private_name(f"{_DCP}._nested_dict.flatten_state_dict", _LOADING)
"""Flattens nested state dicts to the keys of DCP's planners, and returns the path to each entry."""

save_checkpoint = private_name(f"{_DCP}.state_dict_saver._save_state_dict", _SAVING)

load_checkpoint = private_name(f"{_DCP}.state_dict_loader._load_state_dict", _LOADING)
"""`dcp.save` and `dcp.load` without their warning in a single process, which only a filter of all threads silences."""

_checkpoint_wrapper = private_name(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_PREFIX",
    "naming the parameters of modules in checkpoint_wrapper",
)


def without_wrappers(name: str) -> str:
    """A parameter's or module's name without the parts that `checkpoint_wrapper` inserts, as in keys of state dicts."""
    if isinstance(_checkpoint_wrapper, str):
        return name.replace(_checkpoint_wrapper, "")
    if any(part.startswith("_checkpoint") for part in name.split(".")):
        raise _checkpoint_wrapper.error()
    return name


def collects_state_dict_keys() -> bool:
    """Whether the caller's caller is `set_model_state_dict`, which renames only parameters and buffers."""
    return sys._getframe(2).f_globals.get("__name__") == f"{_DCP}.state_dict"


load_hooks = attrgetter("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
"""Hooks registered on an optimizer's `load_state_dict`: dicts of (pre-hooks, post-hooks)."""


def first_state(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], probe: nn.Parameter) -> dict[str, Any]:
    """The state that a first `step()` creates for a parameter, found on a copy of the optimizer."""
    shadow = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        shadow.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    shadow.__dict__.pop("step", None)  # an LR scheduler wraps it to count steps
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.state, shadow.param_groups = defaultdict(dict), [{**settings, "params": [probe]}]
    shadow.step()
    return dict(shadow.state.get(probe, {}))
