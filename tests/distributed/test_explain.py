"""`explain` beside what happens: bytes that are resident, and bytes that go over the wire, counted where they pass."""

import json
import os
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import quantshard as qs
from quantshard.recipe import MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from quantshard.tensor import components
from quantshard.tools.observe import explain
from quantshard.tools.observe.costs import SCALES_WARNING
from tests.covering import exhaustive
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

RECIPES = ["delayed", "current", "block", "rowwise", "mxfp8", "nvfp4", "bf16"]
TWO_COPIES: list[Recipe] = [
    MXFP8BlockScaling(enable_2d_quantization=False),
    NVFP4BlockScaling(disable_2d_quantization=True),
]


class Model(nn.Module):
    """Rows of 200, 96 and 5: with blocks that straddle, and shards that are uneven or empty."""

    def __init__(self, recipe: str | Recipe, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        super().__init__()
        self.recipe = recipe
        self.first = nn.Linear(40, 96, dtype=dtype, device=device)
        with qs.quantized_model_init(recipe=recipe):
            self.a = qs.Linear(96, 200, params_dtype=dtype, device=device)
            self.b = qs.Linear(200, 96, bias=False, params_dtype=dtype, device=device)
        self.norm = nn.LayerNorm(96, dtype=dtype, device=device)
        self.last = nn.Linear(96, 5, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with qs.autocast(recipe=self.recipe):
            return self.last(self.norm(self.b(self.a(self.first(x)).relu())))


class Gathered(TorchDispatchMode):
    """Counts the bytes that this rank gives to all-gathers."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def wrap(model: nn.Module, shape: tuple[int, ...], reshard: bool | None, policy: MixedPrecisionPolicy) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    for layer in (model.a, model.b):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def resident(model: nn.Module) -> int:
    """Bytes of all storages that the parameters keep alive."""
    tensors: list[torch.Tensor] = []
    for param in model.parameters():
        local = components.quantized_local(param)
        tensors += [param.to_local()] if local is None else local.quantized_storage.components.values()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measure(model: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes given to all-gathers in one forward and in one backward."""
    x = torch.randn(4, 40, dtype=dtype)
    with Gathered() as forward:
        y = model(x)
    with Gathered() as backward:
        y.float().sum().backward()
    return forward.bytes, backward.bytes


def compare(
    recipe: str | Recipe, shape: tuple[int, ...], reshard: bool | None, fp32: bool
) -> list[tuple[int, int, int, int, int]]:
    """What `explain` says before the first step and what is counted then; of a BF16 twin, only counted."""
    dtype = torch.float32 if fp32 else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if fp32 else MixedPrecisionPolicy()
    model = Model(recipe, dtype)
    wrap(model, shape, reshard, policy)
    report = explain(model)
    told = report.totals
    assert sum(row.bytes for row in report.rows) == told.bytes
    counted = measure(model, dtype)
    later = explain(model).totals
    assert later == told, "the first step must not change the report"
    model(torch.randn(4, 40, dtype=dtype))  # the root keeps what it gathered
    assert explain(model).totals == told, "nor must gathered parameters"
    for module in filter(lambda m: isinstance(m, FSDPModule), model.modules()):
        module.reshard()
    twin = Model("bf16")
    wrap(twin, shape, reshard, MixedPrecisionPolicy())
    twin_counted = sum(measure(twin, torch.bfloat16))
    return [
        (told.bytes, told.forward_gather_bytes, told.backward_gather_bytes, told.bf16_bytes, told.bf16_gather_bytes),
        (resident(model), *counted, resident(twin), twin_counted),
    ]


CASES = [(recipe, (n,), None, False) for recipe in RECIPES for n in (1, 2, 3)]
CASES += [("mxfp8", (n,), reshard, False) for reshard in (True, False) for n in (2, 3)]
CASES += [("mxfp8", (3,), None, True), ("current", (2, 1), None, False), ("mxfp8", (2, 2), None, False)]
SOME = [(recipe, (3 if recipe == "rowwise" else 2,), None, False) for recipe in RECIPES if recipe != "mxfp8"]
SOME += [("delayed", (1,), None, False), ("mxfp8", (2,), True, False), ("mxfp8", (2,), False, False), *CASES[-3:]]


@pytest.mark.parametrize(("recipe", "shape", "reshard", "fp32"), exhaustive(CASES, SOME))
def test_bytes_are_those_that_are_resident_and_sent(recipe, shape, reshard, fp32):
    ranks = torch.Size(shape).numel()
    for told, counted in run_ranks(ranks, compare, recipe, shape, reshard, fp32):
        assert told == counted
        if shape[-1] > 1:
            assert 0 < told[1] <= (1 if recipe == "bf16" else 0.8) * counted[4]
        else:
            assert told[1:3] == (0, 0)


@pytest.mark.parametrize(("which", "reshard"), exhaustive(product((0, 1), (True, False)), [(0, False), (1, True)]))
def test_two_copies_are_gathered_as_the_passes_need_them(which, reshard):
    for told, counted in run_ranks(3, compare, TWO_COPIES[which], (3,), reshard, False):
        assert told == counted


def described() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("rep", "shard"))
    model = Model("mxfp8")
    fully_shard(model, mesh=mesh)
    optimizer = qs.optimizers.FusedAdam(model.parameters(), exp_avg_dtype=torch.uint8)
    report = explain(model, optimizer)
    held = sum(
        t.to_local().nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)
    )
    assert report.totals.optimizer_bytes == held
    with patch.dict(os.environ, COLUMNS="240"):
        return {row["name"]: row for row in json.loads(report.to_json())["rows"]} | {"text": str(report)}


