"""Parameters of a module on a tensor-parallel mesh: cut along one dim, or replicated.

They are DTensors on that mesh. `fully_shard` can therefore shard them further, optimizers and checkpoints know their
placement, and a checkpoint can be loaded on any other mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from quantshard import private_torch
from quantshard.collectives.process_groups import Group
from quantshard.distributed import distribute
from quantshard.distributed import tensor_parallel as parallel
from quantshard.distributed.tensor_parallel import TensorParallel
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
        """Return the mesh that is known at construction, or None.

        Raises:
            ConfigurationError: the arguments contradict each other.
        """
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
    """Check that these can be the meshes of a module.

    Raises:
        ConfigurationError: `tp_mesh` has several axes, or a size other than `tp_size` (unless that is 1), or
            `weight_mesh` lacks some of its ranks.
    """
    if tp_mesh.ndim != 1:
        raise ConfigurationError(
            f"{owner}: tp_mesh has {tp_mesh.ndim} axes {tp_mesh.mesh_dim_names}; give the tensor-parallel one alone, "
            'such as mesh["tp"]'
        )
    if tp_size not in (1, tp_mesh.size()):
        raise ConfigurationError(
            f"{owner}: the tensor-parallel mesh has {tp_mesh.size()} ranks, but tp_size is {tp_size}; give a mesh of "
            f"{tp_size} ranks, or leave tp_size out"
        )
    if weight_mesh is not None:
        lacking = sorted(set(tp_mesh.mesh.flatten().tolist()) - set(weight_mesh.mesh.flatten().tolist()))
        if lacking:
            raise ConfigurationError(
                f"{owner}: weight_mesh lacks the ranks {lacking} of tp_mesh; it is all axes that weights are sharded "
                "over, flattened, the tensor-parallel one included (or leave it out: the parameters say it)"
            )


class TensorParallelModule(nn.Module):
    """A module whose own parameters are cut over a tensor-parallel mesh, by name: `_cuts` has the dim, or None."""

    def __init__(self, asked: TensorParallelConfig, device: torch.device) -> None:
        super().__init__()
        self._cuts: dict[str, int | None] = {}
        self._asked = asked
        self.sequence_parallel = asked.sequence_parallel
        self.tp_mesh = asked.mesh(type(self).__name__, device)
        self._from_group = self.tp_mesh is not None and asked.tp_mesh is None

    @property
    def tp_size(self) -> int:
        """Number of ranks that share the parameters of one copy of this module."""
        return self._asked.tp_size if self.tp_mesh is None else self.tp_mesh.size()

    def set_tensor_parallel_group(self, tp_group: Group) -> None:
        """Cut the parameters over a process group. For a module under FSDP2, use `set_device_mesh`."""
        if tp_group is not None:
            device = next((param.device for param in self.parameters(recurse=False)), torch.device("cpu"))
            self.set_device_mesh(mesh_of_group(tp_group, device))
            self._from_group = True

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """Convert the parameters to DTensors on the tensor-parallel axis of a mesh; each rank keeps its shard.

        Call it before `fully_shard`, before `reset_parameters` of a module on the meta device, and before building the
        optimizer.

        Args:
            tp_mesh: the axis, e.g. `mesh["tp"]`.
            weight_mesh: all axes that weights are sharded over, flattened. Only checked.

        Raises:
            ConfigurationError: on every rank: a mesh has the wrong size or does not divide a dim, or parameters are
                already on a mesh.
        """
        if tp_mesh is None:
            return
        owner = type(self).__name__
        check_meshes(owner, tp_mesh, weight_mesh, self._asked.tp_size)
        named = list(self.named_parameters(recurse=False))
        if not self._from_group and all(self._is_placed(param, tp_mesh) for _, param in named):
            self.tp_mesh = tp_mesh
            return
        for name, param in named:
            if isinstance(param, DTensor) and not (self._from_group and param.device_mesh == self.tp_mesh):
                raise ConfigurationError(
                    f"{owner}.set_device_mesh: {name} lies on {param.device_mesh} already; call it once, before "
                    "fully_shard"
                )
        for name, param in named:
            if isinstance(param, DTensor):
                setattr(self, name, distribute.on_mesh(param, tp_mesh))
            else:
                setattr(self, name, distribute.shard_parameter(param, tp_mesh, self._cuts[name]))
        self.tp_mesh, self._from_group = tp_mesh, False

    def _is_placed(self, param: Tensor, mesh: DeviceMesh) -> bool:
        return isinstance(param, DTensor) and param.device_mesh == mesh

    def tensor_parallel_of(self, mode: str | None) -> TensorParallel:
        """Return this module's tensor-parallel part for a layer cut by `mode`."""
        if self.tp_mesh is None:
            if self._asked.tp_size > 1 and mode is not None:
                raise ConfigurationError(
                    f"{type(self).__name__} has tp_size={self.tp_size} but no mesh; call set_device_mesh(tp_mesh) or "
                    "set_tensor_parallel_group(tp_group) before its forward"
                )
            return parallel.NONE
        return TensorParallel.of(self.tp_mesh.get_group(), mode, self.sequence_parallel)

    def _gathered(self, x: Tensor) -> Tensor:
        """Under sequence parallelism, gather the rows (dim 0) of all ranks; the gradient is whole on each rank."""
        return parallel.join_rows(x, self.tensor_parallel_of(None)) if self.sequence_parallel else x

    def whole_on_rows(self, *names: str) -> list[Any]:
        """Return replicated parameters that each rank applies to its rows: norms, row-parallel biases. None if
        missing."""
        params = self._locals(names)
        if not self.sequence_parallel or self.tp_mesh is None:
            return params
        tp = self.tensor_parallel_of(None)
        return [None if param is None else parallel.all_reduce_gradient(param, tp) for param in params]

    def _local(self, name: str) -> Any:
        """Return the local part of one parameter; see `_locals`."""
        return self._locals((name,))[0]

    def _locals(self, names: Sequence[str]) -> list[Any]:
        """Return this rank's parts of parameters, or None for names that the module lacks.

        Raises:
            ConfigurationError: a parameter is still sharded by FSDP, or is shared with a module that cuts it in another
                way.
        """
        params = private_torch.parameters_or_values(self, names)
        for index, param in enumerate(params):
            if self.tp_mesh is not None or isinstance(param, DTensor):
                params[index] = self._local_part(names[index], param)
        return params

    def _local_part(self, name: str, param: Any) -> Any:
        if param is None:
            return None
        cut = self._cuts.get(name) if self.tp_mesh is not None else None
        if not isinstance(param, DTensor):
            if cut is not None and self.tp_size > 1:
                raise ConfigurationError(self._cut_otherwise(name, "whole on every rank"))
            return param
        on_tp_mesh = self.tp_mesh is not None and param.device_mesh == self.tp_mesh
        whole = all(placement.is_replicate() for placement in param.placements)
        if on_tp_mesh and param.placements != (Replicate() if cut is None else Shard(cut),) and self.tp_size > 1:
            raise ConfigurationError(self._cut_otherwise(name, f"{param.placements} on tp_mesh"))
        if whole or (on_tp_mesh and cut is not None and param.placements == (Shard(cut),)):
            return param.to_local()
        raise ConfigurationError(
            f"{type(self).__name__}.{name} is still sharded ({param.placements} of {param.device_mesh}); call the "
            "module through the FSDP-wrapped one that gathers it, or call unshard() on that first"
        )

    def _cut_otherwise(self, name: str, found: str) -> str:
        cut = self._cuts.get(name)
        action = "has it whole" if cut is None else f"cuts its dim {cut}"
        return (
            f"{type(self).__name__}.{name} is {found}, but tensor parallelism over {self.tp_size} ranks {action} here; "
            "a weight that is shared with another module must be cut likewise there, as parallelize_module does, "
            "before it is assigned here"
        )
