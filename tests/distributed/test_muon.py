"""Muon has the same bits on any mesh: of matrices that ranks hold in uneven parts, or not at all, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard import private_torch
from quantshard.errors import RankMismatchError
from quantshard.optimizers import Muon, muon, muon_groups
from quantshard.optimizers.state import TensorRegion
from quantshard.tensor import components
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

SAVED_AFTER, STEPS, BUCKET = 2, 4, muon.BUCKET_BYTES
SIZES = ((96, 150), (150, 67), (67, 1), (150, 80))
"""(in, out) of quantized layers: blocks are cut, and of the third all ranks but one hold nothing."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "block": ("block", {}),
    "FP8 momentum": ("mxfp8", {"momentum_buffer_dtype": torch.uint8, "exp_avg_dtype": torch.uint8,
                               "exp_avg_sq_dtype": torch.uint8}),
    "no masters": ("current", {"master_weights": False, "momentum_buffer_dtype": torch.bfloat16}),
    "NVFP4, an average": ("nvfp4", {"ema_decay": 0.9, "store_param_remainders": True, "nesterov": False}),
}  # fmt: skip


class Model(nn.Module):
    """Quantized and plain matrices in hidden layers, an embedding, a head and vectors; TP if there is such an axis."""

    def __init__(self, tp_mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 96, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in SIZES)
        split: dict[str, Any] = {"params_dtype": torch.bfloat16, "tp_mesh": tp_mesh}
        self.layers.append(qs.Linear(80, 144, parallel_mode="column" if tp_mesh else None, **split))
        self.layers.append(qs.Linear(144, 80, parallel_mode="row" if tp_mesh else None, bias=False, **split))
        self.layers.append(nn.Linear(7, 131, bias=False, dtype=torch.bfloat16))
        self.norm = nn.LayerNorm(80, dtype=torch.bfloat16)
        self.head = nn.Linear(80, 31, bias=False, dtype=torch.bfloat16)


def build(case: str, axes: dict[str, int], seed: int) -> tuple[nn.Module, Muon]:
    torch.manual_seed(seed)
    recipe, options = CASES[case]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with qs.quantized_model_init(recipe=recipe):
        model = Model(mesh["tp"] if "tp" in axes else None)
    data = [name for name in axes if name != "tp"]
    for module in [*model.layers, model] if data else []:
        fully_shard(module, mesh=mesh[tuple(data)])
    groups = muon_groups(model, head="head", adamw={"lr": 1e-2, "weight_decay": 0.1})
    return model, Muon(groups, lr=0.02, **options)


def step(
    model: nn.Module, optimizer: Muon, number: int, lacks: Callable[[nn.Parameter], bool] = lambda param: False
) -> None:
    """With the same global gradients on every mesh; none of a parameter that `lacks` one."""
    generator = torch.Generator().manual_seed(100 + number)
    for param in model.parameters():
        whole = torch.randn(param.shape, generator=generator).to(param.dtype)
        place = TensorRegion.of_local(param)
        for dim, (start, size) in enumerate(zip(place.origin, place.shape, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        if isinstance(param, DTensor):
            whole = components.as_dtensor(whole, param, list(param.placements), tuple(param.shape))
        param.grad = None if lacks(param) else whole
    optimizer.step()


def trained(folder: str, axes: dict[str, int], loads: bool, cases: list[str], bucket: int = BUCKET) -> Any:
    """For each case the bits before and after steps of a model that is saved before them, or loaded."""
    found, muon.BUCKET_BYTES = {}, bucket
    for case in cases:
        model, optimizer = build(case, axes, seed=5 + loads)
        for number in range(0 if loads else SAVED_AFTER):
            step(model, optimizer, number)
        (qs.checkpoints.load if loads else qs.checkpoints.save)(f"{folder}/{case}", model, optimizer)
        before = bits(model, optimizer)
        for number in range(SAVED_AFTER, STEPS):
            step(model, optimizer, number)
        found[case] = before, bits(model, optimizer)
    return found


@pytest.mark.parametrize(("saves", "loads"), [(3, 1), pytest.param(1, 3, marks=pytest.mark.exhaustive)])
def test_the_same_bits_on_one_rank_and_three_and_after_a_load_on_the_other(
    saves: int, loads: int, tmp_path: Path
) -> None:
    saved = run_ranks(saves, trained, str(tmp_path), {"dp": saves}, False, [*CASES])
    loaded = run_ranks(loads, trained, str(tmp_path), {"dp": loads}, True, [*CASES])
    assert all(ran == saved[0] for ran in [*saved, *loaded])
    assert all(before != after for before, after in saved[0].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes",
    [{"dp": 2, "tp": 2}, {"tp": 2}, {"replicate": 2, "dp": 2}, {"replicate": 2, "dp": 1, "tp": 2}, {"dp": 4}],
    ids=lambda axes: ", ".join(f"{name} {size}" for name, size in axes.items()),
)
def test_the_same_bits_on_other_meshes(axes: dict[str, int], tmp_path: Path) -> None:
    ranks = torch.Size(axes.values()).numel()
    cases = ["block", "FP8 momentum"]
    on_mesh = run_ranks(ranks, trained, str(tmp_path / "mesh"), axes, False, cases)
    [alone] = run_ranks(1, trained, str(tmp_path / "1"), {"dp": 1}, False, cases)
    assert all(ran == alone for ran in on_mesh)


def seen(folder: str) -> dict[str, Any]:
    """On each rank: all-to-alls of a step; bits with a bucket for each matrix; and what a bad gradient changes."""
    calls: list[int] = []
    whole = dist.all_to_all_single

    def counted(into: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(into.numel())
        return whole(into, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        found: dict[str, Any] = {"bits": trained(folder, {"dp": 3}, False, ["block"])["block"][1]}
        found["calls"] = len(calls) / STEPS
        calls.clear()
        found["bits of small buckets"] = trained(f"{folder}/small", {"dp": 3}, False, ["block"], bucket=1)["block"][1]
        found["calls of small buckets"] = len(calls) / STEPS
    finally:
        dist.all_to_all_single = whole
        muon.BUCKET_BYTES = BUCKET
    model, optimizer = build("block", {"dp": 3}, 5)
    before = bits(model, optimizer)
    for number, name in enumerate(("layers.1.weight", "norm.weight")):  # of Muon's and of AdamW's
        params = dict(model.named_parameters())
        for param in params.values():
            param.grad = components.zeros_like(param, param.dtype) + 1
        if dist.get_rank() == 0:  # layers.1.weight: rows of this rank alone
            private_torch.local_tensor(params[name].grad).view(-1)[3] = torch.inf
        optimizer.step()
        assert optimizer.skipped_steps == number + 1
    found["unchanged"] = before == bits(model, optimizer)
    if dist.get_rank() == 1:
        model.layers[0].weight.grad = None
    with pytest.raises(RankMismatchError, match=r"layers.0.weight has a gradient on some ranks only"):
        optimizer.step()
    return found


def test_few_collectives_and_bounded_buckets_and_steps_that_no_rank_makes(tmp_path: Path) -> None:
    for found in run_ranks(3, seen, str(tmp_path)):
        assert found["calls"] == 2 and found["calls of small buckets"] == 4  # there and back
        assert found["bits"] == found["bits of small buckets"]
        assert found["unchanged"]
