"""What the tensor-parallel tests run on each rank: a module on a mesh beside the same module in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard import private_torch
from quantshard.tensor.quantized_tensor import QuantizedTensor
from tests.distributed import pool
from tests.distributed.models import OTHERS, RECIPES, sha

SEQUENCE, BATCH, HIDDEN, FFN, HEADS = 8, 4, 80, 112, 4
"""Tensor parallelism must divide features, heads and rows; blocks of 32 and 128 are cut all the same."""

LINEARS: dict[str, Callable[..., nn.Module]] = {
    "Linear column": lambda **o: qs.Linear(HIDDEN, FFN, parallel_mode="column", **o),
    "Linear row": lambda **o: qs.Linear(HIDDEN, FFN, parallel_mode="row", **o),
    "LayerNormLinear": lambda **o: qs.LayerNormLinear(
        HIDDEN, 3 * FFN, parallel_mode="column", parameters_split=("a", "b", "c"), **o
    ),
}
BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "LayerNormMLP gelu": lambda **o: qs.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **o),
    "LayerNormMLP swiglu": lambda **o: qs.LayerNormMLP(
        HIDDEN, FFN, set_parallel_mode=True, activation="swiglu", normalization="RMSNorm", bias=False, **o
    ),
    "MultiheadAttention": lambda **o: qs.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, set_parallel_mode=True, input_layernorm=True, fuse_qkv_params=True, **o
    ),
    "TransformerLayer": lambda **o: qs.TransformerLayer(
        HIDDEN, FFN, HEADS, HEADS // 2, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True,
        activation="swiglu", normalization="RMSNorm", bias=True, qk_norm_type="RMSNorm", **o,
    ),
}  # fmt: skip
MODULES = {**LINEARS, **BLOCKS}

MESHES: dict[str, dict[str, int]] = {
    "tp 1": {"tp": 1},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "dp 2, tp 2": {"dp": 2, "tp": 2},
    "dp 2, tp 1": {"data": 2, "model": 1},
    "replicate 2, shard 1, tp 2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
    "shard 1, cp 2, tp 2": {"dp_shard": 1, "cp": 2, "tp": 2},
}


@dataclass(frozen=True)
class Case:
    """One module on one mesh; the last axis is that of tensor parallelism."""

    module: str
    recipe: str
    mesh: str
    sequence_parallel: bool = False
    init: str = "meta"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    recompute_activation: bool = False
    activation_storage: str = ""

    @property
    def ranks(self) -> int:
        return math.prod(MESHES[self.mesh].values())

    @property
    def tp(self) -> int:
        return list(MESHES[self.mesh].values())[-1]


def recipe_of(case: Case) -> Any:
    return {"bf16": "bf16", **RECIPES, **OTHERS}[case.recipe]


def build(case: Case, mesh: DeviceMesh | None, seed: int = 3) -> nn.Module:
    """The module, whole where there is no mesh."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"params_dtype": case.dtype, "device": case.device}
    if case.recompute_activation:
        options["recompute_activation"] = True
    if case.activation_storage:
        options["activation_storage"] = case.activation_storage
    if mesh is not None:
        assert mesh.mesh_dim_names is not None
        options |= {"tp_mesh": mesh[mesh.mesh_dim_names[-1]], "sequence_parallel": case.sequence_parallel}
        options["device"] = "meta" if case.init == "meta" else case.device
    with qs.quantized_model_init(recipe=recipe_of(case)):
        module = MODULES[case.module](**options)
    if mesh is not None:
        outer = data_mesh(mesh)
        if outer is not None:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            fully_shard(module, mesh=outer, mp_policy=policy)
        if case.init == "meta":
            for part in module.modules():
                if hasattr(part, "tp_mesh"):
                    part.reset_parameters()
    return module


def data_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axes before that of tensor parallelism, as `fully_shard` wants them; cp is one with dp_shard."""
    names = mesh.mesh_dim_names
    assert names is not None
    if len(names) == 1:
        return None
    if "cp" in names:
        return mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    return mesh[names[:-1]]


def batch(step: int, features: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SEQUENCE, BATCH, features, generator=generator).to(dtype)


def part_of(x: Tensor, index: int, parts: int, dim: int) -> Tensor:
    return x.chunk(parts, dim)[index].contiguous()


def step(module: nn.Module, case: Case, number: int, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Output and input gradient of one forward and backward, as the whole tensors; parameters have their gradients."""
    dp_index, dps, tp_index, tps = 0, 1, 0, 1
    if mesh is not None:
        tp_index, tps = mesh.get_local_rank(mesh.ndim - 1), case.tp
        dp_index, dps = dist.get_rank() // tps, dist.get_world_size() // tps
    x = part_of(batch(number, HIDDEN, case.dtype), dp_index, dps, 1)
    cut_input = case.module == "Linear row"
    cut_output = case.module in ("Linear column", "LayerNormLinear")
    rows = case.sequence_parallel and mesh is not None
    x = part_of(x, tp_index, tps, -1) if cut_input else part_of(x, tp_index, tps, 0) if rows else x
    x = x.to(case.device).requires_grad_()
    with qs.autocast(recipe=recipe_of(case)):
        y = module(x)
    whole = batch(100 + number, y.shape[-1] * (tps if cut_output else 1), case.dtype)
    dy = part_of(whole, dp_index, dps, 1)
    if cut_output:
        parts = dy.chunk(3, -1) if case.module == "LayerNormLinear" else (dy,)
        dy = torch.cat([part_of(part, tp_index, tps, -1) for part in parts], -1)
    elif rows:
        dy = part_of(dy, tp_index, tps, 0)
    y.backward(dy.to(case.device) * dps)  # FSDP2 takes the mean over data-parallel ranks
    assert x.grad is not None
    return y.detach().cpu(), x.grad.cpu() / dps


