"""Small models, ways to wrap them, and training whose gradients are averaged by the wrapper or by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import quantshard as qs
from quantshard.optimizers import FusedAdam
from tests.distributed.models import RECIPES, bits

WIDTHS = (40, 70, 70, 70, 4)
"""Features between layers: blocks are cut, and the third rank of three holds nothing of the last layer."""

TOKENS, STEPS = 6, 2

Found = dict[str, str]
"""What is compared: numbers in full precision, and hashes of tensors, by name."""

Named = list[tuple[str, Tensor]]


class Net(nn.Sequential):
    """Layers, called in any order, or not at all."""

    order: tuple[int, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order or range(len(self)):
            x = self[index](x)
        return x


def build(recipe: str, dtype: torch.dtype = torch.bfloat16, seed: int = 7, widths: tuple[int, ...] = WIDTHS) -> Net:
    torch.manual_seed(seed)
    with qs.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        return Net(*[qs.Linear(a, b, params_dtype=dtype, device="cpu") for a, b in pairwise(widths)])


def fp32(recipe: str, widths: tuple[int, ...] = WIDTHS) -> Net:
    return build(recipe, torch.float32, widths=widths)


# Wraps

BF16_COMPUTE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)


def shard(model: Any, mesh: tuple[int, ...] | None = None, **options: Any) -> Any:
    if mesh is not None:
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("outer", "inner"))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def data_parallel(model: nn.Module, **options: Any) -> nn.Module:
    qs.check_replicas(model)
    return DistributedDataParallel(model, init_sync=False, **options)


# Training


def inputs(step: int, rank: int | None = None) -> Tensor:
    """Of this rank, or of another."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(TOKENS, WIDTHS[0], generator=generator).bfloat16()


def average(params: Iterable[Tensor], like: str) -> None:
    """DistributedDataParallel divides gradients before it adds them, FSDP2 after. All go in one collective: no element
    has more than two terms that are not zero, so the order of a sum does not matter."""
    grads = [param.grad for param in params if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    assert {grad.dtype for grad in grads} == {flat.dtype}
    if like == "DDP":
        flat /= dist.get_world_size()
    dist.all_reduce(flat)
    if like == "FSDP2":
        flat /= dist.get_world_size()
    for grad, averaged in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(averaged.view_as(grad))


def always(model: Any, is_last: bool) -> Any:
    return nullcontext()


def nothing(model: Any, recipe: str) -> None:
    pass


def adam(named: Named) -> Optimizer:
    return FusedAdam(named, lr=1e-2, weight_decay=0.1)


def train(
    model: nn.Module,
    recipe: str,
    *,
    make: Callable[[Named], Optimizer] = adam,
    by_hand: str = "",
    between: Callable[[Any, str], None] = nothing,
    micro_batches: int = 1,
    micro_batch: Callable[[Any, bool], Any] = always,
    input_dtype: torch.dtype = torch.bfloat16,
) -> Found:
    """Train for a few steps: this rank's losses, and the hashes of all that a checkpoint holds."""
    optimizer = make([(name, param) for name, param in model.named_parameters() if param.requires_grad])
    losses: Found = {}
    for step in range(STEPS):
        between(model, recipe)
        for index, x in enumerate(inputs(step).to(input_dtype).chunk(micro_batches)):
            with micro_batch(model, index == micro_batches - 1):
                with qs.autocast(recipe=RECIPES[recipe]):
                    out = model(x)
                loss = out.float().square().mean() / micro_batches * (dist.get_rank() < 2)
                loss.backward()
            losses[f"loss {step}.{index}"] = loss.item().hex()
        if by_hand:
            average(model.parameters(), by_hand)
        optimizer.step()
        optimizer.zero_grad()
    between(model, recipe)
    return losses | {name.removeprefix("module."): value for name, value in bits(model, optimizer).items()}


def fp32_by_hand(recipe: str, make: Callable[[Named], Optimizer] = adam, widths: tuple[int, ...] = WIDTHS) -> Found:
    """What MixedPrecisionPolicy does: a bf16 copy of the fp32 model runs, and its gradients go back as fp32."""
    model = fp32(recipe, widths)
    optimizer = make(list(model.named_parameters()))
    losses: Found = {}
    for step in range(STEPS):
        working = copy.deepcopy(model).bfloat16()
        with qs.autocast(recipe=RECIPES[recipe]):
            out = working(inputs(step))
        loss = out.float().square().mean() * (dist.get_rank() < 2)
        loss.backward()
        losses[f"loss {step}.0"] = loss.item().hex()
        live = model.state_dict()
        for name, value in working.state_dict().items():
            if name.endswith(("draws", "history")):
                live[name].copy_(value)
        for param, used in zip(model.parameters(), working.parameters(), strict=True):
            assert used.grad is not None
            param.grad = used.grad.float()
        average(model.parameters(), "FSDP2")
        optimizer.step()
        optimizer.zero_grad()
    return losses | bits(model, optimizer)
