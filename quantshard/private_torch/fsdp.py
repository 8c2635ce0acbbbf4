"""FSDP2's settings of parameters, and how it gathers them."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from quantshard.private_torch.lookup import missing, private_name

_GATHERS = "asking FSDP2 how it gathers parameters"
_states = private_name("torch.distributed._composable_state._module_state_mapping", _GATHERS)
_state_class = private_name("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState", _GATHERS)


@dataclass(frozen=True)
class FsdpPlan:
    """Settings of FSDP2 for one parameter. `group`: its parameter group, for the present settings."""

    frees_between_passes: bool = False
    reshards_to_other_mesh: bool = False
    group: weakref.ReferenceType[Any] | None = None

    def frees_now(self) -> bool:
        """True if FSDP2 frees the parameter after each pass, by its present settings."""
        group = None if self.group is None else self.group()
        return group is not None and _frees_between_passes(group)


def _frees_between_passes(group: Any) -> bool:
    return bool(group._reshard_after_forward and group.reshard_after_backward)


def fsdp_plan(storage: Any) -> FsdpPlan:
    """The plan for the sharded parameter whose local tensor has this storage; keep it gathered if there is none."""
    for group, fsdp_param in _managed_parameters():
        if getattr(fsdp_param.sharded_param._local_tensor, "quantized_storage", None) is storage:
            meshes = group.post_forward_mesh_info, group.mesh_info
            after_forward, sharded = (getattr(mesh, "shard_mesh_size", None) for mesh in meshes)
            reshards_to_other_mesh = meshes[0] is not None and after_forward != sharded
            return FsdpPlan(_frees_between_passes(group), reshards_to_other_mesh, weakref.ref(group))
    return FsdpPlan()


def has_offloaded_parameters() -> bool:
    """Whether FSDP2 keeps parameters of this process on the CPU: the host then waits for all ranks in backward."""
    groups = (group for state in _known_states() for group in _param_groups(state))
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


def sharded_parameters() -> list[DTensor]:
    return [_sharded_param(fsdp_param) for _, fsdp_param in _managed_parameters()]


def _sharded_param(fsdp_param: Any) -> Any:
    """The parameter that the optimizer has. FSDP2 notices a replaced parameter only in the first forward."""
    info = fsdp_param._module_info
    sharded = fsdp_param.sharded_state.name == "SHARDED"
    return getattr(info.module, info.param_name) if sharded else fsdp_param.sharded_param


@dataclass(frozen=True)
class FsdpGather:
    """How FSDP2 gathers one parameter: from `ranks` shards, whether again `in_backward`, and in which dtype."""

    param: nn.Parameter
    ranks: int
    in_backward: bool
    padded_numel: int
    dtype: torch.dtype | None


def fsdp_gathers(model: nn.Module) -> dict[tuple[int, str], FsdpGather]:
    """How FSDP2 gathers each parameter, by (id of its module, name in it)."""
    gathers: dict[tuple[int, str], FsdpGather] = {}
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
                gather = FsdpGather(
                    param,
                    ranks=getattr(group.mesh_info, "shard_mesh_size", 1),
                    in_backward=group.post_forward_mesh_info is not None and not keeps,
                    padded_numel=fsdp_param.padded_sharded_param_size.numel(),
                    dtype=fsdp_param.mp_policy.param_dtype if param.is_floating_point() else None,
                )
                modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
                gathers |= {(id(owner), name): gather for owner, name in zip(modules, names, strict=True)}
    return gathers


def has_gathered_parameters(module: nn.Module) -> bool:
    """True if FSDP2 currently has parameters of this module, without its children, unsharded."""
    return any(
        fsdp_param._module_info.module is module and fsdp_param.sharded_state.name != "SHARDED"
        for _, fsdp_param in _managed_parameters()
    )


def _managed_parameters() -> Iterator[tuple[Any, Any]]:
    """FSDP2's parameters in this process, each after its parameter group."""
    for state in _known_states():
        for group in _param_groups(state):
            for fsdp_param in group.fsdp_params:
                yield group, fsdp_param


def _known_states() -> list[Any]:
    """Module states of FSDP2 and of other composable functions."""
    if missing(_states) is not None and not dist.is_initialized():
        return []  # without process groups there are no states
    return [reference() for reference in list(_states.values())]


def _param_groups(state: Any) -> list[Any]:
    """The parameter groups of one `fully_shard`-ed module; before torch 2.12 there is at most one."""
    if not isinstance(state, _state_class):
        return []  # the state of another composable function
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
