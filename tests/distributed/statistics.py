"""What the tests of statistics run on each rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.optimizers import FusedAdam
from quantshard.statistics import Alarm, Statistics, first_nonfinite

SHAPES = ((96, 300), (300, 257))
"""(in, out): of 257 rows two ranks have 129 and 128, and blocks of 32 are cut."""
TOKENS = 192

Rows = dict[tuple[str, str], dict[str, Any]]


def _values(features: int, seed: int) -> Tensor:
    return torch.randn(TOKENS, features, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _rows(statistics: Statistics) -> list[Rows]:
    samples = [*statistics.step(), *statistics.close()]
    return [{(row.name, row.role): row.to_dict() for row in sample.rows} for sample in samples]


def sharded(recipe: str, lr: float) -> Rows:
    """One step under FSDP2, in which no number of an activation depends on the tokens of other ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layers = [qs.Linear(*shape, params_dtype=torch.bfloat16, bias=False, device="cpu") for shape in SHAPES]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = FusedAdam(model.parameters(), lr=lr)
    statistics = Statistics(model, optimizer, every=1)
    with qs.autocast(recipe=recipe):
        y = model(_values(96, 1).chunk(ranks)[rank])
    y.backward(_values(257, 2).chunk(ranks)[rank])
    optimizer.step()
    (rows,) = _rows(statistics)
    return rows


def cut(sequence_parallel: bool) -> Rows:
    """One step of two layers under tensor parallelism, and of the same on one rank."""
    ranks, recipe = dist.get_world_size(), "mxfp8"
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    options = {"params_dtype": torch.bfloat16, "bias": False, "device": "cpu", "tp_mesh": mesh["tp"]}
    options |= {"sequence_parallel": sequence_parallel}
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(
            qs.Linear(96, 256, parallel_mode="column", **options),
            qs.Linear(256, 64, parallel_mode="row", **options),
        )
    optimizer = FusedAdam(model.parameters(), lr=0.0)
    statistics = Statistics(model, optimizer, every=1)
    x, dy = _values(96, 1), _values(64, 2)
    if sequence_parallel:
        x, dy = (each.chunk(ranks)[dist.get_rank()] for each in (x, dy))
    with qs.autocast(recipe=recipe):
        y = model(x)
    y.backward(dy)
    optimizer.step()
    (rows,) = _rows(statistics)
    return rows


def spread_experts(spoiled: int = -1) -> tuple[Rows, list[str]]:
    """One step of four experts with biases, over the ranks, and of a layer behind them; and the names of alarms.
    `spoiled`: the expert that has a NaN in its input."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe="block"):
        experts = qs.GroupedLinear(4, 128, 64, params_dtype=torch.bfloat16, device="cpu", ep_mesh=mesh)
        behind = qs.Linear(64, 32, params_dtype=torch.bfloat16, device="cpu")
    model = nn.ModuleDict({"experts": experts, "behind": behind})
    alarms: list[Alarm] = []
    optimizer = FusedAdam(model.parameters(), lr=0.0)
    statistics = Statistics(model, optimizer, every=1, on_alarm=alarms.append)
    mine = [_values(128, 10 + number)[: 8 + number] for number in experts.local_gemms]
    for number, rows in zip(experts.local_gemms, mine, strict=True):
        rows[0, 0] = math.nan if number == spoiled else rows[0, 0]
    with qs.autocast(recipe="block"):
        behind(experts(torch.cat(mine), [len(rows) for rows in mine])).float().square().sum().backward()
    optimizer.step()
    (rows,) = _rows(statistics)
    return rows, [alarm.name for alarm in alarms if alarm.kind == "nan"]


def spoiled() -> list[str]:
    """A batch of the last rank has an infinite value, which is the second layer's input; then a gradient has one."""
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe="mxfp8"):
        layers = [qs.Linear(96, 96, params_dtype=torch.bfloat16, bias=False, device="cpu") for _ in range(3)]
    model = nn.Sequential(*layers)
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def run() -> None:
        with qs.autocast(recipe="mxfp8"):
            model(_values(96, 1)).float().square().sum().backward()

    told = [str(first_nonfinite(model, run))]
    hook = model[1].register_forward_hook(lambda *a: a[2] * (math.inf if is_last else 1.0))
    told.append(getattr(first_nonfinite(model, run), "text", ""))
    hook.remove()

    def spoil(_: nn.Module, args: tuple[Tensor]) -> None:
        if is_last:
            args[0].register_hook(lambda grad: grad * math.nan)

    model[2].register_forward_pre_hook(spoil)
    told.append(getattr(first_nonfinite(model, run), "text", ""))
    return told
