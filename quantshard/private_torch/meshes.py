"""Device meshes: process groups of their axes, and of the root mesh of a slice."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard.errors import ConfigurationError
from quantshard.private_torch.lookup import needs_attributes


def mesh_group(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of all axes of a DTensor's mesh; none for other tensors."""
    if not isinstance(tensor, DTensor):
        return ()
    return axis_groups(tensor.device_mesh, range(tensor.device_mesh.ndim))


def axis_groups(mesh: DeviceMesh, axes: Iterable[int]) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of the axes of a mesh that have more than one rank.

    Reducing over them one after the other reduces over all ranks that the axes span. A process group of these ranks
    would be a collective call of all processes, some of which may not make it.
    """
    return tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)


@needs_attributes("expert parallelism on an axis of a mesh")
def other_axes(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of all axes of the root mesh except this 1-D mesh: together the ranks with this rank's index on
    it.

    A mesh has no public link to its root mesh.

    Raises:
        ConfigurationError: the mesh is not an axis of a mesh of all processes, so these ranks are unknown.
    """
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
    root_names = root.mesh_dim_names or names or ("",)
    if root.size() != dist.get_world_size() or not (root == mesh or (names and names[0] in root_names)):
        raise ConfigurationError(
            f"which ranks stand alike on the mesh {mesh} is not known: it is not an axis of a mesh of all "
            f"{dist.get_world_size()} processes; make one with init_device_mesh, and slice it"
        )
    if root == mesh:
        return ()
    assert names is not None
    return axis_groups(root, (axis for axis, name in enumerate(root_names) if name != names[0]))
