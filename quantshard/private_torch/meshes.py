"""The ranks that code runs with: process groups of the axes of a mesh, and the running stage of a pipeline."""

import sys
import types
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantshard.errors import ConfigurationError
from quantshard.private_torch.lookup import private_name

process_group = private_name(
    "torch.distributed.distributed_c10d._resolve_process_group", "linear_cross_entropy of a sharded vocabulary"
)
"""Returns the process group with a name, for operators, which take no groups as arguments."""


def mesh_group(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of all axes of a DTensor's mesh; none for other tensors."""
    if not isinstance(tensor, DTensor):
        return ()
    return axis_groups(tensor.device_mesh, range(tensor.device_mesh.ndim))


def axis_groups(mesh: DeviceMesh, axes: Iterable[int]) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of the axes of a mesh that have more than one rank. Together they span the ranks of the axes."""
    return tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)


def other_axes(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of all axes of the root mesh except this 1-D mesh: the ranks with this rank's index on it."""
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
    root_names = root.mesh_dim_names or names or ("",)
    if root.size() != dist.get_world_size() or not (root == mesh or (names and names[0] in root_names)):
        raise ConfigurationError(f"{mesh} is not an axis of a mesh of all processes; slice one from init_device_mesh")
    if root == mesh:
        return ()
    assert names is not None
    return axis_groups(root, (axis for axis, name in enumerate(root_names) if name != names[0]))


_STAGES = "torch.distributed.pipelining.stage"


class RunningStage(NamedTuple):
    """A pipeline stage. `group`: ranks of the pipeline; None: all. `infers`: whether it only infers output shapes."""

    group: dist.ProcessGroup | None
    infers: bool


def running_stage() -> RunningStage | None:
    """The stage that runs its module on this thread, in forward or for recomputation in backward, or None."""
    stages = sys.modules.get(_STAGES)
    if stages is None:
        return None
    frame: types.FrameType | None = sys._getframe(1)
    stage, names = stages.PipelineStage, vars(stages)
    methods = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk
    on_values = {method.__code__ for method in methods}
    # the innermost stage that runs its module on values, not only to infer shapes
    infers = False
    while frame is not None:
        if frame.f_globals is names:
            if frame.f_code in on_values:
                return RunningStage(frame.f_locals["self"].group, False)
            infers = True
        frame = frame.f_back
    return RunningStage(None, True) if infers else None
