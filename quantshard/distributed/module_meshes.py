"""Parameters on a tensor-parallel mesh, cut along one dim or replicated; of a module, or one by one.

A parameter becomes a DTensor on a 1-D mesh, usually `mesh["tp"]`, with this rank's shard as its local tensor.
`fully_shard` on other axes of the same mesh then cuts the shards again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from quantshard import limits, private_torch, sharding
from quantshard.errors import ConfigurationError
from quantshard.formats import Role
from quantshard.recipe import QuantSpec
from quantshard.tensor import components, parameter_state, storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage

AXIS = "tp"


@dataclass(frozen=True)
class TensorParallelConfig:
    """Tensor-parallel arguments of a module, with TransformerEngine's meaning.

    tp_mesh: tensor-parallel axis of a device mesh.
    tp_group: its process group, used without a `tp_mesh`.
    tp_size: the size that `set_device_mesh` or `set_tensor_parallel_group` will provide, if both are None.
    sequence_parallel: outside of the GEMMs, activations are cut along dim 0.
    """

    tp_group: dist.ProcessGroup | None = None
    tp_size: int = 1
    sequence_parallel: bool = False
    tp_mesh: DeviceMesh | None = None

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        """Return the mesh that is known at construction, or None."""
        if self.tp_mesh is None and self.tp_group is not None:
            return mesh_of_group(self.tp_group, device)
        return self.tp_mesh


def mesh_of_group(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    kind = device.type
    if kind == "meta":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(AXIS,))


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
            raise ConfigurationError(f"{owner}.set_device_mesh: {name} is on {param.device_mesh} already; call it once")
    for name, param in named:
        if isinstance(param, DTensor):
            setattr(module, name, on_mesh(param, tp_mesh))
        else:
            setattr(module, name, shard_parameter(param, tp_mesh, module._cuts[name]))
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
    subject = f"{type(module).__name__}.{name}"
    raise ConfigurationError(f"{subject} is still sharded ({param.placements}); call the FSDP-wrapped module around it")


def _cut_otherwise(module: Any, name: str, actual: str) -> str:
    cut = module._cuts.get(name)
    action = "has it whole" if cut is None else f"cuts its dim {cut}"
    problem = f"{actual}, but tensor parallelism over {module.tp_size} ranks {action}"
    return f"{type(module).__name__}.{name} is {problem}; cut a weight that modules share equally in all of them first"


def shard_parameter(param: Tensor, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    """Convert a whole parameter, equal on all ranks, to a DTensor parameter that keeps this rank's shard.

    A shard shares with `param` only the random key, draws and amax history, so that cutting a tied weight twice is
    detected. A replicated parameter shares its memory with `param`.

    Args:
        mesh: a 1-D (sub)mesh. An axis of one rank is cut too, so that placements do not depend on its size.
        dim: the dim to cut, 0 or 1 for quantized parameters, 0 for a stack of matrices. None replicates.
    """
    start, chunk = _place(tuple(param.shape), mesh, dim)
    storage = components.quantized_storage(param)
    if dim is None:
        local = param.detach()
    elif storage is None:
        local = param.detach().narrow(dim, start, chunk).clone(memory_format=torch.contiguous_format)
    else:
        _check_codes(storage.spec, storage.shard.shape, mesh, dim)
        rows = storage.spec.format.matrix_rows or 1  # a stack is cut between its matrices
        local = QuantizedTensor(_alone(storage.piece(dim, start * rows, chunk * rows), mesh), param.dtype)
    return _parameter(local, mesh, dim, param.shape, param.requires_grad)


def empty_parameter(
    shape: Sequence[int], mesh: DeviceMesh, dim: int | None, *, dtype: torch.dtype, device: torch.device | str,
    spec: QuantSpec | None = None, state: dict[str, Tensor] | None = None,
) -> nn.Parameter:  # fmt: skip
    """Create the result of `shard_parameter` for this global shape, uninitialized, without allocating the whole.

    Args:
        spec: format and scaling of a quantized parameter, e.g. `recipe.weight`. None: not quantized.
        state: random key, draws and amax history. Default: new ones, which requires the same torch seed on all ranks.
    """
    shape = torch.Size(shape)
    start, chunk = _place(tuple(shape), mesh, dim)
    if spec is None:
        local = torch.empty([chunk if d == dim else size for d, size in enumerate(shape)], dtype=dtype, device=device)
        return _parameter(local, mesh, dim, shape)
    shard = sharding.whole((shape[0], shape[1]))
    if dim is not None:
        _check_codes(spec, tuple(shape), mesh, dim)
        shard = shard.piece(dim, start, chunk)
    state = state if state is not None else parameter_state.weight_state(spec, device)
    storage = storages.empty(spec, shard, device, state)
    storage.mesh = None if dim is None else mesh
    return _parameter(QuantizedTensor(storage, dtype), mesh, dim, shape)


def on_mesh(param: DTensor, mesh: DeviceMesh) -> nn.Parameter:
    """Move a parameter from a 1-D mesh to another mesh of the same ranks, sharing its memory."""
    local = private_torch.local_tensor(param).detach()
    storage = components.quantized_storage(param)
    if storage is not None and storage.mesh is not None:
        storage.mesh = mesh
    placed = private_torch.dtensor_around(local, mesh, list(param.placements), param.shape)
    return nn.Parameter(placed, requires_grad=param.requires_grad)


def _place(shape: tuple[int, ...], mesh: DeviceMesh, dim: int | None) -> tuple[int, int]:
    if mesh.ndim != 1:
        raise ConfigurationError(f'the tensor-parallel mesh has {mesh.mesh_dim_names}; pass one axis, as mesh["tp"]')
    if dim is None:
        return 0, 0
    ranks, coordinate = mesh.size(), mesh.get_coordinate()
    assert coordinate is not None
    if shape[dim] % ranks:
        problem = f"a parameter {shape}, dim {dim} of {shape[dim]} over {ranks} ranks"
        raise ConfigurationError(limits.refusal("uneven axis", problem))
    chunk = shape[dim] // ranks
    return coordinate[0] * chunk, chunk


def _check_codes(spec: QuantSpec, shape: tuple[int, ...], mesh: DeviceMesh, dim: int) -> None:
    cut = sharding.whole((shape[0], shape[1])).piece(dim, 0, shape[dim] // mesh.size()).cut
    assert cut is not None
    codes = [part for part in spec.format.components if part.role is Role.CODES]
    if not all(cut.is_clean(part) for part in codes):
        packed = max(part.block_shape[dim] for part in codes)
        pieces = f"dim {dim} in pieces of {cut.chunk} over {mesh.size()} ranks, {packed} codes a byte"
        raise ConfigurationError(limits.refusal("cut in a byte", f"a {spec.tag} parameter {shape}, {pieces}"))


def _alone(piece: QuantizedStorage, mesh: DeviceMesh) -> QuantizedStorage:
    """Copy a shard to its own memory, so that it does not keep the whole alive."""
    copy = piece.map(lambda part: part.clone(memory_format=torch.contiguous_format))
    if copy.high_precision is not None:
        copy.high_precision = copy.high_precision.clone(memory_format=torch.contiguous_format)
    copy.mesh = mesh
    return copy


def _parameter(
    local: Tensor, mesh: DeviceMesh, dim: int | None, shape: torch.Size, requires_grad: bool = True
) -> nn.Parameter:
    placement = Replicate() if dim is None else Shard(dim)
    return nn.Parameter(private_torch.dtensor_around(local, mesh, [placement], shape), requires_grad=requires_grad)
