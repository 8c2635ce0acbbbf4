"""One rank of a large mesh without the others: torch's fake process group, in which collectives do nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from quantshard.sharding import ceil_div
from quantshard.tensor import components
from quantshard.tensor.quantized_tensor import QuantizedTensor


@contextmanager
def fake_rank(mesh: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """Be `rank` of a mesh of CPUs that do not exist."""
    clear_cache()  # its keys tell meshes apart by their shapes and names, not by the rank that looks at them
    hook = sys.excepthook  # which init_process_group wraps
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(mesh.values()))
    try:
        yield init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def wrap(
    model: nn.Module, mesh: DeviceMesh, layers: Iterable[nn.Module], tensor_parallel: Mapping[str, int] | None = None
) -> None:
    """Cut parameters over the axis "tp", if there is one, then `fully_shard` over the other axes."""
    names = mesh.mesh_dim_names
    assert names is not None
    if "tp" in names:
        for name, param in list(model.named_parameters()):
            for end, dim in (tensor_parallel or {}).items():
                if name.endswith(end):
                    owner, _, leaf = name.rpartition(".")
                    setattr(model.get_submodule(owner), leaf, nn.Parameter(cut_by_tp(param, mesh["tp"], dim)))
    others = tuple(name for name in names if name != "tp")
    data = mesh if others == names else mesh[others]
    for layer in layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)


def cut_by_tp(param: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """This rank's piece of a whole parameter, as a DTensor over the axis of tensor parallelism."""
    chunk = ceil_div(param.shape[dim], mesh.size())
    start = mesh.get_local_rank() * chunk
    quantized = components.quantized_local(param)
    if quantized is None:
        size = max(min(chunk, param.shape[dim] - start), 0)
        local = param.detach().narrow(dim, min(start, param.shape[dim]), size).contiguous()
    else:
        local = QuantizedTensor(quantized.quantized_storage.piece(dim, start, chunk), param.dtype)
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=param.shape, stride=param.detach().stride()
    )
