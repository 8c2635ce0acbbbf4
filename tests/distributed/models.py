"""What the distributed tests run on each rank: a small model of uneven layers, its training, and its bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

import quantshard as qs
from quantshard import formats
from quantshard.optimizers import FusedAdam
from quantshard.recipe import QuantSpec, Recipe, TableRecipe, TensorRole
from quantshard.tensor import components

RECIPES: dict[str, str | Recipe] = {
    "delayed": qs.recipe.DelayedScaling(amax_history_len=4),
    "current": "current",
    "block": "block",
    "rowwise": "rowwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "mxfp8 two copies": qs.recipe.MXFP8BlockScaling(enable_2d_quantization=False),
}

MXFP4_RECIPE = TableRecipe(
    "mxfp4",
    {
        (role, gemm): QuantSpec(formats.MXFP4_32X32 if role is TensorRole.WEIGHT else formats.MXFP4_1X32)
        for role, gemm in qs.recipe.resolve("mxfp8").table
    },
)
"""Of formats that no named recipe uses."""
OF_WEIGHTS = ("fp8-weights", "mxfp8-weights", "nvfp4-weights")
"""Recipes that quantize weights only."""
OTHERS: dict[str, str | Recipe] = {"mxfp4": MXFP4_RECIPE, **{name: name for name in OF_WEIGHTS}}
"""Recipes by which a `Case` may be built, and which the large tables leave out."""

MESHES = {
    "FSDP2 x1": (1,),
    "FSDP2 x2": (2,),
    "FSDP2 x3": (3,),
    "FSDP2 x4": (4,),
    "HSDP 2x2": (2, 2),
    "HSDP 2x1": (2, 1),
}

SHAPES = ((96, 300), (300, 257), (257, 1))
"""(in, out) of each layer: blocks are cut, and all ranks but one hold nothing of the last."""

GLOBAL_BATCH = 12


@dataclass(frozen=True)
class Case:
    """How to build and wrap the model."""

    recipe: str
    mesh: tuple[int, ...] | None = None
    init: str = "meta"
    reshard: bool = True
    seed: int = 7
    moments: torch.dtype = torch.float32
    micro_batches: int = 1
    device: str = "cpu"
    shapes: tuple[tuple[int, int], ...] = SHAPES

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh or (1,))


def recipe_of(case: Case) -> str | Recipe:
    return RECIPES[case.recipe] if case.recipe in RECIPES else OTHERS[case.recipe]


def mesh_of(case: Case) -> DeviceMesh:
    assert case.mesh is not None
    names = ("outer", "inner")[-len(case.mesh) :]  # any names
    return init_device_mesh(case.device, case.mesh, mesh_dim_names=names)


def build(case: Case) -> nn.Sequential:
    torch.manual_seed(case.seed)
    meta = case.init == "meta" and case.mesh is not None
    device = "meta" if meta else case.device
    with qs.quantized_model_init(recipe=recipe_of(case), preserve_high_precision_init_val=True):
        layers = [qs.Linear(a, b, params_dtype=torch.bfloat16, device=device) for a, b in case.shapes]
    model = nn.Sequential(*layers)
    if case.mesh is not None:
        mesh = mesh_of(case)
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard)
    if meta:
        for layer in model:
            layer.reset_parameters()
    return model


def optimizer_of(model: nn.Module, case: Case) -> FusedAdam:
    return FusedAdam(
        model.named_parameters(),
        lr=1e-2,
        weight_decay=0.1,
        exp_avg_dtype=case.moments,
        exp_avg_sq_dtype=case.moments,
    )


def batch(step: int, case: Case) -> tuple[Tensor, Tensor]:
    """This rank's part of a global batch that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH, case.shapes[0][0], generator=generator).bfloat16()
    y = torch.randn(GLOBAL_BATCH, case.shapes[-1][1], generator=generator)
    rank, world = dist.get_rank(), dist.get_world_size()
    return x.chunk(world)[rank], y.chunk(world)[rank]


