"""What FSDP2 was told to do with parameters, and how it gathers them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from quantshard.private_torch.lookup import missing, needs_attributes, private_name

_GATHERS = "asking FSDP2 how it gathers parameters"
_states = private_name("torch.distributed._composable_state._module_state_mapping", _GATHERS)
_state_class = private_name("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState", _GATHERS)


@dataclass(frozen=True)
class FsdpPlan:
    """What FSDP2 was told to do with one parameter: free it after each pass (and gather it again), and into what."""

    frees_between_passes: bool = False
    reshards_to_other_mesh: bool = False
    group: weakref.ReferenceType[Any] | None = None

    @needs_attributes(_GATHERS)
    def changed(self) -> bool:
        """True if FSDP2 was told since to keep what it was to free; a plan to keep serves freeing too."""
        group = None if self.group is None else self.group()
        return group is not None and self.frees_between_passes and not _frees_between_passes(group)

    @needs_attributes(_GATHERS)
    def frees_after_passes(self) -> bool:
        """True if FSDP2 frees it after each pass, as it was told by now."""
        group = None if self.group is None else self.group()
        return group is not None and _frees_between_passes(group)


def _frees_between_passes(group: Any) -> bool:
    return bool(group._reshard_after_forward and group.reshard_after_backward)


@needs_attributes(_GATHERS)
def fsdp_plan(storage: Any) -> FsdpPlan:
    """The plan for the sharded parameter whose local tensor has this storage.

    FSDP2 hands its hooks no such fact, so its own state is asked: the parameter group that holds the parameter. Keep
    everything gathered where no group is found.
    """
    for state in _known_states():
        for group in _param_groups(state):
            for fsdp_param in group.fsdp_params:
                local = fsdp_param.sharded_param._local_tensor
                if getattr(local, "quantized_storage", None) is storage:
                    after, now = group.post_forward_mesh_info, group.mesh_info
                    size = getattr(now, "shard_mesh_size", None)
                    other = after is not None and getattr(after, "shard_mesh_size", None) != size
                    return FsdpPlan(_frees_between_passes(group), other, weakref.ref(group))
    return FsdpPlan()


@needs_attributes(_GATHERS)
def has_offloaded_parameters() -> bool:
    """Whether FSDP2 keeps parameters of this process on the CPU: at the end of a backward pass the host then waits for
    the gradients, and so for all ranks. There is no public way to ask."""
    groups = (group for state in _known_states() for group in _param_groups(state))
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


@needs_attributes(_GATHERS)
def sharded_parameters() -> list[tuple[DTensor, str]]:
    """FSDP2's sharded parameters in this process, each with its name, or where FSDP2 does not know it with its module's
    class: it looks for names in the first forward, and then not for those of parameters that replaced its own.

    Within an operation's dispatch only the local tensor is known, and no public record leads from it to its DTensor.
    """
    found = []
    for state in _known_states():
        for group in _param_groups(state):
            for fsdp_param in group.fsdp_params:
                info = fsdp_param._module_info
                name = fsdp_param._param_fqn or f"{info.param_name} of a {type(info.module).__name__}"
                found.append((_sharded_param(fsdp_param), name))
    return found


def _sharded_param(fsdp_param: Any) -> Any:
    """The parameter that the optimizer has; FSDP2 learns of one that replaced its own in the first forward only."""
    info = fsdp_param._module_info
    sharded = fsdp_param.sharded_state.name == "SHARDED"
    return getattr(info.module, info.param_name) if sharded else fsdp_param.sharded_param


@dataclass(frozen=True)
class FsdpGather:
    """How FSDP2 gathers one parameter: over how many ranks, in backward too or not, and a plain one as what."""

    param: nn.Parameter
    ranks: int
    in_backward: bool
    padded_numel: int
    dtype: torch.dtype | None


@needs_attributes(_GATHERS)
def fsdp_gathers(model: nn.Module) -> dict[tuple[int, str], FsdpGather]:
    """How FSDP2 gathers each parameter, by (id of its module, name in it).

    FSDP2 has no public way to ask which parameters it gathers together, in which dtype, and whether again in backward.
    A module that is outermost and was not told otherwise keeps its parameters until backward, but FSDP2 decides that
    in the first forward only.
    """
    found: dict[tuple[int, str], FsdpGather] = {}
    outermost: list[str] = []
    for prefix, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        inner = any(not outer or prefix.startswith(f"{outer}.") for outer in outermost)
        outermost += [] if inner else [prefix]
        keeps = not inner and state._is_root is None and bool(state._auto_reshard_after_forward)
        for group in _param_groups(state):
            for fsdp_param in group.fsdp_params:
                info = fsdp_param._module_info
                param = _sharded_param(fsdp_param)
                dtype = fsdp_param.mp_policy.param_dtype if param.is_floating_point() else None
                gather = FsdpGather(
                    param,
                    ranks=getattr(group.mesh_info, "shard_mesh_size", 1),
                    in_backward=group.post_forward_mesh_info is not None and not keeps,
                    padded_numel=fsdp_param.padded_sharded_param_size.numel(),
                    dtype=dtype,
                )
                found[(id(info.module), info.param_name)] = gather
                for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    found[(id(shared), name)] = gather
    return found


@needs_attributes(_GATHERS)
def has_gathered_parameters(module: nn.Module) -> bool:
    """True if FSDP2 holds parameters of this very module gathered now."""
    for state in _known_states():
        for group in _param_groups(state):
            for fsdp_param in group.fsdp_params:
                if fsdp_param._module_info.module is module and fsdp_param.sharded_state.name != "SHARDED":
                    return True
    return False


def _known_states() -> list[Any]:
    """What FSDP2, and other functions of its kind, keep of modules."""
    if missing(_states) is not None and not dist.is_initialized():
        return []  # without process groups there is nothing of it
    return [reference() for reference in list(_states.values())]


def _param_groups(state: Any) -> list[Any]:
    """The parameter groups of one `fully_shard`-ed module; before torch 2.12 there is at most one."""
    if not isinstance(state, _state_class):
        return []  # of another composable function
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
