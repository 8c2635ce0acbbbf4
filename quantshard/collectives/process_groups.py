"""Process groups: which ranks share, or step together, what lies on a mesh."""

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
"""The ranks to reduce over: those of a process group; those that several groups span together, one for each mesh axis;
or this rank alone (None or an empty tuple)."""

_OTHERS = "_quantshard_others"
_AVAILABLE = dist.is_available()


class _SpreadGroup:
    """The ranks that hold other parameters in the place of the one whose attribute this is; not pickled with it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __reduce__(self) -> tuple[type[_SpreadGroup], tuple[()]]:
        return _SpreadGroup, ()


def sharding_group(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The ranks over which a parameter is sharded, as the process groups of its sharding axes.

    Replicating axes are left out, since replicas compute the same values.
    """
    if not isinstance(tensor, DTensor):
        return ()
    axes = [axis for axis, dim in enumerate(private_torch.cut_dims(tensor.placements)) if dim is not None]
    return private_torch.axis_groups(tensor.device_mesh, axes)


def spread_over(param: Tensor, group: dist.ProcessGroup) -> None:
    """Note that other ranks of a group hold other parameters in the place of this one, as they do other experts.

    Whoever puts another tensor in a parameter's place notes it again.
    """
    setattr(param, _OTHERS, _SpreadGroup(group))


def is_expert_parallel(param: Tensor) -> bool:
    """Whether other ranks hold other parameters in its place."""
    return _others(param) is not None


def expert_axis(module: nn.Module) -> DeviceMesh | None:
    """The axis whose ranks hold other parameters of a module in the place of these; None of most modules.

    The module says so itself: `fully_shard` puts other tensors in its parameters' place, and a note on those is lost.
    """
    axis: DeviceMesh | None = getattr(module, "_spread_axis", None)
    return axis


def stepping_group(param: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that must take or skip a step of a parameter together: those of its mesh, and those that hold others in
    its place, since what all of them hold alike must stay so."""
    return united([private_torch.mesh_group(param), _others(param)])


def _others(param: Tensor) -> dist.ProcessGroup | None:
    found: _SpreadGroup | None = vars(param).get(_OTHERS)  # getattr costs more where there is none, which is the rule
    return None if found is None else found.group


def united(groups: Iterable[Groups]) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that several groups span together."""
    return tuple(dict.fromkeys(member for group in groups for member in spanned(group)))


def including(groups: Groups, group: Group) -> Groups:
    """The ranks that `groups` span, and those of one more; it comes last, so that its ranks agree in any case."""
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
    """The group of all processes, or None where there are no process groups."""
    return dist.group.WORLD if _AVAILABLE else None


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must lie for a collective of the group."""
    # not get_backend: after init_process_group() without arguments it says "undefined"
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    if backends.get("cuda", "gloo") not in ("gloo", "mpi") and torch.cuda.is_available():  # theirs are of the CPU
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