def joined(pieces: Tensor, case: Case, mesh: DeviceMesh, *, cut: bool, parts: int = 1) -> Tensor:
    """All ranks' pieces of an activation as one: along features, or rows under sequence parallelism; then the batch."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, pieces)
    groups = [found[i : i + case.tp] for i in range(0, len(found), case.tp)]
    wholes = []
    for group in groups:
        if cut:
            split = [piece.chunk(parts, -1) for piece in group]
            wholes.append(torch.cat([piece[part] for part in range(parts) for piece in split], -1))
        else:
            wholes.append(torch.cat(group, 0) if case.sequence_parallel else group[0])
    return torch.cat(wholes, 1)


def named_gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in module.named_parameters():
        grad = param.grad
        assert grad is not None, name
        if name.endswith("key_bias"):
            continue  # softmax does not change if all keys move alike, so that its gradient is rounding errors only
        yield name, grad.full_tensor() if isinstance(grad, DTensor) else grad


def off(found: Tensor, wanted: Tensor) -> float:
    """How far apart, relative to the norm."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    found, wanted = found.cpu().double(), wanted.cpu().double()
    return float((found - wanted).norm() / wanted.norm())


ONE_STEP = ("bf16", "current", "block", "rowwise", "mxfp8")
"""Recipes that keep nothing from one step to the next."""


@lru_cache(maxsize=8)
def _mesh(name: str, device: str, case_of_the_pool: int) -> DeviceMesh:
    """Made once in a case of the pool, which destroys its groups."""
    axes = MESHES[name]
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def compared(case: Case) -> tuple[list[str], float, str]:
    """What is not bitwise equal at birth, how far one step is off at most, or two if something is kept, and where."""
    mesh = _mesh(case.mesh, case.device, pool.case)
    module, alone = build(case, mesh), build(case, None)
    born, wanted = module.state_dict(), alone.state_dict()
    unequal = [name for name in wanted if name not in born or sha(born[name]) != sha(wanted[name])]
    worst, where = 0.0, ""
    parts = 3 if case.module == "LayerNormLinear" else 1
    for number in range(1 if case.recipe in ONE_STEP else 2):
        outputs = step(module, case, number, mesh)
        references = step(alone, case, number, None)
        cuts = (case.module in ("Linear column", "LayerNormLinear"), case.module == "Linear row")
        named = {
            what: (joined(found, case, mesh, cut=cut, parts=parts if cut else 1), reference)
            for what, found, reference, cut in zip(("y", "dx"), outputs, references, cuts, strict=True)
        }
        of_alone = dict(named_gradients(alone))
        named |= {name: (grad, of_alone[name]) for name, grad in named_gradients(module)}
        for what, (found, reference) in named.items():
            difference = off(found, reference)
            if not difference <= worst:
                worst, where = difference, f"{what} of step {number}"
        module.zero_grad()
        alone.zero_grad()
    return unequal, worst, where


def table(cases: list[Case]) -> list[tuple[list[str], float, str]]:
    return [compared(case) for case in cases]


def on_this_rank(case: Case, mesh: DeviceMesh) -> tuple[dict[str, str], int]:
    """Hashes of outputs, gradients, histories and draws of one step or two, and the bytes that forward keeps."""
    module, found, kept = build(case, mesh), {}, {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, QuantizedTensor):  # a weight, which has no storage of its own
            storage = tensor.untyped_storage()
            kept[number, storage.data_ptr()] = storage.nbytes()
        return tensor

    for number in range(1 if case.recipe in ONE_STEP else 2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, dx = step(module, case, number, mesh)
        found |= {f"y of step {number}": sha(y), f"dx of step {number}": sha(dx)}
        for name, param in module.named_parameters():
            assert param.grad is not None, name
            found[f"{name} of step {number}"] = sha(private_torch.local_tensor(param.grad))
        module.zero_grad()
    found |= {name: sha(private_torch.local_tensor(entry)) for name, entry in module.state_dict().items()}
    return found, sum(kept.values())


def recomputed(cases: list[Case]) -> list[tuple[list[str], int]]:
    """For each case what differs if activations are computed again, and how many bytes fewer are kept."""
    seen = []
    for case in cases:
        mesh = _mesh(case.mesh, case.device, pool.case)
        plain, kept = on_this_rank(case, mesh)
        again, fewer = on_this_rank(replace(case, recompute_activation=True), mesh)
        assert plain.keys() == again.keys()
        seen.append(([name for name in plain if plain[name] != again[name]], kept - fewer))
    return seen