def train(model: nn.Module, optimizer: FusedAdam, case: Case, first: int, last: int) -> list[float]:
    """Train for steps [first, last); the global losses, in full precision."""
    losses = []
    for step in range(first, last):
        x, y = (t.to(case.device) for t in batch(step, case))
        total = torch.zeros(1, dtype=torch.float64, device=case.device)
        for part_x, part_y in zip(x.chunk(case.micro_batches), y.chunk(case.micro_batches), strict=True):
            with qs.autocast(recipe=recipe_of(case)):
                out = model(part_x)
            loss = ((out.float() - part_y) ** 2).mean() / case.micro_batches
            loss.backward()
            total += loss.detach().double()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def set_gradients(model: nn.Module, step: int) -> None:
    """The same global gradients on every mesh."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in model.parameters():
        whole = torch.randn(param.shape, generator=generator).to(param.dtype)
        if isinstance(param, DTensor):
            whole = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = whole.to(param.device)


def content(tensor: Tensor) -> np.ndarray:
    """A tensor's bytes."""
    copy = tensor.detach().cpu().clone()  # numpy() would pin the storage that FSDP2 wants to free
    return copy.reshape(-1).view(torch.uint8).numpy()


def sha(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(content(whole).tobytes()).hexdigest()[:16]


def joined(ranks: Tensor, placements: Sequence[Placement], pieces: list[Tensor]) -> Tensor:
    """The whole of a DTensor from the pieces of the ranks of its mesh. Replicas must hold the same bytes."""
    if not placements:
        return pieces[int(ranks)]
    parts = [joined(rest, placements[1:], pieces) for rest in ranks]
    if isinstance(placements[0], Shard):
        return torch.cat(parts, placements[0].dim)
    assert all(np.array_equal(content(part), content(parts[0])) for part in parts), "replicas differ"
    return parts[0]


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor put together from all ranks, with one collective: full_tensor() of each takes a third of a test."""
    sharded = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    if not sharded:
        return tensors
    if any(
        value.device_mesh.size() != dist.get_world_size() or {*map(type, value.placements)} - {Shard, Replicate}
        for value in sharded.values()
    ):
        return tensors | {name: value.full_tensor() for name, value in sharded.items()}
    mine = {name: content(value._local_tensor) for name, value in sharded.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: (bytes_, sharded[name]._local_tensor.shape) for name, bytes_ in mine.items()})
    found, ranks = dict(tensors), dict[DeviceMesh, Tensor]()
    for name, value in sharded.items():
        pieces = [torch.from_numpy(held[name][0]).view(value.dtype).view(held[name][1]) for held in every]
        if value.device_mesh not in ranks:
            ranks[value.device_mesh] = value.device_mesh.mesh  # made anew by each access
        found[name] = joined(ranks[value.device_mesh], value.placements, pieces)
        assert found[name].shape == value.shape, name
    return found


def bits(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, str]:
    """Hashes of all that a checkpoint holds, each tensor put together from all ranks."""
    tensors: dict[str, Any] = dict(model.state_dict())
    if optimizer is not None:
        for index, entries in optimizer.state_dict()["state"].items():
            tensors.update({f"{index}.{key}": value for key, value in entries.items() if isinstance(value, Tensor)})
    return {name: sha(tensor) for name, tensor in whole(tensors).items()}


def gathered_bits(model: nn.Sequential) -> dict[str, str]:
    """Hashes of the components of every gathered weight, as the GEMMs see them."""
    found = {}
    for index, layer in enumerate(model):
        if hasattr(layer, "unshard"):
            layer.unshard()
        weight = components.quantized_local(layer.weight)
        assert weight is not None
        found.update({f"{index}.{name}": sha(part) for name, part in weight.quantized_storage.components.items()})
        if hasattr(layer, "reshard"):
            layer.reshard()
    return found
