"""Parameters sharded over one mesh axis before `fully_shard`: the basis of tensor parallelism.

A parameter becomes a DTensor on a 1-D mesh, usually `mesh["tp"]`, with this rank's shard as its local tensor. A
quantized shard knows its place in the global tensor, so new values, states and checkpoints have the bits of the whole
tensor. `fully_shard` on other axes of the same mesh then cuts the shards again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from quantshard import limits, private_torch, sharding
from quantshard.errors import ConfigurationError
from quantshard.formats import Role
from quantshard.recipe import QuantSpec
from quantshard.tensor import components
from quantshard.tensor import storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage


def shard_parameter(param: Tensor, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    """Convert a whole parameter, equal on all ranks, to a DTensor parameter that keeps this rank's shard.

    There is no collective. A shard has its own memory; only the random key, draws and amax history are shared with
    `param`, so that cutting a tied weight twice is detected. A replicated parameter shares its memory with `param`.

    Args:
        param: quantized or not, with any number of dims, on any device including meta.
        mesh: a 1-D (sub)mesh. An axis of one rank is cut too, so that placements do not depend on its size.
        dim: the dim to cut, 0 or 1 for quantized parameters. None replicates.
    """
    subject = f"a parameter {tuple(param.shape)}"
    if isinstance(param, DTensor):
        raise ConfigurationError(
            f"{subject} is a DTensor already ({param.placements} of {param.device_mesh}); shard it over "
            f"{_named(mesh)} once, and before fully_shard"
        )
    start, chunk = _place(tuple(param.shape), mesh, dim, subject)
    quantized = components.quantized_local(param)
    if dim is None:
        local = param.detach()
    elif quantized is None:
        local = param.detach().narrow(dim, start, chunk).clone(memory_format=torch.contiguous_format)
    else:
        _check_codes(quantized.quantized_storage.cell, tuple(param.shape), mesh, dim)
        local = QuantizedTensor(_alone(quantized.quantized_storage.piece(dim, start, chunk), mesh), param.dtype)
    return _parameter(local, mesh, dim, param.shape, param.requires_grad)


def empty_parameter(
    shape: Sequence[int],
    mesh: DeviceMesh,
    dim: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    cell: QuantSpec | None = None,
    state: dict[str, Tensor] | None = None,
) -> nn.Parameter:
    """Create the result of `shard_parameter` for this global shape, uninitialized, without allocating the whole.

    Fill a quantized parameter with `quantshard.requantize_([(parameter, local_values)])`, on every rank.

    Args:
        shape: global shape.
        mesh, dim: as in `shard_parameter`.
        dtype: dtype of the parameter; nominal for a quantized one.
        device: device of the shard. "meta" allocates nothing.
        cell: format and scaling of a quantized parameter, e.g. `recipe.weight`. None: not quantized.
        state: random key, draws and amax history. Default: new ones, which requires the same torch seed on all ranks.
    """
    shape = torch.Size(shape)
    start, chunk = _place(tuple(shape), mesh, dim, f"a parameter {tuple(shape)}")
    if cell is None:
        local = torch.empty([chunk if d == dim else size for d, size in enumerate(shape)], dtype=dtype, device=device)
        return _parameter(local, mesh, dim, shape)
    shard = sharding.whole((shape[0], shape[1]))
    if dim is not None:
        _check_codes(cell, tuple(shape), mesh, dim)
        shard = shard.piece(dim, start, chunk)
    state = state if state is not None else storages.weight_state(cell, device)
    storage = storages.empty(cell, shard, device, state)
    storage.mesh = None if dim is None else mesh
    return _parameter(QuantizedTensor(storage, dtype), mesh, dim, shape)


def on_mesh(param: DTensor, mesh: DeviceMesh) -> nn.Parameter:
    """Move a parameter from a 1-D mesh to another mesh of the same ranks, sharing its memory."""
    local = private_torch.local_tensor(param).detach()
    quantized = components.quantized_local(param)
    if quantized is not None and quantized.quantized_storage.mesh is not None:
        quantized.quantized_storage.mesh = mesh
    placed = private_torch.dtensor_around(local, mesh, list(param.placements), param.shape)
    return nn.Parameter(placed, requires_grad=param.requires_grad)


def _place(shape: tuple[int, ...], mesh: DeviceMesh, dim: int | None, subject: str) -> tuple[int, int]:
    """Return the start and length of this rank's shard along `dim`."""
    if mesh.ndim != 1:
        raise ConfigurationError(f'{subject}: give one axis of the mesh, e.g. mesh["tp"], not all of {_named(mesh)}')
    if dim is None:
        return 0, 0
    if not 0 <= dim < len(shape):
        raise ConfigurationError(
            f"{subject} has no dim {dim} to shard over {_named(mesh)}; use one of its dims or None"
        )
    ranks, coordinate = mesh.size(), mesh.get_coordinate()
    if shape[dim] % ranks:
        raise ConfigurationError(
            limits.refusal("uneven axis", f"{subject}, dim {dim} of {shape[dim]} over {ranks} ranks of {_named(mesh)}")
        )
    if coordinate is None:
        raise ConfigurationError(f"{subject}: this rank is not in the mesh {_named(mesh)}")
    chunk = shape[dim] // ranks
    return coordinate[0] * chunk, chunk


def _check_codes(cell: QuantSpec, shape: tuple[int, ...], mesh: DeviceMesh, dim: int) -> None:
    cut = sharding.whole((shape[0], shape[1])).piece(dim, 0, shape[dim] // mesh.size()).cut
    assert cut is not None
    codes = [part for part in cell.format.components if part.role is Role.CODES]
    if not all(cut.is_clean(part) for part in codes):
        packed = max(part.block_shape[dim] for part in codes)
        raise ConfigurationError(
            limits.refusal(
                "cut in a byte",
                f"a {cell.tag} parameter {shape}, dim {dim} in pieces of {cut.chunk} over {mesh.size()} ranks of "
                f"{_named(mesh)}, {packed} codes a byte",
            )
        )


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


def _named(mesh: DeviceMesh) -> str:
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    names = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
    return "(" + ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)) + ")"
