"""State dicts, distributed checkpoints and optimizers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

state_dict_stager = StateDictStager
"""Copies a state dict into memory of the host that the next copy uses again. What is public, `DefaultStager`, ends its
own after each copy in torch 2.11: so it copies once, and the memory would be pinned anew each time."""

storage_info = _StorageInfo
"""Where DCP's metadata say that one piece of an entry is. Its readers want this class, which has no public name."""

set_element = set_element
"""Puts a value into nested dicts and lists by the path that DCP's planners keep for it; they have no public way to."""

flatten_state_dict = flatten_state_dict
"""Nested state dicts by the keys that DCP's planners give to their entries, and the path to each."""

CHECKPOINT_WRAPPER = _CHECKPOINT_PREFIX
"""What `checkpoint_wrapper` puts into names of parameters, and takes out of the keys of state dicts."""

save_checkpoint = _save_state_dict

load_checkpoint = _load_state_dict
"""What `dcp.save` and `dcp.load` do, without their remark on a single process. That cannot be silenced beside training:
filters of warnings are of the whole process, so a save in a thread would change what training hears."""


def end_checkpoint_process() -> None:
    """End the process that `dcp.async_save` keeps for saving, if there is one.

    It lives as long as this one does, and keeps the ranks that it was started with; there is no public way to end it.
    """
    _async_process_executor._CHECKPOINT_PROCESS = None  # its destructor asks it to end, and waits


def load_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks that were registered on an optimizer's `load_state_dict`: those to run before, those to run after.

    A class that replaces the method has no public way to run them.
    """
    before = optimizer._optimizer_load_state_dict_pre_hooks  # type: ignore[attr-defined]
    return [*before.values()], [*optimizer._optimizer_load_state_dict_post_hooks.values()]  # type: ignore[attr-defined]


def first_state(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], probe: nn.Parameter) -> dict[str, Any]:
    """What a first `step()`, which alone makes states, makes for a parameter: that of an object of the same class with
    states, groups and hooks of its own, so that nobody learns of it."""
    shadow = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        shadow.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    shadow.__dict__.pop("step", None)  # which an LR scheduler wraps to count steps
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.state, shadow.param_groups = defaultdict(dict), [{**settings, "params": [probe]}]
    shadow.step()
    return dict(shadow.state.get(probe, {}))
