"""A model whose parameters tensor parallelism and FSDP2 cut along either dim, on meshes of several axes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.distributed.module_meshes import shard_parameter
from tests.distributed import pool
from tests.distributed.models import RECIPES


@dataclass(frozen=True)
class Axes:
    """A mesh: axis -> size, outermost first; which axis is cut first, and over which `fully_shard` then shards.

    `flat`: two axes that are flattened into one for `fully_shard`.
    """

    sizes: dict[str, int] = field(hash=False)
    tp: str | None = None
    data: tuple[str, ...] = ()
    flat: bool = False

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    def root(self) -> DeviceMesh:
        return _root(self, pool.case)

    def data_mesh(self, root: DeviceMesh) -> DeviceMesh | None:
        if not self.data:
            return None
        mesh = root if self.data == root.mesh_dim_names else root[self.data]
        return mesh._flatten("any_name") if self.flat else mesh


@lru_cache(maxsize=32)
def _root(axes: Axes, case: int) -> DeviceMesh:
    """Made once in a case of the pool, which destroys its groups: they take long to make."""
    return init_device_mesh("cpu", tuple(axes.sizes.values()), mesh_dim_names=tuple(axes.sizes))


MESHES = {
    "1": Axes({"dp": 1}),
    "dp 4": Axes({"dp": 4}, data=("dp",)),
    "dp 2, tp 2": Axes({"dp": 2, "tp": 2}, "tp", ("dp",)),
    "tp 4": Axes({"tp": 4}, "tp"),
    "dp_replicate 2, dp_shard 2": Axes({"dp_replicate": 2, "dp_shard": 2}, data=("dp_replicate", "dp_shard")),
    "dp_replicate 2, tp 2": Axes({"dp_replicate": 2, "tp": 2}, "tp"),
    "dp 3": Axes({"dp": 3}, data=("dp",)),
    "dp_shard 1, tp 2": Axes({"dp_shard": 1, "tp": 2}, "tp", ("dp_shard",)),
}
MORE_MESHES = {
    "tp 2, dp 2": Axes({"tp": 2, "dp": 2}, "tp", ("dp",)),
    "x 2, y 1, z 2": Axes({"x": 2, "y": 1, "z": 2}, "z", ("x", "y")),
    "dp_shard 2, cp 1, tp 2": Axes({"dp_shard": 2, "cp": 1, "tp": 2}, "tp", ("dp_shard", "cp"), flat=True),
    "dp_shard 1, cp 2, tp 2": Axes({"dp_shard": 1, "cp": 2, "tp": 2}, "tp", ("dp_shard", "cp"), flat=True),
    "tp 1, dp 2": Axes({"tp": 1, "dp": 2}, "tp", ("dp",)),
}

CUTS: dict[str, int | None] = {
    "column.weight": 0,
    "column.bias": 0,
    "row.weight": 1,
    "row.bias": None,
    "replicated.weight": None,
    "plain.weight": 1,
}
"""The dim that tensor parallelism cuts. It does not touch the norm, so that the norm is on another mesh."""


def whole(recipe: str, seed: int = 7, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Blocks of every size straddle the cuts of 140 rows and 152 columns; some ranks hold nothing of the one row."""
    torch.manual_seed(seed)
    kind = {"params_dtype": dtype, "device": device}
    with qs.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        layers: dict[str, nn.Module] = {
            "column": qs.Linear(152, 140, **kind),
            "row": qs.Linear(152, 140, **kind),
            "replicated": qs.Linear(24, 1, bias=False, **kind),
            "norm": qs.RMSNorm(9, **kind),
        }
    with qs.quantized_model_init(enabled=False):
        layers["plain"] = qs.Linear(200, 12, bias=False, **kind)
    return nn.Sequential(OrderedDict(layers))


def build(
    axes: Axes, recipe: str, seed: int = 7, meta: bool = False, dtype: torch.dtype = torch.bfloat16
) -> nn.Sequential:
    model = whole(recipe, seed, "meta" if meta else "cpu", dtype)
    root = axes.root()
    for name, dim in CUTS.items() if axes.tp else ():
        layer, leaf = name.split(".")
        whole_param = model.get_parameter(name)
        setattr(model.get_submodule(layer), leaf, shard_parameter(whole_param, root[axes.tp], dim))
    data = axes.data_mesh(root)
    if data is not None:
        for layer in model:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    if meta:
        for layer in model:
            layer.reset_parameters()
    return model


def quantized_layers(model: nn.Sequential) -> Iterator[tuple[str, qs.Linear]]:
    return ((name, model.get_submodule(name)) for name in ("column", "row", "replicated"))
