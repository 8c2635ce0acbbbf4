"""Training on a mesh beside training in one process: the model of examples/train_fsdp2_tp.py, with its tied head.

Two runs differ in the order of their sums, and, over data-parallel ranks, in the scales of activations. To tell one
from the other, sums can be taken in float64 (`Case.exact`): their order then moves a result by 1e-16 of itself, which
never carries it over the boundary between two codes or two float32s, in so few steps. What is left must be the scales,
and with amaxes taken over all ranks (`Case.global_amaxes`) nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import quantshard as qs
from quantshard.collectives import flat_max, process_groups
from quantshard.gemm import backend, emulated, operands
from quantshard.tensor import components
from quantshard.tensor.storage import QuantizedStorage
from tests.distributed.models import RECIPES

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_fsdp2_tp as example

MESHES = {
    "1": {"dp": 1, "tp": 1},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "dp 2, tp 2": {"dp": 2, "tp": 2},
    "dp_replicate 2, tp 2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
    "dp 3": {"dp": 3, "tp": 1},
}
"""The last axis is that of tensor parallelism; FSDP2 is over the others."""

SIZES = {
    "VOCABULARY": 64, "HIDDEN": 48, "FFN": 80, "HEADS": 4, "KV_HEADS": 4, "LAYERS": 1, "SEQUENCE": 8, "BATCH": 12,
}  # fmt: skip
"""Tensor parallelism cuts blocks of 32 and 128; the batch divides by 1, 2 and 3 data-parallel ranks."""

STEPS = 10


@dataclass(frozen=True)
class Case:
    """How to train. `exact`: sums in float64. `global_amaxes`: current scaling scales by the amax over all ranks."""

    recipe: str
    mesh: str = "1"
    exact: bool = False
    global_amaxes: bool = False

    @property
    def ranks(self) -> int:
        return math.prod(MESHES[self.mesh].values())

    @property
    def alone(self) -> Case:
        return replace(self, mesh="1", global_amaxes=False)


@dataclass(frozen=True)
class Run:
    """State dict at birth, losses, first gradients, and at the end the masters, or parameters that need none."""

    born: dict[str, Tensor]
    losses: list[float]
    gradients: dict[str, Tensor]
    trained: dict[str, Tensor]


def exact_matmul(
    a: operands.Operand,
    b: operands.Operand,
    out_dtype: torch.dtype,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    nan_flag: Tensor | None = None,
    precision: torch.dtype | None = None,
    fast: bool = False,
    read: object = None,
) -> Tensor:
    """`backend.matmul` in float64."""
    left = _double(a, backend.Orientation.COLUMNWISE if transpose_a else backend.Orientation.ROWWISE)
    right = _double(b, backend.Orientation.ROWWISE if transpose_b else backend.Orientation.COLUMNWISE)
    out = torch.matmul(left.t() if transpose_a else left, right.t() if transpose_b else right)
    out = out if bias is None else out + bias
    return out if nan_flag is None else out + nan_flag


def _double(operand: operands.Operand, wanted: backend.Orientation) -> Tensor:
    return operand if isinstance(operand, Tensor) else emulated._values(operand, wanted, torch.float32).double()


def amaxes_of_all_ranks(
    storage: QuantizedStorage, values: Tensor, given: Tensor | None, split: Any
) -> dict[str, Tensor]:
    """`operands._amaxes`, of the activations of all data-parallel ranks together."""
    if given is not None:
        return {name: given.view(1, 1) for name in operands.scale_names(storage.spec)}
    found, reduction = storage.measure(values), flat_max.FlatMax()
    for grid in found.values():
        reduction.add(grid, process_groups.world())
    reduction.reduce()
    return found


def whole_amax_of_all_ranks(values: Tensor, split: Any) -> Tensor:
    """`operands.whole_amax`, of the activations of all data-parallel ranks together."""
    found, reduction = values.abs().amax().float().reshape(1), flat_max.FlatMax()
    reduction.add(found, process_groups.world())
    reduction.reduce()
    return found.view(())


@contextmanager
def as_asked(case: Case) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in SIZES.items():
            stack.enter_context(patch.object(example, name, value))
        stack.enter_context(patch.object(example, "DTYPE", torch.float64 if case.exact else torch.float32))
        if case.exact:
            stack.enter_context(patch.object(backend, "matmul", exact_matmul))
        if case.global_amaxes:
            stack.enter_context(patch.object(operands, "_amaxes", amaxes_of_all_ranks))
            stack.enter_context(patch.object(operands, "whole_amax", whole_amax_of_all_ranks))
        yield


def run(case: Case) -> Run:
    """Train over all ranks."""
    axes = MESHES[case.mesh]
    with as_asked(case):
        return _run(case, init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))


def run_alone(cases: list[Case]) -> dict[Case, Run]:
    """Train in one process: of all ranks together each takes some of the cases."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world, 1, 1), mesh_dim_names=("each", "dp", "tp"))["dp", "tp"]
    found = {}
    for case in cases[rank::world]:
        with as_asked(case):
            found[case] = _run(case, mesh)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, found)
    return {case: each for part in every for case, each in part.items()}