def test_sharding_is_described():
    ranks = run_ranks(4, described)
    assert [r["a.weight"]["local_rows"] for r in ranks] == [[0, 50], [50, 100], [100, 150], [150, 200]]
    assert [r["last.weight"]["local_rows"] for r in ranks] == [[0, 2], [2, 4], [4, 5], [5, 5]]
    row = ranks[1]["a.weight"]
    assert row["mesh"] == {"rep": 1, "shard": 4}
    assert row["placements"] == ["Replicate", "Shard(0)"]
    assert row["optimizer"] == {"exp_avg": "FP8", "exp_avg_sq": "fp32", "master_param": "fp32"}
    assert "rep=1 Replicate, shard=4 Shard(0)" in ranks[1]["text"]


def straddling(rows: int, shape: tuple[int, ...]) -> dict[str, Any]:
    with qs.quantized_model_init(recipe="nvfp4"):
        model = nn.Sequential(qs.Linear(64, rows, bias=False, params_dtype=torch.bfloat16))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    fully_shard(model, mesh=mesh)
    (row,) = explain(model).rows
    storage = components.quantized_local(next(model.parameters())).quantized_storage
    scale, codes = storage.components["scale_inv"].nbytes, storage.components["codes"].nbytes
    return {"notes": row.notes, "warnings": row.warnings, "scale": scale, "codes": codes, "reduced": row.reduced_bytes}


@pytest.mark.parametrize(
    ("rows", "shape", "is_heavy"),
    [
        (64, (4,), False),  # 16 rows a rank: no block straddles
        (24, (4,), False),  # 6 rows a rank: blocks straddle, but weigh little
        (3, (4,), True),  # a row a rank, and none on the last
        (2, (2, 2), True),
    ],
)
def test_straddling_blocks_are_stated_and_warned_of(rows, shape, is_heavy):
    for found in run_ranks(torch.Size(shape).numel(), straddling, rows, shape):
        shared = found["scale"] if rows % (16 * shape[-1]) else 0
        assert found["reduced"] == 4 * (1 + shared)  # the tensor's own amax, and one for each shared block
        assert len(found["notes"]) == (1 if shared else 0)
        assert len(found["warnings"]) == is_heavy
        if is_heavy:
            assert shared > SCALES_WARNING * found["codes"]
            assert "shard over fewer ranks, and replicate over the others" in found["warnings"][0]
            share = f"{shared / found['codes']:.1%}" if found["codes"] else "no codes at all"
            assert share in found["warnings"][0]


def on_meta() -> tuple[str, str]:
    reports = []
    for device in ("meta", "cpu"):
        model = Model("mxfp8", device=device)
        wrap(model, (dist.get_world_size(),), None, MixedPrecisionPolicy())
        reports.append(explain(model).to_json())
    return reports[0], reports[1]


def test_meta_device_gives_the_same_report():
    for meta, real in run_ranks(2, on_meta):
        assert meta == real


def filled_later() -> tuple[bool, dict[str, str]]:
    with qs.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(qs.Linear(96, 200, params_dtype=torch.bfloat16, device="meta"))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    before = explain(model).to_json()
    model[0].reset_parameters()  # registers new parameters, of which FSDP2 hears in the first forward only
    after = explain(model, qs.optimizers.FusedAdam(model.parameters()))
    return explain(model).to_json() == before, after.rows[0].optimizer


def test_parameters_that_fsdp_has_not_seen_yet_are_found():
    for same, optimizer in run_ranks(2, filled_later):
        assert same
        assert optimizer == {"exp_avg": "fp32", "exp_avg_sq": "fp32", "master_param": "fp32"}
