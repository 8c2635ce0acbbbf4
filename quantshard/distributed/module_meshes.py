"""Parameters of a module on a tensor-parallel mesh: cut along one dim, or replicated.

They are DTensors on that mesh. `fully_shard` can therefore shard them further, optimizers and checkpoints know their
placement, and a checkpoint can be loaded on any other mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from quantshard.distributed import distribute
from quantshard.errors import ConfigurationError

AXIS = "tp"
"""Name of a mesh axis that is created from a process group."""


@dataclass(frozen=True)
class TensorParallelConfig:
    """Tensor-parallel arguments of a module, with TransformerEngine's meaning.

    tp_mesh: tensor-parallel axis of a device mesh.
    tp_group: its process group, as an alternative.
    tp_size: required size of either. If both are None, the size that `set_device_mesh` or
        `set_tensor_parallel_group` will provide.
    sequence_parallel: outside of the GEMMs, activations are cut along dim 0.
    """

    tp_group: dist.ProcessGroup | None = None
    tp_size: int = 1
    sequence_parallel: bool = False
    tp_mesh: DeviceMesh | None = None

    def mesh(self, owner: str, device: torch.device) -> DeviceMesh | None:
        """Return the mesh that is known at construction, or None."""
        mesh = self.tp_mesh
        if mesh is None and self.tp_group is not None:
            mesh = mesh_of_group(self.tp_group, device)
        if mesh is None:
            return None
        check_meshes(owner, mesh, None, self.tp_size)
        if self.tp_group is not None and dist.get_process_group_ranks(self.tp_group) != mesh.mesh.tolist():
            raise ConfigurationError(f"{owner}: tp_group and tp_mesh are of different ranks; give one of them")
        return mesh


def mesh_of_group(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Create a 1-D mesh from a process group."""
    kind = device.type
    if kind == "meta":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(AXIS,))


def check_meshes(owner: str, tp_mesh: DeviceMesh, weight_mesh: DeviceMesh | None, tp_size: int) -> None:
    """Check that these can be the meshes of a module."""
    if tp_mesh.ndim != 1:
        raise ConfigurationError(
            f'{owner}: tp_mesh has {tp_mesh.ndim} axes {tp_mesh.mesh_dim_names}; pass one, such as mesh["tp"]'
        )
    if tp_size not in (1, tp_mesh.size()):
        raise ConfigurationError(
            f"{owner}: the tensor-parallel mesh has {tp_mesh.size()} ranks, but tp_size is {tp_size}; leave one out"
        )
    if weight_mesh is not None:
        lacking = sorted(set(tp_mesh.mesh.flatten().tolist()) - set(weight_mesh.mesh.flatten().tolist()))
        if lacking:
            raise ConfigurationError(
                f"{owner}: weight_mesh lacks the ranks {lacking} of tp_mesh; pass all axes that weights are sharded "
                "over, flattened, or leave it out"
            )


def put_on_mesh(module: Any, tp_mesh: DeviceMesh) -> None:
    """Convert a module's parameters to DTensors on a tensor-parallel axis, cut as its `_cuts` says."""
    owner = type(module).__name__
    named = list(module.named_parameters(recurse=False))
    is_placed = [isinstance(param, DTensor) and param.device_mesh == tp_mesh for _, param in named]
    if not module._from_group and all(is_placed):
        module.tp_mesh = tp_mesh
        return
    for name, param in named:
        if isinstance(param, DTensor) and not (module._from_group and param.device_mesh == module.tp_mesh):
            raise ConfigurationError(
                f"{owner}.set_device_mesh: {name} lies on {param.device_mesh} already; call it once, before fully_shard"
            )
    for name, param in named:
        if isinstance(param, DTensor):
            setattr(module, name, distribute.on_mesh(param, tp_mesh))
        else:
            setattr(module, name, distribute.shard_parameter(param, tp_mesh, module._cuts[name]))
    module.tp_mesh, module._from_group = tp_mesh, False


def local_part(module: Any, name: str, param: Any) -> Any:
    """Return this rank's part of a module's parameter; see `QuantizedModule._locals`."""
    if param is None:
        return None
    cut = module._cuts.get(name) if module.tp_mesh is not None else None
    if not isinstance(param, DTensor):
        if cut is not None and module.tp_size > 1:
            raise ConfigurationError(_cut_otherwise(module, name, "whole on every rank"))
        return param
    on_tp_mesh = module.tp_mesh is not None and param.device_mesh == module.tp_mesh
    whole = all(placement.is_replicate() for placement in param.placements)
    if on_tp_mesh and param.placements != (Replicate() if cut is None else Shard(cut),) and module.tp_size > 1:
        raise ConfigurationError(_cut_otherwise(module, name, f"{param.placements} on tp_mesh"))
    if whole or (on_tp_mesh and cut is not None and param.placements == (Shard(cut),)):
        return param.to_local()
    raise ConfigurationError(
        f"{type(module).__name__}.{name} is still sharded ({param.placements} of {param.device_mesh}); call the "
        "FSDP-wrapped module around it, or its unshard() first"
    )


def _cut_otherwise(module: Any, name: str, actual: str) -> str:
    cut = module._cuts.get(name)
    action = "has it whole" if cut is None else f"cuts its dim {cut}"
    return (
        f"{type(module).__name__}.{name} is {actual}, but tensor parallelism over {module.tp_size} ranks {action}; "
        "cut a weight that modules share equally in all of them, before it is assigned here"
    )
