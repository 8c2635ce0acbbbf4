"""Codes of an activation's inputs do not depend on how these are cut over ranks, and a resumed run has their bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.gemm.operands import OperandSplit
from quantshard.modules.activation_storage import STORAGES
from quantshard.modules.layernorm_mlp import activate_stored
from quantshard.optimizers import FusedAdam
from tests.distributed import tensor_parallel
from tests.distributed.models import sha
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
TOKENS, FEATURES = 7, 402
"""Neither is divided by 3 ranks, or by 128; 384 features are in whole blocks."""


def whole(seed: int, features: int) -> Tensor:
    x = torch.randn(TOKENS, features, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 3, features)  # so that each piece of a block has an amax of its own


def stored(inputs: list[Tensor], dy: Tensor, split: OperandSplit | None) -> list[Tensor]:
    """Codes, result and gradients of a gated activation."""
    storage = STORAGES["fp8"]._replace(split=split)
    gate, up = (x.clone().requires_grad_() for x in inputs)
    codes = storage.keep([gate, up])[::3]
    y, _ = activate_stored(gate, "sreglu", up, storage)  # of products alone: exp differs at the ends of SIMD loops
    return [*codes, y.detach(), *torch.autograd.grad(y, (gate, up), dy)]


def cut() -> list[str]:
    """What differs from the same part of the whole, of pieces along features and along tokens."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    for features in (FEATURES, 384):
        inputs, dy = [whole(1, features), whole(2, features)], whole(3, features)
        alone = stored(inputs, dy, None)
        for dim, split in ((0, None), (1, OperandSplit(1, dist.group.WORLD))):
            part = [x.tensor_split(ranks, dim)[rank].contiguous() for x in (*inputs, dy)]
            for found, wanted in zip(stored(part[:2], part[2], split), alone, strict=True):
                if not torch.equal(found, wanted.tensor_split(ranks, dim)[rank]):
                    wrong.append(f"{features} features, cut along {dim}")
    return wrong


def model() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with qs.quantized_model_init(recipe="mxfp8"):
        made = nn.Sequential(*[qs.LayerNormMLP(50, 130, activation="swiglu", activation_storage="fp8") for _ in "ab"])
    for layer in (*made, made):
        fully_shard(layer, mesh=mesh)
    return made


def step(made: nn.Module, optimizer: FusedAdam, number: int) -> None:
    x = torch.randn(5, 50, generator=torch.Generator().manual_seed(number))
    with qs.autocast(recipe="mxfp8"):
        y = made(x)
    y.sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def resumed(folder: str) -> list[str]:
    """What differs after four steps, of which the last two are another run's."""
    ends = []
    for first, last in ((0, 4), (0, 2), (2, 4)):
        made = model()
        optimizer = FusedAdam(made.named_parameters(), lr=1e-2)
        if first:
            qs.checkpoints.load(Path(folder), made, optimizer)
        for number in range(first, last):
            step(made, optimizer, number)
        if last == 2:
            qs.checkpoints.save(Path(folder), made, optimizer)
        ends.append({name: sha(value) for name, value in made.state_dict().items()})
    return [name for name in ends[0] if ends[0][name] != ends[2][name]]


def modules() -> list[tuple[list[str], float, str]]:
    """Tensor-parallel modules beside whole ones: pieces of 56 features, which share a block with others."""
    asked = tensor_parallel.Case("LayerNormMLP swiglu", "bf16", "tp 2", activation_storage="fp8")
    return tensor_parallel.table([asked, replace(asked, sequence_parallel=True, recompute_activation=True)])


def test_codes_are_those_of_the_whole_and_a_resumed_run_has_their_bits(tmp_path: Path) -> None:
    for ranks in (1, 3):
        assert run_ranks(ranks, cut) == [[]] * ranks
    assert run_ranks(3, resumed, str(tmp_path / "saved")) == [[]] * 3


def test_tensor_parallel_modules_are_those_of_one_process() -> None:
    for found in run_ranks(2, modules):
        for unequal, worst, where in found:
            assert not unequal and worst <= 1e-6, (worst, where)