def _run(case: Case, mesh: DeviceMesh) -> Run:
    recipe: Any = "bf16" if case.recipe == "bf16" else RECIPES[case.recipe]
    model = build(case, mesh, recipe)
    born = wholes(model.state_dict())
    # An epsilon above all gradients makes Adam linear in them: it does not magnify what is left of a sum near zero.
    eps, rate = (1e-8, 3e-3) if case.exact else (1.0, 0.1)
    params = dict(model.named_parameters())
    twins = {name: nn.Parameter(param.detach().float()) for name, param in params.items() if is_plain_float64(param)}
    optimizer = qs.optimizers.FusedAdam({**params, **twins}.items(), lr=rate, eps=eps)
    losses, gradients = [], {}
    for step in range(STEPS):
        losses.append(_forward_and_backward(model, recipe, mesh, step))
        if step == 0:
            gradients = wholes({name: param.grad for name, param in model.named_parameters()})
        step_twins(params, twins, optimizer)
        model.zero_grad()
    trained = {}
    for name, param in params.items():
        has_master = "master_param" in optimizer.state.get(param, {})
        trained[name] = optimizer.get_unscaled_state(param, "master_param") if has_master else param
    return Run(born, losses, gradients, wholes(trained))


def is_plain_float64(param: Tensor) -> bool:
    """Sums of these are exact; they are trained as float32, which FusedAdam's arithmetic is."""
    return param.requires_grad and param.dtype is torch.float64 and components.quantized_local(param) is None


@torch.no_grad()
def step_twins(
    params: dict[str, nn.Parameter], twins: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    for name, twin in twins.items():
        grad = params[name].grad
        assert grad is not None
        twin.grad = grad.float()
    optimizer.step()
    for name, twin in twins.items():
        params[name].copy_(twin)


def build(case: Case, mesh: DeviceMesh, recipe: Any) -> example.Llama:
    torch.manual_seed(0)
    tp = mesh["tp"]
    model = example.Llama(recipe, tp, sequence_parallel=tp.size() > 1)
    if mesh.ndim > 1:
        assert mesh.mesh_dim_names is not None
        fully_shard(model, mesh=mesh[mesh.mesh_dim_names[:-1]])
        model.set_gradient_divide_factor(1.0)  # each rank's loss is its part of the mean
        model.set_force_sum_reduction_for_comms(True)
    example.fill(model, "cpu")
    if case.exact:
        for name, param in model.named_parameters():
            param.requires_grad_(
                "norm_weight" not in name and name != "norm.weight"
            )  # their gradients are float32 sums
    return model


def _forward_and_backward(model: example.Llama, recipe: Any, mesh: DeviceMesh, step: int) -> float:
    """The loss of the global batch; parameters have its gradients."""
    tp, group = mesh["tp"], None if mesh.size() > 1 else mesh["tp"].get_group()
    parts = mesh.size() // tp.size()
    tokens, targets = example.batch(text(), step, dist.get_rank() // tp.size() % parts, parts)
    with qs.autocast(recipe=recipe, amax_reduction_group=group):
        logits = DTensor.from_local(model(tokens), tp, [Shard(-1)])
    with loss_parallel():
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (targets.numel() * parts)
        loss.backward()
    total = loss.full_tensor().detach() / tp.size()
    if mesh.size() > 1:
        dist.all_reduce(total)
    return total.item()


def text() -> Tensor:
    """Half of it is zeros, which is soon learned."""
    generator = torch.Generator().manual_seed(1)
    shape = (4000,)
    return torch.randint(64, shape, generator=generator) * torch.randint(2, shape, generator=generator)


def wholes(named: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of the whole tensors."""
    return {name: example.whole(value.detach()).clone() for name, value in named.items() if value is not None}


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """How far apart, relative to the norm, of the tensor where it is most."""
    assert found.keys() == wanted.keys()
    apart = [(found[name].double() - wanted[name].double()).norm() / wanted[name].double().norm() for name in wanted]
    return float(max(apart))
