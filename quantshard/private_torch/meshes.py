"""Device meshes: the process groups of their axes, and of the mesh that one was sliced from."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard.errors import ConfigurationError
from quantshard.private_torch.lookup import needs_attributes


def mesh_group(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The ranks of a DTensor's mesh, as the process group of each of its axes; none for other tensors."""
    if not isinstance(tensor, DTensor):
        return ()
    return axis_groups(tensor.device_mesh, range(tensor.device_mesh.ndim))


def axis_groups(mesh: DeviceMesh, axes: Iterable[int]) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of some axes of a mesh, of those that have more than one rank.

    What is reduced over them one after the other is reduced over the ranks that the axes span together, without a
    process group of these: to make one is a collective call of all processes, some of which may not know of it.
    """
    return tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)


@needs_attributes("expert parallelism on an axis of a mesh")
def other_axes(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of all axes but this one of the mesh that a 1-D mesh is an axis of: together the ranks that
    stand at this rank's place on it. A mesh has no public way to tell what it was sliced from.

    Raises:
        ConfigurationError: it is not an axis of a mesh of all processes, so these ranks are not known.
    """
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
    known = root.mesh_dim_names or names or ("",)
    if root.size() != dist.get_world_size() or not (root == mesh or (names and names[0] in known)):
        raise ConfigurationError(
            f"which ranks stand alike on the mesh {mesh} is not known: it is not an axis of a mesh of all "
            f"{dist.get_world_size()} processes; make one with init_device_mesh, and slice it"
        )
    if root == mesh:
        return ()
    assert names is not None
    return axis_groups(root, (axis for axis, name in enumerate(known) if name != names[0]))
