"""Process groups: the ranks that share the contents of a mesh or must step together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard import private_torch

Group = dist.ProcessGroup | None
Groups = Group | tuple[dist.ProcessGroup, ...]
"""The ranks to reduce over: one process group, several groups that together span the ranks (one per mesh axis), or only
this rank (None or an empty tuple)."""

_OTHERS = "_quantshard_others"


class _SpreadGroup:
    """The ranks that hold other parameters in place of the one with this attribute. Pickling drops the group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __reduce__(self) -> tuple[type[_SpreadGroup], tuple[()]]:
        return _SpreadGroup, ()


def sharding_group(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups of a parameter's sharding axes, without replicating ones."""
    if not isinstance(tensor, DTensor):
        return ()
    axes = [axis for axis, dim in enumerate(private_torch.cut_dims(tensor.placements)) if dim is not None]
    return private_torch.axis_groups(tensor.device_mesh, axes)


def spread_over(param: Tensor, group: dist.ProcessGroup) -> None:
    """Mark a parameter as expert-parallel: other ranks of the group hold other parameters in its place."""
    setattr(param, _OTHERS, _SpreadGroup(group))


def is_expert_parallel(param: Tensor) -> bool:
    """True if other ranks hold other parameters in place of this one."""
    return _others(param) is not None


def expert_axis(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh axis over which a module's parameters are expert-parallel, or None."""
    axis: DeviceMesh | None = getattr(module, "_spread_axis", None)
    return axis


def stepping_group(param: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the ranks that must take or skip a step together: of the parameter's mesh, and of other experts."""
    return united([private_torch.mesh_group(param), _others(param)])


def summed_over(param: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the ranks that hold other shards of a parameter, or other experts."""
    return united([sharding_group(param), _others(param)])


def _others(param: Tensor) -> dist.ProcessGroup | None:
    # vars: getattr is slower for a missing attribute, which is the common case.
    mark: _SpreadGroup | None = vars(param).get(_OTHERS)
    return None if mark is None else mark.group


def united(groups: Iterable[Groups]) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups that together span the ranks of several groups."""
    return tuple(dict.fromkeys(member for group in groups for member in spanned(group)))


def including(groups: Groups, group: Group) -> Groups:
    """Add the ranks of one more group. It comes last, so that its ranks agree in any case."""
    if group is None:
        return groups
    ranks = set(dist.get_process_group_ranks(group))
    if any(ranks.issubset(dist.get_process_group_ranks(member)) for member in spanned(groups)):
        return groups
    return (*spanned(groups), group)


def spanned(group: Groups) -> tuple[dist.ProcessGroup, ...]:
    if group is None:
        return ()
    return group if isinstance(group, tuple) else (group,)


def world() -> dist.ProcessGroup | None:
    """Return the group of all processes, or None if there are no process groups."""
    return dist.group.WORLD


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of tensors in collectives of this group."""
    # get_backend would return "undefined" after init_process_group() without arguments.
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if backends.get("cuda", "gloo") not in ("gloo", "mpi") and torch.cuda.is_available():  # these two use the CPU
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
